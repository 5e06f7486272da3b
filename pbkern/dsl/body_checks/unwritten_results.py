"""Kernel -> KernelError where a result, or a part of it, is written by no program: the caller would get undefined elements.

A result that shares its array with an operand may stay as it is. Where a block is is known from
affine index maps, and from others by asking them for each program of a small grid; maps that read
operands, grids of a size that is known only when the kernel runs, and stores at computed places get
the benefit of the doubt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import KernelError
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.dsl.interpret import block_starts
from pbkern.dsl.kernel import BlockMapping, Element, Kernel
from pbkern.dsl.primitives.ref_access import (
    MOST_MARKED,
    Index,
    constant_positions,
    is_ref_access,
    ref_access,
)

from .place_walk import PlaceWalk

MOST_ASKED = 512  # programs whose block is asked for one by one: 0.1 ms each

Box = tuple[tuple[int, int], ...]  # (first, end) per dimension


def check_written(kernel: Kernel, bounded: Collection[int] = ()) -> None:
    """Raises KernelError.

    `bounded`: numbers of results whose blocks have sizes that programs choose (BoundedSlice).
    """
    aliased = {number for _, number in kernel.aliases}
    written = _jax.written_inputs(kernel.body.jaxpr)
    for n, output in enumerate(kernel.outputs):
        if n in aliased or not math.prod(output.array.shape):
            continue
        if len(kernel.inputs) + n not in written:
            raise KernelError(
                f"{output.origin} of kernel `{kernel.name}` is never stored to",
                at=kernel.defined_at,
                why=f"what its {output.array} elements would be is whatever was in memory",
                hint="o_ref[...] = value in the body; input_output_aliases for a result that may stay as an operand was",
            )
        if n not in bounded:
            _check_block(kernel, n, output)
            _check_grid(kernel, n, output)


# --- within a block
# ------------------------------------------------------------------------------------------------


def _check_block(kernel: Kernel, number: int, mapping: BlockMapping) -> None:
    """Checks that stores at constant places cover the block.

    Blocks that overlap may leave edges to each other.
    """
    size = math.prod(mapping.ref_shape)
    if size > MOST_MARKED or any(isinstance(dim, Element) for dim in mapping.dims):
        return
    marked = np.zeros(mapping.ref_shape, bool)
    for indices in _stores(
        kernel.body.jaxpr, kernel.body.jaxpr.invars[len(kernel.inputs) + number]
    ):
        where = [constant_positions(index) for index in indices] if indices is not None else [None]
        if None in where:
            return
        marked[tuple(where)] = True
    if not marked.all():
        first = tuple(map(int, np.argwhere(~marked)[0]))
        raise KernelError(
            f"kernel `{kernel.name}` leaves a part of each block of {mapping.origin} unwritten",
            at=kernel.defined_at,
            why=f"{size - int(marked.sum())} of {size} elements of a block of shape {mapping.ref_shape}, the first at {first}",
            hint="store to all of o_ref; input_output_aliases for a result that may stay as an operand was",
        )


def _stores(jaxpr: jex.Jaxpr, ref: jex.Var) -> Iterator[tuple[Index, ...] | None]:
    """Indices of each store to a Ref; None for a store in a loop or branch."""
    for eqn in jaxpr.eqns:
        if is_ref_access(eqn):
            access = ref_access(eqn)
            if access.ref is ref and access.kind != "load":
                yield access.indices
        elif ref in eqn.invars and any(inner_jaxprs(eqn)):
            yield None


# --- over the grid
# -------------------------------------------------------------------------------------------------


def _check_grid(kernel: Kernel, number: int, mapping: BlockMapping) -> None:
    """The blocks of all programs together are the array."""
    if kernel.dynamic_grid:
        return
    if not kernel.num_programs:
        _raise_uncovered(kernel, mapping, "no program runs")
    if None not in mapping.starts:
        for axis in range(len(mapping.dims)):
            _check_dimension(kernel, mapping, axis)
    blocks = math.prod(
        -(-size // max(dim.size, 1)) for size, dim in zip(mapping.array.shape, mapping.dims)
    )
    if kernel.num_programs < blocks:
        _raise_uncovered(
            kernel,
            mapping,
            f"{kernel.num_programs} programs write a block each, the array has {blocks}",
        )
    if kernel.num_programs > MOST_ASKED or _reads_prefetched(kernel, mapping):
        return
    programs = list(itertools.product(*map(range, kernel.grid)))
    ref = kernel.body.jaxpr.invars[len(kernel.inputs) + number]
    storing = programs
    if all(indices is None for indices in _stores(kernel.body.jaxpr, ref)):
        storing = [place for place in programs if _may_store(kernel, number, place)]
    if None in mapping.starts or _share_axes(mapping) or len(storing) < len(programs):
        _check_cells(kernel, mapping, storing, programs)


def _share_axes(mapping: BlockMapping) -> bool:
    """Whether two dimensions of the array move with one dimension of the grid: the covered elements are then no box."""
    symbols = [start.symbols for start in mapping.starts if start is not None]
    return any(left & right for left, right in itertools.combinations(symbols, 2))


def _check_dimension(kernel: Kernel, mapping: BlockMapping, dim: int) -> None:
    """Checks that each element of a dimension is in a block.

    With strides in rising order, the first that leaves a gap after what the smaller ones cover
    leaves it for good: the next block starts after it.
    """
    start, size, extent = mapping.starts[dim], mapping.dims[dim].size, mapping.array.shape[dim]
    assert start is not None  # it is affine
    first, last = start.bounds(lambda axis: kernel.grid[axis])
    covered = size
    for axis in sorted(start.symbols, key=lambda symbol: abs(start.coefficient(symbol))):
        stride = abs(start.coefficient(axis))
        if kernel.grid[axis] > 1:
            if stride > covered:
                break
            covered += stride * (kernel.grid[axis] - 1)
    if first > 0 or first + covered < extent:
        gap = (0, first) if first > 0 else (first + covered, extent)
        _raise_uncovered(
            kernel,
            mapping,
            f"dimension {dim}: blocks of {size} start at {first} to {last}, none has element {gap[0]}",
        )


def _reads_prefetched(kernel: Kernel, mapping: BlockMapping) -> bool:
    return len(mapping.index_map.jaxpr.invars) > len(kernel.grid)


def _may_store(kernel: Kernel, number: int, place: tuple[int, ...]) -> bool:
    """Whether a program may store to a result: no condition on its place in the grid keeps it from that."""
    ref = len(kernel.inputs) + number
    return ref in PlaceWalk(place, kernel.grid, set()).run(kernel.body.jaxpr)


def _check_cells(
    kernel: Kernel, mapping: BlockMapping, storing: list[tuple], programs: list[tuple]
) -> None:
    """Asks the index map where the block of each program that stores is, and marks it."""
    with jax.ensure_compile_time_eval():
        boxes = [_box(mapping, block_starts(mapping, index, [])) for index in storing]
    cuts = [
        sorted({0, size, *(min(max(edge, 0), size) for region in boxes for edge in region[axis])})
        for axis, size in enumerate(mapping.array.shape)
    ]
    if math.prod(len(cut) - 1 for cut in cuts) > MOST_MARKED:
        return
    marked = np.zeros([len(cut) - 1 for cut in cuts], bool)
    for box in boxes:
        marked[tuple(slice(*np.searchsorted(cut, ends)) for cut, ends in zip(cuts, box))] = True
    if not marked.all():
        first = tuple(cut[i] for cut, i in zip(cuts, np.argwhere(~marked)[0]))
        why = f"no block has element {first}"
        if len(storing) < len(programs):
            idle = next(place for place in programs if place not in storing)
            why = f"element {first}: conditions in the body keep program {idle} from storing"
        _raise_uncovered(kernel, mapping, why)


def _box(mapping: BlockMapping, starts: Sequence[int]) -> Box:
    return tuple(
        (max(start, 0), min(start + dim.size, size))
        for start, dim, size in zip(starts, mapping.dims, mapping.array.shape)
    )


def _raise_uncovered(kernel: Kernel, mapping: BlockMapping, why: str) -> None:
    sizes = ", ".join(
        f"pbkern.cdiv({size}, {dim.size})"
        for size, dim in zip(mapping.array.shape, mapping.dims)
        if dim.size < size
    )
    raise KernelError(
        f"the grid of kernel `{kernel.name}` leaves a part of {mapping.origin} unwritten",
        at=kernel.defined_at,
        why=f"array {mapping.array}, grid {kernel.grid}; {why}",
        hint=f"one program per block, {sizes or 'at least one'}, and an index map that reaches them all; "
        "input_output_aliases for a result that may stay as an operand was",
    )
