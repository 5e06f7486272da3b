"""Results that are computed beside what they are made of, and copied over it -> stores over it, where the walk allows.

    for i < n: t[i] = a[i] + a[i + 1] + a[i + 2]
    for i < n: a[i] = t[i]                             ->     for i < n: a[i] = a[i] + a[i + 1] + a[i + 2]

A step may store over elements that no later one loads. Rows before it are done with; along the
vector dimension, what is before it is in registers, which hand it from step to step
(targets/cpu/schedule/sliding_windows.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from pbkern.core.affine import Affine
from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import apart
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Pool, Shifted, Stmt, Store
from pbkern.targets.cpu.schedule.nest_schedule import (
    NestSchedule,
    overwritten_by,
    schedule_decided_for,
    scheduled,
)
from pbkern.targets.cpu.schedule.sliding_windows import (
    Chunk,
    Point,
    Visits,
    chunks,
    key_of,
    moved_loads,
    parts,
)

from .strip_mining import inside, nests_of

# A nest and the schedule with which it is emitted; where a store goes.
NestWithSchedule = tuple[Nest, NestSchedule]
Place = tuple[Affine, ...]


def store_in_place(
    stmts: Sequence[Stmt],
    pool: Pool,
    kept: set[Buf],
    schedule_for: Callable[[Nest], NestWithSchedule],
) -> list[Stmt]:
    """Statements with fewer copies. `kept`: root buffers that others touch."""
    out = inside(stmts, kept, lambda body, others: store_in_place(body, pool, others, schedule_for))
    for at in range(len(out) - 1, 0, -1):
        copy, beside = out[at], _copied(out[at])
        if isinstance(copy, Nest) and beside and not beside & kept:
            makers = _makers(out, at, beside)
            joined = _joined(makers, copy, pool, schedule_for) if makers else None
            if joined is not None:
                out[at - len(makers) : at + 1] = joined
    return out


def _copied(stmt: Stmt) -> set[Buf]:
    """The scratch that a statement copies elsewhere, if that is all it does."""
    if (
        not isinstance(stmt, Nest)
        or stmt.rdims
        or stmt.ordered
        or any(not isinstance(store.value, Load) for store in stmt.stores)
    ):
        return set()
    targets = {store.buf.root for store in stmt.stores}
    loads = [cast(Load, store.value) for store in stmt.stores]
    found = {load.buf for load in loads}
    plain = all(
        not load.guard and not store.guard and store.mask is None
        for load, store in zip(loads, stmt.stores)
    )
    apart_from = (
        len(found) == len(targets) == len(stmt.stores) and not {buf.root for buf in found} & targets
    )
    return (
        found
        if plain and apart_from and all(buf.arena and buf.storage is None for buf in found)
        else set()
    )


def _makers(stmts: Sequence[Stmt], at: int, beside: set[Buf]) -> list[Nest]:
    """The nests right before a copy that make what it copies; none if others touch that."""
    first = at
    while first and _makes(stmts[first - 1], beside):
        first -= 1
    if first == at or beside & effects.touched([*stmts[:first], *stmts[at + 1 :]]):
        return []
    return nests_of(stmts[first:at])


def _makes(stmt: Stmt, beside: set[Buf]) -> bool:
    """Whether a statement stores once at each of its points, to each of these buffers, and does nothing else."""
    if (
        not isinstance(stmt, Nest)
        or stmt.rdims
        or stmt.ordered
        or schedule_decided_for(stmt) is not None
    ):
        return False
    if beside & {load.buf.root for load in stmt.loads()}:
        return False
    live = sorted(dim for dim, size in stmt.dims.items() if size > 1)
    once = all(
        sorted(_steps(store)) == live and not store.guard and store.mask is None
        for store in stmt.stores
    )
    return (
        once and len(stmt.stores) == len(beside) and {store.buf for store in stmt.stores} == beside
    )


def _steps(store: Store) -> list:
    """Dimensions that walk an axis alone, step by step."""
    return [
        position.terms[0][0]
        for position in store.index
        if len(position.terms) == 1 and position.terms[0][1] == 1
    ]


def _joined(
    makers: list[Nest], copy: Nest, pool: Pool, schedule_for: Callable[[Nest], NestWithSchedule]
) -> list[Stmt] | None:
    """Joins the largest maker in place: after the others, before the copies of what those made."""
    placed = [place for maker in makers if (place := _placed(maker, copy)) is not None]
    if len(placed) < len(makers) or sum(map(_points, makers)) != _points(copy):
        return None
    if not all(
        _store_apart(maker, earlier) for k, maker in enumerate(makers) for earlier in makers[:k]
    ):
        return None
    largest = max(range(len(makers)), key=lambda number: _points(makers[number]))
    values = [store.value for store in makers[largest].stores]
    over = frozenset(store.buf.root for store in copy.stores)
    nest = replace(makers[largest], stores=tuple(_writes(placed[largest], values)))
    nest = scheduled(nest, overwritten=over)
    if not walks_ahead(*schedule_for(nest)):
        return None
    others = [k for k in range(len(makers)) if k != largest]
    copies = [
        replace(
            makers[other],
            stores=tuple(
                _writes(placed[other], [_load(store, pool) for store in makers[other].stores])
            ),
        )
        for other in others
    ]
    return [*(makers[other] for other in others), nest, *copies]


def _writes(places: list[tuple[Buf, Place]], values: list[Expr]) -> list[Store]:
    return [Store(buf, index, value) for (buf, index), value in zip(places, values)]


def _store_apart(nest: Nest, other: Nest) -> bool:
    by_buffer = {store.buf: store.index for store in other.stores}
    return all(
        apart(store.index, nest.dims, by_buffer[store.buf], other.dims) for store in nest.stores
    )


def _points(nest: Nest) -> int:
    return math.prod(nest.dims.values())


def _load(store: Store, pool: Pool) -> Expr:
    return pool.load(store.value.dtype, store.buf, store.index, False)


def _placed(maker: Nest, copy: Nest) -> list[tuple[Buf, Place]] | None:
    """Finds where a copy puts what each write of a maker stores; None if it is not known, or some of it is not copied."""
    by_buffer = {cast(Load, copy_write.value).buf: copy_write for copy_write in copy.stores}
    found: list[tuple[Buf, Place]] = []
    for store in maker.stores:
        copied = by_buffer[store.buf]
        place = _place(store, maker, copied, copy)
        if place is None:
            return None
        found.append((copied.buf, place))
    return found


def _place(made: Store, maker: Nest, store: Store, copy: Nest) -> Place | None:
    from_copy: dict[str, Affine] = {}
    for stored, read in zip(made.index, cast(Load, store.value).index):
        inner = [(dim, coeff) for dim, coeff in read.terms if dim in copy.dims]
        if len(inner) > 1 or any(coeff != 1 or dim in from_copy for dim, coeff in inner):
            return None
        rest = stored - Affine(tuple(term for term in read.terms if term not in inner), read.const)
        if not rest.symbols <= maker.dims.keys():
            return None
        low, high = rest.bounds(lambda dim: maker.dims[dim])
        if low < 0 or high >= (copy.dims[inner[0][0]] if inner else 1):
            return None
        from_copy |= {dim: rest for dim, _ in inner}
    if {dim for dim, size in copy.dims.items() if size > 1} - from_copy.keys():
        return None
    return tuple(
        position.substitute(lambda dim: from_copy.get(dim, 0 if dim in copy.dims else None))
        for position in store.index
    )


# ---------------------------------------------------------------- order


def walks_ahead(nest: Nest, sched: NestSchedule) -> bool:
    """Whether all overwritten elements are loaded before the nest stores there, if it is emitted with this schedule."""
    nest = moved_loads(nest, sched)
    if (
        sched.vector is None
        or sched.transpose
        or not all(_steps_along_axes(nest, store, sched.vector) for store in nest.stores)
    ):
        return False
    stores = {store.buf.root: store for store in nest.stores}
    distances = {}
    for load in nest.loads():
        if load.buf.root in overwritten_by(nest):
            apart_by = _distance(load, stores[load.buf.root])
            if apart_by is None or min(apart_by[:-1], default=0) < 0:
                return False
            distances[id(load)] = apart_by
    return _Row(nest, sched, distances).is_safe()


def _steps_along_axes(nest: Nest, store: Store, vector: str) -> bool:
    """Whether each axis is walked by at most one dimension, step by step, and the last one by vectors."""
    walked = [
        [(dim, coeff) for dim, coeff in position.terms if dim in nest.dims]
        for position in store.index
    ]
    steps = all(len(steps) <= 1 and all(coeff == 1 for _, coeff in steps) for steps in walked)
    return steps and walked[-1:] == [[(vector, 1)]] and store.mask is None and not store.guard


def _distance(expr: Expr, store: Store) -> tuple[int, ...] | None:
    """Distance of a load from what its point stores, per axis."""
    if not isinstance(expr, Load) or expr.buf is not store.buf or expr.guard:
        return None
    apart_by = [mine - theirs for mine, theirs in zip(expr.index, store.index)]
    return (
        tuple(delta.const for delta in apart_by)
        if all(delta.is_const for delta in apart_by)
        else None
    )


class _Row:
    """One row of steps along the vector dimension.

    Rows before it are never loaded, as distances along others are none or positive. `distances`: id
    of a load -> from what its point stores there, per axis.
    """

    def __init__(self, nest: Nest, sched: NestSchedule, distances: dict[int, tuple[int, ...]]):
        assert sched.vector is not None
        self.nest, self.sched, self.vector, self.distances = nest, sched, sched.vector, distances
        # "": an axis that no dimension walks
        self.walked_by = {
            store.buf: [
                next(iter(position.symbols & nest.dims.keys()), "") for position in store.index[:-1]
            ]
            for store in nest.stores
        }

    def is_safe(self) -> bool:
        at_hand: set = set()
        for chunk in chunks(self.nest, self.sched):
            visits = Visits(self.nest, self.sched, chunk.vectors)
            handed = set(visits.carried)
            first, later = (at_hand, chunk.low), (handed, chunk.high)
            steps = [first] if chunk.is_one_step(self.sched) else [first, later]
            if not all(self._loads_before_stores(visits, chunk, *step) for step in steps):
                return False
            at_hand = handed
        return True

    def _loads_before_stores(self, visits: Visits, chunk: Chunk, at_hand: set, done: int) -> bool:
        """Whether one step loads nothing that it, or the `done` elements of these rows before it, have stored."""
        lanes, loaded = self.sched.lanes, set(at_hand)
        stored: set[tuple] = set()
        for point in visits.points:
            for store in self.nest.stores:
                for key, load, where in self._needed(store.value, point, at_hand):
                    if (
                        key not in loaded
                        and (place := self._place(cast(Load, load), where)) is not None
                    ):
                        *row, at = place
                        if (-done < at + lanes and at < 0) or any(
                            other_row == row and abs(column - at) < lanes
                            for *other_row, column in stored
                        ):
                            return False
                    if chunk.tail is None:  # masked loads are not shared
                        loaded.add(key)
                stored.add(
                    (
                        store.buf,
                        *(point.get(dim, 0) for dim in self.walked_by[store.buf]),
                        point[self.vector],
                    )
                )
        return True

    def _needed(
        self, value: Expr, point: Point, at_hand: set
    ) -> Iterator[tuple[tuple, Expr, Point]]:
        """(key, load of what the nest stores over, place) for a value at a point, except for what is made of values at hand."""
        waiting = [(value, point)]
        while waiting:
            expr, where = waiting.pop()
            key = key_of(expr, where)
            if key in at_hand:
                continue
            if id(expr) in self.distances:
                yield key, expr, where
            places = (
                parts(expr, where, self.vector, self.sched.lanes)
                if isinstance(expr, Shifted)
                else [where]
            )
            waiting += [(arg, place) for arg in expr.args for place in places]

    def _place(self, expr: Load, point: Point) -> tuple | None:
        """Place of a load, among the rows that this one walks and from where the step starts; None where beyond them."""
        *rows, column = self.distances[id(expr)]
        found = []
        for dim, far in zip(self.walked_by[expr.buf], rows):
            at = point.get(dim, 0) + far
            if at >= self.sched.jam.get(dim, 1):
                return None
            found.append(at)
        return expr.buf, *found, point.get(self.vector, 0) + column
