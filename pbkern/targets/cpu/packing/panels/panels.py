"""Panels of the operand along vectors, and the products with them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from pbkern.core.affine import Affine
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
)
from pbkern.lower.passes.strips.strip_mining import even_part
from pbkern.targets.costs.caches import are_apart
from pbkern.targets.cpu.machines.machine import FAR_BYTES
from pbkern.targets.cpu.packing.limits import PackLimits
from pbkern.targets.cpu.packing.operand_copies import (
    copy_dtype,
    is_expensive,
)
from pbkern.targets.cpu.schedule.nest_schedule import final_schedule, scheduled
from pbkern.targets.cpu.schedule.prefetch import is_far, rows_ahead
from pbkern.targets.cpu.schedule.register_tiles.choice import choose, contraction_tile

from .broadcast_operand import has_parts_of_lines
from .far_rows import row_bytes


def in_panels(
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
    panels = ProductPanels(nest, streamed, vector, counters, context, limits, shift)
    if panels.filled_by:
        size = 1
    elif (near := min(panels.most_near(width), full)) > 1:
        size = even_part(near, full)
    else:
        size = _group_size(streamed, vector, full, limits.most_panels)
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


def panel_pays(
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
        (row_bytes(streamed, rdim), nest.dims[rdim]) for rdim in nest.rdims if nest.dims[rdim] > 1
    ]
    return reuse >= limits.panel_reuse and are_apart(
        depth, max(steps)[0], max(step * size for step, size in steps), context.options
    )


def is_along(operand: Expr, vector: str) -> bool:
    """Whether elements along a dimension are neighbours, wherever an operand varies along it."""
    return all(
        flat_coefficient(*load.access, vector) == 1
        for load in _loads(operand)
        if isinstance(load, Load) and vector in load.symbols
    )


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
    size = depth * nest.dims[vector] * copy_dtype(streamed.dtype).itemsize
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


def filling_dim(nest: Nest, streamed: Expr, vector: str, limits: PackLimits) -> str | None:
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


class ProductPanels:
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
        self.filled_by = None if shift else filling_dim(nest, streamed, vector, limits)

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
        is_turned = count > 1 and not is_along(streamed, self.vector)
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
        fewest = self.limits.fewest_block_tiles * tile
        if count <= self.most_near(width):
            most = fewest = tile
        if rows <= most or most < fewest:
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

    def most_near(self, width: int) -> int:
        """Panels of a group that stays in the first cache, each tile of rows taking them in turn; 0 where results stay near.

        Panel by panel, each row of results would be stored a line at a time, in pages of their own. Measured on Zen 3, one
        thread, 2048 x 32 by 32 x 2048: 4.5 ms, and 3.7 so; with the second operand transposed 5.1 and 3.5.
        """
        is_stored_far = any(is_far(store.buf) for store in self.nest.stores)
        if not is_stored_far or not has_parts_of_lines(self.context):
            return 0
        depth = math.prod(self.nest.dims[rdim] for rdim in self.reduced)
        near = self.context.options.l1_bytes * self.limits.near_panel // 100
        itemsize = copy_dtype(self.streamed.dtype).itemsize
        return min(near // (depth * width * itemsize), self.limits.most_panels)

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
