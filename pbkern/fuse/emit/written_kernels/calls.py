"""KernelCall: a call of a kernel that fusion did not make, while other equations become parts of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pbkern import _jax
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process.jaxpr_digest import same
from pbkern.dsl.kernel import BlockMapping, Kernel, Scratch
from pbkern.dsl.trace import canonical_body

# Equations that report to the user.
REPORTS = frozenset(("check_failed", "debug_print", "debug_callback", "breakpoint"))


class Refused(Exception):
    """Something cannot become a part of a kernel; the message says why."""


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A kernel on operands.

    Attributes:
      kernel: the kernel; the first operands are its programs', others its last stage's.
      operands: atoms of the function.
      results: variables of the function.
      eqn: the user's call, for messages.
    """

    kernel: Kernel
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    eqn: Any

    @property
    def invars(self) -> tuple[Any, ...]:
        return self.operands

    @property
    def outvars(self) -> tuple[Any, ...]:
        return self.results

    def label(self, mapping: BlockMapping) -> str:
        return f"{mapping.origin} of kernel `{self.kernel.name}`"


def check_reports(kernel: Kernel) -> None:
    """Raises Refused for a kernel with checks, prints or breakpoints: their texts name the kernel and its operands."""
    for eqn in equations(kernel.body.jaxpr):
        if eqn.primitive.name in REPORTS:
            raise Refused(f"the body of kernel `{kernel.name}` has checks, prints or breakpoints")


class Operands:
    """Operands of a kernel in the making: atoms of the function, and their blocks."""

    def __init__(self) -> None:
        self.atoms: list = []
        self.mappings: list[BlockMapping] = []

    def add(self, atom, mapping: BlockMapping, is_shared: bool = False) -> int:
        """The number of an operand; that of an equal one, unless it shares its array with a result."""
        for number, (other, known) in enumerate(zip(self.atoms, self.mappings)):
            if not is_shared and other is atom and same_blocks(known, mapping):
                return number
        self.atoms.append(atom)
        self.mappings.append(mapping)
        return len(self.atoms) - 1


def same_blocks(one: BlockMapping, other: BlockMapping) -> bool:
    """Whether programs see the same blocks of arrays of one shape."""
    return (
        one.array.shape == other.array.shape
        and one.dims == other.dims
        and same(one.index_map, other.index_map)
    )


def assembled(
    kernel: Kernel,
    inputs: Sequence[BlockMapping],
    outputs: Sequence[BlockMapping],
    scratch: Sequence[Scratch],
    run: Callable[..., None],
    **changes: Any,
) -> Kernel:
    """The kernel with other operands, results and scratch. `run`: traces its body, on Refs of these."""
    types = [(mapping.ref_shape, mapping.array.dtype) for mapping in (*inputs, *outputs)]
    types += [(buf.shape, buf.dtype) for buf in scratch]
    with jax.enable_x64(True):  # every type is explicit by now
        closed = jax.make_jaxpr(run)(*[_jax.ref_aval(*type_) for type_ in types])
    return dataclasses.replace(
        kernel,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        scratch=tuple(scratch),
        body=canonical_body(closed, kernel.name),
        with_rules=None,
        **changes,
    )
