"""A nest's points -> threads: which dimension runs along the lanes of a warp, and how many threads reduce one point.

Points of free dimensions are numbered, the dimension along lanes fastest, and mapped to teams:
one thread each, or, where reductions are long and points few, a part of a warp, a warp or the whole
block. A nest whose points meet, because one stores what another one reads or stores, runs on one
thread, in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import apart, flat_coefficient
from pbkern.lower.nest.ir import Buf, Nest, Store
from pbkern.lower.nest.reductions import depends_on_order

from .sectors import WholeSectors, whole_sectors
from .tiles import Tile, nest_rewrites, tiles, whole_terms


@dataclass(frozen=True)
class ThreadMapping:
    """Who computes a nest.

    Attributes:
      free: free dimensions with their sizes, slowest first.
      reduced: reduced dimensions with their sizes, slowest first.
      team: threads that share the reduction of a point: 1, a power of two up to the warp, or all
        threads of the block.
      threads: of the block.
      alone: one thread computes all points, in the nest's own order.
      tiles: several points of one thread (tiles.py); their dimensions count its places.
      beside: a reduced dimension, of which threads take so many neighbours at a time; it counts
        such groups.
      everyone: every thread computes its one point, and stores it to registers of its own.
      in_registers: root buffers of which threads have their points' elements in registers, with the
        element's place at a point; a thread's points are written out then.
      sectors: along lanes, points are counted from the start of a sector, of reduced dimensions if threads share these.
    """

    free: tuple[tuple[str, int], ...]
    reduced: tuple[tuple[str, int], ...]
    team: int
    threads: int
    alone: bool = False
    tiles: tuple[Tile, ...] = ()
    beside: tuple[str, int] | None = None
    everyone: bool = False
    in_registers: tuple[tuple[Buf, Affine], ...] = ()
    sectors: WholeSectors | None = None

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Free dimensions with the number of places that threads count along each."""
        if self.sectors is None or self.team > 1:
            return self.free
        return *self.free[:-1], (self.sectors.dim, self.sectors.places)

    @property
    def points(self) -> int:
        return math.prod(size for _, size in self.places)

    @property
    def terms(self) -> int:
        return math.prod(size for _, size in self.reduced)

    @property
    def teams(self) -> int:
        return self.threads // self.team

    @property
    def steps(self) -> int:
        """Points that the first team takes, tiles counted as one."""
        return -(-self.points // self.teams)


def map_to_threads(nest: Nest, threads: int, warp: int, reassociate: bool = True) -> ThreadMapping:
    """Maps the nest's points to so many threads.

    `reassociate`: sums of floats may be made of partial ones.
    """
    free = {dim: size for dim, size in nest.dims.items() if dim not in nest.rdims}
    reduced = {rdim: nest.dims[rdim] for rdim in nest.rdims}
    if not is_parallel(nest, free):
        return ThreadMapping(tuple(free.items()), tuple(reduced.items()), 1, threads, alone=True)
    points, terms, team = math.prod(free.values()), math.prod(reduced.values()), 1
    in_order = nest.ordered or (
        not reassociate and any(depends_on_order(reduction) for reduction in nest.reductions)
    )
    count = 1
    if reduced and not in_order and is_parallel(nest, nest.dims):
        team = _team(nest, points, terms, threads, warp, free, reduced)
        along = list(along_lanes(nest, reduced))[-1]
        team, count = _whole(nest, along, team, terms, warp)
        if 1 < team < warp and points % (threads // team) and nest_rewrites(nest):
            team = 1  # teams without a point take part as well: they would read what others store
    order = along_lanes(nest, reduced if team > 1 else free)
    if team > 1:
        sizes = order | {along: order[along] // count}
        return ThreadMapping(
            tuple(free.items()),
            tuple(sizes.items()),
            team,
            threads,
            beside=(along, count) if count > 1 else None,
            sectors=whole_sectors(nest, sizes, warp, count, is_reduced=True),
        )
    thread_tiles = tiles(nest, order, threads)
    places = order | {tile.dim: tile.steps for tile in thread_tiles}
    return ThreadMapping(
        tuple(places.items()),
        tuple(reduced.items()),
        team,
        threads,
        tiles=thread_tiles,
        sectors=_sectors(nest, order, thread_tiles, warp),
    )


def _sectors(
    nest: Nest, order: Mapping[str, int], tiles: Sequence[Tile], warp: int
) -> WholeSectors | None:
    """Whole sectors of rows along lanes, of which threads have a place or whole vectors each."""
    along = list(order)[-1] if order else ""
    if not tiles:
        return whole_sectors(nest, order, warp)
    (tile, *more) = tiles
    if more or not tile.beside or tile.dim != along or tile.size % tile.count:
        return None
    return whole_sectors(nest, {**order, along: tile.steps}, warp, tile.count)


def _whole(nest: Nest, along: str, team: int, terms: int, warp: int) -> tuple[int, int]:
    """(threads of a team, neighbours that each takes at a time): whole vectors, for which a team may have fewer threads."""
    count = whole_terms(nest, along) if team > 1 else 1
    fewer = team
    while 1 < fewer <= warp and terms // count < fewer:
        fewer //= 2
    return (fewer, count) if fewer > 1 and terms // count >= fewer else (team, 1)


def _team(
    nest: Nest,
    points: int,
    terms: int,
    threads: int,
    warp: int,
    free: Mapping[str, int],
    reduced: Mapping[str, int],
) -> int:
    """Largest team for a point that leaves no thread idle; those of a warp where neighbours of a row lie side by side."""
    if points * warp <= threads and terms >= 2 * threads:
        return threads
    team = 1
    along, weight = _neighbours(nest, reduced)
    row = reduced[along] if weight > _neighbours(nest, free)[1] else 0
    while team < warp and 2 * team <= terms and (2 * team <= row or 2 * team * points <= threads):
        team *= 2
    if 1 < team < warp and row % team and _is_near(nest):  # threads may as well have a row each
        while team > 1 and team * points > threads:
            team //= 2
    return team


def _is_near(nest: Nest) -> bool:
    """Whether all that is reduced is scratch of the block."""
    terms = Nest({}, reductions=nest.reductions)
    return all(load.buf.root.arena for load in terms.loads())


def _neighbours(nest: Nest, dims: Mapping[str, int]) -> tuple[str, int]:
    """(the dimension along which most accesses go to neighbours, how often these are made)."""
    return max(
        ((dim, _weight(nest, dim)) for dim, size in dims.items() if size > 1),
        key=lambda weighed: weighed[1],
        default=("", 0),
    )


def lane_weights(nest: Nest, dims: Sequence[str], but: Buf) -> dict[str, int]:
    """Counts accesses that go to neighbours along each dimension, but for those of one root buffer."""
    return {dim: _weight(nest, dim, but) for dim in dims}


def _weight(nest: Nest, dim: str, but: Buf | None = None) -> int:
    """Counts accesses whose next one along a dimension is the neighbour.

    Those that do not depend on others of the dimensions are made once for all of them.
    """
    free = [x for x in nest.dims if x not in nest.rdims]
    accesses = [(load.buf, load.index, load.symbols) for load in nest.loads()]
    accesses += [
        (store.buf, store.index, frozenset(nest.dims if store.inner else free))
        for store in nest.stores
    ]
    return sum(
        math.prod(nest.dims[x] for x in nest.dims if x in symbols)
        for buf, index, symbols in accesses
        if buf.root is not but and abs(flat_coefficient(buf, index, dim)) == 1
    )


def along_lanes(nest: Nest, dims: Mapping[str, int]) -> dict[str, int]:
    """Dimensions in an order whose last one runs along lanes: the one along which most accesses go to neighbours."""
    if not dims:
        return {}
    best = max(dims, key=lambda dim: (dims[dim] > 1, _weight(nest, dim), list(dims).index(dim)))
    return {dim: size for dim, size in dims.items() if dim != best} | {best: dims[best]}


def lane_dimension(nest: Nest, mapping: ThreadMapping) -> str:
    """The dimension along which neighbouring threads go; "" if there is none."""
    free = {dim: size for dim, size in nest.dims.items() if dim not in nest.rdims}
    dims = {rdim: nest.dims[rdim] for rdim in nest.rdims} if mapping.team > 1 else free
    order = along_lanes(nest, dims)
    return list(order)[-1] if order and not mapping.alone else ""


# ---------------------------------------------------------------- do points meet?


def is_parallel(nest: Nest, dims: Mapping[str, int]) -> bool:
    """Whether points that differ in these dimensions may run at the same time.

    Each then stores to its own elements, and none reads what another one stores.
    """
    streamed = {dim: size for dim, size in dims.items() if size > 1}
    stored: dict[Buf, list[Store]] = {}
    for store in nest.stores:
        if store.inner:  # at every point, also of reduced dimensions that one thread walks
            symbols = frozenset().union(*(position.symbols for position in store.index))
            walked = {
                rdim: nest.dims[rdim]
                for rdim in nest.rdims
                if rdim in symbols and nest.dims[rdim] > 1
            }
            told = is_one_to_one(store.index, streamed | walked)
        else:
            told = is_one_to_one(
                store.index,
                {dim: extent for dim, extent in streamed.items() if dim not in nest.rdims},
            )
        if not told:
            return False
        stored.setdefault(store.buf.root, []).append(store)
    pairs = [
        (store, load.buf, load.index)
        for load in nest.loads()
        for store in stored.get(load.buf.root, ())
    ]
    pairs += [
        (later, earlier.buf, earlier.index)
        for ws in stored.values()
        for k, later in enumerate(ws)
        for earlier in ws[:k]
    ]
    return all(
        _same_element(store, buf, index) or _apart(store, buf, index, nest)
        for store, buf, index in pairs
    )


def _same_element(store: Store, buf: Buf, index: Sequence[Affine | None]) -> bool:
    return buf is store.buf and tuple(index) == tuple(store.index)


def _apart(store: Store, buf: Buf, index: Sequence[Affine | None], nest: Nest) -> bool:
    return buf is store.buf and not nest.moves() and apart(store.index, nest.dims, index, nest.dims)


def is_one_to_one(index: Sequence[Affine], dims: Mapping[str, int]) -> bool:
    """Whether different points have different indices.

    Axis by axis, an index tells its dimensions if each moves it further than all finer ones
    together.
    """
    left = dict(dims)
    progress = True
    while left and progress:
        progress = False
        for position in index:
            mine = sorted(
                (abs(c), moved_dim) for moved_dim, c in position.terms if moved_dim in left
            )
            reach, told = 0, bool(mine)
            for coeff, dim in mine:
                told = told and coeff > reach
                reach += coeff * (left[dim] - 1)
            if told:
                left = {
                    left_dim: size
                    for left_dim, size in left.items()
                    if left_dim not in {x for _, x in mine}
                }
                progress = True
    return not left
