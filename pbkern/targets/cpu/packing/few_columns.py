"""Product with few columns, or few rows -> the same with vectors along the reduction.

A register tile of broadcasts and vectors along columns needs more of both. Each row of the large
operand, contiguous along the reduction, is read once in whole vectors instead; the small operand is
copied, transposed where it must be.
"""

from __future__ import annotations

import math

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, Gather, Load, Nest, Stmt, Store, nodes
from pbkern.targets.cpu.machines.machine import ROW_PADDING, Vectors
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule, scheduled
from pbkern.targets.cpu.schedule.prefetch import is_far
from pbkern.targets.cpu.schedule.vector_dimension import register_bits

from .limits import PackLimits
from .operand_copies import replace_operand
from .words_in_place import words_in_place


def few_rows(
    nest: Nest, streamed: Expr, stationary: Expr, context, limits: PackLimits
) -> list[Stmt] | None:
    """A product with few rows and columns that are contiguous along a deep reduction, as one with few columns.

    Of one row, which shares no column's elements with another, there is nothing to copy.
    """
    rows = [
        dim
        for dim, size in nest.dims.items()
        if size > 1 and dim in stationary.symbols and dim not in streamed.symbols
    ]
    words = words_in_place(nest, streamed, stationary, context)
    has_panels = nest.reuse(streamed) >= limits.fewest_panel_rows
    deep = limits.deep_row_vectors if has_panels else limits.depth_vectors
    lanes = context.options.vectors.bits // register_bits(words.nest)
    if len(rows) > 1 or max(words.nest.dims[rdim] for rdim in words.nest.rdims) < deep * lanes:
        return None
    vector = rows[0] if rows else None
    product = few_columns(words.nest, words.stationary, words.streamed, vector, context, limits)
    return [*words.before, *product] if product is not None else None


def tile_pays(
    nest: Nest, streamed: Expr, stationary: Expr, vector: str, context, limits: PackLimits
) -> bool:
    """Whether vectors along few columns are better: with 16 registers, two rows at a time would read a far copy of them.

    A tile of twelve rows reads the columns a sixth as often. Measured on one core of Zen 3, float32, ms with vectors along the
    reduction and along the columns: 3000 x 3000 by 4 columns 3.07 and 3.05, by 5 4.3 and 3.7, by 8 4.4 and 2.5, by 12 6.4 and
    4.4; 1000 x 1000 by 8 0.38 and 0.30; of a copy that is near, 512 x 512 by 12 0.098 and 0.105; of one that the second cache
    does not hold, 2000 x 20000 by 8 32 and 41. float64, 3000 x 3000 by 2 5.6 and 4.3, by 8 10.4 and 5.9.
    """
    options, vectors = context.options, context.options.vectors
    if vectors.registers > 16 or not all(
        isinstance(arg, Load) and arg.dtype.itemsize >= 4 and arg.buf.root.dtype == arg.dtype
        for arg in (streamed, stationary)
    ):
        return False
    itemsize = streamed.dtype.itemsize
    row_bytes = math.prod(nest.dims[rdim] for rdim in nest.rdims) * itemsize
    copy_bytes = nest.dims[vector] * row_bytes
    near_bytes = options.l1_bytes - limits.side_by_side_rows_of_16 * row_bytes
    half_filled = 2 * nest.dims[vector] * itemsize * 8 >= vectors.bits
    return half_filled and near_bytes < copy_bytes <= options.l2_bytes // limits.panel_share


def few_columns(
    nest: Nest, streamed: Expr, stationary: Expr, vector: str | None, context, limits: PackLimits
) -> list[Stmt] | None:
    """A product with few columns, along `vector`: vectors along the reduction, on the columns' transpose; or None.

    Each row of the other operand, contiguous along the reduction, is then read once in whole
    vectors. `vector`: None for one column, which must be contiguous.
    """
    inner = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
    vectors = context.options.vectors
    lanes = vectors.bits // register_bits(nest)
    columns = nest.dims[vector] if vector is not None else 1
    if (
        len(inner) != 1
        or columns > limits.few_columns
        or nest.dims[inner[0]] < limits.depth_vectors * lanes
    ):
        return None
    (k_dim,) = inner
    mine, other = (
        [dim for dim in nest.dims if dim in expr.symbols and nest.dims[dim] > 1]
        for expr in (streamed, stationary)
    )
    batch, rows = (
        [dim for dim in mine if dim not in (vector, k_dim)],
        [dim for dim in other if dim not in mine],
    )
    large = _row_in_place(stationary, k_dim)
    if large is None or len(rows) != 1 or k_dim not in mine or not {k_dim, *batch} <= set(other):
        return None
    product, copies = nest, list[Stmt]()
    if vector is not None:
        product, copies = _transposed_columns(nest, streamed, batch, k_dim, vector, context)
    elif _row_in_place(streamed, k_dim) is None:
        return None
    tile = (
        _column_tile(large, limits) if vector is None else _columns_tile(columns, vectors, limits)
    )
    jam = {rows[0]: min(nest.dims[rows[0]], tile.rows)}
    if vector is not None:
        jam = {vector: tile.columns, **jam}
    along = (rows[0],) if vector is None else (rows[0], vector)
    order = (*(dim for dim in nest.dims if dim not in (k_dim, *along)), *along)
    schedule = NestSchedule(
        lanes=lanes, vector=k_dim, jam=jam, order=order, unroll=tile.vectors, fixed=True
    )
    prefetched = {}
    if is_far(large.buf) and tile.prefetches:
        prefetched = {
            large.buf.root: jam[rows[0]] * abs(flat_coefficient(large.buf, large.index, rows[0]))
        }
    return [*copies, scheduled(product, schedule=schedule, prefetched=prefetched)]


@dataclass(frozen=True)
class _DepthTile:
    """A register tile with vectors along the reduction: rows of the large operand, columns, vectors of each in a step."""

    rows: int
    columns: int = 1
    vectors: int = 1
    prefetches: bool = True


def _columns_tile(columns: int, vectors: Vectors, limits: PackLimits) -> _DepthTile:
    """The tile of several columns, which are divided evenly."""
    most = limits.side_by_side_columns
    many_registers = vectors.registers > 16
    rows = limits.side_by_side_rows if many_registers else limits.side_by_side_rows_of_16
    return _DepthTile(rows, -(-columns // -(-columns // most)))


def _column_tile(large: Load, limits: PackLimits) -> _DepthTile:
    """The tile of one column, whose rows share it alone."""
    nbytes = large.buf.size * large.buf.dtype.itemsize
    if nbytes >= limits.one_column_stream_bytes:
        return _DepthTile(rows=8)
    return _DepthTile(rows=4, vectors=2, prefetches=False)


def _row_in_place(operand: Expr, k_dim: str) -> Load | None:
    """The load of an operand that reads nothing else, without a guard and contiguous along a dimension."""
    loads = [node for node in nodes([operand]) if isinstance(node, Load | Gather)]
    if len(loads) != 1 or not isinstance(loads[0], Load) or loads[0].guard:
        return None
    return loads[0] if flat_coefficient(*loads[0].access, k_dim) == 1 else None


def _transposed_columns(
    nest: Nest, streamed: Expr, batch: list[str], k_dim: str, vector: str, context
) -> tuple[Nest, list[Stmt]]:
    """The product with a transposed copy of the columns, and the copy."""
    transposed = streamed
    copies: list[Stmt] = []
    for last in (
        [[vector, k_dim]] if isinstance(streamed, Load) else [[k_dim, vector], [vector, k_dim]]
    ):  # made along rows, then transposed
        sizes = {dim: nest.dims[dim] for dim in [*batch, *last]}
        *outer, length = sizes.values()  # rows that do not fall into one cache set
        buf, index = (
            context.new_buffer((*outer, length + ROW_PADDING), streamed.dtype),
            tuple(map(Affine.symbol, sizes)),
        )
        copies.append(Nest(sizes, stores=(Store(buf, index, transposed),), at=nest.at))
        transposed = context.pool.load(streamed.dtype, buf, index, False)
    return replace_operand(nest, streamed, transposed), copies
