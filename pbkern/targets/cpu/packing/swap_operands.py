"""Contraction -> the same with vectors along rows of its other operand, and a copy that turns the sums, where that is less.

Before -> after, a convolution with channels first:
    out[o, y, x] = f(sum of image[i, y + h, x + w] * filter[o, i, h, w])       vectors along x
    sums[y, x, o] = sum of image[i, y + h, x + w] * filter[o, i, h, w]         vectors along o
    out[o, y, x] = f(sums[y, x, o])

Rows of images are short: of 7 pixels, 16 lanes lose more than half, of 28 an eighth. Channels fill
them. What is contiguous along the wrong dimension is transposed twice for that: one operand while
it is packed into panels (panels/panels.py), and the results.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Load, Nest, Stmt
from pbkern.targets.costs.caches import TRANSPOSE_CYCLES
from pbkern.targets.cpu.schedule.register_tiles.choice import choose, contraction_tile
from pbkern.targets.cpu.schedule.register_tiles.prices import is_product, product_cycles

from .limits import PackLimits
from .operand_copies import OperandCopies, copy_dtype, stage
from .panels.depth_runs import longest_run, product_along, summed_in_scratch


def swapped_operands(
    nest: Nest, usual: str | None, context, limits: PackLimits, staged: OperandCopies
) -> tuple[list[Stmt], Nest] | None:
    """(products to be packed, the copy behind them), or None where vectors along `usual`, or as `choose` says, do as well."""
    if not is_product(nest) or any(store.inner for store in nest.stores):
        return None
    expr, other = nest.reductions[0].args
    if not all(
        isinstance(operand, Load) and operand.dtype.itemsize >= limits.fewest_element_bytes
        for operand in (expr, other)
    ):
        return None
    rows = [
        dim
        for dim, size in nest.dims.items()
        if size > 1 and dim not in nest.rdims and (dim in expr.symbols) != (dim in other.symbols)
    ]
    cycles = {
        row: _cycles(product_along(nest, row, context.pool), row, context, limits)
        for row in rows
        if row != usual
    }
    vector = min(cycles, key=cycles.__getitem__, default=None)
    results = math.prod(size for dim, size in nest.dims.items() if dim not in nest.rdims)
    if vector is None or cycles[
        vector
    ] + TRANSPOSE_CYCLES * results > limits.swapped_time * _usual_cycles(
        nest, usual, context, limits
    ):
        return None
    streamed, before = cast(Load, expr if vector in expr.symbols else other), list[Stmt]()
    if not _is_run(nest, streamed, limits.shortest_swapped_run):
        copy = stage(nest, streamed, copy_dtype(streamed.buf.dtype), context, before, staged)
        (reduction,) = nest.reductions
        nest = replace(
            nest,
            reductions=(
                replace(
                    reduction,
                    args=tuple(copy or arg if arg is streamed else arg for arg in reduction.args),
                ),
            ),
        )
    width, _ = contraction_tile(nest, vector, context.options.vectors)
    contract = context.options.contract
    longest = longest_run(nest, width, context, limits) if contract else None
    products, behind = summed_in_scratch(nest, vector, longest, context)
    return before + products, behind


def _cycles(nest: Nest, vector: str, context, limits: PackLimits) -> float:
    """Cycles with vectors along `vector`, the operand that it moves packed where that is strided."""
    sched = contraction_tile(nest, vector, context.options.vectors)[1]
    (streamed,) = (cast(Load, arg) for arg in nest.reductions[0].args if vector in arg.symbols)
    if flat_coefficient(streamed.buf, streamed.index, vector) == 1:
        return product_cycles(nest, sched)
    elements = math.prod(size for dim, size in nest.dims.items() if dim in streamed.symbols)
    packing = elements * (
        TRANSPOSE_CYCLES
        if _is_run(nest, streamed, limits.shortest_swapped_run)
        else limits.copy_cycles + TRANSPOSE_CYCLES
    )
    return min(product_cycles(nest, sched), product_cycles(nest, sched, packed=streamed) + packing)


def _is_run(nest: Nest, load: Load, shortest: int) -> bool:
    """Whether a load walks a run of neighbours along reduced dimensions: those are transposed in registers, others copied."""
    steps = sorted(
        (abs(flat_coefficient(load.buf, load.index, rdim)), nest.dims[rdim])
        for rdim in nest.rdims
        if nest.dims[rdim] > 1
    )
    length = 1
    for step, size in steps:
        if step == length:
            length *= size
    return length >= shortest


def _usual_cycles(nest: Nest, usual: str | None, context, limits: PackLimits) -> float:
    """Cycles of the product as it is."""
    options = context.options
    chosen = product_cycles(nest, choose(nest, options.vectors, options.contract))
    return chosen if usual is None else min(chosen, _cycles(nest, usual, context, limits))
