"""Deep product -> runs of its reduced dimension, each of which adds to the sums: its panels stay in a near cache.

Before -> after, with runs of 256:
    out[i, j] = f(sum over k of a[i, k] * b[k, j])
    sums[i, j] = 0
    for each run r: sums[i, j] = sums[i, j] + sum over k < 256 of a[i, 256 r + k] * b[256 r + k, j]
    out[i, j] = f(sums[i, j])

The sums are the results themselves where nothing is left to do with them. Source: Goto & van de
Geijn 2008, "Anatomy of high-performance matrix multiplication", the loop over blocks of k.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.lower.grid import block_shift
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.unroll import with_results
from pbkern.lower.nest.ir import Accumulator, Buf, For, Nest, Stmt, Store
from pbkern.targets.cpu.packing.limits import PackLimits


def is_deep(nest: Nest, depth: int, width: int, staged: bool, context, limits: PackLimits) -> bool:
    """Whether a panel of all reduced elements is too long for its part of the second cache.

    `staged`: the other operand is copied.
    """
    share = limits.staged_panel_share if staged else limits.panel_share
    return depth * width * nest.reductions[0].dtype.itemsize > context.options.l2_bytes // share


def longest_run(nest: Nest, width: int, context, limits: PackLimits) -> int:
    """Reduced elements of a run whose panel, `width` columns wide, has its part of the second cache."""
    itemsize = nest.reductions[0].dtype.itemsize
    return max(context.options.l2_bytes // limits.run_share // (width * itemsize), 1)


def in_depth_runs(nest: Nest, vector: str, longest: int, context) -> list[Stmt]:
    """The product in runs of at most `longest` elements, and what is left to do with its sums."""
    if _sums_are_results(nest):
        return _in_runs(nest, longest, context)
    products, copy = summed_in_scratch(nest, vector, longest, context)
    return [*products, copy]


def _sums_are_results(nest: Nest) -> bool:
    """Whether results can hold partial sums: as they are, and of no other program, which shifted blocks share."""
    (store, *more_stores), (reduction,) = nest.stores, nest.reductions
    plain = (
        not more_stores
        and isinstance(store.value, Accumulator)
        and store.buf.dtype == reduction.dtype
        and store.mask is None
        and not store.guard
    )
    shared = any(
        symbol.startswith(block_shift.PREFIX)
        for position in store.index
        for symbol in position.symbols
    )
    return (
        plain and not shared and all(load.buf.root is not store.buf.root for load in nest.loads())
    )


def summed_in_scratch(
    nest: Nest, vector: str, longest: int | None, context
) -> tuple[list[Stmt], Nest]:
    """(products whose sums are in an array of their own, contiguous along `vector`, the copy behind them).

    `longest`: elements of a run; None: one product.
    """
    product = product_along(nest, vector, context.pool)
    sums = context.new_buffer(product.stores[0].buf.shape, nest.reductions[0].dtype)
    product = replace(product, stores=tuple(replace(store, buf=sums) for store in product.stores))
    value = context.pool.load(sums.dtype, sums, product.stores[0].index, False)
    free = {dim: size for dim, size in nest.dims.items() if dim not in nest.rdims}
    behind = with_results(Nest(free, stores=nest.stores, at=nest.at), [value], context.pool)
    return [product] if longest is None else _in_runs(product, longest, context), behind


def product_along(nest: Nest, vector: str, pool) -> Nest:
    """The product with its sums in an array whose last dimension is `vector`."""
    free = {
        dim: size for dim, size in nest.dims.items() if dim not in nest.rdims and dim != vector
    } | {vector: nest.dims[vector]}
    dims = free | {rdim: nest.dims[rdim] for rdim in nest.rdims}
    (reduction,) = nest.reductions
    sums = Buf("sums", tuple(free.values()), reduction.dtype, arena=True)
    store = Store(
        sums, tuple(map(Affine.symbol, free)), pool.accumulator(reduction.dtype, 0), inner=False
    )
    return Nest(
        dims,
        nest.rdims,
        (reduction,),
        (store,),
        at=nest.at,
    )


def _in_runs(product: Nest, longest: int, context) -> list[Stmt]:
    """The product itself, or runs of one of its reduced dimensions, whose panels stay near.

    Each adds to the sums.
    """
    (store,), (reduction,) = product.stores, product.reductions
    trips = -(-math.prod(product.dims[rdim] for rdim in product.rdims) // longest)
    outer = _dim_of_runs(product, trips)
    if outer is None or trips == 1:
        return [product]
    size = product.dims[outer]
    trips = min(trips, size)
    length = _even_length(size, trips)
    free = {dim: extent for dim, extent in product.dims.items() if dim not in product.rdims}
    zero = Nest(
        free,
        stores=(replace(store, value=context.const(0, reduction.dtype), inner=True),),
        at=product.at,
    )
    before = context.pool.load(reduction.dtype, store.buf, store.index, False)
    added = replace(store, value=context.op("add", reduction.dtype, before, store.value))
    adding = replace(product, stores=(added,))

    def run(start: Affine, length: int) -> Nest:
        return part(adding, outer, start, length, context.pool)

    counter = context.names("%i")
    out: list[Stmt] = [
        zero,
        For(counter, size // length, (run(Affine.symbol(counter, length), length),)),
    ]
    return out + ([run(Affine((), size - size % length), size % length)] if size % length else [])


def _dim_of_runs(product: Nest, trips: int) -> str | None:
    """The reduced dimension that is cut: the outermost if it has so many elements, else the longest."""
    live = [rdim for rdim in product.rdims if product.dims[rdim] > 1]
    if not live:
        return None
    return live[0] if product.dims[live[0]] >= trips else max(live, key=product.dims.__getitem__)


def _even_length(size: int, trips: int) -> int:
    """Length of `trips` runs, or of some more that are all of one length."""
    return next(
        (size // n for n in range(trips, min(2 * trips, size) + 1) if size % n == 0),
        -(-size // trips),
    )
