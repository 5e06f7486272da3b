"""Product with few columns, or few rows -> the same with vectors along the reduction.

A register tile of broadcasts and vectors along columns needs more of both. Each row of the large
operand, contiguous along the reduction, is read once in whole vectors instead; the small operand is
copied, transposed where it must be.
"""

from __future__ import annotations

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, Load, Nest, Stmt, Store
from pbkern.targets.cpu.machines.machine import ROW_PADDING
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule, scheduled
from pbkern.targets.cpu.schedule.prefetch import is_far
from pbkern.targets.cpu.schedule.vector_dimension import register_bits

from .limits import PackLimits
from .operand_copies import replace_operand


def few_rows(
    nest: Nest, streamed: Expr, stationary: Expr, context, limits: PackLimits
) -> list[Stmt] | None:
    """A product with few rows and columns that are contiguous along a deep reduction, as one with few columns."""
    rows = [
        dim
        for dim, size in nest.dims.items()
        if size > 1 and dim in stationary.symbols and dim not in streamed.symbols
    ]
    deep = limits.deep_row_vectors * context.options.vectors.bits // register_bits(nest)
    if (
        len(rows) != 1
        or not isinstance(stationary, Load)
        or max(nest.dims[rdim] for rdim in nest.rdims) < deep
    ):
        return None
    return few_columns(nest, stationary, streamed, rows[0], context, limits)


def few_columns(
    nest: Nest, streamed: Expr, stationary: Expr, vector: str, context, limits: PackLimits
) -> list[Stmt] | None:
    """A product with few columns, along `vector`: vectors along the reduction, on the columns' transpose; or None.

    Each row of the other operand, contiguous along the reduction, is then read once in whole
    vectors.
    """
    inner = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
    vectors = context.options.vectors
    lanes = vectors.bits // register_bits(nest)
    if (
        len(inner) != 1
        or nest.dims[vector] > limits.few_columns
        or nest.dims[inner[0]] < limits.depth_vectors * lanes
        or not isinstance(stationary, Load)
    ):
        return None
    k_dim, columns = inner[0], nest.dims[vector]
    plain = not stationary.guard and flat_coefficient(stationary.buf, stationary.index, k_dim) == 1
    mine, other = (
        [dim for dim in nest.dims if dim in expr.symbols and nest.dims[dim] > 1]
        for expr in (streamed, stationary)
    )
    batch, rows = (
        [dim for dim in mine if dim not in (vector, k_dim)],
        [dim for dim in other if dim not in mine],
    )
    if not plain or len(rows) != 1 or k_dim not in mine or not {k_dim, *batch} <= set(other):
        return None
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
    product = replace_operand(nest, streamed, transposed)
    many_registers = vectors.registers > 16
    most_rows = limits.side_by_side_rows if many_registers else limits.side_by_side_rows_of_16
    jammed = -(-columns // -(-columns // limits.side_by_side_columns))
    jam = {vector: jammed, rows[0]: min(nest.dims[rows[0]], most_rows)}
    order = (*(dim for dim in nest.dims if dim not in (k_dim, vector, rows[0])), rows[0], vector)
    schedule = NestSchedule(lanes=lanes, vector=k_dim, jam=jam, order=order, fixed=True)
    prefetched = {}
    if is_far(stationary.buf):
        prefetched = {
            stationary.buf.root: jam[rows[0]]
            * abs(flat_coefficient(stationary.buf, stationary.index, rows[0]))
        }
    return [*copies, scheduled(product, schedule=schedule, prefetched=prefetched)]
