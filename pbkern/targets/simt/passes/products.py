"""Which nests matrix instructions compute, what of other nests belongs to their operands, and tiles of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.edit.inline import recomputed
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.ir import Buf, Expr, Gather, Load, Nest, Op, Stmt, nodes
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.layout import BANK_ROW_BYTES, Panels, Swizzle
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

Context = NestContext[ThreadOptions]


@dataclass(frozen=True)
class MatrixProduct:
    """A nest that a matrix instruction computes.

    dims: rows, columns, depth. orders: dimensions of each operand's tile, that of neighbours in memory last.
    """

    nest: Nest
    dims: tuple[str, str, str]
    orders: tuple[tuple[str, str], tuple[str, str]]
    instruction: ProductInstruction


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
    rows, columns, depth = product.dims
    along = all(order[-1] == depth for order in product.orders)
    chosen = []
    for row in GROUP_INSTRUCTIONS:
        height, width, _ = row.shape
        size = row.operands[0].itemsize
        deep = row.row_bytes // size
        used = zip((rows, columns, depth), (height, width, deep))
        if (
            (row.operands, row.accumulator) == same
            and row.is_available(options)
            and (along or size == WIDEST_TURNED_BYTES)
            and all(2 * product.nest.dims[dim] > unit for dim, unit in used)
        ):
            chosen.append(replace(product, instruction=row))
    return chosen


def matrix_product(nest: Nest, context: Context) -> MatrixProduct | None:
    """The product that a nest is: of rows and columns over one depth, in the types of an instruction."""
    single = [dim for dim, size in nest.dims.items() if size == 1 and dim not in nest.rdims]
    left_out: dict[str, Affine] = dict.fromkeys(single[: max(len(nest.dims) - 3, 0)], Affine())
    sizes = {dim: size for dim, size in nest.dims.items() if dim not in left_out}
    nest = renamed(nest, left_out, sizes, context.pool) if left_out else nest
    if len(nest.rdims) > 1 and nest.by is None:
        nest = collapse(nest, context.pool, context.aliases)
    free = [dim for dim in nest.dims if dim not in nest.rdims]
    if len(nest.reductions) != 1 or len(nest.rdims) != 1 or len(free) != 2 or nest.by is not None:
        return None
    (reduction,), (depth,) = nest.reductions, nest.rdims
    if not reduction.is_plain_product or nest.ordered or nest.moves():
        return None
    if any(store.inner for store in nest.stores):
        return None
    sides = [[dim for dim in free if dim in arg.symbols] for arg in reduction.args]
    if sorted(map(len, sides)) != [1, 1] or sides[0] == sides[1]:
        return None
    (rows,), (columns,) = sides
    loaded = {node.buf.root for node in nodes(reduction.args) if isinstance(node, Load | Gather)}
    if loaded & effects.written([nest]):
        return None  # tiles would be copied behind the stores of others
    reduction = reduction.mapped(narrowed)
    operands = tuple(stored_type(arg) for arg in reduction.args)
    row = instruction_for(operands, reduction.dtype, context.options)
    if row is None:
        return None
    first, second = (
        _order(arg, (side, depth)) for arg, side in zip(reduction.args, (rows, columns))
    )
    dims = {dim: nest.dims[dim] for dim in (rows, columns, depth)}
    whole = replace(nest, dims=dims, reductions=(reduction,))
    return MatrixProduct(whole, (rows, columns, depth), (first, second), row)


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


def _order(expr: Expr, dims: tuple[str, str]) -> tuple[str, str]:
    """The dimension along which most loads go to neighbours last."""
    loads = [node for node in nodes([expr]) if isinstance(node, Load)]
    first, second = (
        sum(abs(flat_coefficient(load.buf, load.index, dim)) == 1 for load in loads) for dim in dims
    )
    return dims if second >= first else (dims[1], dims[0])


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


def in_chunks(copy: Nest, value: Expr, context: Context) -> Nest:
    """The copy of a value to a tile, which threads share out by chunks where the device does not make it."""
    nest = replace(copy, stores=(replace(copy.stores[0], value=value),))
    if context.options.device.copies_tiles and copied_at_once(nest):
        return nest
    return replace(nest, by=Chunking(computed_at_once(nest), context.options.threads))


def ranges_of(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Smallest and largest value of dimensions."""
    return {dim: (0, size - 1) for dim, size in sizes.items()}


def with_operands(
    stmts: Sequence[Stmt], readers: Mapping[Buf, int], context: Context
) -> list[Stmt]:
    """The statements with what is stored for one product alone computed while its tiles are copied.

    `readers`: how many nests of the program read a buffer.
    """
    statements = list(stmts)
    for at, reader in enumerate(statements):
        if not isinstance(reader, Nest) or not any(r.is_plain_product for r in reader.reductions):
            continue
        inside, written = reader, effects.written([reader])
        makers: list[Nest] = []
        for maker in reversed(statements[:at]):
            if isinstance(maker, Nest) and _is_operand(maker, inside, readers, context):
                candidate = recomputed(maker, inside, context.pool)
                touched = effects.read([maker]) | effects.written([maker])
                if candidate is not None and not touched & written:
                    inside, makers = candidate, [*makers, maker]
            written |= effects.written([maker])
        if makers and matrix_product(inside, context):
            statements[at] = inside
            remaining = [stmt for stmt in statements if not any(stmt is maker for maker in makers)]
            return with_operands(remaining, readers, context)
    return statements


def _is_operand(maker: Nest, reader: Nest, readers: Mapping[Buf, int], context: Context) -> bool:
    """Whether a nest reads what another one stores, and no other nest does."""
    loaded = {load.buf for load in reader.loads()}
    stored = {store.buf for store in maker.stores}
    return bool(stored & loaded) and all(
        buf.arena and buf not in context.persistent and readers.get(buf) == 1 for buf in stored
    )
