"""Which nests matrix instructions compute, what of other nests belongs to their operands, and tiles of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.edit.inline import recomputed
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.ir import (
    AsyncProduct,
    Buf,
    Const,
    Expr,
    For,
    Gather,
    InRange,
    Load,
    Nest,
    Op,
    Stmt,
    Store,
    Wait,
    nodes,
    with_bodies,
)
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.layout import BANK_ROW_BYTES, Panels, Swizzle
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.schedule.copies import (
    WIDEST_COPY_BYTES,
    computed_at_once,
    copied_at_once,
)
from pbkern.targets.simt.schedule.instructions import (
    GROUP_INSTRUCTIONS,
    WARP_INSTRUCTIONS,
    WIDEST_TURNED_BYTES,
)
from pbkern.targets.simt.schedule.lane_products import FEWEST_IN_BLOCK, oriented

Context = NestContext[ThreadOptions]


@dataclass(frozen=True)
class MatrixProduct:
    """A nest that a matrix instruction computes: of all dimensions that it has, tiles have rows, columns and a depth.

    rows: dimensions that are the rows of a tile together, such as the pixels of several lines, the slowest first. orders: the
    dimensions along either axis of each operand's tile, those of neighbours in memory last.
    """

    nest: Nest
    rows: tuple[str, ...]
    column: str
    depth: str
    orders: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    instruction: ProductInstruction

    @property
    def dims(self) -> tuple[str, ...]:
        return *self.rows, self.column, self.depth

    @property
    def is_one_tile(self) -> bool:
        """Whether the nest has no other dimensions, and one of rows."""
        return len(self.nest.dims) == 3


def instruction_for(
    operands: tuple[np.dtype, ...], accumulator: np.dtype, options: ThreadOptions
) -> ProductInstruction | None:
    """The row by which one warp multiplies all bits of such operands."""
    rows = (row for row in WARP_INSTRUCTIONS if row.is_available(options) and not row.reads)
    return next(
        (row for row in rows if (row.operands, row.accumulator) == (operands, accumulator)), None
    )


def by_groups(product: MatrixProduct, options: ThreadOptions) -> list[MatrixProduct]:
    """The product by instructions of several warps, those of the most columns first.

    They read tiles in shared memory, whose rows run along the depth, or across it if elements have two bytes. At least half of
    each dimension of an instruction is used.
    """
    same = product.instruction.operands, product.instruction.accumulator
    sizes = product.nest.dims
    extents = (
        math.prod(sizes[dim] for dim in product.rows), sizes[product.column], sizes[product.depth],
    )  # fmt: skip
    along = all(order[-1] == (product.depth,) for order in product.orders)
    chosen = []
    for row in GROUP_INSTRUCTIONS:
        height, width, _ = row.shape
        size = row.operands[0].itemsize
        units = height, width, row.row_bytes // size
        if (
            (row.operands, row.accumulator) == same
            and row.is_available(options)
            and (along or size == WIDEST_TURNED_BYTES)
            and all(2 * extent > unit for extent, unit in zip(extents, units))
        ):
            chosen.append(replace(product, instruction=row))
    return chosen


def matrix_product(nest: Nest, context: Context) -> MatrixProduct | None:
    """The product that a nest is: of rows and columns over a depth, in the types of an instruction."""
    if len(nest.rdims) > 1 and nest.by is None:
        nest = collapse(nest, context.pool, context.aliases)
    if len(nest.reductions) != 1 or nest.by is not None or nest.ordered or nest.moves():
        return None
    (reduction,) = nest.reductions
    if not reduction.is_plain_product or any(store.inner for store in nest.stores):
        return None
    loaded = {node.buf.root for node in nodes(reduction.args) if isinstance(node, Load | Gather)}
    if loaded & effects.written([nest]):
        return None  # tiles would be copied behind the stores of others
    row = None
    for candidate in (reduction.mapped(narrowed), reduction):
        operands = tuple(stored_type(arg) for arg in candidate.args)
        row = instruction_for(operands, candidate.dtype, context.options)
        if row is not None:
            reduction = candidate
            break
    free = [dim for dim in nest.dims if dim not in nest.rdims]
    first, second = (
        [dim for dim in free if dim in arg.symbols and dim not in other.symbols]
        for arg, other in zip(reduction.args, reversed(reduction.args))
    )
    if row is None or not first or not second or not nest.rdims:
        return None
    rows = [dim for dim in first if nest.dims[dim] > 1] or first[-1:]
    column = max(second, key=nest.dims.__getitem__)
    depth = max(nest.rdims, key=nest.dims.__getitem__)
    if len(nest.dims) > 3 and 2 * nest.dims[depth] < row.shape[-1]:
        return None  # most of what windows add would be zeros
    single: dict[str, Affine] = {
        dim: Affine()
        for dim, size in nest.dims.items()
        if size == 1 and dim not in (*rows, column, depth)
    }
    beside = {
        dim: size
        for dim, size in nest.dims.items()
        if dim not in (*rows, column, depth) and dim not in single
    }
    dims = beside | {dim: nest.dims[dim] for dim in (*rows, column, depth)}
    rdims = tuple(dim for dim in nest.rdims if dim in dims)
    whole = renamed(replace(nest, reductions=(reduction,), rdims=rdims), single, dims, context.pool)
    sides = (tuple(rows), (column,))
    orders = tuple(_order(arg, side, depth) for arg, side in zip(whole.reductions[0].args, sides))
    first_along, second_along = (order[-1] == (depth,) for order in orders)
    row = oriented(row, (first_along, second_along))
    if row.is_of_lanes and not _is_large(row, whole, (rows, [column], [depth])):
        return None
    return MatrixProduct(whole, tuple(rows), column, depth, orders, row)


def _is_large(row: ProductInstruction, nest: Nest, axes: Sequence[Sequence[str]]) -> bool:
    """Whether a nest has instructions for several warps, and steps: lanes have other ways to compute what is smaller."""
    sizes = [math.prod(nest.dims[dim] for dim in axis) for axis in axes]
    rows, columns, steps = (
        power_of_two(size, unit) // unit for size, unit in zip(sizes, row.shape)
    )
    return rows * columns >= FEWEST_IN_BLOCK and steps > 1


def are_copied(product: MatrixProduct) -> bool:
    """Whether operands are what is in memory, and zeros outside of it."""
    values = nodes(product.nest.reductions[0].args)
    return all(
        isinstance(node, Load | Const | InRange)
        or (isinstance(node, Op) and node.info.primitive == "select_n")
        for node in values
    )


def narrowed(expr: Expr) -> Expr:
    """An operand before it is converted to a type that holds all of its values."""
    while isinstance(expr, Op) and expr.info.primitive == "convert_element_type":
        (before,) = expr.args
        if not np.can_cast(stored_type(before), expr.dtype):
            break
        expr = before
    return expr


def stored_type(expr: Expr) -> np.dtype:
    """The type in which an operand is staged without loss."""
    return expr.buf.dtype if isinstance(expr, Load) else expr.dtype


def _order(
    expr: Expr, side: tuple[str, ...], depth: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of an operand's tile, that along which most loads go to neighbours last."""
    loads = [node for node in nodes([expr]) if isinstance(node, Load)]
    along_side, along_depth = (
        sum(abs(flat_coefficient(load.buf, load.index, dim)) == 1 for load in loads)
        for dim in (side[-1], depth)
    )
    return (side, (depth,)) if along_depth >= along_side else ((depth,), side)


def tile_buffer(
    shape: tuple[int, ...], dtype: np.dtype, context: Context, row_bytes: int = 0
) -> Buf:
    """Shared memory for an operand, whose rows are read by chunks without bank conflicts.

    row_bytes: of the widest panel of columns; 0: rows are whole.
    """
    size, (*_, columns) = dtype.itemsize, shape
    width = min(row_bytes // size, columns) or columns
    swizzle = Swizzle.of_rows(width, WIDEST_COPY_BYTES // size, BANK_ROW_BYTES // size)
    if swizzle is not None and width < columns:
        swizzle = replace(swizzle, panels=Panels(shape[-2], columns, width))
    return replace(context.new_buffer(shape, dtype), space="shared", layout=swizzle)


def is_tile(arg: Expr) -> TypeGuard[Load]:
    """Whether an operand is read from a tile in shared memory, as it is."""
    return isinstance(arg, Load) and arg.buf.space == "shared" and arg.buf.layout is not None


def reads_tiles(product: MatrixProduct, sides: tuple[int, int]) -> bool:
    """Whether the instruction reads both operands, tiles in shared memory, as they lie there; `sides`: rows and columns."""
    row = product.instruction
    size = row.operands[0].itemsize
    for arg, order, side in zip(product.nest.reductions[0].args, product.orders, sides):
        if not is_tile(arg):
            return False
        (*_, high, wide), layout = arg.buf.shape, arg.buf.layout
        panels = layout.panels if isinstance(layout, Swizzle) else None
        row_bytes = size * (panels.width if panels else wide)
        length = high if order[-1] == (product.depth,) else wide
        if length != side or (row.row_bytes and row_bytes != row.row_bytes):
            return False
    return True


def begun(product: Nest) -> list[Stmt]:
    """A product of tiles as statements, which the device makes by itself if several warps compute it together."""
    assert isinstance(product.by, Tiling)
    if not product.by.instruction.row_bytes:
        return [product]
    return [AsyncProduct((product,)), Wait(0, products=True)]


def left_under_way(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Loops that leave the product of a step under way when the next step begins, whose tiles are kept as long.

        for %o < n:                                 for %o < n:
          async product: (adds to c)                  async product: (adds to c)
          wait 0 of products                ->        wait 1 of products
                                                    wait 0 of products

    Legal where nothing else in the loop touches the sums, and no copy goes to a tile in the step behind its own.
    """
    out: list[Stmt] = []
    for stmt in stmts:
        if not isinstance(stmt, For):
            out.append(with_bodies(stmt, left_under_way))
            continue
        begins = [x for x in stmt.body if isinstance(x, AsyncProduct)]
        sums = effects.written(begins)
        rest = [x for x in stmt.body if x not in begins]
        ends = Wait(0, products=True)
        if len(begins) == rest.count(ends) == 1 and not effects.touched(rest) & sums:
            body = tuple(Wait(1, products=True) if x == ends else x for x in stmt.body)
            out += [replace(stmt, body=body), ends]
        else:
            out.append(with_bodies(stmt, left_under_way))
    return out


def in_chunks(copy: Nest, value: Expr, context: Context) -> Nest:
    """The copy of a value to a tile, which threads share out by chunks where the device does not make it."""
    nest = replace(copy, stores=(replace(copy.stores[0], value=value),))
    if context.options.device.copies_tiles and copied_at_once(nest):
        return nest
    return replace(nest, by=Chunking(computed_at_once(nest), context.options.threads))


def power_of_two(size: int, unit: int) -> int:
    """The unit times the smallest power of two that is not below a size."""
    return unit << max(math.ceil(size / unit) - 1, 0).bit_length()


def ranges_of(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Smallest and largest value of dimensions."""
    return {dim: (0, size - 1) for dim, size in sizes.items()}


def with_operands(
    stmts: Sequence[Stmt], readers: Mapping[Buf, int], context: Context, of_arrays: bool = False
) -> list[Stmt]:
    """The statements with what is stored for one product alone computed while its tiles are copied.

    `readers`: how many nests of the program read a buffer. `of_arrays`: only what is made of arrays, for two products as well,
    which is left to be stored by others.
    """
    statements = list(stmts)
    for at, reader in enumerate(statements):
        if not isinstance(reader, Nest) or not any(r.is_plain_product for r in reader.reductions):
            continue
        inside, written = reader, effects.written([reader])
        left: dict[int, list[Nest]] = {}  # position of a maker -> the nest of what it stores beside
        for position in reversed(range(at)):
            maker = statements[position]
            if isinstance(maker, Nest) and (
                wanted := _operands(maker, inside, readers, context, of_arrays)
            ):
                candidate = recomputed(wanted, inside, context.pool)
                touched = effects.read([wanted]) | effects.written([wanted])
                if candidate is not None and not touched & written:
                    inside = candidate
                    beside = tuple(x for x in maker.stores if x not in wanted.stores)
                    left[position] = [replace(maker, stores=beside)] if beside else []
                    left[position] = [maker] if of_arrays else left[position]
            written |= effects.written([maker])
        if left and matrix_product(inside, context):
            statements[at] = inside
            remaining = [one for n, stmt in enumerate(statements) for one in left.get(n, [stmt])]
            return with_operands(remaining, readers, context, of_arrays)
    return statements


def _operands(
    maker: Nest, reader: Nest, readers: Mapping[Buf, int], context: Context, of_arrays: bool
) -> Nest | None:
    """The part of a nest that is for products alone; none if threads hold what it loads."""
    loaded = {load.buf for load in reader.loads()}
    counts = (1, 2) if of_arrays else (1,)

    def is_wanted(store: Store) -> bool:
        buf, loads = store.buf, Nest({}, stores=(store,)).loads()
        is_own = buf in loaded and buf.arena and not buf.space and buf not in context.persistent
        is_held = any(x.buf.space == "registers" or (of_arrays and x.buf.arena) for x in loads)
        return is_own and readers.get(buf, 0) in counts and not is_held

    stores = tuple(filter(is_wanted, maker.stores))
    is_plain = len(stores) == len(maker.stores) or not maker.reductions
    return replace(maker, stores=stores) if stores and is_plain else None
