"""Several points of a nest per thread: its own small nest, whose expressions share what points have in common.

    for i, j: acc += a[i, k] * b[k, j]      ->      for i, j: acc0 += a[i, k] * b[k, j],     acc1 += a[i, k] * b[k, j + n],
                                                             acc2 += a[i + m, k] * b[k, j],  acc3 += a[i + m, k] * b[k, j + n]

Points lie far apart, so that lanes still read neighbours; where they store whole vectors of 16
bytes, side by side. The last ones along a dimension may lie outside: their place is kept inside,
and nothing is stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Accumulator, Buf, Expr, Gather, Load, Nest, Reduction, Store, nodes

BOOL = np.dtype(bool)
# An index below all indices of arrays: the lower end of a range that has none.
BELOW_ALL_INDICES = -(1 << 40)
# Bytes of the widest load of a thread. Source: CUDA C++ Programming Guide, device memory accesses.
WIDEST_LOAD_BYTES = 16
# Threads that whole vectors must leave with work: those of a warp.
FEWEST_LANES = 32
# Accumulators of one thread: they are in registers, of which there are 255.
MOST_TILE_POINTS = 32
# A load and its address, in multiply-adds.
LOAD_COST = 2.0


@dataclass(frozen=True)
class Tile:
    """Points of one thread along one dimension.

    Attributes:
      size: of the dimension. count: points. beside: whether they lie side by side.
    """

    dim: str
    size: int
    count: int
    beside: bool = False

    @property
    def steps(self) -> int:
        """Threads' places along the dimension."""
        return -(-self.size // self.count)

    def place(self, number: int) -> Affine:
        """Point number number at the thread's place."""
        if self.beside:
            return Affine.symbol(self.dim, self.count) + number
        return Affine.symbol(self.dim) + number * self.steps

    def may_lie_outside(self, number: int) -> bool:
        return self.place(number).evaluate({self.dim: self.steps - 1}) >= self.size

    def clamped(self, number: int) -> str:
        """Symbol of the place of such a point, kept inside."""
        return f"{self.dim}@{number}"


def tiles(nest: Nest, free: Mapping[str, int], threads: int) -> tuple[Tile, ...]:
    """Number of points that a thread takes, by dimension; none where that leaves threads without work."""
    points = int(np.prod(list(free.values()), dtype=np.int64))
    if nest.ordered or nest.moves() or (any(store.inner for store in nest.stores) and nest.rdims):
        return ()
    if nest.rdims:
        return _shared_operands(nest, free, points, threads)
    return _whole_vectors(nest, free, points)


def _shared_operands(
    nest: Nest, free: Mapping[str, int], points: int, threads: int
) -> tuple[Tile, ...]:
    """Tiles along the dimensions along which loads of a reduction are the same.

    With them, all threads together take the fewest instructions for a term.
    """
    terms = [
        node
        for node in Nest({}, reductions=nest.reductions).nodes()
        if isinstance(node, Load | Gather)
    ]
    along = [
        dim
        for dim, size in free.items()
        if size > 1 and any(dim not in term.symbols for term in terms)
    ]
    along = sorted(along, key=lambda dim: -free[dim])[:2]

    def cost(counts: tuple[int, ...]) -> float:
        chosen, each = dict(zip(along, counts)), math.prod(counts)
        places = math.prod(-(-size // chosen.get(dim, 1)) for dim, size in free.items())
        loads = sum(
            math.prod(count for dim, count in chosen.items() if dim in term.symbols)
            for term in terms
        )
        return -(-places // threads) * (each * len(nest.reductions) + LOAD_COST * loads)

    options = [
        candidate
        for candidate in itertools.product(*((1, 2, 4, 8) for _ in along))
        if math.prod(candidate) * len(nest.reductions) <= MOST_TILE_POINTS
        and all(count <= free[dim] for dim, count in zip(along, candidate))
    ]
    if nest_rewrites(nest):  # a point that lies outside would read what another thread stores
        options = [
            option
            for option in options
            if all(free[dim] % count == 0 for dim, count in zip(along, option))
        ]
    best = min(options, key=lambda option: (cost(option), option))
    return tuple(Tile(dim, free[dim], count) for dim, count in zip(along, best) if count > 1)


def nest_rewrites(nest: Nest, but: Buf | None = None) -> bool:
    """Whether it reads, anywhere, an array that it writes, other than a certain root buffer."""
    written = {store.buf.root for store in nest.stores} - {but}
    return any(load.buf.root in written for load in nest.loads())


def accepts(nest: Nest, chosen: Sequence[Tile], held: Buf) -> bool:
    """Whether a nest may be tiled so, although its own choice may be another; `held` is a root buffer in registers."""
    if chosen and (
        nest.ordered or nest.moves() or (any(store.inner for store in nest.stores) and nest.rdims)
    ):
        return False
    if any(t.may_lie_outside(t.count - 1) for t in chosen) and nest_rewrites(nest, held):
        return False
    sizes = [buffer.dtype.itemsize for buffer in _buffers(nest) if buffer.root is not held]
    for tile in chosen:
        if tile.beside and (
            max(sizes, default=0) * tile.count > WIDEST_LOAD_BYTES
            or not _is_whole(nest, tile.dim, tile.count, held)
        ):
            return False
    return True


def _whole_vectors(nest: Nest, free: Mapping[str, int], points: int) -> tuple[Tile, ...]:
    """Along the dimension along which all accesses are the same or whole vectors, at multiples of their size."""
    sizes = {store.buf.dtype.itemsize for store in nest.stores} | {
        load.buf.dtype.itemsize for load in nest.loads()
    }
    if not sizes or 0 in sizes:
        return ()
    count = WIDEST_LOAD_BYTES // max(sizes)
    if len({store.inner for store in nest.stores}) > 1:
        return ()
    for dim, size in free.items():
        if (
            count > 1
            and size % count == 0
            and points >= count * FEWEST_LANES
            and _is_whole(nest, dim, count)
        ):
            return (Tile(dim, size, count, beside=True),)
    return ()


def whole_terms(nest: Nest, dim: str) -> int:
    """Number of neighbours along a reduced dimension that a thread may load, and store, as whole vectors; 1 if it may not."""
    stores = [store for store in nest.stores if store.inner]
    terms = [arg for reduction in nest.reductions for arg in reduction.args]
    loads = [
        term
        for term in nodes([*terms, *(store.value for store in stores)])
        if isinstance(term, Load | Gather) and dim in term.symbols
    ]
    if not loads or nest.ordered or nest.moves():
        return 1
    if any(isinstance(load, Gather) or load.guard for load in loads):
        return 1
    if any(store.guard or store.mask is not None for store in stores):
        return 1
    accesses = [(access.buf, access.index) for access in (*loads, *stores)]
    sizes = [buf.dtype.itemsize for buf, _ in accesses]
    count = WIDEST_LOAD_BYTES // max(sizes) if min(sizes) else 1
    flats = [flat_index(buf, index) for buf, index in accesses]
    return (
        count
        if nest.dims[dim] % count == 0 and all(_is_along(flat, dim, count) for flat in flats)
        else 1
    )


def terms_beside(
    nest: Nest, dim: str, count: int, context: NestContext
) -> tuple[list[Sequence[Reduction]], list[Store]]:
    """The reductions at each of `count` neighbours, and the stores at one after the other.

    The dimension counts such groups of neighbours.
    """
    places = [{dim: Affine.symbol(dim, count) + offset} for offset in range(count)]
    renames = [context.pool.renamer(place) for place in places]
    stores = [
        store.moved(place, rename)
        for place, rename in zip(places, renames)
        for store in nest.stores
        if store.inner
    ]
    return [[reduction.mapped(at) for reduction in nest.reductions] for at in renames], stores


def _is_along(flat: Affine, dim: str, count: int) -> bool:
    return (
        flat.coefficient(dim) == 1
        and flat.const % count == 0
        and all(coeff % count == 0 for symbol, coeff in flat.terms if symbol != dim)
    )


def _buffers(nest: Nest) -> list[Buf]:
    return [load.buf for load in nest.loads()] + [store.buf for store in nest.stores]


def _is_whole(nest: Nest, dim: str, count: int, but: Buf | None = None) -> bool:
    accesses = [(load.buf, load.index) for load in nest.loads() if dim in load.symbols] + [
        (store.buf, store.index) for store in nest.stores
    ]
    if any(isinstance(load, Gather) and dim in load.symbols for load in nest.loads()):
        return False
    if any(store.guard for store in nest.stores):
        return False
    guarded = [load for load in nest.loads() if isinstance(load, Load) and load.guard]
    if not all(_is_inside_whole(load, dim, count) for load in guarded):
        return False
    return all(
        _is_along(flat_index(buf, i), dim, count) for buf, i in accesses if buf.root is not but
    )


def _is_inside_whole(load: Load, dim: str, count: int) -> bool:
    """Whether so many neighbours along a dimension are all inside of the array, or none is."""
    ends = [
        (place, size) for place, size in zip(load.index, load.buf.shape) if dim in place.symbols
    ]
    return all(size % count == 0 and _is_along(place, dim, count) for place, size in ends)


def renamed_points(chosen: Sequence[Tile]) -> Iterator[dict[str, Affine]]:
    """Per point of a thread, its place along the tiled dimensions; kept inside where it may lie outside."""
    for at in itertools.product(*(range(tile.count) for tile in chosen)):
        yield {
            tile.dim: Affine.symbol(tile.clamped(number))
            if tile.may_lie_outside(number)
            else tile.place(number)
            for tile, number in zip(chosen, at)
        }


def tiled(nest: Nest, chosen: Sequence[Tile], context: NestContext) -> Nest:
    """The nest of one thread's points: dimensions count places."""
    if not chosen:
        return nest
    reductions, stores, width = [], [], len(nest.reductions)
    numbers = itertools.product(*(range(tile.count) for tile in chosen))
    for n, (at, dims) in enumerate(zip(numbers, renamed_points(chosen))):
        masks = [
            context.pool.in_range(tile.place(number), BELOW_ALL_INDICES, tile.size)
            for tile, number in zip(chosen, at)
            if tile.may_lie_outside(number)
        ]

        def accumulators(expr: Expr, point: int = n) -> Expr | None:
            return (
                context.pool.accumulator(expr.dtype, expr.number + point * width)
                if isinstance(expr, Accumulator) and point
                else None
            )

        renamed = context.pool.renamer(dims)
        numbered = context.pool.rewriter(accumulators)
        reductions += [reduction.mapped(renamed) for reduction in nest.reductions]

        def moved(expr: Expr, function: Callable = renamed, numbering: Callable = numbered) -> Expr:
            return numbering(function(expr))

        stores += [_moved(store.mapped(moved), dims, masks, context) for store in nest.stores]
    sizes = {tile.dim: tile.steps for tile in chosen}
    clamped = {
        tile.clamped(number): tile.size
        for tile in chosen
        for number in range(tile.count)
        if tile.may_lie_outside(number)
    }
    stepped = {dim: sizes.get(dim, size) for dim, size in nest.dims.items()} | clamped
    return replace(nest, dims=stepped, reductions=tuple(reductions), stores=tuple(stores))


def _moved(
    store: Store, dims: Mapping[str, Affine], masks: Sequence[Expr], context: NestContext
) -> Store:
    for mask in masks:
        store = replace(
            store, mask=mask if store.mask is None else context.op("and", BOOL, store.mask, mask)
        )
    return store.moved(dims, lambda expr: expr)
