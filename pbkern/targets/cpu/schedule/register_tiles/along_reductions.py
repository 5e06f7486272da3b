"""Tiles whose vectors run along a reduced dimension."""

from __future__ import annotations

from dataclasses import replace

from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Load, Nest
from pbkern.lower.nest.reductions import per_accumulator
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule
from pbkern.targets.cpu.schedule.short_rows import batched_rows
from pbkern.targets.cpu.schedule.vector_dimension import is_long_point

from .prices import PRODUCTS_UNDER_WAY, STEP_CYCLES, tiled_cycles
from .steps import vectors_along

# Points along one side of a tile whose vectors run along the reduction, at most.
MOST_TILE_SIDE = 6
# Accumulators of the fewest rows that are added up in turns: fewer wait for one another.
FEWEST_ROWS = 4
# Vectors of a row that several rows at a time are added up of, at most.
FEW_VECTORS = 8


def reduction_tile(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """Vectors along a reduced dimension: several accumulators hide latency; rows share an operand where there is one."""
    vectors, count = vectors_along(nest, sched), len(nest.reductions)
    unroll = max(1, min((2 if count <= 2 else 1) if is_long_point(nest) else 8 // count, vectors))
    rows = [dim for dim, size in nest.dims.items() if size > 1 and dim not in nest.rdims]
    shared = [
        row
        for row in rows
        if any(row not in load.symbols and sched.vector in load.symbols for load in nest.loads())
    ]
    near = _rows_in_registers(nest, sched, rows)
    if near is not None:
        jam = {near: nest.dims[near]} if nest.dims[near] > 1 else {}
        return replace(sched, jam=jam, unroll=1)
    if shared and any(reduction.is_plain_product for reduction in nest.reductions):
        jam = {shared[-1]: min(4, nest.dims[shared[-1]])}
        return _tile_both_sides(nest, replace(sched, jam=jam, unroll=min(4, vectors)))
    return replace(sched, unroll=unroll)


def _rows_in_registers(nest: Nest, sched: NestSchedule, rows: list[str]) -> str | None:
    """The dimension of a few sums of rows that memory has in turns, as parts of larger rows: an accumulator for each.

        a[row, i, :] for all rows, then a[row, i + 1, :] ..     ->     a[row, i, :] and a[row, i + 1, :], then the next row

    What is read follows one another, and lanes are added up once.
    """
    far = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1 and rdim != sched.vector]
    if len(rows) != 1 or not far or nest.ordered:
        return None
    (row,) = rows
    points = nest.dims[row] * len(per_accumulator(nest.reductions, bool))
    inside = [
        abs(flat_coefficient(load.buf, load.index, row))
        < min(abs(flat_coefficient(load.buf, load.index, rdim)) for rdim in far)
        for load in nest.loads()
        if isinstance(load, Load) and sched.vector in load.symbols
    ]
    if not inside or not all(inside) or is_long_point(nest):
        return None
    return row if FEWEST_ROWS <= points <= sched.registers // 4 else None


def batched(nest: Nest, sched: NestSchedule, full: int) -> NestSchedule:
    """Short rows: as many as a vector has lanes end in one vector. `full`: lanes of a register.

    Values with their places are many operations to compare: those of half a register are found row
    by row.
    """
    rows = batched_rows(nest, sched.along)
    if rows is None or vectors_along(nest, sched) > FEW_VECTORS or nest.dims[rows] < sched.lanes:
        return sched
    if sched.lanes == full or all(
        reduction.op not in ("argmax", "argmin") for reduction in nest.reductions
    ):
        return replace(sched, batched_rows=rows, jam={rows: sched.lanes}, unroll=1)
    return sched


def _tile_both_sides(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """A register tile of points; some share one operand, others the other one: gradients of a convolution's weights."""
    if len(nest.reductions) != 1:
        return sched
    left, right = (arg.symbols for arg in nest.reductions[0].args)
    free = [dim for dim, size in nest.dims.items() if size > 1 and dim not in nest.rdims]
    sides = [
        [dim for dim in free if dim in mine and dim not in other]
        for mine, other in ((left, right), (right, left))
    ]
    if not all(sides) or sched.vector not in left & right:
        return sched
    (left_dim, left_size), (right_dim, right_size) = (
        (side[-1], nest.dims[side[-1]]) for side in sides
    )
    tiles = [
        (i, j, unroll)
        for i in range(1, min(left_size, MOST_TILE_SIDE) + 1)
        for j in range(1, min(right_size, MOST_TILE_SIDE) + 1)
        for unroll in range(1, min(4, vectors_along(nest, sched)) + 1)
        if i * j * unroll <= sched.accumulators - min(i, j)
    ]

    def cycles(tile: tuple[int, int, int]) -> float:
        i, j, unroll = tile
        step = lambda i, j, vectors: (
            max(
                i * j * vectors,
                (i + j) * vectors,
                PRODUCTS_UNDER_WAY if i * j * vectors < PRODUCTS_UNDER_WAY else 0,
            )
            / 2
            + STEP_CYCLES
        )
        return tiled_cycles(
            left_size,
            i,
            lambda x: tiled_cycles(
                right_size,
                j,
                lambda y: tiled_cycles(
                    vectors_along(nest, sched), unroll, lambda vectors: step(x, y, vectors)
                ),
            ),
        )

    i, j, unroll = min(tiles, key=cycles)
    jam = {dim: count for dim, count in ((left_dim, i), (right_dim, j)) if count > 1}
    return replace(sched, jam=jam, unroll=unroll)
