"""Scratch that starts again in the course of the grid, so that programs pass nothing on along the dimensions before.

    @pl.when(pl.program_id(2) == 0)
    def _(): sum_ref[...] = jnp.zeros_like(sum_ref)

Every program with index 0 along dimension 2, and so the first one for each pair of indices along
dimensions 0 and 1, overwrites the scratch before anything reads it: pairs are independent of each
other.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from pbkern.core.jaxprs.walks import literal_value
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.primitives.ref_access import is_ref_access, is_whole, ref_access


def restarting_dimension(kernel: Kernel, scratch: int) -> int:
    """The grid dimension along which scratch is first handed on; programs that differ before it hand on nothing."""
    dim = _restart(kernel, scratch)
    return 0 if dim is None else dim


def starts_overwritten(kernel: Kernel, scratch: int) -> bool:
    """Whether the first program, and so any that starts again, overwrites scratch before anything reads it."""
    return _restart(kernel, scratch) is not None


def is_overwritten_by_each(kernel: Kernel, scratch: int) -> bool:
    """Whether every program overwrites scratch before it reads it."""
    return _restart(kernel, scratch) == len(kernel.grid)


def _restart(kernel: Kernel, scratch: int) -> int | None:
    """The first dimension along which scratch is handed on; None where programs are not known to overwrite it first."""
    jaxpr = kernel.body.jaxpr
    ref = jaxpr.invars[len(kernel.inputs) + len(kernel.outputs) + scratch]
    first = next((eqn for eqn in jaxpr.eqns if ref in _variables(eqn.invars)), None)
    if first is None:
        return len(kernel.grid)
    if _overwrites(first, ref, jaxpr):
        return len(kernel.grid)
    if (
        first.primitive.name != "cond"
        or len(first.params["branches"]) != 2
        or first.invars[0] is ref
    ):
        return None
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    dims = _dimensions_at_zero(first.invars[0], makers)
    branch = first.params["branches"][1].jaxpr
    inner = [var for var, atom in zip(branch.invars, first.invars[1:]) if atom is ref]
    touched = next((eqn for eqn in branch.eqns if inner[0] in _variables(eqn.invars)), None)
    starts_anew = (
        dims and len(inner) == 1 and touched is not None and _overwrites(touched, inner[0], branch)
    )
    return min(dims) if dims and starts_anew else None


def _variables(atoms: Sequence) -> list:
    return [atom for atom in atoms if isinstance(atom, jex.Var)]


def _overwrites(eqn, ref, jaxpr: jex.Jaxpr) -> bool:
    """Whether an equation stores to all of a Ref, and nothing wants what was there."""
    if not is_ref_access(eqn):
        return False
    access = ref_access(eqn)
    whole = all(is_whole(index, size) for index, size in zip(access.indices, ref.aval.shape))
    used = {variable for equation in jaxpr.eqns for variable in _variables(equation.invars)} | set(
        _variables(jaxpr.outvars)
    )
    return (
        access.kind == "store"
        and access.ref is ref
        and access.mask is None
        and whole
        and not used & set(eqn.outvars)
    )


def _dimensions_at_zero(atom, makers: dict) -> set[int]:
    """Grid dimensions at whose index 0, of all of them, a test holds; none where it is another test."""
    eqn = makers.get(atom) if isinstance(atom, jex.Var) else None
    if eqn is None:
        return set()
    match eqn.primitive.name:
        case "convert_element_type":
            return _dimensions_at_zero(eqn.invars[0], makers)
        case "and":
            parts = [_dimensions_at_zero(var, makers) for var in eqn.invars]
            return parts[0] | parts[1] if all(parts) else set()
        case "eq":
            index, number = eqn.invars
            of = makers.get(index) if isinstance(index, jex.Var) else None
            zero = isinstance(number, jex.Literal) and literal_value(number) == 0
            return (
                {of.params["axis"]}
                if zero and of is not None and of.primitive.name == "program_id"
                else set()
            )
    return set()
