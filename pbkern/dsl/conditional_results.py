"""Kernel -> results that values at run time may leave unwritten: these start as zeros (build_programs.py).

    @pbkern.when(x[0] > 0)
    def _(): o[...] = x[...]

    pbkern.store(o, ..., x[...], mask=x[...] > 0)

Otherwise a caller would read whatever was in memory. Stores that depend on nothing but the
program's place in the grid, and stores at computed places, are the author's to get right: no fill
is paid for there. What no program can write is an error (body_checks/unwritten_results.py).
"""

from __future__ import annotations

from jax.extend import core as jex

from pbkern.core.jaxprs import inner_jaxprs
from pbkern.dsl.primitives.ref_access import is_ref_access, ref_access

from .kernel import BlockMapping, Kernel


def unsure_results(kernel: Kernel) -> tuple[int, ...]:
    """Numbers of results that start as zeros, because values decide whether all of them are written.

    These are results of grids whose size an operand gives, of index maps that read operands, and
    those that are stored to under conditions or masks of values alone. Results that share memory
    with an operand keep what that has. Kernels of the fuser write all of their results.
    """
    if not kernel.defined_at:
        return ()
    aliased = {number for _, number in kernel.aliases}
    found = []
    constants = set(kernel.body.jaxpr.constvars)
    for n, output in enumerate(kernel.outputs):
        ref = kernel.body.jaxpr.invars[len(kernel.inputs) + n]
        if n not in aliased and (
            kernel.dynamic_grid
            or _moves_with_values(kernel, output)
            or not _is_stored(kernel.body.jaxpr, ref, set(constants))
        ):
            found.append(n)
    return tuple(found)


def _moves_with_values(kernel: Kernel, mapping: BlockMapping) -> bool:
    """Whether prefetched operands decide which blocks the programs write."""
    jaxpr = mapping.index_map.jaxpr
    read = {var for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, jex.Literal)}
    return any(var in read or var in jaxpr.outvars for var in jaxpr.invars[len(kernel.grid) :])


def _is_stored(
    jaxpr: jex.Jaxpr, ref: jex.Var, places: set[jex.Var], judges_masks: bool = True
) -> bool:
    """Whether the body stores to a Ref under no condition or mask, or under one of the place in the grid alone.

    places: operands that are known from the place in the grid; those that equations make of them
    join. judges_masks: False where places are not known, as in loops: masks get the benefit of the
    doubt.
    """

    def is_by_place(atom) -> bool:
        return isinstance(atom, jex.Literal) or atom in places

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if is_ref_access(eqn):
            access = ref_access(eqn)
            is_whole = access.mask is None or is_by_place(access.mask) or not judges_masks
            if access.ref is ref and access.kind != "load" and is_whole:
                return True
        elif ref in eqn.invars:
            if name == "cond" and _branches_store(eqn, ref, places, judges_masks):
                return True
            if name not in ("cond", "while") and any(
                _inner_is_stored(eqn, inner.jaxpr, ref) for inner in inner_jaxprs(eqn)
            ):
                return True
        elif all(map(is_by_place, eqn.invars)):  # of no operands: program_id, num_programs, iota
            places.update(eqn.outvars)
    return False


def _branches_store(eqn, ref: jex.Var, places: set[jex.Var], judges_masks: bool) -> bool:
    condition, *operands = eqn.invars
    stores = []
    for branch in eqn.params["branches"]:
        inner = dict(zip(operands, branch.jaxpr.invars))
        known = {
            var
            for operand, var in zip(operands, branch.jaxpr.invars)
            if isinstance(operand, jex.Literal) or operand in places
        }
        stores.append(_is_stored(branch.jaxpr, inner[ref], known, judges_masks))
    is_by_place = isinstance(condition, jex.Literal) or condition in places
    return any(stores) if is_by_place else all(stores)


def _inner_is_stored(eqn, inner: jex.Jaxpr, ref: jex.Var) -> bool:
    """Does so for a call's or a scan's jaxpr; one whose operands are arranged otherwise is given the benefit of the doubt."""
    if len(inner.invars) != len(eqn.invars):
        return True
    return _is_stored(inner, inner.invars[list(eqn.invars).index(ref)], set(), judges_masks=False)
