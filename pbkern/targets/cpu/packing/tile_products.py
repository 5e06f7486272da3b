"""Contraction of bfloat16 or bytes -> products of tiles (AMX), 16 x 16 results by one instruction.

    out[i, j] = f(sum over k of a[i, k] * b[k, j])

    for each block of columns:                  pack panels of b: stay in the second cache
      for each block of rows:                   pack rows of a
        for each part of the depth:             two tiles of a, so long: stay in the first cache
          sums[i, j] (+)= a[i, part] . b[part, j]           by the instruction, 2 x 2 tiles of results at a time
        out[i, j] = f(sums[i, j])

Elements are copied as words of 32 bits, each of neighbours along the depth. A tile is 16 rows of 16 words, and starts at a
cache line. Both copies have zeros behind the depth; rows and columns behind the last ones are computed and not stored.
Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20, "Intel AMX instructions".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.edit.unroll import with_results
from pbkern.lower.nest.ir import Buf, Expr, For, Load, Nest, Op, Reduction, Stmt, Store, with_nests
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.targets.cpu.schedule.instructions import BFLOAT16, TILE_ROWS, tile_product
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule, scheduled

from .limits import PackLimits
from .pair_products import (
    INT32,
    UINT32,
    depth_dim,
    is_narrow_integer,
    joined_word,
    word_in_place,
)
from .panels.depth_runs import in_depth_runs

# Tiles beside each other that one step computes, in rows and in columns: four of results and two of each operand fill the
# eight registers.
TILES_ACROSS = 2
# Bytes of a tile.
TILE_BYTES = TILE_ROWS * TILE_ROWS * INT32.itemsize


@dataclass(frozen=True)
class Depth:
    """Order in which the reduced dimensions of a product follow one another in words.

    dims: reduced dimensions, that of the words last. sizes: of all but the last one. elements: of the last one.
    """

    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    elements: int
    word: int

    @property
    def run(self) -> int:
        """Words of the innermost dimension."""
        return -(-self.elements // self.word)

    @property
    def words(self) -> int:
        return math.prod(self.sizes) * self.run

    @property
    def padded(self) -> int:
        """Words of whole tiles."""
        return -(-self.words // TILE_ROWS) * TILE_ROWS

    def place(self, word: Affine) -> Affine:
        """The place among all words of one of the innermost dimension."""
        place: Affine = Affine()
        for dim, size in zip(self.dims, self.sizes):
            place = place * size + Affine.symbol(dim)
        return place * self.run + word


@dataclass(frozen=True)
class RowBlock:
    """The rows of a block: the first dimension from some point on, and all of the others.

    dims: dimensions of rows, outermost first. sizes: of those behind the first. count: points of the first in a full block.
    """

    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    count: int

    def of(self, count: int) -> int:
        """Rows of so many points of the first dimension."""
        return count * math.prod(self.sizes)

    def place(self) -> Affine:
        """The row of a point in its block."""
        place = Affine.symbol(self.dims[0])
        for dim, size in zip(self.dims[1:], self.sizes):
            place = place * size + Affine.symbol(dim)
        return place


def tile_products(
    nest: Nest, vector: str, streamed: Expr, stationary: Expr, context, limits: PackLimits
) -> list[Stmt] | None:
    """The product by tiles; None if no instruction has its types, or if tiles would be mostly empty."""
    reduction = nest.reductions[0]
    k_dim = depth_dim(nest, stationary, 1)
    types = _element_type(stationary), _element_type(streamed)
    instruction = (
        tile_product(context.options, (types[0], types[1]), reduction.dtype)
        if types[0] is not None and types[1] is not None
        else None
    )
    if instruction is None or k_dim is None or any(store.inner for store in nest.stores):
        return None
    rdims = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
    outer = tuple(rdim for rdim in rdims if rdim != k_dim)
    if not {k_dim, *outer} <= streamed.symbols & stationary.symbols:
        return None
    depth = Depth(
        (*outer, k_dim),
        tuple(nest.dims[rdim] for rdim in outer),
        nest.dims[k_dim],
        instruction.word_elements,
    )
    free = [dim for dim, size in nest.dims.items() if size > 1 and dim not in nest.rdims]
    if not all((dim in streamed.symbols) or (dim in stationary.symbols) for dim in free):
        return None
    rows = [dim for dim in free if dim not in streamed.symbols]
    batch = [dim for dim in free if dim in streamed.symbols and dim != vector]
    block = _row_block(nest, rows, depth, context, limits)
    if block is None or not _fills_tiles(nest, vector, block, depth, limits):
        return None
    panel_bytes = min(nest.dims[vector], limits.tile_run_columns) * INT32.itemsize
    longest = context.options.l2_bytes // limits.tile_columns_share // panel_bytes
    runs = (
        in_depth_runs(nest, vector, longest * depth.word, context)
        if depth.words > longest and context.options.contract
        else [nest]
    )
    if len(runs) > 1:
        return with_nests(runs, lambda run: _of_run(run, vector, context, limits))
    product = _TiledProduct(nest, vector, streamed, stationary, instruction, depth, block, context)
    loops = [*batch, *(dim for dim in rows if dim not in block.dims)]
    return product.statements(loops, limits)


def _of_run(run: Nest, vector: str, context, limits: PackLimits) -> list[Stmt]:
    """A run of a deep product by tiles; what is done before and behind the runs as it is."""
    if not run.reductions:
        return [run]
    args = run.reductions[0].args
    (streamed,) = (arg for arg in args if vector in arg.symbols)
    (stationary,) = (arg for arg in args if arg is not streamed)
    return tile_products(run, vector, streamed, stationary, context, limits) or [run]


def _element_type(operand: Expr) -> np.dtype | None:
    """The type of the elements of an operand as words hold them, None where tiles take no such elements."""
    if is_narrow_integer(operand) and operand.args[0].dtype.itemsize == 1:
        return operand.args[0].dtype
    is_half = operand.dtype == BFLOAT16 and isinstance(operand, Load | Op)
    return BFLOAT16 if is_half else None


def _row_block(
    nest: Nest, rows: Sequence[str], depth: Depth, context, limits: PackLimits
) -> RowBlock | None:
    """The rows that are packed together, such that steps of tiles are few and full; None without rows."""
    step = TILES_ACROSS * TILE_ROWS
    most = max(
        context.options.l2_bytes // limits.tile_rows_share // (depth.padded * INT32.itemsize), step
    )

    half = limits.half_tile_step

    def time(block: RowBlock) -> tuple[float, int]:
        size = nest.dims[block.dims[0]]
        full, rest = divmod(size, block.count)
        steps = full * _steps(block.of(block.count), half) + _steps(block.of(rest), half)
        return steps / block.of(size), block.of(block.count)

    blocks = [
        RowBlock(tuple(rows[at:]), tuple(nest.dims[dim] for dim in rows[at + 1 :]), count)
        for at, first in enumerate(rows)
        for count in range(1, min(nest.dims[first], step) + 1)
    ]
    suiting = [block for block in blocks if block.of(block.count) <= most]
    return min(suiting, key=time, default=None)


def _steps(rows: int, half_step: float) -> float:
    """Time of a block's rows, in that of a whole step."""
    full, rest = divmod(_padded(rows) // TILE_ROWS, TILES_ACROSS)
    return full + half_step * (rest > 0)


def _padded(rows: int) -> int:
    return -(-rows // TILE_ROWS) * TILE_ROWS


def _fills_tiles(
    nest: Nest, vector: str, block: RowBlock, depth: Depth, limits: PackLimits
) -> bool:
    """Whether rows, columns and words of tiles are used, by and large."""
    rows = block.of(nest.dims[block.dims[0]])
    used = (
        rows / _padded(rows)
        * nest.dims[vector] / _padded(nest.dims[vector])
        * math.prod(depth.sizes) * depth.elements / (depth.padded * depth.word)
    )  # fmt: skip
    return used * 100 >= limits.used_tiles and rows >= limits.tile_rows


class _TiledProduct:
    """One product by tiles, and its buffers."""

    def __init__(
        self,
        nest: Nest,
        vector: str,
        streamed: Expr,
        stationary: Expr,
        instruction: ProductInstruction,
        depth: Depth,
        rows: RowBlock,
        context,
    ):
        self.nest, self.vector, self.depth, self.rows = nest, vector, depth, rows
        self.streamed, self.stationary, self.instruction = streamed, stationary, instruction
        self.context, self.pool = context, context.pool
        # Packed panels have no dimensions of one element.
        self.places: dict[str, Affine] = {
            dim: Affine() for dim, size in nest.dims.items() if size == 1
        }

    def statements(self, loops: Sequence[str], limits: PackLimits) -> list[Stmt]:
        """The whole product inside loops over `loops`, dimensions of which each program has all points."""
        outer = [dim for dim in loops if dim in self.streamed.symbols]
        inner = [dim for dim in loops if dim not in outer]
        columns, options = self.nest.dims[self.vector], self.context.options
        panel_bytes = self.depth.padded * TILE_ROWS * INT32.itemsize
        most = max(options.l2_bytes // limits.tile_columns_share // panel_bytes, TILES_ACROSS)
        tiles = -(-columns // TILE_ROWS)
        blocks = -(-tiles // most)
        block = -(-tiles // blocks // TILES_ACROSS) * TILES_ACROSS * TILE_ROWS
        return self._looped(
            outer, lambda: self._cut(columns, block, lambda *run: self._of_columns(inner, *run))
        )

    def _looped(self, dims: Sequence[str], body) -> list[Stmt]:
        """Loops over dimensions around statements that `body` makes."""
        counters = {dim: self.context.names("%i") for dim in dims}
        before = dict(self.places)
        self.places |= {dim: Affine.symbol(counter) for dim, counter in counters.items()}
        statements = body()
        self.places = before
        for dim in reversed(dims):
            statements = [For(counters[dim], self.nest.dims[dim], tuple(statements))]
        return statements

    def _cut(self, size: int, block: int, body) -> list[Stmt]:
        """`body(start, count)` for all runs of `block` points, and for those that are left."""
        full, rest = divmod(size, block)
        statements: list[Stmt] = []
        if full == 1:
            statements += body(Affine(), block)
        elif full:
            counter = self.context.names("%i")
            statements.append(For(counter, full, tuple(body(Affine.symbol(counter, block), block))))
        return statements + (body(Affine((), full * block), rest) if rest else [])

    def _of_columns(self, inner: Sequence[str], start: Affine, columns: int) -> list[Stmt]:
        tiles = -(-columns // TILE_ROWS)
        buf = self._words((tiles, self.depth.padded, TILE_ROWS))

        def of_rows(at: Affine, points: int) -> list[Stmt]:
            return self._of_rows(buf, start, columns, at, points)

        size = self.nest.dims[self.rows.dims[0]]
        products = self._looped(inner, lambda: self._cut(size, self.rows.count, of_rows))
        return [*self._packed_columns(buf, start, columns), *products]

    def _of_rows(
        self,
        panels: Buf,
        first_column: Affine,
        columns: int,
        first_row: Affine,
        points: int,
    ) -> list[Stmt]:
        rows = _padded(self.rows.of(points))
        lines = self.depth.padded // TILE_ROWS
        packed = self._words((rows, (lines + (lines % 2 == 0)) * TILE_ROWS))
        total = self.context.new_buffer(
            (panels.shape[0], rows, TILE_ROWS), self.instruction.accumulator
        )
        at = self.places | {self.rows.dims[0]: first_row + Affine.symbol(self.rows.dims[0])}
        return [
            *self._packed_rows(packed, at, points),
            *self._products(packed, panels, total),
            *self._results(total, at, points, first_column, columns),
        ]

    def _words(self, shape: tuple[int, ...]) -> Buf:
        return self.context.new_buffer(shape, INT32)

    # ---------------------------------------------------------------- packing

    def _packed_rows(self, buf: Buf, at: dict[str, Affine], points: int) -> Iterator[Stmt]:
        dims = {self.rows.dims[0]: points} | dict(zip(self.rows.dims[1:], self.rows.sizes))
        row = self.rows.place()
        for words, word in self._words_of(self.stationary, at):
            index = (row, self.depth.place(Affine.symbol(words.name) + words.start))
            yield self._copy({**dims, **words.dims}, Store(buf, index, word))
        yield from self._zeros(buf, self.depth.words, self.depth.padded)

    def _packed_columns(self, buf: Buf, start: Affine, columns: int) -> Iterator[Stmt]:
        tile, column = self.context.names("d"), self.context.names("d")
        for first, tiles, width in _tiles_of(columns):
            place = Affine.symbol(tile) + first
            at = self.places | {self.vector: start + place * TILE_ROWS + Affine.symbol(column)}
            for words, word in self._words_of(self.streamed, at):
                index = (
                    place,
                    self.depth.place(Affine.symbol(words.name) + words.start),
                    Affine.symbol(column),
                )
                dims = {tile: tiles, **words.dims, column: width}
                yield self._copy(dims, Store(buf, index, word))
        yield from self._zeros(buf, self.depth.words, self.depth.padded)

    def _copy(self, dims: dict[str, int], store: Store) -> Nest:
        return Nest(dims, stores=(store,), at=self.nest.at)

    def _zeros(self, buf: Buf, low: int, high: int) -> Iterator[Stmt]:
        """Zeros in words `low` to `high` of the depth, the second axis of both copies, if any."""
        if low < high:
            names = [self.context.names("d") for _ in buf.shape]
            first, word, *rest = map(Affine.symbol, names)
            dims = dict(zip(names, buf.shape)) | {names[1]: high - low}
            value = self.context.const(0, INT32)
            yield self._copy(dims, Store(buf, (first, word + low, *rest), value))

    def _words_of(self, operand: Expr, at: dict[str, Affine]) -> Iterator[tuple[_WordRun, Expr]]:
        """The words of an operand in which all elements are there, then those in which some are."""
        *outer, last = self.depth.dims
        full, rest = divmod(self.depth.elements, self.depth.word)
        sizes = dict(zip(outer, self.depth.sizes))
        for start, count, elements in ((0, full, self.depth.word), (full, 1, rest)):
            if count and elements:
                run = _WordRun(last, start, {**sizes, last: count})
                yield run, self._word(operand, last, start, elements, at)

    def _word(
        self, operand: Expr, dim: str, start: int, elements: int, at: dict[str, Affine]
    ) -> Expr:
        """The word of the elements from (dim + start) * word on, the first lowest."""
        source = operand.args[0] if is_narrow_integer(operand) else operand
        count = self.depth.word
        if isinstance(source, Load) and not source.guard and elements == count:
            placed = self.pool.rename(source, at)
            assert isinstance(placed, Load)
            whole = word_in_place(placed, dim, self.context)
            if whole is not None:
                moved = {dim: Affine.symbol(dim) + start}
                return self.pool.rename(whole, moved) if start else whole
        places = [
            {dim: Affine.symbol(dim, count) + (start * count + number)}
            for number in range(elements)
        ]
        bits = np.dtype(f"uint{INT32.itemsize * 8 // count}")
        parts = [self._bits(self.pool.rename(source, at | place), bits) for place in places]
        word = joined_word(parts, UINT32, self.context)
        return self.context.op("bitcast_convert_type", INT32, word, params={"new_dtype": INT32})

    def _bits(self, element: Expr, bits: np.dtype) -> Expr:
        """An element as an unsigned integer."""
        if element.dtype == bits:
            return element
        return self.context.op("bitcast_convert_type", bits, element, params={"new_dtype": bits})

    # ---------------------------------------------------------------- products

    def _products(self, packed: Buf, panels: Buf, total: Buf) -> Iterator[Stmt]:
        """Products of parts of the depth: the first stores sums, the others add to them."""
        part_words = self._part_words()
        for low in range(0, self.depth.padded, part_words):
            words = min(part_words, self.depth.padded - low)
            for first, tiles in _pairs(panels.shape[0]):
                for row, blocks in _pairs(packed.shape[0] // TILE_ROWS):
                    yield self._product(
                        packed, panels, total, (row, blocks), (first, tiles), low, words
                    )

    def _part_words(self) -> int:
        """Words of a part of the depth: two tiles of rows so long fill two thirds of the first cache."""
        tiles = self.context.options.l1_bytes * 2 // 3 // (TILES_ACROSS * TILE_BYTES)
        return max(tiles, 1) * TILE_ROWS

    def _product(
        self,
        packed: Buf,
        panels: Buf,
        total: Buf,
        rows: tuple[int, tuple[int, int]],
        columns: tuple[int, tuple[int, int]],
        low: int,
        words: int,
    ) -> Nest:
        names = self.context.names
        down, i, row, across, j, column, step, word = (names("d") for _ in range(8))
        (first_row, (downs, high)), (first_tile, (acrosses, wide)) = rows, columns
        row_at = (
            Affine.symbol(down, high * TILE_ROWS)
            + Affine.symbol(i, TILE_ROWS)
            + Affine.symbol(row)
            + first_row * TILE_ROWS
        )
        tile_at = Affine.symbol(across, wide) + Affine.symbol(j) + first_tile
        word_at = Affine.symbol(step, TILE_ROWS) + Affine.symbol(word) + low
        operands = (
            self.pool.load(INT32, packed, (row_at, word_at), False),
            self.pool.load(INT32, panels, (tile_at, word_at, Affine.symbol(column)), False),
        )
        dtype = self.instruction.accumulator
        value: Expr = self.pool.accumulator(dtype, 0)
        index = (tile_at, row_at, Affine.symbol(column))
        if low:
            before = self.pool.load(dtype, total, index, False)
            value = self.context.op("add", dtype, before, value)
        dims = {down: downs, across: acrosses, i: high, j: wide, row: TILE_ROWS, column: TILE_ROWS}
        dims |= {step: words // TILE_ROWS, word: TILE_ROWS}
        product = Nest(
            dims,
            (step, word),
            (Reduction("dot", operands, dtype, by=self.instruction),),
            (Store(total, index, value, inner=False),),
            at=self.nest.at,
        )
        schedule = NestSchedule(
            jam={i: high, j: wide},
            order=(down, across),
            instruction_dims=(row, column, word),
            fixed=True,
        )
        return scheduled(product, schedule=schedule)

    # ---------------------------------------------------------------- results

    def _results(
        self, total: Buf, at: dict[str, Affine], points: int, start: Affine, columns: int
    ) -> Iterator[Stmt]:
        """Stores of the product, which read sums."""
        tile, column = self.context.names("d"), self.context.names("d")
        free = {dim: size for dim, size in self.nest.dims.items() if dim not in self.nest.rdims}
        whole = Nest(free, stores=self.nest.stores, at=self.nest.at)
        rows = {self.rows.dims[0]: points} | dict(zip(self.rows.dims[1:], self.rows.sizes))
        for first, tiles, width in _tiles_of(columns):
            place = Affine.symbol(tile) + first
            places = at | {self.vector: start + place * TILE_ROWS + Affine.symbol(column)}
            index = (place, self.rows.place(), Affine.symbol(column))
            value = self.pool.load(total.dtype, total, index, False)
            rename = self.pool.renamer(places)
            stores = tuple(store.moved(places, rename) for store in whole.stores)
            moved = Nest({**rows, tile: tiles, column: width}, stores=stores, at=self.nest.at)
            yield with_results(moved, [value], self.pool)


@dataclass(frozen=True)
class _WordRun:
    """Words along the innermost reduced dimension from `start` on; dims: all reduced dimensions, in words."""

    name: str
    start: int
    dims: dict[str, int]


def _tiles_of(columns: int) -> Iterator[tuple[int, int, int]]:
    """(first tile, number of tiles, columns of each): whole tiles, then one that is not."""
    full, rest = divmod(columns, TILE_ROWS)
    if full:
        yield 0, full, TILE_ROWS
    if rest:
        yield full, 1, rest


def _pairs(tiles: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """(first tile, (number of steps, tiles of a step)): steps of TILES_ACROSS tiles, then one of those that are left."""
    full, rest = divmod(tiles, TILES_ACROSS)
    if full:
        yield 0, (full, TILES_ACROSS)
    if rest:
        yield full * TILES_ACROSS, (1, rest)
