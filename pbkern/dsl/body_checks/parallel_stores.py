"""Kernel -> KernelError where programs along a dimension declared "parallel" store to the same elements of a result.

Which of them is last is not known: the result is that of any. Seen without running: the result's
block does not move with the dimension, and the body stores to constant places in it; or it moves by
less than its size, and the body stores to all of it; under no condition or mask.
`pbkern.interpret` finds the rest as it runs (RaceError).
"""

from __future__ import annotations

from jax.extend import core as jex

from pbkern.core.errors import KernelError
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import BlockMapping, Kernel
from pbkern.dsl.primitives.ref_access import Point, Range, is_ref_access, is_whole, ref_access


def check_parallel_stores(kernel: Kernel) -> None:
    """Raises KernelError. Kernels of the fuser are not looked at."""
    for axis in parallel_dims(kernel) if kernel.defined_at else ():
        if kernel.grid[axis] == 1:
            continue
        for n, output in enumerate(kernel.outputs):
            ref = kernel.body.jaxpr.invars[len(kernel.inputs) + n]
            moves = _moves(output, axis)
            if moves is None or not _stores(kernel.body.jaxpr, ref, output, whole=any(moves)):
                continue
            if all(abs(step) < dim.size for step, dim in zip(moves, output.dims)):
                _refuse(kernel, output, axis, moves)


def _moves(mapping: BlockMapping, axis: int) -> list[int] | None:
    """Elements by which the next program's block along a grid dimension starts later; None if that is not known."""
    starts = [start for start in mapping.starts if start is not None]
    if len(starts) < len(mapping.starts):
        return None
    return [start.coefficient(axis) for start in starts]


def _refuse(kernel: Kernel, output: BlockMapping, axis: int, moves: list[int]) -> None:
    size = tuple(dim.size for dim in output.dims)
    reason = (
        f"blocks of {size} start {tuple(moves)} apart: they overlap"
        if any(moves)
        else f"the index map of {output.origin} does not use it"
    )
    raise KernelError(
        f"programs of kernel `{kernel.name}` that run in parallel write the same elements of {output.origin}",
        at=kernel.defined_at,
        why=f'grid {kernel.grid}, dimension {axis} is "parallel", and {reason}',
        hint=f'an index map that moves by a block with grid dimension {axis}, or "arbitrary" in dimension_semantics, '
        "where programs run in order",
    )


def _stores(jaxpr: jex.Jaxpr, ref: jex.Var, mapping: BlockMapping, whole: bool) -> bool:
    """Whether there is a store without condition or mask to constant places, or to all of the block."""
    for eqn in jaxpr.eqns:
        if is_ref_access(eqn):
            access = ref_access(eqn)
            if access.ref is not ref or access.kind == "load" or access.mask is not None:
                continue
            if all(map(_is_constant, access.indices)) and (
                not whole or all(map(is_whole, access.indices, mapping.ref_shape))
            ):
                return True
    return False


def _is_constant(index) -> bool:
    match index:
        case Point(int()) | Range(int()):
            return True
    return False
