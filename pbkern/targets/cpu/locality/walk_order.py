"""Whether a nest loads what it overwrites before it stores there, step by step.

A step may store over elements that no later one loads. Rows before it are done with; along the
vector dimension, what is before it is in registers, which hand it from step to step
(targets/cpu/schedule/sliding_windows.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from pbkern.lower.nest.ir import Expr, Load, Nest, Shifted, Store
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.schedule.nest_schedule import (
    NestSchedule,
    overwritten_by,
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


def walks_ahead(nest: Nest, sched: NestSchedule, core: Vectors) -> bool:
    """Whether all overwritten elements are loaded before the nest stores there, if it is emitted with this schedule."""
    nest = moved_loads(nest, sched, core)
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
        rows_of = []
        for dim, far in zip(self.walked_by[expr.buf], rows):
            at = point.get(dim, 0) + far
            if at >= self.sched.jam.get(dim, 1):
                return None
            rows_of.append(at)
        return expr.buf, *rows_of, point.get(self.vector, 0) + column
