"""Blocks in shared memory that products read -> tiles that matrix instructions read as they are.

%t1: float16[100,48]                                        %t1: float16[128,64] swizzle
nest [d0<100, d1<48]                                        nest [d0<128, d1<64]
  %t1[d0, d1] = %a0[d0, 48*%g2 + d1]?             ->          %t1[d0, d1] = (%a0[d0, 48*%g2 + d1]? where d0 < 100, d1 < 48)
nest [i<100, j<64, k<48*]                                   nest [i<100, j<64, k<48*]
  acc0 dot= %t1[i, k], %t2[k, j]                              acc0 dot= %t1[i, k], %t2[k, j]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pbkern.lower.nest import effects
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import Buf, Load, Nest, Stmt, bodies, every, with_bodies
from pbkern.targets.simt.schedule.instructions import has_matrix_instructions

from .contract import ContractTiles
from .products import (
    Context,
    MatrixProduct,
    by_groups,
    matrix_product,
    power_of_two,
    tile_buffer,
    with_operands,
)


def with_tiles(stmts: Sequence[Stmt], blocks: Collection[Buf], context: Context) -> list[Stmt]:
    """The statements with tiles in place of those blocks that a product reads whole, and that fit its tile."""
    if not has_matrix_instructions(context.options):
        return list(stmts)
    leaves = [stmt for stmt in every(stmts) if not bodies(stmt)]
    readers = Counter(buf for stmt in leaves for buf in effects.read([stmt]))

    def inlined(block: Sequence[Stmt]) -> list[Stmt]:
        return with_operands([with_bodies(stmt, inlined) for stmt in block], readers, context)

    ready = inlined(stmts)
    tiles: dict[Buf, Buf] = {}
    for nest in [stmt for stmt in every(ready) if isinstance(stmt, Nest)]:
        product = matrix_product(nest, context)
        if product is not None and product.is_one_tile:
            candidates = (*by_groups(product, context.options), product)
            choices = (_tiles(candidate, blocks, context) for candidate in candidates)
            for block, tile in next(filter(None, choices), {}).items():
                tiles.setdefault(block, tile)
    return relocated(ready, tiles.get, context.pool, lambda buf, index: _long(index, buf))


def _tiles(product: MatrixProduct, blocks: Collection[Buf], context: Context) -> dict[Buf, Buf]:
    """Blocks that are operands -> their tiles; none where no tile of the instruction holds the product, or a block whole."""
    nest, row = product.nest, product.instruction
    size = row.operands[0].itemsize
    sizes = ContractTiles().tile(product, context.options)
    unit = max(row.shape[-1], row.row_bytes // size)
    sizes[product.depth] = power_of_two(nest.dims[product.depth], unit)
    tiles = {}
    for arg, order in zip(nest.reductions[0].args, product.orders):
        dims = [dim for axis in order for dim in axis]
        sides = {dim: nest.dims[dim] for dim in dims}
        if isinstance(arg, Load) and arg.buf in blocks and _is_whole(arg, sides):
            shape = tuple(sizes[dim] for dim in dims)
            tile = tile_buffer(shape, arg.buf.dtype, context, row.row_bytes)
            tiles[arg.buf] = replace(tile, name=arg.buf.name)
        elif row.row_bytes:
            return {}
    is_one = all(sizes[dim] >= size for dim, size in nest.dims.items())
    return tiles if is_one else {}


def _is_whole(load: Load, dims: Mapping[str, int]) -> bool:
    """Whether a load goes over all of a block in these dimensions, in their order."""
    places = [position.terms for position in _long(load.index, load.buf)]
    shape = _long(load.buf.shape, load.buf)
    return places == [((dim, 1),) for dim in dims] and shape == tuple(dims.values())


def _long(values: Sequence, buf: Buf) -> tuple:
    """The values, one per axis of a buffer, of axes that have more than one place."""
    return tuple(value for value, size in zip(values, buf.shape) if size > 1)
