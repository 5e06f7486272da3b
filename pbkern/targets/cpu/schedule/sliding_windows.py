"""Stencils in registers: vectors that neighbouring points share are loaded, or computed, once.

    a[i], a[i + 1], a[i + 2] for lanes 0..15   ->   low = a[0..15], high = a[16..31], lanes 1..16 and 2..17 of both

Along the vector dimension, values at some distance are `moved` ones (lower/nest/ir/), made of
whole vectors by shuffles; what is `high` for one step is `low` for the next, which keeps it in
registers. A load that straddles two cache lines takes two accesses of the cache, and all but those
at multiples of a vector do: rows of scratch that is read so are made whole vectors long
(targets/cpu/packing/row_padding.py), so that the same loads of every row are aligned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import flat_coefficient, flat_index, is_written
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Op, Pool, Shifted
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.math.op_cycles import COST

from .interleaved_access import is_strided
from .nest_schedule import NestSchedule, overwritten_by
from .vector_dimension import is_long_point

# Bytes of a vector that fills a cache line.
LINE_VECTOR_BYTES = 64
# Accesses of the cache in the time of a cycle of shifts: less than the two that begin in a cycle, as they
# wait.
SHIFT_ACCESSES = 1.4
# Cache accesses that a store costs.
STORE_ACCESSES = 2.0
# Vectors that registers keep from step to step, beside those of the step itself.
MOST_CARRIED = 16
# Vector operations per cycle and access of the cache: two pipes for sums, two for products.
OPERATIONS = 1.7

Point = dict[str, int]


def parts(expr: Shifted, point: Point, vector: str | None, lanes: int) -> list[Point]:
    """Points at which a moved value's operand is needed for its value at a point.

    They are the place itself, or, along the vector dimension, one or two multiples of a vector.
    """
    place = dict(point)
    for dim, distance in expr.moves:
        place[dim] = place.get(dim, 0) + distance
    if not lanes or vector is None or vector not in expr.symbols:
        return [place]
    first, lane = divmod(place.get(vector, 0), lanes)
    return [
        {**place, vector: number * lanes} for number in ((first, first + 1) if lane else (first,))
    ]


def key_of(expr: Expr, point: Point) -> tuple:
    """Key that tells values of one expression apart."""
    return id(expr), tuple(
        sorted((dim, offset) for dim, offset in point.items() if dim in expr.symbols)
    )


@dataclass(frozen=True)
class Visits:
    """Values that one step of a nest needs, `vectors` at a time along its vector dimension."""

    nest: Nest
    sched: NestSchedule
    vectors: int

    @property
    def step(self) -> int:
        return self.vectors * self.sched.lanes

    @cached_property
    def points(self) -> list[Point]:
        jam, vector, lanes = self.sched.jam, self.sched.along, self.sched.lanes
        rows = [
            dict(zip(jam, offsets))
            for offsets in itertools.product(*(range(count) for count in jam.values()))
        ]
        return [{**row, vector: lanes * vec} for row in rows for vec in range(self.vectors)]

    @cached_property
    def visited(self) -> dict[tuple, tuple[Expr, Point]]:
        """All of them."""
        return self._visit({})

    @cached_property
    def carried(self) -> dict[tuple, tuple[Expr, Point]]:
        """Operands of moved values that the step before has made, and that this one reads.

        What others of them are made of is not read again.
        """
        vector = self.sched.along
        visits: dict[tuple, tuple[Expr, Point]] = {}
        for expr, point in self.visited.values():
            for place in (
                parts(expr, point, vector, self.sched.lanes) if isinstance(expr, Shifted) else ()
            ):
                (arg,) = expr.args
                ahead = {**place, vector: place.get(vector, 0) + self.step}
                if vector in arg.symbols and key_of(arg, ahead) in self.visited:
                    visits[key_of(arg, place)] = arg, place
        read: set[tuple] = set()
        self._visit(visits, read)
        return {key: value for key, value in visits.items() if key in read}

    def cycles(self, core: Vectors, memory: float = 0.0) -> float:
        """Estimate for a vector of results: arithmetic goes on while caches and, for `memory` cycles, memory are accessed."""
        values = self._visit(self.carried).values()
        spilled = max(len(self.carried) - MOST_CARRIED, 0)
        accesses = (
            STORE_ACCESSES * len(self.nest.stores) * len(self.points)
            + (STORE_ACCESSES + 1) * spilled
        )
        places = {
            _place(expr, point)
            for expr, point in values
            if isinstance(expr, Load) and self.sched.vector in expr.symbols
        }
        accesses += sum(
            core.crossing_accesses if _straddles(*place, self.sched) else 1 for place in places
        )
        return max(
            self._arithmetic(values, core) / len(self.points), accesses / len(self.points) + memory
        )

    def _arithmetic(self, values: Iterable[tuple[Expr, Point]], core: Vectors) -> float:
        """Sums have pipes of their own, one of them for shifts as well; products, too, and products with sums."""
        names = [
            expr.info.primitive
            for expr, _ in values
            if isinstance(expr, Op) and not _keeps_its_operand(expr)
        ]
        products, sums = names.count("mul"), sum(name in ("add", "sub") for name in names)
        both = min(products, sums)
        shifts = core.shift_cycles * sum(
            isinstance(expr, Shifted)
            and len(parts(expr, point, self.sched.vector, self.sched.lanes)) > 1
            for expr, point in values
        )
        every = sum(COST[name] for name in names) - both + 2 * shifts
        return max(every / OPERATIONS, sums - both + shifts, products)

    def _visit(self, known: dict, read: set[tuple] | None = None) -> dict:
        """Values that a step needs beside `known` ones; the keys of those that it reads go to `read`."""
        visits: dict[tuple, tuple[Expr, Point]] = {}
        waiting = [(root, point) for point in self.points for root in self.nest.expressions()]
        while waiting:
            expr, where = waiting.pop()
            key = key_of(expr, where)
            if key in known:
                if read is not None and key not in read:
                    read.add(key)
                    vector = self.sched.along  # the step makes the next one's as well
                    waiting.append((expr, {**where, vector: where.get(vector, 0) + self.step}))
                continue
            if key in visits:
                continue
            visits[key] = expr, where
            places = (
                parts(expr, where, self.sched.vector, self.sched.lanes)
                if isinstance(expr, Shifted)
                else [where]
            )
            waiting += [(arg, place) for arg in expr.args for place in places]
        return visits


def _keeps_its_operand(expr: Op) -> bool:
    """Whether rounding keeps all bits: code has nothing for it."""
    if expr.info.primitive != "reduce_precision":
        return False
    of_type = np.finfo(expr.dtype)
    bits = expr.info.params["exponent_bits"], expr.info.params["mantissa_bits"]
    return bits[0] >= of_type.nexp and bits[1] >= of_type.nmant


class Chunk(NamedTuple):
    """Points [low, high) along a nest's vector dimension, `vectors` per step; tail: the live lanes of a partial one."""

    low: int
    high: int
    vectors: int
    tail: int | None = None

    def is_one_step(self, sched: NestSchedule) -> bool:
        return self.high - self.low <= self.vectors * sched.lanes


def chunks(nest: Nest, sched: NestSchedule) -> list[Chunk]:
    """Chunks that a nest's vector dimension is cut into.

    The partial vector of a register tile joins the whole ones before it, which share the other
    operand with it.
    """
    size, lanes, unroll = nest.dims[sched.along], sched.lanes, sched.unroll
    full, tail = divmod(size, lanes)
    main = full // unroll * unroll
    if nest.moves():
        main = min(main, streaming_vectors(Visits(nest, sched, unroll), nest.reaches()))
    parts = [Chunk(0, main * lanes, unroll)] if main else []
    while full - main > unroll:
        parts.append(Chunk(main * lanes, (main + unroll) * lanes, unroll))
        main += unroll
    if tail and full > main and _is_register_tile(nest, sched.along):
        return [*parts, Chunk(main * lanes, size, full - main + 1, tail)]
    if full > main:
        parts.append(Chunk(main * lanes, full * lanes, full - main))
    return parts + ([Chunk(full * lanes, size, 1, tail)] if tail else [])


def _is_register_tile(nest: Nest, vector: str) -> bool:
    """Whether sums of several vectors are kept side by side, where none share loads or stores of their elements.

    Points of functions that fill the registers are taken one by one.
    """
    if (
        not nest.rdims
        or vector in nest.rdims
        or nest.ordered
        or nest.moves()
        or is_long_point(nest)
    ):
        return False
    accesses = [load.access for load in nest.loads() if isinstance(load, Load)] + [
        (store.buf, store.index) for store in nest.stores
    ]
    return not any(is_strided(buf, index, vector) for buf, index in accesses)


def streaming_vectors(visits: Visits, reached: dict[int, dict[str, int]]) -> int:
    """Counts the vectors of a row that can be made without reading behind the elements that are needed.

    Of scratch, whose place and size are whole lines, the rest of an aligned vector may be read too.
    """
    vector, lanes = visits.sched.along, visits.sched.lanes
    size = visits.nest.dims[vector]
    most = size
    for expr, point in visits.visited.values():
        if isinstance(expr, Load) and vector in expr.symbols and not expr.guard:
            beyond = point.get(vector, 0) - reached.get(id(expr), {}).get(vector, 0)
            if beyond >= visits.step or _straddles(*_place(expr, point), visits.sched):
                most = min(most, size - beyond - lanes + visits.step)
    return max(most // visits.step, 0) * visits.vectors


# ---------------------------------------------------------------- loads


@dataclass
class _Group:
    """Loads of one buffer that differ in constants only. base: the constants from which distances are counted."""

    loads: list[Load]
    lanes: int
    aligned: bool

    @property
    def places(self) -> set[int]:
        return {load.index[-1].const for load in self.loads}

    def base(self, axis: int, moves: bool) -> int | None:
        """The constant of an axis that all share; None: each has its own."""
        if not moves:
            return None
        least = min(load.index[axis].const for load in self.loads)
        last = axis == len(self.loads[0].index) - 1
        return least // self.lanes * self.lanes if last and self.aligned else least


def moved_loads(nest: Nest, sched: NestSchedule, core: Vectors) -> Nest:
    """The nest with overlapping loads as moved ones, where that is less work."""
    vector = sched.vector
    if nest.reductions or vector is None or sched.transpose:
        return nest
    chosen = [group for group in _groups(nest, sched) if _pays(group, sched.unroll, core)]
    if not chosen:
        return nest
    pool = Pool()
    new: dict[int, Expr] = {}
    for cluster in chosen:
        new |= _as_moved(cluster, nest, vector, pool)
    moved = nest.mapped(
        pool.rewriter(lambda load: new.get(id(load)))
    )  # of nests without reductions
    return (
        moved
        if Visits(moved, sched, sched.unroll).cycles(core)
        < Visits(nest, sched, sched.unroll).cycles(core)
        else nest
    )


def _groups(nest: Nest, sched: NestSchedule) -> list[_Group]:
    vector, lanes = sched.along, sched.lanes
    by_row: dict[tuple, list[Load]] = {}
    for candidate in _candidates(nest, vector):
        by_row.setdefault((candidate.buf, *(i.linear() for i in candidate.index)), []).append(
            candidate
        )
    groups = []
    for loads in by_row.values():
        buf, index = loads[0].access
        flat = flat_index(buf, index)
        steps = [coeff for dim, coeff in flat.terms if dim != vector]
        whole = buf.dtype.itemsize * lanes == LINE_VECTOR_BYTES and all(
            step % lanes == 0 for step in steps
        )
        groups.append(_Group(loads, lanes, buf.arena and whole))
    return groups


def _candidates(nest: Nest, vector: str) -> Iterable[Load]:
    """Loads of whole vectors that are the same at whatever point of the nest."""
    for load in nest.loads():
        steady = load.buf.root in overwritten_by(nest) or not is_written(load, nest)
        if (
            isinstance(load, Load)
            and not load.guard
            and load.buf.dtype == load.buf.root.dtype
            and steady
        ):
            buf, index = load.access
            if flat_coefficient(buf, index, vector) == 1 and index[-1].coefficient(vector) == 1:
                yield load


def _pays(group: _Group, unroll: int, core: Vectors) -> bool:
    """Whether whole vectors and shifts are less work than a load for each place."""
    places = {place + group.lanes * vec for place in group.places for vec in range(unroll)}
    if len(places) < 2:
        return False
    base = 0 if group.aligned else min(places)
    lanes = [(place - base) % group.lanes for place in places]
    whole = {
        (place - base) // group.lanes + k
        for place, lane in zip(places, lanes)
        for k in range(1 + (lane > 0))
    }
    fresh = sum(vector + unroll not in whole for vector in whole)
    crossing = core.crossing_accesses
    straddling = 1 if group.aligned else crossing
    direct = sum(1 if group.aligned and not lane else crossing for lane in lanes)
    shifts = SHIFT_ACCESSES * core.shift_cycles * sum(lane > 0 for lane in lanes)
    return fresh * straddling + shifts < direct


def _place(load: Load, point: Point) -> tuple[Buf, Affine]:
    """Place where a load reads at a point: expressions of different constants may meet there."""
    buf, index = load.access
    flat = flat_index(buf, index)
    return buf.root, flat + sum(flat.coefficient(dim) * offset for dim, offset in point.items())


def _straddles(buf: Buf, place: Affine, sched: NestSchedule) -> bool:
    """Whether a vector may span two cache lines."""
    steps = [coeff for dim, coeff in place.terms if dim != sched.vector]
    return not buf.arena or any(step % sched.lanes for step in (place.const, *steps))


def _as_moved(group: _Group, nest: Nest, vector: str, pool: Pool) -> dict[int, Expr]:
    """id of a load -> what takes its place."""
    buf, index = group.loads[0].access
    axes = [_moving_dim(axis, index, nest) for axis in range(len(index) - 1)] + [vector]
    bases = [group.base(k, axis is not None) for k, axis in enumerate(axes)]
    new = {}
    for source in group.loads:
        place = source.index
        base = tuple(
            i if origin is None else i.linear() + origin for i, origin in zip(place, bases)
        )
        distances = [
            (axis, i.const - origin)
            for axis, i, origin in zip(axes, place, bases)
            if origin is not None and i.const != origin
        ]
        load = pool.load(source.dtype, buf, base, False)
        new[id(source)] = (
            pool.shifted(source.dtype, tuple(distances), (load,)) if distances else load
        )
    return new


def _moving_dim(axis: int, index: tuple[Affine, ...], nest: Nest) -> str | None:
    """The dimension by which this index alone moves step by step, if there is one only."""
    steps = [dim for dim, coeff in index[axis].terms if dim in nest.dims and coeff == 1]
    if len(index[axis].symbols & nest.dims.keys()) != 1 or not steps:
        return None
    return steps[0] if sum(steps[0] in position.symbols for position in index) == 1 else None


def overlapping(nest: Nest, vector: str | None) -> Iterable[Load]:
    """Loads of scratch at several places of a row, within a nest without reductions that has vectors along `vector`."""
    if nest.reductions:
        return
    rows: dict[tuple, dict[int, Load]] = {}
    for candidate in _candidates(nest, vector) if vector else ():
        buf, index = candidate.access
        if buf.arena and buf.storage is None and len(buf.shape) > 1:
            rows.setdefault((buf, *index[:-1], index[-1].linear()), {})[index[-1].const] = candidate
    for places in rows.values():
        if len(places) > 1:
            yield from places.values()
