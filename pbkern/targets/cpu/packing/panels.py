"""Contraction nest -> statements that copy its operands into scratch first, where that pays.

The operand that varies along the vector dimension is packed panel by panel, [reduction][panel
width], so that the microkernel streams contiguous memory; this also transposes operands stored the
other way round and evaluates producers once (the prologue). The operand that is broadcast is copied
where its rows would fall into one cache set, or its elements into lines that evict one another
(operand_copies.py). A far operand of few rows is packed by the products of the first rows. Deep
products run in parts (depth_runs.py), those of few rows or columns along rows of their large operand
(few_columns.py). Copies of small floats are float32: an element is converted once, not wherever it is
read. Source: Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pbkern.core.affine import Affine
from pbkern.core.machine import LINE_BYTES
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.split import split
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Expr,
    For,
    Gather,
    Load,
    Nest,
    Op,
    Reduction,
    Stmt,
    Store,
    with_nests,
)
from pbkern.lower.passes.strips.strip_mining import even_part
from pbkern.targets.costs.caches import are_apart
from pbkern.targets.cpu.machines.machine import FAR_BYTES, ROWS_AT_ONCE
from pbkern.targets.cpu.schedule.nest_schedule import final_schedule, scheduled
from pbkern.targets.cpu.schedule.prefetch import is_far, rows_ahead
from pbkern.targets.cpu.schedule.register_tiles.choice import choose, contraction_tile

from .depth_runs import in_depth_runs, is_deep, longest_run
from .few_columns import few_columns, few_rows
from .limits import PackLimits
from .operand_copies import (
    OperandCopies,
    copy_dtype,
    is_expensive,
    is_scattered,
    replace_operand,
    rows_conflict,
    stage,
)
from .pair_products import PAIR, Words, in_whole_words, is_narrow_integer, pair_products
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
        narrow = few_columns(
            *_in_pairs(nest, streamed, stationary, context),
            vector,
            context,
            limits,
        )
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
        nest, _ = _stage_still(nest, stationary, True, context, limits, out, staged)
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
    fills = _filling_dim(nest, streamed, vector, limits) is not None
    width, _ = contraction_tile(nest, vector, context.options.vectors, fills)
    out, trial = list[Stmt](), OperandCopies(staged.written, dict(staged.copies))
    spread, apart = _stage_still(nest, stationary, False, context, limits, out, trial)
    words = _in_words(spread, streamed, apart, vector, width, context, limits)
    if words is not None:
        staged.copies = trial.copies
        panels = _panels(words.nest, words.packed, vector, width, context, limits, words.shift)
        return out + words.before + panels
    depth = math.prod(nest.dims[rdim] for rdim in nest.rdims)
    is_turned = isinstance(stationary, Load) and is_scattered(
        nest, stationary, nest.reuse(stationary), context.options
    )
    if is_turned:
        strips = _row_strips(nest, vector, streamed, stationary, depth, context, limits)
        if strips is not None:
            return strips
    fits = not is_deep(nest, depth, width, is_turned, context, limits)
    may_run = context.options.contract and not any(store.inner for store in nest.stores)
    streams = may_run and _is_streamed(nest, streamed, vector, depth, context, limits)
    pays = not streams and _panel_pays(nest, streamed, vector, depth, context, limits)
    if pays and not fits and may_run:
        runs = in_depth_runs(nest, vector, longest_run(nest, width, context, limits), context)
        return _packed(runs, context, limits, staged)
    if not pays and not streams and not _is_along(streamed, vector):
        return [nest]  # few rows: vectors along the reduction
    out = []
    nest, _ = _stage_still(nest, stationary, True, context, limits, out, staged)
    if pays and fits:
        return out + _panels(nest, streamed, vector, width, context, limits)
    if streams:
        far_rows = _far_rows(nest, streamed, limits)
        if (
            depth > limits.most_runs * far_rows
        ):  # sums of sums: rounding errors grow with the number of additions
            runs = in_depth_runs(nest, vector, limits.most_runs * far_rows, context)
            return out + _packed(runs, context, limits, staged)
        return out + _rows_at_once(nest, cast(Load, streamed), vector, far_rows, context)
    if out:
        nest = scheduled(nest, schedule=contraction_tile(nest, vector, context.options.vectors)[1])
    return [*out, nest]


def _row_strips(
    nest: Nest,
    vector: str,
    streamed: Expr,
    stationary: Expr,
    depth: int,
    context,
    limits: PackLimits,
) -> list[Stmt] | None:
    """Panels of all columns, then strips of rows that are copied to the second cache, each of which takes the panels in turn.

        out[i, j] = sum of a[k, i] * b[k, j]
    ->
        panels[p, k, j] = b[k, 16 p + j]
        for each strip s:
          rows[i, k] = a[k, 96 s + i]                                             (i < 96)
          for each panel p:
            out[96 s + i, 16 p + j] = sum of rows[i, k] * panels[p, k, j]         (i < 96)

    For rows whose elements are apart, so that they are copied in any case: of rows that are read where they are, 64 columns
    of 8000 x 256 took 8 to 15 % longer so, of 9000 x 300 as long (Zen 3). A panel stays in the first cache for a whole strip.
    None where the first cache holds all panels or the second one does not, where it does not hold a panel beside rows, and
    where vectors are whole lines.
    """
    sizes = _strip_sizes(nest, vector, streamed, stationary, depth, context, limits)
    if sizes is None:
        return None
    row, width, height, length = sizes
    pool = context.pool
    panels = _Panels(nest, streamed, vector, {}, context, limits, None)
    full, left = divmod(nest.dims[vector], width)
    places: list[tuple[Affine, int, int]] = [(Affine(), full, width)] + (
        [(Affine((), full * width), 1, left)] if left else []
    )
    copies = [panels.packed(*place) for place in places]

    def strip(start: Affine, size: int) -> list[Stmt]:
        out = list[Stmt]()
        piece = part(nest, row, start, size, pool)
        (still,) = (arg for arg in piece.reductions[0].args if vector not in arg.symbols)
        # A copy of the strip holds other rows each time: no other product may read it.
        piece, _ = _stage_still(piece, still, True, context, limits, out, OperandCopies(set()))
        products = _Panels(piece, streamed, vector, {}, context, limits, None)
        for (_, buf), place in zip(copies, places):
            out += products.products(buf, *place)
        return out

    number = -(-nest.dims[row] // length)
    length = min(-(-nest.dims[row] // (number * height)) * height, nest.dims[row])
    counter, (count, rest) = context.names("%i"), divmod(nest.dims[row], length)
    strips = For(counter, count, tuple(strip(Affine.symbol(counter, length), length)))
    last = strip(Affine((), count * length), rest) if rest else []
    return [*(copy for copy, _ in copies), strips, *last]


def _strip_sizes(
    nest: Nest,
    vector: str,
    streamed: Expr,
    stationary: Expr,
    depth: int,
    context,
    limits: PackLimits,
) -> tuple[str, int, int, int] | None:
    """(dimension of rows, columns of a panel, rows of a register tile, rows of a strip at most), where strips pay."""
    options = context.options
    rows = [
        dim
        for dim, size in nest.dims.items()
        if size > 1 and dim not in nest.rdims and dim != vector
    ]
    reduced = {rdim for rdim in nest.rdims if nest.dims[rdim] > 1}
    if len(rows) != 1 or rows[0] in streamed.symbols or not reduced <= streamed.symbols:
        return None
    if not all(isinstance(arg, Load) and not is_expensive(arg) for arg in (streamed, stationary)):
        return None
    (row,), row_bytes = rows, depth * nest.reductions[0].dtype.itemsize
    lanes = options.vectors.bits // (8 * nest.reductions[0].dtype.itemsize)
    if nest.dims[vector] < 2 * lanes:
        return None
    # Columns that fill no vector have a panel of their own.
    filled = part(nest, vector, Affine(), nest.dims[vector] // lanes * lanes, context.pool)
    width, tile = contraction_tile(filled, vector, options.vectors, has_far_rows=False)
    height = tile.jam.get(row, 1)
    length = options.l2_bytes // limits.strip_share // row_bytes // height * height
    if (
        not _has_parts_of_lines(context)
        or not options.l1_bytes
        < row_bytes * nest.dims[vector]
        <= options.l2_bytes // limits.panel_share
        or row_bytes * width > options.l1_bytes * limits.near_panel // 100
        or length < limits.fewest_strip_rows
        or nest.dims[row] < limits.fewest_stripped_rows
        or nest.dims[vector] < 2 * width
    ):
        return None
    return row, width, height, length


def _has_parts_of_lines(context) -> bool:
    """Whether a vector is a part of a line: tiles take as many lines from the second cache for fewer multiply-adds."""
    return context.options.vectors.bits < 8 * LINE_BYTES


def _is_streamed(
    nest: Nest, streamed: Expr, vector: str, depth: int, context, limits: PackLimits
) -> bool:
    """Whether a panel of a far operand would pay, if more than these few rows shared it."""
    inner = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
    if (
        not isinstance(streamed, Load)
        or len(inner) != 1
        or inner[0] not in streamed.symbols
        or not is_far(streamed.buf)
    ):
        return False
    step, is_row = (
        _row_bytes(streamed, inner[0]),
        flat_coefficient(streamed.buf, streamed.index, vector) == 1,
    )
    few = nest.reuse(streamed) < limits.far_panel_reuse
    return (
        few
        and is_row
        and depth >= 4 * ROWS_AT_ONCE
        and are_apart(depth, step, depth * step, context.options)
    )


def _far_rows(nest: Nest, streamed: Expr, limits: PackLimits) -> int:
    """Rows of a far operand that the few rows of the other one are multiplied with at a time."""
    waits = nest.reuse(streamed) <= limits.waiting_rows
    return ROWS_AT_ONCE if waits else limits.multiplied_rows


def _rows_at_once(nest: Nest, streamed: Load, vector: str, far_rows: int, context) -> list[Stmt]:
    """Products of a few far rows at a time along their whole length, while the next ones are fetched.

    Each adds to the sums.
    """
    root, step = (
        streamed.buf.root,
        max(flat_coefficient(streamed.buf, streamed.index, rdim) for rdim in nest.rdims),
    )

    def decided(part: Nest) -> list[Stmt]:
        if not part.reductions:
            return [part]
        tile = contraction_tile(part, vector, context.options.vectors)[1]
        return [scheduled(part, schedule=tile, prefetched={root: far_rows * step})]

    return with_nests(in_depth_runs(nest, vector, far_rows, context), decided)


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
        if _panel_pays(candidate.nest, candidate.packed, vector, candidate.depth, context, limits):
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


def _panel_pays(
    nest: Nest, streamed: Expr, vector: str, depth: int, context, limits: PackLimits
) -> bool:
    if depth < 8 or not set(nest.rdims) & streamed.symbols:
        return False
    if any(rdim not in streamed.symbols and nest.dims[rdim] > 1 for rdim in nest.rdims):
        return False
    reuse = nest.reuse(streamed)
    if not isinstance(streamed, Load):
        return reuse > 1
    if is_expensive(streamed) and reuse >= limits.panel_reuse:
        return True
    coefficient = flat_coefficient(streamed.buf, streamed.index, vector)
    if coefficient != 1:
        return reuse >= limits.fewest_panel_rows
    steps = [
        (_row_bytes(streamed, rdim), nest.dims[rdim]) for rdim in nest.rdims if nest.dims[rdim] > 1
    ]
    return reuse >= limits.panel_reuse and are_apart(
        depth, max(steps)[0], max(step * size for step, size in steps), context.options
    )


def _is_along(operand: Expr, vector: str) -> bool:
    """Whether elements along a dimension are neighbours, wherever an operand varies along it."""
    return all(
        flat_coefficient(*load.access, vector) == 1
        for load in _loads(operand)
        if isinstance(load, Load) and vector in load.symbols
    )


def _row_bytes(load: Load, dim: str) -> int:
    buf = load.buf
    return abs(flat_coefficient(buf, load.index, dim)) * buf.dtype.itemsize


def _stage_still(
    nest: Nest,
    stationary: Expr,
    converted: bool,
    context,
    limits: PackLimits,
    out: list[Stmt],
    staged: OperandCopies,
) -> tuple[Nest, Expr]:
    """The product with a copy of its broadcast operand, and that operand.

    The operand is copied where its rows collide in the cache, or, with `converted`, where reading
    it is expensive; else both are as they are.
    """
    if not isinstance(stationary, Load):
        return nest, stationary
    reuse, dtype = nest.reuse(stationary), stationary.buf.dtype
    if is_scattered(nest, stationary, reuse, context.options):
        before = len(out)
        copy = stage(
            nest,
            stationary,
            copy_dtype(dtype) if converted else dtype,
            context,
            out,
            staged,
            turned=True,
        )
        if len(out) > before:
            out[before:] = _in_row_blocks(cast(Nest, out[before]), context, limits)
        if copy is not None:
            return replace_operand(nest, stationary, copy), copy
    pays = rows_conflict(nest, stationary, reuse, limits) or (
        converted and is_expensive(stationary) and reuse >= limits.row_reuse
    )
    copy = (
        stage(nest, stationary, copy_dtype(dtype) if converted else dtype, context, out, staged)
        if pays
        else None
    )
    return (nest, stationary) if copy is None else (replace_operand(nest, stationary, copy), copy)


def _in_row_blocks(copy: Nest, context, limits: PackLimits) -> list[Stmt]:
    """A copy that transposes, in blocks of the source's rows: each block is read along all columns before the next one.

        t[j, i] = a[i, j]  (i < 20)    ->    t[j, 8 b + i] = a[8 b + i, j]  (b < 2, i < 8), t[j, 16 + i] = a[16 + i, j]  (i < 4)

    Column by column, parts of all rows are read for each vector of columns, and rows are in pages of their own. The rows of
    the copy, of which a block stores a few elements each, stay in the first cache where there are few columns.
    """
    schedule, pool = choose(copy, context.options.vectors), context.pool
    row, column = schedule.along, schedule.transpose
    if not _has_parts_of_lines(context) or column is None:
        return [copy]
    count, left = divmod(copy.dims[row], schedule.lanes)
    if count < 2 or copy.dims[column] > limits.most_block_columns:
        return [copy]
    block, whole = context.names("d"), count * schedule.lanes
    blocks = split(
        part(copy, row, Affine(), whole, pool), {row: {block: count, row: schedule.lanes}}, pool
    )
    outer = [dim for dim in copy.dims if dim not in (row, column)]
    dims = {dim: blocks.dims[dim] for dim in (*outer, block, column, row)}
    prefetched = {
        root: distance
        for load in copy.loads()
        if isinstance(load, Load)
        for root, distance in rows_ahead(load, row, schedule.lanes).items()
    }
    last = [part(copy, row, Affine((), whole), left, pool)] if left else []
    return [scheduled(replace(blocks, dims=dims), prefetched=prefetched), *last]


def _panels(
    nest: Nest,
    streamed: Expr,
    vector: str,
    width: int,
    context,
    limits: PackLimits,
    shift: Reduction | None = None,
) -> list[Stmt]:
    """for batch..., for group of panels: pack the group, then the contraction over each; a last, narrower panel.

    `shift`: a reduction of packed elements that is subtracted from the results.
    """
    outer = [
        outer_dim
        for outer_dim in nest.dims
        if outer_dim in streamed.symbols
        and outer_dim != vector
        and outer_dim not in nest.rdims
        and nest.dims[outer_dim] > 1
    ]
    counters = {outer_dim: context.names("%i") for outer_dim in outer}
    if _fits_once(nest, streamed, vector, context, limits):
        width = nest.dims[vector]
    full, rest = divmod(nest.dims[vector], width)
    panels = _Panels(nest, streamed, vector, counters, context, limits, shift)
    size = 1 if panels.filled_by else _group_size(streamed, vector, full, limits.most_panels)
    stmts: list[Stmt] = []
    if full // size:
        group = context.names("%i")
        stmts.append(
            For(
                group,
                full // size,
                tuple(panels.group(Affine.symbol(group) * (size * width), size, width)),
            )
        )
    if full % size:
        stmts += panels.group(Affine((), full // size * size * width), full % size, width)
    if rest:
        stmts += panels.group(Affine((), full * width), 1, rest)
    for dim in reversed(outer):
        stmts = [For(counters[dim], nest.dims[dim], tuple(stmts))]
    return stmts


def _fits_once(nest: Nest, streamed: Expr, vector: str, context, limits: PackLimits) -> bool:
    """Whether one panel holds all columns, in the second cache, so that far rows of the other operand are read once.

    Rows that stay in the second cache are as near for the next panel. Tiles of one wide panel read lines that are rows of it
    apart, which may evict one another from the first cache.
    Measured on Zen 4 with AVX2, 9000 x 300 by 300 x 64, which is transposed: 5.6 ms with two or three panels, 4.6 with one. On
    Zen 3, 128 rows of 64 elements by 64 x 512: a tenth less time with panels of a tile's width.
    """
    (other,) = (arg for arg in nest.reductions[0].args if arg is not streamed)
    if not isinstance(other, Load):
        return False
    depth = math.prod(nest.dims[rdim] for rdim in nest.rdims)
    size = depth * nest.dims[vector] * streamed.dtype.itemsize
    read = math.prod(nest.dims[dim] for dim in other.symbols & nest.dims.keys())
    return (
        read * other.buf.dtype.itemsize >= FAR_BYTES
        and size <= context.options.l2_bytes // limits.panel_share
    )


def _group_size(streamed: Expr, vector: str, full: int, most: int) -> int:
    """Panels that are packed at once: rows of one panel alone are a few lines, each of a page of its own."""
    steps = {
        flat_coefficient(load.buf, load.index, vector) if isinstance(load, Load) else None
        for load in _loads(streamed)
    }
    if steps - {0, 1} or full < 2:
        return 1
    return even_part(min(most, full), full)


def _loads(expr: Expr) -> tuple[Load | Gather, ...]:
    return Nest({}, reductions=(Reduction("dot", (expr,), expr.dtype),)).loads()


def _filling_dim(nest: Nest, streamed: Expr, vector: str, limits: PackLimits) -> str | None:
    """The dimension of rows whose first ones fill panels while they are multiplied; None: a copy fills them.

    Only the time in which a far operand comes is worth the second text of the product.
    """
    rows = [
        dim
        for dim, size in nest.dims.items()
        if size > 1 and dim not in nest.rdims and dim not in streamed.symbols
    ]
    if len(rows) != 1 or nest.dims[rows[0]] > limits.most_filling_rows:
        return None
    if not isinstance(streamed, Load) or is_expensive(streamed) or not is_far(streamed.buf):
        return None
    return rows[0] if flat_coefficient(streamed.buf, streamed.index, vector) == 1 else None


class _Panels:
    """The statements of one contraction's panels."""

    def __init__(
        self,
        nest: Nest,
        streamed: Expr,
        vector: str,
        counters: dict[str, str],
        context,
        limits: PackLimits,
        shift: Reduction | None,
    ):
        self.nest, self.streamed, self.vector, self.counters, self.shift = (
            nest,
            streamed,
            vector,
            counters,
            shift,
        )
        self.context, self.pool, self.limits = context, context.pool, limits
        self.vectors = context.options.vectors
        self.reduced = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
        self.tile = 0  # vectors of a full panel's register tile; full panels come first
        self.filled_by = None if shift else _filling_dim(nest, streamed, vector, limits)

    def _filled_by_products(self, dim: str, start: Affine, width: int) -> list[Stmt]:
        """A panel's products, of which those of the first tile of rows read the operand itself, and store what they read.

            panel[k, j] = b[k, j]                          out[i, j] = sum of a[i, k] * b[k, j], panel[k, j] = b[k, j]  (i < 8)
            out[i, j] = sum of a[i, k] * panel[k, j]  ->   out[i, j] = sum of a[i, k] * panel[k, j]                     (8 <= i)

        Multiply-adds hide the time in which the operand comes.
        """
        pool, sizes = self.pool, [self.nest.dims[rdim] for rdim in self.reduced]
        buf = self.context.new_buffer((1, *sizes, width), self.streamed.dtype)
        product = self._product(buf, Affine(), start, width, None)
        schedule = final_schedule(product)
        column, rows = schedule.along, product.dims[dim]
        first = min(schedule.jam.get(dim, 1), rows)
        index = self._index(Affine(), column)
        packed = pool.load(self.streamed.dtype, buf, index, False)
        source = pool.rename(self.streamed, self._renaming(start + Affine.symbol(column)))
        filling = part(product, dim, Affine(), first, pool).mapped(
            lambda expr: pool.rewrite(expr, lambda node: source if node is packed else None)
        )
        prefetched = rows_ahead(
            cast(Load, source), self.reduced[-1], self.limits.filling_rows_ahead
        )
        filling = scheduled(filling, prefetched=prefetched)
        if first == rows:
            return [filling]
        filling = replace(filling, stores=(*filling.stores, Store(buf, index, source)))
        return [filling, part(product, dim, Affine((), first), rows - first, pool)]

    def group(self, start: Affine, count: int, width: int) -> list[Stmt]:
        """Packs columns start .. start + count * width - 1 as `count` panels, then multiplies with each."""
        if self.filled_by is not None:
            return self._filled_by_products(self.filled_by, start, width)
        copy, buf = self.packed(start, count, width)
        before: list[Stmt] = [copy]
        shifts = None
        if self.shift is not None:
            sums, shifts = self._shifts(buf, count, width)
            before.append(sums)
        return before + self.products(buf, start, count, width, shifts)

    def packed(self, start: Affine, count: int, width: int) -> tuple[Stmt, Buf]:
        """The copy of a group of panels, and where it is."""
        streamed, sizes = self.streamed, {dim: self.nest.dims[dim] for dim in self.reduced}
        dtype = streamed.dtype if isinstance(streamed, Op) else cast(Load, streamed).buf.dtype
        buf: Buf = self.context.new_buffer((count, *sizes.values(), width), copy_dtype(dtype))
        panel, column = self.context.names("d"), self.context.names("d")
        at = Affine.symbol(panel) if count > 1 else Affine()
        place = self._renaming(start + at * width + Affine.symbol(column))
        copied = Store(buf, self._index(at, column), self.pool.rename(streamed, place))
        is_turned = count > 1 and not _is_along(streamed, self.vector)
        dims = sizes | ({panel: count} if count > 1 and not is_turned else {}) | {column: width}
        copy = self._prefetching(Nest(dims, stores=(copied,), at=self.nest.at), column)
        return For(panel, count, (copy,)) if is_turned else copy, buf

    def products(
        self, buf: Buf, start: Affine, count: int, width: int, shifts: Buf | None = None
    ) -> list[Stmt]:
        """The products with each panel of a group; of rows that are apart, as many at a time as stay in the second cache."""
        if count == 1:
            return [self._product(buf, Affine(), start, width, shifts)]

        def with_panel() -> tuple[str, Nest]:
            counter = self.context.names("%i")
            at = Affine.symbol(counter)
            return counter, self._product(buf, at, start + at * width, width, shifts)

        counter, product = with_panel()
        row, tile = next(iter(final_schedule(product).jam.items()), ("", 1))
        rows, most = product.dims.get(row, 1), self._block_rows(row) // tile * tile
        if rows <= most or most < self.limits.fewest_block_tiles * tile:
            return [For(counter, count, (product,))]
        blocks, rest = divmod(rows, most)
        block = self.context.names("%i")
        body = part(product, row, Affine.symbol(block, most), most, self.pool)
        out: list[Stmt] = [For(block, blocks, (For(counter, count, (body,)),))]
        if rest:
            counter, product = with_panel()
            last = part(product, row, Affine((), rows - rest), rest, self.pool)
            out.append(For(counter, count, (last,)))
        return out

    def _block_rows(self, row: str) -> int:
        """Rows of the other operand that panels of a group are multiplied with in turn; 0: all of them."""
        (other,) = (arg for arg in self.nest.reductions[0].args if arg is not self.streamed)
        depth = math.prod(self.nest.dims[rdim] for rdim in self.reduced)
        if not isinstance(other, Load):
            return 0
        are_parts = abs(flat_coefficient(other.buf, other.index, row) or 0) >= 2 * depth
        row_bytes = depth * other.buf.dtype.itemsize
        if not are_parts or row_bytes * self.nest.dims.get(row, 1) < FAR_BYTES:
            return 0
        return self.context.options.l2_bytes // self.limits.block_share // row_bytes

    def _prefetching(self, copy: Nest, column: str) -> Nest:
        """The copy of a group, which prefetches far rows.

        Where the copy transposes rows, it takes a vector of columns along all of them, and prefetches the next columns'.
        Measured on Zen 3, 24 columns of 2 MB of a larger operand: 0.5 ms, 1.0 without prefetches.
        """
        row, ahead = self.reduced[-1], self.limits.rows_ahead
        schedule = choose(copy, self.vectors)
        if schedule.transpose == row and schedule.vector == column:
            count, rest = divmod(copy.dims[column], schedule.lanes)
            if not rest:
                outer, row, ahead = self.context.names("d"), column, schedule.lanes
                copy = split(copy, {column: {outer: count, column: ahead}}, self.pool)
                copy = replace(copy, dims={outer: count, **copy.dims})
        prefetched = {
            root: distance
            for load in copy.loads()
            if isinstance(load, Load)
            for root, distance in rows_ahead(load, row, ahead).items()
        }
        return scheduled(copy, prefetched=prefetched)

    def _shifts(self, buf: Buf, count: int, width: int) -> tuple[Nest, Buf]:
        """Terms that are subtracted from the results, by panel and column."""
        panel, column = self.context.names("d"), self.context.names("d")
        at = Affine.symbol(panel) if count > 1 else Affine()
        packed = self.pool.load(self.streamed.dtype, buf, self._index(at, column), False)
        assert self.shift is not None
        reduction = replace(
            self.shift,
            args=tuple(packed if arg is self.streamed else arg for arg in self.shift.args),
        )
        shifts = self.context.new_buffer((count, width), reduction.dtype)
        value = self.pool.accumulator(reduction.dtype, 0)
        store = Store(shifts, (at, Affine.symbol(column)), value, inner=False)
        dims = (
            ({panel: count} if count > 1 else {})
            | {column: width}
            | {dim: self.nest.dims[dim] for dim in self.reduced}
        )
        sums = Nest(dims, tuple(self.reduced), (reduction,), (store,), at=self.nest.at)
        tile = contraction_tile(sums, column, self.vectors)[1]
        return scheduled(sums, schedule=tile), shifts

    def _index(self, panel: Affine, column: str) -> tuple[Affine, ...]:
        return panel, *map(Affine.symbol, self.reduced), Affine.symbol(column)

    def _renaming(self, column: Affine) -> dict[str, Affine]:
        # Panels have no dimensions of one element.
        single: dict[str, Affine] = {
            rdim: Affine() for rdim in self.nest.rdims if self.nest.dims[rdim] == 1
        }
        return (
            single
            | {dim: Affine.symbol(counter) for dim, counter in self.counters.items()}
            | {self.vector: column}
        )

    def _product(
        self, buf: Buf, panel: Affine, start: Affine, width: int, shifts: Buf | None
    ) -> Nest:
        nest, pool, column = self.nest, self.pool, self.context.names("d")
        rename = self._renaming(start + Affine.symbol(column))
        packed = pool.load(self.streamed.dtype, buf, self._index(panel, column), False)

        def shifted(expr: Expr) -> Expr | None:
            if not isinstance(expr, Accumulator) or shifts is None:
                return None
            shift = pool.load(expr.dtype, shifts, (panel, Affine.symbol(column)), False)
            return self.context.op("sub", expr.dtype, expr, shift)

        def renamed(expr: Expr) -> Expr:
            return pool.rewrite(pool.rename(expr, rename), shifted)

        dims = {
            dim: size
            for dim, size in nest.dims.items()
            if dim not in self.counters and dim != self.vector and dim not in nest.rdims
        }
        dims |= {column: width} | {rdim: nest.dims[rdim] for rdim in nest.rdims}
        reduction = nest.reductions[0]
        args = tuple(packed if arg is self.streamed else renamed(arg) for arg in reduction.args)
        stores = [store.moved(rename, renamed) for store in nest.stores]
        product = Nest(
            dims,
            nest.rdims,
            (replace(reduction, args=args),),
            tuple(stores),
            nest.ordered,
            nest.at,
        )
        fills = self.filled_by is not None
        schedule = contraction_tile(product, column, self.vectors, fills, nest)[1]
        schedule = replace(schedule, cut_as=self.tile)
        self.tile = schedule.tile
        return scheduled(product, schedule=schedule)
