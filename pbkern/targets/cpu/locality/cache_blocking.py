"""Runs of nests that pass over the same data -> loops over rows of it that stay in the nearest cache.

    for all rows: m[row] = max x[row]                       for each row:  m = max x[row]
    for all rows: l[row] = sum exp(x[row] - m[row])    ->                  l = sum exp(x[row] - m)
    for all rows: y[row] = exp(x[row] - m[row]) / l[row]                   y[row] = exp(x[row] - m) / l

Each nest alone would find its operands in a cache further away, or in memory. While the last nest
of a step reads a row, the step's next one is fetched: a step computes more than it loads, and a
row's first reader would wait for memory instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.ir import Buf, Load, Nest, Stmt, with_nests
from pbkern.lower.passes.strips.strip_mining import (
    JOINS,
    Chain,
    NestRun,
    StripMinedLoop,
    even_part,
    inside,
    nests_of,
    with_runs_changed,
)
from pbkern.targets.cpu.machines.machine import ROWS_AT_ONCE, Vectors
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule, scheduled
from pbkern.targets.cpu.schedule.prefetch import is_far, is_matrix_product
from pbkern.targets.cpu.schedule.register_tiles.choice import choose

from .row_fusion import fuse_over_rows
from .transposed_tiles import TileLimits, in_tiles


@dataclass(frozen=True)
class _SharedBuffer:
    """A buffer that several nests walk: bytes of it in one program, and per axis each nest's dimension there."""

    nbytes: int
    axes: tuple[dict[int, str] | None, ...]


@dataclass(frozen=True)
class BlockForCaches(TileLimits):
    """Cuts runs of nests into strips that fit near caches, or of single rows, and sums of far rows into a few at a time.

    Transposes of far rows become tiles. Inner statements too.
    """

    cache_share: int = threshold(2, "strips that the nearest cache holds")
    far_row_bytes: int = threshold(
        1024,
        "bytes between rows from which on taking several rows at once pays. Source: not recorded",
    )
    near_operand_bytes: int = threshold(
        64 << 10,
        "bytes of the largest operand for which it does not pay, however far apart its rows are. Source: not recorded",
    )
    minor_nest_factor: int = threshold(
        64,
        "times that a nest has fewer points than all together if it may lose its vectors: scalars of a row, say",
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        def in_strips(run: list[Nest], elsewhere: set[Buf]) -> list[Stmt] | None:
            chain_and_length = _best_chain(NestRun(run), context, self)
            if chain_and_length is None:
                return None
            in_turn = fuse_over_rows(chain_and_length[0], elsewhere, context, self)
            return (
                in_turn
                or _CacheBlocking(
                    *chain_and_length, elsewhere, context, self.many_strips
                ).statements()
            )

        near = with_runs_changed(stmts, set(context.persistent), self.longest_run, in_strips)
        return with_nests(
            near,
            lambda nest: _far_rows(collapse(nest, context.pool, context.aliases), context, self),
        )


def _far_rows(nest: Nest, context: NestContext, limits: BlockForCaches) -> list[Stmt]:
    """A nest whose rows are far apart in an order that keeps near what it comes back to."""
    return in_tiles(nest, context, limits) or _rows_at_once(nest, context, limits)


def _rows_at_once(nest: Nest, context: NestContext, limits: BlockForCaches) -> list[Stmt]:
    """A nest with rows that are far apart a few at a time: all of one sum before those of the next.

    Vectors along rows become one number once for a few rows, not for each. Measured on Zen 3, one thread, maxima over the first
    and last axis: 60 x 200 x 150 0.19 ms so, 0.26 row by row; 100 x 1000 x 20 0.34 and 1.31.
    """
    schedule = choose(nest, context.options.vectors)
    row_dim = _streamed_rows(nest, schedule, limits)
    if row_dim is None:
        return [nest]
    apart = next(
        (dim for dim in nest.dims if nest.dims[dim] > 1 and _is_around(nest, dim, row_dim)), None
    )
    chain = Chain.find(NestRun([nest]), {0: apart or row_dim})
    if chain is None:
        return [nest]
    rows = 1 if apart else ROWS_AT_ONCE
    cut = StripMinedLoop(chain, rows, set(), context, limits.many_strips).statements()
    if not apart:
        return cut
    return inside(
        cut,
        set(),
        lambda body, _: [
            stmt
            for inner_nest in nests_of(body)
            for stmt in _rows_at_once(inner_nest, context, limits)
        ],
    )


def _is_around(nest: Nest, outer: str, rows: str) -> bool:
    """Whether each step along `outer` goes past all rows, in everything that has them."""
    steps = [
        [abs(flat_coefficient(load.buf, load.index, dim) or 0) for dim in (outer, rows)]
        for load in nest.loads()
    ]
    return outer not in nest.rdims and all(
        far >= step * nest.dims[rows] for far, step in steps if step
    )


def _streamed_rows(nest: Nest, schedule: NestSchedule, limits: BlockForCaches) -> str | None:
    """The dimension of a reduction over rows that are far apart, whose elements are used once each.

    Columns in registers would be added up one line of memory after the other, rows apart: a few
    rows at a time, along their whole length, are what prefetchers follow. So are rows whose vectors
    are added up along them.
    """
    vector = schedule.vector
    live = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1 and rdim != vector]
    if len(live) != 1 or nest.ordered or any(store.inner for store in nest.stores):
        return None
    row_dim, fewest = live[0], 2 if vector in nest.rdims else 4 * ROWS_AT_ONCE
    if vector is None or schedule.transpose or nest.dims[row_dim] < fewest:
        return None
    if vector in nest.rdims and schedule.jam and schedule.unroll == 1:
        return None  # the accumulators of all rows are in registers, and rows are read in turns
    if any(
        reduction.op not in JOINS or is_matrix_product(nest, reduction)
        for reduction in nest.reductions
    ):
        return None
    for load in nest.loads():
        if isinstance(load, Load) and not load.buf.arena and {row_dim, vector} <= load.symbols:
            size = load.buf.dtype.itemsize
            step = abs(flat_coefficient(load.buf, load.index, row_dim) or 0) * size
            parts = schedule.lanes * schedule.unroll * size < step  # a row is not read as a whole
            if (
                step >= limits.far_row_bytes
                and parts
                and _extent(nest, load.index) * size > limits.near_operand_bytes
            ):
                return row_dim
    return None


def _best_chain(
    run: NestRun, context: NestContext, limits: BlockForCaches
) -> tuple[Chain, int] | None:
    """The nests that share most, along the outermost dimension that allows it, and the length of a strip."""
    near_bytes = context.options.l1_bytes // limits.cache_share
    shared = sorted(_shared(run), key=lambda s: -s.nbytes)
    for candidate in shared:
        if candidate.nbytes <= near_bytes:
            break
        for seeds in candidate.axes:
            chain = Chain.find(run, seeds) if seeds else None
            if (
                chain is None
                or not seeds
                or not _pays(chain, seeds, context.options.vectors, limits)
            ):
                continue
            length = max(
                near_bytes // _bytes_per_index(chain), ROWS_AT_ONCE if _sums_rows(chain) else 1
            )
            if length < chain.size:
                return chain, even_part(length, chain.size)
    return None


def _sums_rows(chain: Chain) -> bool:
    """Whether a nest adds up rows: sums in memory, which take a few rows at a time."""
    return any(dim in chain.run[at].rdims for at, dim in chain.dims.items())


def _shared(run: NestRun) -> Iterator[_SharedBuffer]:
    places: dict[Buf, list[tuple[int, tuple]]] = {}
    for at, touched in enumerate(run.accesses):
        for buf, index, _ in touched:
            if all(position is not None for position in index) and (
                at,
                index,
            ) not in places.setdefault(buf, []):
                places[buf].append((at, index))
    for buf, walks in places.items():
        if len({at for at, _ in walks}) < 2:
            continue
        nbytes = max(_extent(run[at], index) for at, index in walks) * buf.dtype.itemsize
        axes = tuple(
            _walk(run, [(at, index[k]) for at, index in walks]) for k in range(len(buf.shape))
        )
        yield _SharedBuffer(nbytes, axes)


def _extent(nest: Nest, index: tuple) -> int:
    """Elements that a nest touches."""
    names = frozenset().union(*(position.symbols for position in index)) & nest.dims.keys()
    return math.prod(nest.dims[name] for name in names)


def _walk(run: NestRun, places: list[tuple[int, Affine]]) -> dict[int, str] | None:
    """Position -> dimension, if all nests walk an axis step by step from the same start."""
    dims: dict[int, str] = {}
    starts = set()
    for at, affine in places:
        names = affine.symbols & run[at].dims.keys()
        if len(names) != 1:
            return None
        (dim,) = names
        if affine.coefficient(dim) != 1 or dims.setdefault(at, dim) != dim:
            return None
        starts.add(affine - Affine.symbol(dim))
    sizes = {run[at].dims[name] for at, name in dims.items()}
    return dims if len(starts) == 1 and len(sizes) == 1 and sizes.pop() > 1 else None


def _pays(chain: Chain, seeds: dict[int, str], vectors: Vectors, limits: BlockForCaches) -> bool:
    """Whether one loop holds several of the nests that share, and no nest loses its vectors or its register tile."""
    loops = [group for group in chain.groups() if isinstance(group, list)]
    if not any(len(seeds.keys() & set(loop)) > 1 for loop in loops):
        return False
    points = {at: math.prod(chain.run[at].dims.values()) for at in chain.dims}
    for at, dim in chain.dims.items():
        nest = chain.run[at]
        if points[at] * limits.minor_nest_factor < sum(points.values()):
            continue
        if choose(nest, vectors).vector == dim:
            return False
        if any(is_matrix_product(nest, reduction) for reduction in nest.reductions):
            return False  # bound by arithmetic: it has tiles and packing of its own
    return True


def _bytes_per_index(chain: Chain) -> int:
    total: dict[Buf, int] = {}
    for at, dim in chain.dims.items():
        for buf, index, _ in chain.run.accesses[at]:
            if all(position is not None for position in index) and any(
                dim in position.symbols for position in index
            ):
                size = _extent(chain.run[at], index) // chain.size * buf.dtype.itemsize
                total[buf.root] = max(total.get(buf.root, 0), size)
    return max(sum(total.values()), 1)


class _CacheBlocking(StripMinedLoop):
    """Strips that fetch the next one."""

    def bodies(self, group: list[int], nests: list[Nest]) -> list[Nest]:
        last: dict[
            Buf, tuple[Nest, int]
        ] = {}  # the last nest that reads a buffer, and where it is furthest on
        furthest: dict[Buf, int] = {}  # of all nests
        steps: dict[Buf, int] = {}
        for at, nest in zip(group, nests):
            for buf, index, written in self.run.accesses[at]:
                if written or any(position is None for position in index) or not is_far(buf):
                    continue
                step = (
                    sum(
                        position.coefficient(self.chain.dims[at]) * stride
                        for position, stride in zip(index, buf.strides)
                    )
                    * self.length
                )
                if step:
                    start = sum(
                        position.const * stride for position, stride in zip(index, buf.strides)
                    )
                    before = last.get(buf.root, (nest, start))
                    last[buf.root] = nest, max(start, before[1]) if before[0] is nest else start
                    furthest[buf.root] = max(furthest.get(buf.root, start), start)
                    steps[buf.root] = step
        ahead: dict[int, dict[Buf, int]] = {id(nest): {} for nest in nests}
        for buf, (nest, start) in last.items():
            ahead[id(nest)][buf] = steps[buf] + furthest[buf] - start
        return [scheduled(nest, prefetched=ahead[id(nest)]) for nest in nests]
