"""Sums of products -> matrix instructions over tiles in shared memory, whose copies run some steps ahead.

                                              nest [i<128, j<128] by mma 4x2
                                                c[i, j] = 0.0
                                              for %s < 2:
nest [i<128, j<128, k<4096*]                    async: the tiles of step %s
  acc0 dot= a[i, k], b[k, j]           ->     for %o < 128:
  y[i, j] = f(acc0)  (after)                    wait 1
                                                async: the tiles of step %o + 2
                                                nest [i<128, j<128, k<32*] by mma 4x2
                                                  acc0 dot= t[%o, i, k], u[%o, k, j]
                                                  c[i, j] = c[i, j] + acc0  (after)
                                              wait 0
                                              nest [i<128, j<128] by mma 4x2
                                                y[i, j] = f(c[i, j])
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects
from pbkern.lower.nest.conditions.index_tests import simplified
from pbkern.lower.nest.edit.accumulate import accumulated_in
from pbkern.lower.nest.edit.grow import grown, guarded, in_steps, zero_filled
from pbkern.lower.nest.edit.join_loops import joined_loops
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.pipeline import pipelined
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.edit.stage import staged
from pbkern.lower.nest.ir import Expr, For, Nest, Op, Stmt, bodies, every, with_bodies
from pbkern.lower.nest.tiles.axes import Axis, row_major, tile_shape
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.schedule.instructions import REGISTERS, has_matrix_instructions
from pbkern.targets.simt.schedule.lane_products import LANES

from .products import (
    Context,
    MatrixProduct,
    are_copied,
    begun,
    by_groups,
    in_chunks,
    is_tile,
    left_under_way,
    matrix_product,
    power_of_two,
    ranges_of,
    reads_tiles,
    stored_type,
    tile_buffer,
    with_operands,
)
from .residents import resident_products


@dataclass(frozen=True)
class ContractTiles:
    """Computes products by the device's matrix instructions, where it has one for their types and the tile fits."""

    depth_bytes: int = threshold(64, "bytes of a row of a tile along the depth: one step")
    stages: int = threshold(3, "steps of tiles in shared memory at a time")
    group_stages: int = threshold(4, "as stages, where a product is under way beside the next one")
    most_sums: int = threshold(64, "sums of a thread, each in a register of 128")
    group_sums: int = threshold(
        128, "as most_sums, for instructions of several warps, which need few other registers"
    )
    other_registers: int = threshold(
        74, "registers of a thread beside group_sums: what ptxas takes, with room for prologues"
    )
    resident_stages: int = threshold(2, "steps of copies for products whose results stay")
    resident_words: int = threshold(
        400, "registers of a thread for all arrays between products, which live at different times"
    )
    resident_sums: int = threshold(
        192,
        "of these, for sums that products of a loop add to: a thread has 255 for them and operands",
    )

    def __call__(self, stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
        if not has_matrix_instructions(context.options):
            return list(stmts)
        readers = Counter(
            buf for stmt in every(stmts) if not bodies(stmt) for buf in effects.read([stmt])
        )

        def contracted(block: Sequence[Stmt]) -> list[Stmt]:
            out: list[Stmt] = []
            for stmt in with_operands(block, readers, context):
                product = matrix_product(stmt, context) if isinstance(stmt, Nest) else None
                tiled = None if product is None else self.tiled(product, context)
                out += [with_bodies(stmt, contracted)] if tiled is None else tiled
            return out

        words = self.resident_words, self.resident_sums
        products = contracted(resident_products(stmts, context, self.resident_stages, words))
        return left_under_way(products) if context.options.delay else products

    def tiled(self, product: MatrixProduct, context: Context) -> list[Stmt] | None:
        """The product's statements by the first instruction of which a tile fits the block's warps and memory; else None."""
        for candidate in (*by_groups(product, context.options), product):
            statements = self.by_instruction(candidate, context)
            if statements is not None:
                return statements
        return None

    def by_instruction(self, product: MatrixProduct, context: Context) -> list[Stmt] | None:
        """The product's statements by its instruction; None where no tile fits."""
        nest, loops = product.nest, []
        for dim, size in self.tile(product, context.options).items():
            if nest.dims[dim] > size:
                trips = math.ceil(nest.dims[dim] / size)
                counter = context.names("%c")
                whole = grown(nest, {dim: trips * size}, context)
                nest = part(whole, dim, Affine.symbol(counter, size), size, context.pool)
                loops.append((counter, trips))
            if size == 1:
                nest = _without(nest, {dim: Affine()}, context)

        def left(axis: Sequence[str]) -> tuple[str, ...]:
            return tuple(dim for dim in axis if dim in nest.dims)

        rows = left(product.rows)
        orders = tuple((left(outer), left(inner)) for outer, inner in product.orders)
        narrowed = replace(product, nest=nest, rows=rows, orders=orders)
        statements = self.one_tile(narrowed, dict(loops), context)
        for counter, trips in reversed(loops):
            statements = statements and [For(counter, trips, tuple(statements))]
        return statements

    def tile(self, product: MatrixProduct, options: ThreadOptions) -> dict[str, int]:
        """Sizes along dimensions that are not reduced: powers of two, of which threads have registers for the sums.

        Dimensions that are neither rows nor columns are taken one by one. Where threads compute operands, another block
        multiplies meanwhile: tiles of fewer sums leave room for it.
        """
        nest, (height, width, _) = product.nest, product.instruction.shape
        looped = {dim: 1 for dim in nest.dims if dim not in (*nest.rdims, *product.dims)}
        rows = {dim: power_of_two(nest.dims[dim], 1) for dim in product.rows}
        slowest = product.rows[0]
        rows[slowest] = max(rows[slowest], rows[slowest] * height // math.prod(rows.values()))
        columns = power_of_two(nest.dims[product.column], width)
        has_room = options.threads * (self.group_sums + self.other_registers) <= REGISTERS
        is_of_groups = product.instruction.row_bytes > 0
        most = (
            self.group_sums if is_of_groups and has_room and are_copied(product) else self.most_sums
        )
        if not product.instruction.is_of_lanes:
            # Fragments that two lanes hold take more registers.
            most //= product.instruction.layouts[0].copies
        while (count := math.prod(rows.values())) * columns > most * options.threads:
            if count > columns:
                rows[next(dim for dim in rows if rows[dim] > 1)] //= 2
            else:
                columns //= 2
        return {**looped, **rows, product.column: columns}

    def one_tile(
        self, product: MatrixProduct, counters: Mapping[str, int], context: Context
    ) -> list[Stmt] | None:
        """The statements of a tile; `counters`: of loops around it, with their trips."""
        row, depth, options = product.instruction, product.depth, context.options
        sizes = self.tile(product, options)
        axes = {dim: sizes[dim] for dim in product.rows}, {product.column: sizes[product.column]}
        if all(map(is_tile, product.nest.reductions[0].args)):
            return self.of_tiles(product, axes, context)
        rows, columns = tile_shape(axes)
        step = self.step_along_depth(product)
        by = self.tiling(row, (rows, columns, step), options)
        step_bytes = (rows + columns) * step * row.operands[0].itemsize
        stages, under_way = self.stages_of(row, step_bytes, options)
        if by is None or stages < 2 + under_way or 0 in product.nest.dims.values():
            return None
        nest = grown(product.nest, sizes, context)
        sums = replace(
            context.new_buffer((rows, columns), row.accumulator), space="registers", layout=by
        )
        zeros, total, last = accumulated_in(nest, sums, context, tuple(map(row_major, axes)))
        around = {
            dim: (context.names("%o"), total.dims[dim]) for dim in total.rdims if dim != depth
        }
        total = _without(
            total, {dim: Affine.symbol(name) for dim, (name, _) in around.items()}, context
        )
        loop = in_steps(total, depth, step, context)
        (inner,) = loop.body
        assert isinstance(inner, Nest)
        trips = {**counters, **dict(around.values())}
        copies, inner = _with_copied_operands(inner, product, trips, context)
        if row.row_bytes and not all(map(_is_in_vectors, copies)):
            return None  # threads would need a register for each element of twice as many
        parts = _products_of_step(replace(inner, by=by), product, step, copies, context)
        whole = For(loop.counter, loop.trips, (*copies, *parts))
        if around:
            whole, copies = self.joined(dict(around.values()), whole, copies, context)
        steps = pipelined(
            whole,
            stages,
            copies,
            lambda copy: copy.by is None,
            context,
            products=row.row_bytes > 0,
            under_way=under_way,
        )
        return [replace(zeros, by=by), *steps, replace(last, by=by)]

    def step_along_depth(self, product: MatrixProduct) -> int:
        """Elements along the depth that a tile takes at a time."""
        row = product.instruction
        size = row.operands[0].itemsize
        deep = power_of_two(product.nest.dims[product.depth], row.shape[-1])
        return row.row_bytes // size or min(self.depth_bytes // size, deep)

    def stages_of(
        self, row: ProductInstruction, step_bytes: int, options: ThreadOptions
    ) -> tuple[int, int]:
        """(steps in shared memory at a time, products that are under way beside the next one)."""
        # Where two blocks share a multiprocessor, one multiplies while the other one waits.
        has_company = 2 * self.stages * step_bytes <= options.shared_bytes
        under_way = int(row.row_bytes > 0 and not has_company)
        stages = self.group_stages if under_way else self.stages
        return min(stages, options.shared_bytes // step_bytes), under_way

    def of_tiles(
        self, product: MatrixProduct, axes: tuple[Axis, Axis], context: Context
    ) -> list[Stmt] | None:
        """The statements of a product whose operands are whole tiles in shared memory, with zeros behind their ends."""
        (rows, columns), row = tile_shape(axes), product.instruction
        depth = power_of_two(product.nest.dims[product.depth], row.shape[-1])
        by = self.tiling(row, (rows, columns, depth), context.options)
        if by is None or not reads_tiles(product, (rows, columns)):
            return None
        sizes = {**axes[0], **axes[1]}
        nest = grown(product.nest, sizes, context)
        nest = replace(nest, dims={**nest.dims, product.depth: depth})
        sums = replace(
            context.new_buffer((rows, columns), row.accumulator), space="registers", layout=by
        )
        zeros, total, last = accumulated_in(nest, sums, context, tuple(map(row_major, axes)))

        def inside(node: Expr) -> Expr | None:
            return context.pool.load(node.dtype, *node.access) if is_tile(node) else None

        args = tuple(map(context.pool.rewriter(inside), total.reductions[0].args))
        total = replace(total, reductions=(replace(total.reductions[0], args=args),), by=by)
        return [replace(zeros, by=by), *begun(total), replace(last, by=by)]

    def joined(
        self, around: Mapping[str, int], loop: For, copies: Sequence[Nest], context: Context
    ) -> tuple[For, list[Nest]]:
        """(one loop over windows and steps of the depth, its copies; the device's are zeros behind its last step)."""
        bounds = context.bounds | ranges_of({**around, loop.counter: int(loop.trips)})
        sure = [simplified(copy, context.pool, bounds) for copy in copies]
        whole = joined_loops(
            around, replace(loop, body=(*sure, *loop.body[len(copies) :])), context
        )
        is_step = context.pool.in_range(Affine.symbol(whole.counter), 0, int(whole.trips))
        lets = len(whole.body) - len(loop.body)
        masked = []
        for copy in whole.body[lets : lets + len(copies)]:
            assert isinstance(copy, Nest)
            if copy.by is not None:
                masked.append(copy)
                continue
            (store,) = copy.stores
            value = guarded(store.value, context.pool)
            zero = context.const(0, value.dtype)
            masked.append(
                replace(copy, stores=(replace(store, value=context.select(is_step, value, zero)),))
            )
        parts = whole.body[lets + len(copies) :]
        return replace(whole, body=(*whole.body[:lets], *masked, *parts)), masked

    def tiling(
        self, row: ProductInstruction, shape: tuple[int, int, int], options: ThreadOptions
    ) -> Tiling | None:
        """All warps over the tile, the part of each as square as can be: it reads m + n elements for m * n products."""
        groups, rest = divmod(options.threads, options.device.warp * row.warps)
        choices = [Tiling(row, (groups // across, across)) for across in range(1, groups + 1)]
        rows, columns, _ = shape

        def operands(by: Tiling) -> int:
            """Elements of operands that a warp reads, or a lane, for each step along the depth."""
            height, width = rows // by.warps[0], columns // by.warps[1]
            if row.is_of_lanes:
                return height // LANES[0] + width // LANES[1]
            return height + width

        return min(
            (
                by
                for by in choices
                if not rest and by.warps[0] * by.warps[1] == groups and by.fits(shape)
            ),
            key=lambda by: (operands(by), by.warps),
            default=None,
        )


def _with_copied_operands(
    step: Nest, product: MatrixProduct, trips: Mapping[str, int], context: Context
) -> tuple[list[Nest], Nest]:
    """(copies of a step's operands to shared memory, the step that reads these); trips: of the loops around it."""
    copies = []
    for arg, order in zip(step.reductions[0].args, product.orders):
        dims = [{dim: step.dims[dim] for dim in axis} for axis in order]
        ranges = ranges_of({**dims[0], **dims[1], **trips})
        filled = zero_filled(arg, context.bounds | ranges, context)
        assert isinstance(arg, Op), "a step's operand is masked"
        dtype = stored_type(arg.args[-1])
        buf = tile_buffer(tile_shape(dims), dtype, context, product.instruction.row_bytes)
        copy, step = staged(step, arg, buf, order, context.pool)
        copies.append(in_chunks(copy, filled, context))
    return copies, step


def _products_of_step(
    nest: Nest, product: MatrixProduct, step: int, copies: Sequence[Nest], context: Context
) -> list[Nest]:
    """A step's product as several along the depth: one behind each copy by threads.

    An instruction of several warps reads the whole step from shared memory.
    """
    row = product.instruction
    by_threads = sum(copy.by is not None for copy in copies)
    count = 1 if row.row_bytes else min(max(by_threads, 1), step // row.shape[-1])
    length = step // count
    return [
        part(nest, product.depth, Affine((), number * length), length, context.pool)
        for number in range(step // length)
    ]


def _is_in_vectors(copy: Nest) -> bool:
    """Whether each thread copies several neighbours at once."""
    return copy.by is None or (isinstance(copy.by, Chunking) and copy.by.count > 1)


def _without(nest: Nest, places: Mapping[str, Affine], context: Context) -> Nest:
    """The nest at one place of some dimensions."""
    dims = {dim: size for dim, size in nest.dims.items() if dim not in places}
    rdims = tuple(dim for dim in nest.rdims if dim in dims)
    return replace(renamed(nest, places, dims, context.pool), rdims=rdims)
