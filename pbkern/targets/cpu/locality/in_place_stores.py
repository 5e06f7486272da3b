"""Results that are computed beside what they are made of, and copied over it -> stores over it, where the walk allows.

    for i < n: t[i] = a[i] + a[i + 1] + a[i + 2]
    for i < n: a[i] = t[i]                             ->     for i < n: a[i] = a[i] + a[i + 1] + a[i + 2]

A step may store over elements that no later one loads. Rows before it are done with; along the
vector dimension, what is before it is in registers, which hand it from step to step
(targets/cpu/schedule/sliding_windows.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

from pbkern.core.affine import Affine
from pbkern.lower.nest import scratch
from pbkern.lower.nest.addresses import apart
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Pool, Shifted, Stmt, Write
from pbkern.targets.cpu.schedule.register_tiles import NestSchedule
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
Scheduled = tuple[Nest, NestSchedule]
Place = tuple[Affine, ...]


def store_in_place(
    stmts: list[Stmt], pool: Pool, kept: set[Buf], scheduled: Callable[[Nest], Scheduled]
) -> list[Stmt]:
    """Statements with fewer copies. `kept`: root buffers that others touch."""
    out = inside(stmts, kept, lambda body, others: store_in_place(body, pool, others, scheduled))
    for at in range(len(out) - 1, 0, -1):
        copy, beside = out[at], _copied(out[at])
        if isinstance(copy, Nest) and beside and not beside & kept:
            makers = _makers(out, at, beside)
            joined = _joined(makers, copy, pool, scheduled) if makers else None
            if joined is not None:
                out[at - len(makers) : at + 1] = joined
    return out


def _copied(stmt: Stmt) -> set[Buf]:
    """The scratch that a statement copies elsewhere, if that is all it does."""
    if (
        not isinstance(stmt, Nest)
        or stmt.rdims
        or stmt.ordered
        or any(not isinstance(write.value, Load) for write in stmt.writes)
    ):
        return set()
    targets = {write.buf.root for write in stmt.writes}
    loads = [cast(Load, write.value) for write in stmt.writes]
    found = {load.buf for load in loads}
    plain = all(
        not load.guard and not write.guard and write.mask is None
        for load, write in zip(loads, stmt.writes)
    )
    apart_from = (
        len(found) == len(targets) == len(stmt.writes) and not {buf.root for buf in found} & targets
    )
    return (
        found
        if plain and apart_from and all(buf.arena and buf.storage is None for buf in found)
        else set()
    )


def _makers(stmts: list[Stmt], at: int, beside: set[Buf]) -> list[Nest]:
    """The nests right before a copy that make what it copies; none if others touch that."""
    first = at
    while first and _makes(stmts[first - 1], beside):
        first -= 1
    if first == at or beside & scratch.touched([*stmts[:first], *stmts[at + 1 :]]):
        return []
    return nests_of(stmts[first:at])


def _makes(stmt: Stmt, beside: set[Buf]) -> bool:
    """Whether a statement stores once at each of its points, to each of these buffers, and does nothing else."""
    if not isinstance(stmt, Nest) or stmt.rdims or stmt.ordered or stmt.schedule is not None:
        return False
    if beside & {load.buf.root for load in stmt.loads()}:
        return False
    live = sorted(dim for dim, size in stmt.dims.items() if size > 1)
    once = all(
        sorted(_steps(write)) == live and not write.guard and write.mask is None
        for write in stmt.writes
    )
    return (
        once and len(stmt.writes) == len(beside) and {write.buf for write in stmt.writes} == beside
    )


def _steps(write: Write) -> list:
    """Dimensions that walk an axis alone, step by step."""
    return [
        position.terms[0][0]
        for position in write.index
        if len(position.terms) == 1 and position.terms[0][1] == 1
    ]


def _joined(
    makers: list[Nest], copy: Nest, pool: Pool, scheduled: Callable[[Nest], Scheduled]
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
    values = [write.value for write in makers[largest].writes]
    over = frozenset(write.buf.root for write in copy.writes)
    nest = replace(makers[largest], writes=_writes(placed[largest], values), over=over)
    if not walks_ahead(*scheduled(nest)):
        return None
    others = [k for k in range(len(makers)) if k != largest]
    copies = [
        replace(
            makers[other],
            writes=_writes(placed[other], [_load(write, pool) for write in makers[other].writes]),
        )
        for other in others
    ]
    return [*(makers[other] for other in others), nest, *copies]


def _writes(places: list[tuple[Buf, Place]], values: list[Expr]) -> list[Write]:
    return [Write(buf, index, value) for (buf, index), value in zip(places, values)]


def _store_apart(nest: Nest, other: Nest) -> bool:
    by_buffer = {write.buf: write.index for write in other.writes}
    return all(
        apart(write.index, nest.dims, by_buffer[write.buf], other.dims) for write in nest.writes
    )


def _points(nest: Nest) -> int:
    return math.prod(nest.dims.values())


def _load(write: Write, pool: Pool) -> Expr:
    return pool.load(write.value.dtype, write.buf, write.index, False)


def _placed(maker: Nest, copy: Nest) -> list[tuple[Buf, Place]] | None:
    """Finds where a copy puts what each write of a maker stores; None if it is not known, or some of it is not copied."""
    by_buffer = {cast(Load, copy_write.value).buf: copy_write for copy_write in copy.writes}
    found: list[tuple[Buf, Place]] = []
    for write in maker.writes:
        copied = by_buffer[write.buf]
        place = _place(write, maker, copied, copy)
        if place is None:
            return None
        found.append((copied.buf, place))
    return found


def _place(made: Write, maker: Nest, write: Write, copy: Nest) -> Place | None:
    from_copy: dict[str, Affine] = {}
    for stored, read in zip(made.index, cast(Load, write.value).index):
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
        for position in write.index
    )


# ---------------------------------------------------------------- order


def walks_ahead(nest: Nest, sched: NestSchedule) -> bool:
    """Whether all elements of `nest.over` are loaded before the nest stores there, if it is emitted with this schedule."""
    nest = moved_loads(nest, sched)
    if (
        sched.vector is None
        or sched.transpose
        or not all(_steps_along_axes(nest, write, sched.vector) for write in nest.writes)
    ):
        return False
    stores = {write.buf.root: write for write in nest.writes}
    distances = {}
    for load in nest.loads():
        if load.buf.root in nest.over:
            apart_by = _distance(load, stores[load.buf.root])
            if apart_by is None or min(apart_by[:-1], default=0) < 0:
                return False
            distances[id(load)] = apart_by
    return _Row(nest, sched, distances).is_safe()


def _steps_along_axes(nest: Nest, write: Write, vector: str) -> bool:
    """Whether each axis is walked by at most one dimension, step by step, and the last one by vectors."""
    walked = [
        [(dim, coeff) for dim, coeff in position.terms if dim in nest.dims]
        for position in write.index
    ]
    steps = all(len(steps) <= 1 and all(coeff == 1 for _, coeff in steps) for steps in walked)
    return steps and walked[-1:] == [[(vector, 1)]] and write.mask is None and not write.guard


def _distance(expr: Expr, write: Write) -> tuple[int, ...] | None:
    """Distance of a load from what its point stores, per axis."""
    if not isinstance(expr, Load) or expr.buf is not write.buf or expr.guard:
        return None
    apart_by = [mine - theirs for mine, theirs in zip(expr.index, write.index)]
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
            write.buf: [
                next(iter(position.symbols & nest.dims.keys()), "") for position in write.index[:-1]
            ]
            for write in nest.writes
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
            for write in self.nest.writes:
                for key, load, where in self._needed(write.value, point, at_hand):
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
                        write.buf,
                        *(point.get(dim, 0) for dim in self.walked_by[write.buf]),
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
