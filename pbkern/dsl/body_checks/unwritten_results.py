"""Kernel -> KernelError where a result, or a part of it, is written by no program: the caller would get whatever was in memory.

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
from pbkern.core.jaxprs import inner_jaxprs
from pbkern.dsl.interpret import block_starts
from pbkern.dsl.kernel import BlockMapping, Element, Kernel
from pbkern.dsl.primitives.ref_access import Index, Point, Range, is_ref_access, ref_access

MOST_ASKED = 512  # programs whose block is asked for one by one: 0.1 ms each
MOST_MARKED = 1 << 20  # elements or cells that are marked one by one

Box = tuple[tuple[int, int], ...]  # (first, end) per dimension


def check_written(k: Kernel, bounded: Collection[int] = ()) -> None:
    """Raises KernelError.

    `bounded`: numbers of results whose blocks have sizes that programs choose (BoundedSlice).
    """
    aliased = {o for _, o in k.aliases}
    written = _jax.written_inputs(k.body.jaxpr)
    for n, m in enumerate(k.outputs):
        if n in aliased or not math.prod(m.array.shape):
            continue
        if len(k.inputs) + n not in written:
            raise KernelError(
                f"{m.origin} of kernel `{k.name}` is never stored to",
                at=k.defined_at,
                why=f"what its {m.array} elements would be is whatever was in memory",
                hint="o_ref[...] = value in the body; input_output_aliases for a result that may stay as an operand was",
            )
        if n not in bounded:
            _check_block(k, n, m)
            _check_grid(k, m)


# --- within a block
# ------------------------------------------------------------------------------------------------


def _check_block(k: Kernel, n: int, m: BlockMapping) -> None:
    """Checks that stores at constant places cover the block.

    Blocks that overlap may leave edges to each other.
    """
    size = math.prod(m.ref_shape)
    if size > MOST_MARKED or any(isinstance(d, Element) for d in m.dims):
        return
    marked = np.zeros(m.ref_shape, bool)
    for indices in _stores(k.body.jaxpr, k.body.jaxpr.invars[len(k.inputs) + n]):
        where = [_positions(i) for i in indices] if indices is not None else [None]
        if None in where:
            return
        marked[tuple(where)] = True
    if not marked.all():
        first = tuple(map(int, np.argwhere(~marked)[0]))
        raise KernelError(
            f"kernel `{k.name}` leaves a part of each block of {m.origin} unwritten",
            at=k.defined_at,
            why=f"{size - int(marked.sum())} of {size} elements of a block of shape {m.ref_shape}, the first at {first}",
            hint="store to all of o_ref; input_output_aliases for a result that may stay as an operand was",
        )


def _stores(jaxpr: jex.Jaxpr, ref: jex.Var) -> Iterator[tuple[Index, ...] | None]:
    """Indices of each store to a Ref; None for what loops and branches may store."""
    for eqn in jaxpr.eqns:
        if is_ref_access(eqn):
            access = ref_access(eqn)
            if access.ref is ref and access.kind != "load":
                yield access.indices
        elif ref in eqn.invars and any(inner_jaxprs(eqn)):
            yield None


def _positions(index: Index) -> int | slice | None:
    match index:
        case Point(int(at)):
            return at
        case Range(int(start), size, stride):
            return slice(start, start + size * stride, stride)
    return None


# --- over the grid
# -------------------------------------------------------------------------------------------------


def _check_grid(k: Kernel, m: BlockMapping) -> None:
    """The blocks of all programs together are the array."""
    if k.dynamic_grid:
        return
    if not k.num_programs:
        _raise_uncovered(k, m, "no program runs")
    if None not in m.starts:
        for d in range(len(m.dims)):
            _check_dimension(k, m, d)
    blocks = math.prod(-(-n // max(d.size, 1)) for n, d in zip(m.array.shape, m.dims))
    if k.num_programs < blocks:
        _raise_uncovered(
            k, m, f"{k.num_programs} programs write a block each, the array has {blocks}"
        )
    if None in m.starts or _share_axes(m):
        _check_cells(k, m)


def _share_axes(m: BlockMapping) -> bool:
    """Whether two dimensions of the array move with one of the grid: what programs cover is no box then."""
    symbols = [s.symbols for s in m.starts if s is not None]
    return any(a & b for a, b in itertools.combinations(symbols, 2))


def _check_dimension(k: Kernel, m: BlockMapping, d: int) -> None:
    """Checks that each element of a dimension is in a block.

    With strides in rising order, the first that leaves a gap after what the smaller ones cover
    leaves it for good: the next block starts after it.
    """
    start, size, extent = m.starts[d], m.dims[d].size, m.array.shape[d]
    assert start is not None  # it is affine
    first, last = start.bounds(lambda axis: k.grid[axis])
    covered = size
    for axis in sorted(start.symbols, key=lambda a: abs(start.coefficient(a))):
        stride = abs(start.coefficient(axis))
        if k.grid[axis] > 1:
            if stride > covered:
                break
            covered += stride * (k.grid[axis] - 1)
    if first > 0 or first + covered < extent:
        gap = (0, first) if first > 0 else (first + covered, extent)
        _raise_uncovered(
            k,
            m,
            f"dimension {d}: blocks of {size} start at {first} to {last}, none has element {gap[0]}",
        )


def _check_cells(k: Kernel, m: BlockMapping) -> None:
    """Asks the index map where each program's block is, and marks it."""
    if len(m.index_map.jaxpr.invars) > len(k.grid) or k.num_programs > MOST_ASKED:
        return
    with jax.ensure_compile_time_eval():
        boxes = [
            _box(m, block_starts(m, index, [])) for index in itertools.product(*map(range, k.grid))
        ]
    cuts = [
        sorted({0, n, *(min(max(e, 0), n) for b in boxes for e in b[d])})
        for d, n in enumerate(m.array.shape)
    ]
    if math.prod(len(c) - 1 for c in cuts) > MOST_MARKED:
        return
    marked = np.zeros([len(c) - 1 for c in cuts], bool)
    for box in boxes:
        marked[tuple(slice(*np.searchsorted(c, ends)) for c, ends in zip(cuts, box))] = True
    if not marked.all():
        first = tuple(c[i] for c, i in zip(cuts, np.argwhere(~marked)[0]))
        _raise_uncovered(k, m, f"no block has element {first}")


def _box(m: BlockMapping, starts: Sequence[int]) -> Box:
    return tuple((max(s, 0), min(s + d.size, n)) for s, d, n in zip(starts, m.dims, m.array.shape))


def _raise_uncovered(k: Kernel, m: BlockMapping, why: str) -> None:
    sizes = ", ".join(
        f"pbkern.cdiv({n}, {d.size})" for n, d in zip(m.array.shape, m.dims) if d.size < n
    )
    raise KernelError(
        f"the grid of kernel `{k.name}` leaves a part of {m.origin} unwritten",
        at=k.defined_at,
        why=f"array {m.array}, grid {k.grid}; {why}",
        hint=f"one program per block, {sizes or 'at least one'}, and an index map that reaches them all; "
        "input_output_aliases for a result that may stay as an operand was",
    )
