"""Contraction nest -> statements that copy its operands into scratch first, where that pays.

The operand that varies along the vector dimension is packed panel by panel, [reduction][panel
width], so that the microkernel streams contiguous memory; this also transposes operands stored the
other way round and evaluates producers once (the prologue). The operand that is broadcast is copied
where its rows would fall into one cache set, or its elements into lines that evict one another
(panels/broadcast_operand.py). A far operand of few rows is packed by the products of the first rows. Deep
products run in parts (panels/depth_runs.py), those of few rows or columns along rows of their large operand
(few_columns.py). Copies of small floats are float32: an element is converted once, not wherever it is
read. Source: Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import (
    Expr,
    Load,
    Nest,
    Op,
    Stmt,
    with_nests,
)
from pbkern.targets.cpu.schedule.nest_schedule import scheduled
from pbkern.targets.cpu.schedule.register_tiles.choice import choose, contraction_tile

from .few_columns import few_columns, few_rows, tile_pays
from .limits import PackLimits
from .operand_copies import (
    OperandCopies,
    is_scattered,
)
from .pair_products import PAIR, Words, in_whole_words, is_narrow_integer, pair_products
from .panels.broadcast_operand import stage_still
from .panels.depth_runs import in_depth_runs, is_deep, longest_run
from .panels.far_rows import is_streamed, rows_at_once, rows_together
from .panels.near_runs import near_runs
from .panels.panels import filling_dim, in_panels, is_along, panel_pays
from .panels.row_strips import row_strips
from .quad_products import QUAD, quad_products
from .swap_operands import swapped_operands
from .tile_products import tile_products


def pack(
    nest: Nest, context, limits: PackLimits, staged: OperandCopies, turn: bool = True
) -> list[Stmt]:
    """The nest alone, or with copies of operands before it.

    `turn`: vectors may be moved.
    """
    operands = product_operands(nest)
    if (
        operands is not None and context.options.contract
    ):  # lanes would be partial sums: only where sums may be reassociated
        vector, streamed, stationary = operands
        tiles = tile_products(nest, vector, streamed, stationary, context, limits)
        if tiles is not None:
            return tiles
        narrow = None
        if not tile_pays(nest, streamed, stationary, vector, context, limits):
            paired = _in_pairs(nest, streamed, stationary, context)
            narrow = few_columns(*paired, vector, context, limits)
        narrow = narrow or few_rows(nest, streamed, stationary, context, limits)
        if narrow is not None:
            return narrow
    other = (
        swapped_operands(nest, operands and operands[0], context, limits, staged) if turn else None
    )
    if other is not None:
        products, copy = other
        return [*_packed(products, context, limits, staged), copy]
    if operands is None:
        return [nest]
    vector, streamed, stationary = operands
    if nest.dims[vector] < limits.fewest_columns:
        if _walks_results(nest, stationary, context):
            return [nest]
        out = list[Stmt]()
        nest, _ = stage_still(nest, stationary, True, context, limits, out, staged)
        return [*out, nest]
    return _along_columns(nest, vector, streamed, stationary, context, limits, staged)


def _walks_results(nest: Nest, stationary: Expr, context) -> bool:
    """Whether vectors along neighbours of the operand that would be broadcast are the best: a copy would take them apart."""
    vector = choose(nest, context.options.vectors, context.options.contract).vector
    return (
        vector is not None
        and vector not in nest.rdims
        and isinstance(stationary, Load)
        and flat_coefficient(stationary.buf, stationary.index, vector) == 1
    )


def _along_columns(
    nest: Nest,
    vector: str,
    streamed: Expr,
    stationary: Expr,
    context,
    limits: PackLimits,
    staged: OperandCopies,
) -> list[Stmt]:
    """A product with vectors along columns: of panels, in words or elements, or of operands where they are."""
    fills = filling_dim(nest, streamed, vector, limits) is not None
    width, _ = contraction_tile(nest, vector, context.options.vectors, fills)
    out, trial = list[Stmt](), OperandCopies(staged.written, dict(staged.copies))
    spread, apart = stage_still(nest, stationary, False, context, limits, out, trial)
    words = _in_words(spread, streamed, apart, vector, width, context, limits)
    if words is not None:
        staged.copies = trial.copies
        panels = in_panels(words.nest, words.packed, vector, width, context, limits, words.shift)
        return out + words.before + panels
    depth = math.prod(nest.dims[rdim] for rdim in nest.rdims)
    is_turned = isinstance(stationary, Load) and is_scattered(
        nest, stationary, nest.reuse(stationary), context.options
    )
    may_run = context.options.contract and not any(store.inner for store in nest.stores)
    if is_turned:
        runs = near_runs(nest, vector, streamed, stationary, context, limits) if may_run else None
        if runs is not None:
            return _packed(runs, context, limits, staged)
        strips = row_strips(nest, vector, streamed, stationary, depth, context, limits)
        if strips is not None:
            return strips
    fits = not is_deep(nest, depth, width, is_turned, context, limits)
    streams = may_run and is_streamed(nest, streamed, vector, depth, context, limits)
    pays = not streams and panel_pays(nest, streamed, vector, depth, context, limits)
    if pays and not fits and may_run:
        runs = in_depth_runs(nest, vector, longest_run(nest, width, context, limits), context)
        return _packed(runs, context, limits, staged)
    if not pays and not streams and not is_along(streamed, vector):
        return [nest]  # few rows: vectors along the reduction
    out = []
    nest, _ = stage_still(nest, stationary, True, context, limits, out, staged)
    if pays and fits:
        return out + in_panels(nest, streamed, vector, width, context, limits)
    if streams:
        far_rows = rows_together(nest, streamed, limits)
        if (
            depth > limits.most_runs * far_rows
        ):  # sums of sums: rounding errors grow with the number of additions
            runs = in_depth_runs(nest, vector, limits.most_runs * far_rows, context)
            return out + _packed(runs, context, limits, staged)
        return out + rows_at_once(nest, cast(Load, streamed), vector, far_rows, context)
    if out:
        nest = scheduled(nest, schedule=contraction_tile(nest, vector, context.options.vectors)[1])
    return [*out, nest]


def _packed(
    stmts: Sequence[Stmt], context, limits: PackLimits, staged: OperandCopies
) -> list[Stmt]:
    """The statements with every product in them packed."""

    def packed(nest: Nest) -> list[Stmt]:
        return pack(nest, context, limits, staged, turn=False) if nest.reductions else [nest]

    return with_nests(stmts, packed)


def _in_words(
    nest: Nest,
    streamed: Expr,
    stationary: Expr,
    vector: str,
    width: int,
    context,
    limits: PackLimits,
) -> Words | None:
    """The product over words of the most elements that suit its operands, if panels of them pay."""
    fewest = limits.fewest_word_rows if is_narrow_integer(streamed) else limits.fewest_panel_rows
    if nest.reuse(streamed) < fewest:
        return None
    for words, count in ((quad_products, QUAD), (pair_products, PAIR)):
        candidate = words(
            in_whole_words(nest, count, context, limits), streamed, stationary, context
        )
        if (
            candidate is None
            or candidate.depth * width * 4 > context.options.l2_bytes // limits.panel_share
        ):
            continue
        if panel_pays(candidate.nest, candidate.packed, vector, candidate.depth, context, limits):
            return candidate
    return None


def product_operands(nest: Nest) -> tuple[str, Expr, Expr] | None:
    """(vector dimension, operand along it, the other one) of a single product worth a register tile."""
    if (
        len(nest.reductions) != 1
        or not nest.reductions[0].is_plain_product
        or nest.ordered
        or not nest.stores
    ):
        return None
    vector = _nearest_dim(nest)
    if vector is None:
        return None
    expr, other = nest.reductions[0].args
    if (vector in expr.symbols) == (vector in other.symbols):
        return None
    streamed, stationary = (expr, other) if vector in expr.symbols else (other, expr)
    if not isinstance(streamed, Load | Op) or streamed.dtype.itemsize < 2:
        return None
    return vector, streamed, stationary


def _in_pairs(nest: Nest, streamed: Expr, stationary: Expr, context) -> tuple[Nest, Expr, Expr]:
    """A product and its operands, over words where `stationary` can be read so in place."""
    paired = (
        pair_products(nest, streamed, stationary, context)
        if stationary.dtype.name == "bfloat16"
        else None
    )
    if paired is None:
        return nest, streamed, stationary
    return paired.nest, paired.packed, paired.stationary


def _nearest_dim(nest: Nest) -> str | None:
    """The dimension along which results are contiguous, or else nearest to one another."""
    store = nest.stores[0]
    steps = {
        dim: abs(flat_coefficient(store.buf, store.index, dim))
        for dim, size in nest.dims.items()
        if size > 1 and dim not in nest.rdims
    }
    return min((dim for dim, step in steps.items() if step), key=steps.__getitem__, default=None)
