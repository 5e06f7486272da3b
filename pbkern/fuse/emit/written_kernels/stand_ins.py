"""Bodies traced again with values in place of Refs.

A StandIn takes the place of a Ref among a body's arguments, and says what loads from it and stores to it become.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_rewrites.contents import access_of, read
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.primitives.ref_access import RefAccess, is_ref_access, is_whole, ref_access

from .calls import Refused

# Turns that a loop counts for in prices, if its length depends on values.
UNKNOWN_TURNS = 8


@dataclass(frozen=True, eq=False)
class StandIn:
    """Takes the place of a Ref.

    Attributes:
      shape: the Ref's.
      contents: gives the values of all elements, for loads; None where the body loads nothing.
      stored: takes a value that is stored to all of the Ref; None where the body stores nothing.
      inside: dimension -> in_bounds along it.
      ref: another Ref on which accesses act; `contents` and `stored` are not called then.
    """

    shape: tuple[int, ...]
    contents: Callable[[], jax.Array] | None = None
    stored: Callable[[Any], None] | None = None
    inside: Callable[[int], jax.Array] | None = None
    ref: Any = None

    def access(self, eqn, operands: Sequence) -> list:
        if self.ref is not None:
            return list(_jax.bind_again(eqn, [self.ref, *operands[1:]]))
        access = access_of(eqn, self.shape, operands)
        if access.kind == "load" and self.contents is not None:
            return [read(self.contents(), access)]
        if access.kind == "store" and self.stored is not None:
            self.stored(access.value)
            return [None for _ in eqn.outvars]
        raise Refused(f"its body has a {access.kind} that has no counterpart")


def trace_with(kernel: Kernel, memory: Sequence) -> None:
    """Traces a kernel's body on Refs and StandIns."""

    def rewrite(eqn, *operands) -> list | None:
        if operands and isinstance(operands[0], StandIn):
            if eqn.primitive.name == "in_bounds" and operands[0].inside is not None:
                return [operands[0].inside(eqn.params["axis"])]
            if is_ref_access(eqn):
                return operands[0].access(eqn, operands)
        return None

    retrace_into(kernel.body.jaxpr, (), memory, rewrite)


@dataclass(frozen=True)
class BodyAccess:
    """One access to a Ref.

    Attributes:
      access: its elements.
      shape: the Ref's.
      turns: how often a program makes it.
      guarded: whether it is in a branch.
      depth: number of branches and loops around it.
      reads_old: whether it is a store whose old value is used.
    """

    access: RefAccess
    shape: tuple[int, ...]
    turns: int = 1
    guarded: bool = False
    depth: int = 0
    reads_old: bool = False

    @property
    def is_whole_store(self) -> bool:
        access = self.access
        return (
            access.kind == "store"
            and access.mask is None
            and not self.reads_old
            and all(map(is_whole, access.indices, self.shape))
        )


def accesses(
    jaxpr: jex.Jaxpr, ref, turns: int = 1, guarded: bool = False, depth: int = 0
) -> Iterator[BodyAccess]:
    """All accesses to a Ref of a body, at any depth."""
    used = {atom for atom in jaxpr.outvars if isinstance(atom, jex.Var)}
    used |= {atom for eqn in jaxpr.eqns for atom in atoms(eqn)}
    for eqn in jaxpr.eqns:
        if is_ref_access(eqn):
            if eqn.invars[0] is ref:
                access = ref_access(eqn)
                reads_old = access.kind == "store" and not used.isdisjoint(eqn.outvars)
                shape = array_aval(ref).shape
                yield BodyAccess(access, shape, turns, guarded, depth, reads_old)
            continue
        for inner, operands, times, is_branch in _inside(eqn):
            for var, atom in zip(inner.invars, operands):
                if atom is ref:
                    yield from accesses(inner, var, turns * times, guarded or is_branch, depth + 1)


def _inside(eqn) -> Iterator[tuple[jex.Jaxpr, Sequence, int, bool]]:
    """(jaxpr, its operands, how often it runs, whether it is a branch) of control flow."""
    params, operands = eqn.params, eqn.invars
    match eqn.primitive.name:
        case "cond":
            yield from ((branch.jaxpr, operands[1:], 1, True) for branch in params["branches"])
        case "scan":
            yield params["jaxpr"].jaxpr, operands, params["length"], False
        case "while":
            count = params["cond_nconsts"]
            end = count + params["body_nconsts"]
            yield params["cond_jaxpr"].jaxpr, operands[:count], UNKNOWN_TURNS, True
            yield params["body_jaxpr"].jaxpr, operands[count:end], UNKNOWN_TURNS, True


def ref_of(kernel: Kernel, number: int):
    """The variable of a body's Ref; operands come first, then results."""
    return kernel.body.jaxpr.invars[number]
