"""Scratch between products -> registers of the threads that compute them: sums of one product are operands of the next.

                                                     async: q
    for %i < n:                                      for %i < n:
      nest [i<64, j<64, k<64*]                         wait 0
        acc0 dot= q[i, k], keys[64*%i + j, k]          async: keys and values of step %i + 1
        s[i, j] = acc0  (after)               ->       nest [i<64, j<64, k<64*] by mma 4x1: s
      nest [i<64, j<64*]                               nest [i<64, j<64*] by mma 4x1
        acc0 max= s[i, j]                                acc0 max= s[i, j]
        m[i] = acc0  (after)                             m[i] = acc0  (after)
      ...                                              ...

Each warp has rows of its own: what lies along a row is exchanged by its lanes alone, and no scratch is in shared memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest import effects, scratch
from pbkern.lower.nest.edit.accumulate import accumulated_in
from pbkern.lower.nest.edit.grow import guarded, zero_filled
from pbkern.lower.nest.edit.pipeline import pipelined
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.edit.stage import staged
from pbkern.lower.nest.effects import Effects
from pbkern.lower.nest.ir import (
    Accumulator,
    AsyncCopy,
    Buf,
    Expr,
    For,
    Gather,
    Load,
    Nest,
    Op,
    Stmt,
    Store,
    Wait,
    bodies,
    every,
    nodes,
    with_bodies,
    with_nests,
)
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.lower.passes.merge_nests import without_unread

from .orientation import turned
from .padded_rows import whole_rows
from .products import (
    Context,
    MatrixProduct,
    begun,
    by_groups,
    in_chunks,
    is_tile,
    matrix_product,
    ranges_of,
    reads_tiles,
    stored_type,
    tile_buffer,
    with_operands,
)

# Reductions along rows that lanes of a warp make together.
ROW_REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True)
class Residents:
    """Arrays in registers, by the tiling of all nests that touch them. products: by the id of their nests."""

    arrays: frozenset[Buf]
    by: Tiling
    products: dict[int, MatrixProduct]


def resident_products(
    stmts: Sequence[Stmt], context: Context, stages: int, most_words: tuple[int, int]
) -> list[Stmt]:
    """The statements with scratch between products in registers, where all of it can be; else as they are.

    stages: steps of copies in shared memory at a time, fewer where these do not fit. most_words: registers of a thread for all
    arrays together, and for those that the products of a loop add to, which are alive at the same time.
    """
    plain = with_nests(stmts, lambda nest: [_without_single_dims(nest, context)])
    short = _of_arrays(plain, context)
    plain = whole_rows(short, context)
    residents = _residents(plain, context, most_words)
    # Turned arrays have other rows, and what was a row may then be a column, which is not made longer.
    behind = turned(short, context)
    ways = [turned(plain, context), None if behind is None else whole_rows(behind, context)]
    for way in ways:
        better = None if way is None else _residents(way, context, most_words)
        if way and better and (not residents or len(better.arrays) > len(residents.arrays)):
            plain, residents = way, better
    if residents is None:
        return list(stmts)
    plain = _sooner(plain, residents)
    held = {
        buf: replace(
            buf, shape=tuple(_long(buf.shape, buf)), space="registers", layout=residents.by
        )
        for buf in residents.arrays
    }
    for fewer in range(stages, 0, -1):
        changed = _Writer(residents, held, context, fewer).whole(plain)
        if _tile_bytes(changed) <= context.options.shared_bytes:
            return changed
        if _arena(changed, "") - {buf.root for buf in context.persistent}:
            break  # what stays in memory needs room as well
    return list(stmts)


def _arena(stmts: Sequence[Stmt], space: str) -> set[Buf]:
    """Scratch that statements touch in a space."""
    return {
        buf.root for buf in effects.touched(list(stmts)) if buf.arena and buf.root.space == space
    }


def _tile_bytes(stmts: Sequence[Stmt]) -> int:
    """Shared memory of the tiles of statements, which has room for nothing else."""
    elsewhere = _arena(stmts, "") | _arena(stmts, "registers")
    _, end = scratch.place(list(stmts), 0, elsewhere)
    return end


def _of_arrays(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    """The statements with operands that are made of arrays alone computed while their tiles are copied."""
    leaves = [stmt for stmt in every(stmts) if not bodies(stmt)]
    readers = Counter(buf for stmt in leaves for buf in effects.read([stmt]))

    def inlined(block: Sequence[Stmt]) -> list[Stmt]:
        inside = [with_bodies(stmt, inlined) for stmt in block]
        return with_operands(inside, readers, context, of_arrays=True)

    return without_unread(inlined(stmts), {buf.root for buf in context.persistent})


def _sooner(stmts: Sequence[Stmt], residents: Residents) -> list[Stmt]:
    """The statements with each product right behind what makes its first operand, which then takes registers no longer."""
    out: list[Stmt] = []
    for stmt in stmts:
        stmt = with_bodies(stmt, lambda block: _sooner(block, residents))
        product = residents.products.get(id(stmt))
        first = product.nest.reductions[0].args[0] if product else None
        at = len(out)
        if isinstance(first, Load) and first.buf in residents.arrays:
            mine = Effects.of(stmt)
            while at and mine.commute(Effects.of(out[at - 1])):
                at -= 1
            if not at or first.buf not in effects.written([out[at - 1]]):
                at = len(out)
        out.insert(at, stmt)
    return out


def _without_single_dims(nest: Nest, context: Context) -> Nest:
    """The nest without dimensions of one point, where two others are left, and one that is reduced if any is."""
    keeps = all(nest.dims[dim] == 1 for dim in nest.rdims)
    single: dict[str, Affine] = {
        dim: Affine()
        for dim, size in nest.dims.items()
        if size == 1 and not (keeps and dim in nest.rdims)
    }
    if not single or nest.moves() or len(nest.dims) == len(single):
        return nest
    dims = {dim: size for dim, size in nest.dims.items() if dim not in single}
    rdims = tuple(dim for dim in nest.rdims if dim in dims)
    return renamed(replace(nest, rdims=rdims), single, dims, context.pool)


def _long(values: Sequence, buf: Buf) -> list:
    """The values, one per axis of a buffer, of axes that have more than one place."""
    return [value for value, size in zip(values, buf.shape) if size > 1]


def _residents(
    stmts: Sequence[Stmt], context: Context, most_words: tuple[int, int]
) -> Residents | None:
    """The largest set of arrays that products and nests along rows touch in the registers of one tiling."""
    leaves = [stmt for stmt in every(stmts) if not bodies(stmt)]
    nests = [stmt for stmt in leaves if isinstance(stmt, Nest)]
    products = {
        id(nest): product
        for nest in nests
        if (product := matrix_product(nest, context)) is not None
        and product.is_one_tile
        and not product.instruction.is_of_lanes  # whose sums are no operand of another one
    }
    if not products:
        return None
    rows = list(dict.fromkeys(product.instruction for product in products.values()))
    alike = {Tiling(row, (1, 1)).holds_like(Tiling(rows[0], (1, 1))) for row in rows}
    if alike != {True}:
        return None
    rows = [*_group_rows(products.values(), context), rows[0]]
    elsewhere = effects.touched([stmt for stmt in leaves if not isinstance(stmt, Nest)])
    arrays = {
        store.buf
        for nest in nests
        for store in nest.stores
        if store.buf.arena and store.buf.storage is None
    }
    arrays -= elsewhere | (context.persistent - context.fresh)
    shapes = [
        tuple(product.nest.dims[dim] for dim in product.dims) for product in products.values()
    ]
    held: dict[Tiling, set[Buf]] = {}
    for row in rows:
        warps = context.options.threads // (context.options.device.warp * row.warps)
        for across in (1 << bit for bit in range(warps.bit_length())):
            by = Tiling(row, (warps // across, across))
            held[by] = _held(nests, products, arrays, by)
    # Warps that have rows of their own exchange nothing else; squares read the fewest operands.
    by = min(
        held,
        key=lambda by: (
            -len(held[by]),
            rows.index(by.instruction),
            sum(height // by.warps[0] + width // by.warps[1] for height, width, _ in shapes),
        ),
    )
    arrays = held[by]
    results = {store.buf for product in products.values() for store in product.nest.stores}

    def words(buffers: Iterable[Buf]) -> float:
        return sum(
            by.held(_long(buf.shape, buf)).size("register") * buf.dtype.itemsize / 4
            for buf in buffers
        )

    loops = [stmt for stmt in every(stmts) if isinstance(stmt, For)]
    sums = [_sums(loop.body, products) & arrays for loop in loops]
    if not results & arrays or words(arrays) > most_words[0]:
        return None
    if max(map(words, sums), default=0) > most_words[1]:
        return None
    reads_again = any(
        nest.rdims and effects.read([nest]) & results for nest in nests
    )  # another product, or a reduction along rows
    if not reads_again and len(products) == 1:
        return None  # whose operands are better computed while they are copied
    return Residents(frozenset(arrays), by, products)


def _sums(stmts: Sequence[Stmt], products: Mapping[int, MatrixProduct]) -> set[Buf]:
    """Arrays that products among statements add to."""
    return {
        store.buf
        for stmt in every(stmts)
        if id(stmt) in products
        for store in products[id(stmt)].nest.stores
        if any(load.buf is store.buf for load in products[id(stmt)].nest.loads())
    }


def _group_rows(products: Iterable[MatrixProduct], context: Context) -> list[ProductInstruction]:
    """Instructions of several warps by which all products, of whole tiles in shared memory, can be computed."""
    common: list[ProductInstruction] | None = None
    for product in products:
        rows, column = (product.nest.dims[dim] for dim in (product.rows[0], product.column))
        mine = [
            candidate.instruction
            for candidate in by_groups(product, context.options)
            if reads_tiles(candidate, (rows, column))
        ]
        common = [row for row in mine if common is None or row in common]
    return common or []


def _held(
    nests: Sequence[Nest], products: Mapping[int, MatrixProduct], arrays: set[Buf], by: Tiling
) -> set[Buf]:
    """The arrays that can stay in the registers of a tiling, all nests that touch them being spread by it."""
    while True:
        bad = {
            buf
            for nest in nests
            for buf in effects.touched([nest]) & arrays
            if not _stays(nest, buf, products.get(id(nest)), by)
        }
        if not bad:
            return arrays
        arrays = arrays - bad


def _stays(nest: Nest, buf: Buf, product: MatrixProduct | None, by: Tiling) -> bool:
    """Whether each thread finds the elements of an array that a nest needs of it in its own registers."""
    shape = tuple(nest.dims.values())
    if nest.ordered or nest.moves() or len(_long(buf.shape, buf)) not in (1, 2):
        return False
    loads = [load for load in nest.loads() if load.buf.root is buf]
    dims = list(nest.dims)
    if product is not None:
        dims = list(product.dims)
        shape = tuple(product.nest.dims[dim] for dim in dims)
        first = [load for load in _loads(product, 0) if load.buf.root is buf]
        if not by.fits(shape) or any(load.buf.root is buf for load in _loads(product, 1)):
            return False
        if first and not _is_first_operand(product, buf, by):
            return False
        loads = [load for load in loads if load not in first]
    elif (
        len(dims) not in (1, 2)
        or not set(nest.rdims) <= set(dims[1:])
        or not by.fits(shape)
        or any(reduction.op not in ROW_REDUCTIONS for reduction in nest.reductions)
        or (by.warps[1] > 1 and (nest.rdims or len(dims) == 1))
    ):
        return False
    stores = [store for store in nest.stores if store.buf.root is buf]
    places = [_long(access.index, buf) for access in (*loads, *stores)]
    ways = [[Affine.symbol(dim) for dim in dims[:count]] for count in (1, 2)]
    sizes = [list(shape[:count]) for count in (1, 2)]
    return (
        all(access.buf is buf for access in (*loads, *stores))
        and not any(isinstance(load, Gather) or load.guard for load in loads)
        and all(
            place in ways and _long(buf.shape, buf) == sizes[len(place) - 1] for place in places
        )
    )


def _is_first_operand(product: MatrixProduct, buf: Buf, by: Tiling) -> bool:
    """Whether an array is the first operand as it is, and lanes hold what the instruction takes of it."""
    arg = product.nest.reductions[0].args[0]
    (rows,), depth = product.rows, product.depth
    return (
        isinstance(arg, Load)
        and not by.instruction.row_bytes
        and arg.buf is buf
        and _long(arg.index, buf) == [Affine.symbol(rows), Affine.symbol(depth)]
        and by.held_first(product.nest.dims[rows], product.nest.dims[depth]) is not None
    )


def _loads(product: MatrixProduct, operand: int) -> list[Load | Gather]:
    """Loads of an operand of a product."""
    expressions = nodes([product.nest.reductions[0].args[operand]])
    return [node for node in expressions if isinstance(node, Load | Gather)]


@dataclass
class _Tiles:
    """Tiles that products of a loop's body read, by their elements.

    Operands that are the same elements, along whichever of their dimensions a product sums, have one tile: instructions
    read rows and columns of it. Copies that do not change with the loop are made before it, and belong to what is around.

    Attributes:
      counter: of the loop; "" of other statements.
      around: tiles of what is around the loop; None where copies do not leave these statements.
    """

    context: Context
    counter: str = ""
    around: _Tiles | None = None
    buffers: dict[tuple, Buf] = field(default_factory=dict)

    def find(self, dims: Mapping[str, int], value: Expr, dtype: np.dtype) -> Buf | None:
        """The tile that has an operand's elements, if there is one."""
        buf = self.buffers.get(self._key(dims, value, dtype))
        return self.around.find(dims, value, dtype) if buf is None and self.around else buf

    def add(self, dims: Mapping[str, int], value: Expr, buf: Buf) -> None:
        if self.around and self.counter not in value.symbols:
            self.around.add(dims, value, buf)
        else:
            self.buffers[self._key(dims, value, buf.dtype)] = buf

    def _key(self, dims: Mapping[str, int], value: Expr, dtype: np.dtype) -> tuple:
        """Sizes and elements, whatever the dimensions are called."""
        places = {dim: Affine.symbol(f"%axis{number}") for number, dim in enumerate(dims)}
        return tuple(dims.values()), self.context.pool.rename(value, places), dtype


@dataclass
class _Writer:
    """Writes the statements anew. held: array -> its registers. bounds: of symbols that copies ahead do not move."""

    residents: Residents
    held: dict[Buf, Buf]
    context: Context
    stages: int
    bounds: dict[str, tuple[int, int]] = field(default_factory=dict)

    def whole(self, stmts: Sequence[Stmt]) -> list[Stmt]:
        counters = {stmt.counter for stmt in every(stmts) if isinstance(stmt, For)}
        known = self.context.bounds.items()
        self.bounds = {symbol: ends for symbol, ends in known if symbol not in counters}
        written = effects.written(stmts)
        may_move = lambda copy: not effects.read([copy]) & written
        copies, out = self.block(stmts, may_move, _Tiles(self.context))
        return [*self.begun(copies), *out]

    def begun(self, copies: Sequence[Nest]) -> list[Stmt]:
        """Copies that are there behind these statements."""
        late = [copy for copy in copies if copy.by is None]
        threads: list[Stmt] = [copy for copy in copies if copy not in late]
        if late:
            threads += [AsyncCopy(tuple(late)), Wait(0)]
        return threads

    def block(
        self, stmts: Sequence[Stmt], may_move: Callable[[Nest], bool], tiles: _Tiles
    ) -> tuple[list[Nest], list[Stmt]]:
        """(copies of what nothing changes, to be made before; the statements that read them)."""
        before: list[Nest] = []
        out: list[Stmt] = []
        for stmt in stmts:
            product = self.residents.products.get(id(stmt))
            if isinstance(stmt, For):
                inside = _Tiles(self.context, stmt.counter, tiles)
                copies, body = self.block(stmt.body, may_move, inside)
                moving = [copy for copy in copies if stmt.counter in _symbols(copy)]
                before += [copy for copy in copies if copy not in moving]
                loop = replace(stmt, body=(*moving, *body))
                if moving:
                    out += pipelined(
                        loop,
                        self.stages,
                        moving,
                        lambda copy: copy.by is None,
                        self.context,
                    )
                else:
                    out.append(loop)
            elif product is not None and self.residents.arrays & effects.touched([product.nest]):
                copies, nests = self.product(product, tiles, may_move)
                before += [copy for copy in copies if may_move(copy)]
                out += self.begun([copy for copy in copies if not may_move(copy)])
                out += nests
            elif isinstance(stmt, Nest) and self.residents.arrays & effects.touched([stmt]):
                out.append(replace(self.in_registers(stmt), by=self.residents.by))
            else:
                out.append(self.inside(stmt, may_move))
        return before, out

    def inside(self, stmt: Stmt, may_move: Callable[[Nest], bool]) -> Stmt:
        """A statement that is no product: its blocks make copies of their own."""

        def changed(block: Sequence[Stmt]) -> list[Stmt]:
            copies, out = self.block(block, may_move, _Tiles(self.context))
            return [*self.begun(copies), *out]

        return with_bodies(stmt, changed)

    def in_registers(self, nest: Nest) -> Nest:
        (changed,) = relocated(
            [nest], self.held.get, self.context.pool, lambda buf, index: tuple(_long(index, buf))
        )
        return changed

    def product(
        self, product: MatrixProduct, tiles: _Tiles, may_move: Callable[[Nest], bool]
    ) -> tuple[list[Nest], list[Stmt]]:
        """(copies of operands to tiles, the nests of the product).

        tiles: of copies that stand before it in the same statements and may move.
        """
        context, by = self.context, self.residents.by
        if not by.instruction.row_bytes:
            by = replace(by, instruction=product.instruction)
        nest = self.in_registers(product.nest)
        (rows,) = product.rows
        shape = nest.dims[rows], nest.dims[product.column]
        accumulator = product.instruction.accumulator
        before, total, behind = self.sums(nest, accumulator, shape)
        copies = []
        for arg, order in zip(total.reductions[0].args, product.orders):
            if is_tile(arg) or (isinstance(arg, Load) and arg.buf.space == "registers"):
                continue
            dims = {dim: total.dims[dim] for axis in order for dim in axis}
            ranges = self.bounds | ranges_of(dims)
            value = zero_filled(guarded(arg, context.pool), ranges, context)
            tile = tiles.find(dims, value, stored_type(arg))
            buf = tile or tile_buffer(tuple(dims.values()), stored_type(arg), context)
            copy, total = staged(total, arg, buf, order, context.pool)
            if tile is None:
                copies.append(in_chunks(copy, value, context))
                if may_move(copies[-1]):
                    tiles.add(dims, value, buf)
        around = [[replace(part, by=by) for part in parts] for parts in (before, behind)]
        return copies, [*around[0], *begun(replace(total, by=by)), *around[1]]

    def sums(
        self, nest: Nest, accumulator: np.dtype, shape: tuple[int, int]
    ) -> tuple[list[Nest], Nest, list[Nest]]:
        """(what comes before a product, the product, which adds to an array in registers, what comes behind it)."""
        context, (store, *more) = self.context, nest.stores
        addend = _addend(store, accumulator)
        if more or addend is None:
            sums = replace(
                context.new_buffer(shape, accumulator),
                space="registers",
                layout=self.residents.by,
            )
            zeros, total, last = accumulated_in(nest, sums, context)
            return [zeros], total, [last]
        here = context.pool.load(store.buf.dtype, store.buf, store.index)
        value = context.op(
            "add", accumulator, here, context.pool.accumulator(nest.reductions[0].dtype, 0)
        )
        total = replace(nest, stores=(replace(store, value=value),))
        dims = {dim: size for dim, size in nest.dims.items() if dim not in nest.rdims}
        first = Nest(dims, stores=(replace(store, value=addend, inner=True),), at=nest.at)
        return [] if addend is here else [first], total, []


def _addend(store: Store, accumulator: np.dtype) -> Expr | None:
    """The expression to which a product's sums are added, if an array in registers holds the result; else None."""
    value, buf = store.value, store.buf
    is_sum = isinstance(value, Op) and value.info.primitive == "add" and store.mask is None
    if not is_sum or buf.space != "registers" or buf.dtype != accumulator or store.guard:
        return None
    for addend, other in (value.args, value.args[::-1]):
        is_free = not any(isinstance(node, Accumulator) for node in nodes([addend]))
        if is_free and isinstance(other, Accumulator):
            return addend
    return None


def _symbols(copy: Nest) -> frozenset[str]:
    return copy.stores[0].value.symbols
