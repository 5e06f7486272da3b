"""Loop -> the scratch that it keeps in registers: what its nests read and write at the same few vectors in every round.

    for each row:  t = x[row, :] . w;  s[0:200] = s[0:200] + t * x[row, 0:200]

Here s are 13 vectors, loaded before the loop, carried through it and stored behind it. Operands
that every round reads at one place, such as w, are loaded before the loop as well while registers
last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import Buf, For, Load, Nest, Store
from pbkern.targets.cpu.machines.machine import Vectors

from .nest_schedule import NestSchedule, final_schedule
from .register_tiles.along_results import column_vectors
from .register_tiles.choice import MAX_TILE_NODES

# Registers that the arithmetic of a round needs beside what is kept. Source: not recorded.
WORKING_REGISTERS = 6
# Accumulators of one sum, whose rounds overlap. Source: not recorded.
SUM_ACCUMULATORS = 4


class RegisterSpan(NamedTuple):
    """`size` elements from `start` on, in vectors of `lanes`; single elements have 0 lanes."""

    start: int
    size: int
    lanes: int

    @property
    def vectors(self) -> int:
        return -(-self.size // max(self.lanes, 1))

    def live(self, at: int) -> int:
        """Elements of the vector that starts at `at`."""
        return min(self.start + self.size - at, self.lanes)


@dataclass
class PromotionPlan:
    """carried: what is kept, by root buffer; schedules: of each nest of the body, whose vectors of it are in one tile."""

    carried: dict[Buf, RegisterSpan]
    schedules: list[NestSchedule]


def plan(
    loop: For, vectors: Vectors, schedule_of: Callable[[Nest], NestSchedule] = final_schedule
) -> PromotionPlan | None:
    """Plans what a loop keeps, with these schedules of its nests; None if there is nothing."""
    if not all(
        isinstance(stmt, Nest) and all(stmt.dims.values()) and not stmt.moves()
        for stmt in loop.body
    ):
        return None
    nests: list[Nest] = [stmt for stmt in loop.body if isinstance(stmt, Nest)]
    schedules = [schedule_of(nest) for nest in nests]
    carried: dict[Buf, RegisterSpan] = {}
    most = column_vectors(vectors.registers)
    for buf in _changed(nests):
        places = {
            span
            for nest, schedule in zip(nests, schedules)
            for span in _places(nest, schedule, buf)
        }
        place = _joint(places)
        if (
            place is not None
            and place.vectors + sum(span.vectors for span in carried.values()) <= most
        ):
            carried[buf] = place
    if not carried:
        return None
    return PromotionPlan(
        carried, [_in_one_tile(nest, schedule, carried) for nest, schedule in zip(nests, schedules)]
    )


def _joint(places: set[RegisterSpan | None]) -> RegisterSpan | None:
    """The one place, or the elements between the first and the last if all are single ones."""
    if len(places) == 1:
        return places.pop()
    known = [place for place in places if place is not None]
    if len(known) < len(places) or any(place.lanes for place in known):
        return None
    first, last = min(place.start for place in known), max(place.start for place in known)
    return RegisterSpan(first, last - first + 1, 0)


def _changed(nests: list[Nest]) -> list[Buf]:
    """Scratch that is read before it is written, and written."""
    read: dict[Buf, None] = {}
    changed: dict[Buf, None] = {}
    written: set[Buf] = set()
    for nest in nests:
        read |= {load.buf.root: None for load in nest.loads() if load.buf.root not in written}
        written |= {store.buf.root for store in nest.stores}
        changed |= {store.buf.root: None for store in nest.stores if store.buf.root in read}
    return [buf for buf in changed if buf.arena]


def _places(nest: Nest, schedule: NestSchedule, buf: Buf) -> list[RegisterSpan | None]:
    """Places where a nest touches a buffer; None for what is not the same in every round, or not of the form of a Place."""
    places = [
        _place(nest, schedule, load.buf, load.index)
        if isinstance(load, Load) and not load.guard
        else None
        for load in nest.loads()
        if load.buf.root is buf
    ]
    return places + [
        _place(nest, schedule, store.buf, store.index) if _is_plain(nest, schedule, store) else None
        for store in nest.stores
        if store.buf.root is buf
    ]


def _place(nest: Nest, schedule: NestSchedule, buf: Buf, index: tuple) -> RegisterSpan | None:
    flat = flat_index(buf, index)
    streamed = [symbol for symbol in flat.symbols if nest.dims.get(symbol) != 1]
    if buf.dtype != buf.root.dtype or not flat.symbols <= nest.dims.keys():
        return None
    if not streamed:
        return RegisterSpan(flat.const, 1, 0)
    vector = schedule.along
    if (
        streamed != [vector]
        or vector in nest.rdims
        or flat.coefficient(vector) != 1
        or not _is_straight(nest, schedule)
    ):
        return None
    place = RegisterSpan(flat.const, nest.dims[vector], schedule.lanes)
    return place if place.vectors * len(nest.nodes()) <= MAX_TILE_NODES else None


def _is_plain(nest: Nest, schedule: NestSchedule, store: Store) -> bool:
    """Whether a write takes place once at each of its elements."""
    after_sums = not store.inner or all(nest.dims[rdim] == 1 for rdim in nest.rdims)
    return after_sums and store.mask is None and not store.guard and _is_straight(nest, schedule)


def _is_straight(nest: Nest, schedule: NestSchedule) -> bool:
    """Whether nothing but reduced dimensions and the one of vectors has a loop."""
    loops = {dim for dim, size in nest.dims.items() if size > 1} - {schedule.vector, *nest.rdims}
    return not loops and schedule.transpose is None


def _in_one_tile(nest: Nest, sched: NestSchedule, carried: dict[Buf, RegisterSpan]) -> NestSchedule:
    if sched.vector is None:
        return sched
    if sched.vector in nest.rdims:
        if not _is_straight(nest, sched) or nest.rdims != (sched.vector,):
            return sched
        short = -(-nest.dims[sched.vector] // sched.lanes) <= column_vectors(sched.registers)
        return replace(sched, unroll=min(sched.unroll, SUM_ACCUMULATORS), straight=short)
    roots = {load.buf.root for load in nest.loads()} | {store.buf.root for store in nest.stores}
    if any(buf in roots and span.lanes for buf, span in carried.items()):
        return replace(sched, unroll=-(-nest.dims[sched.vector] // sched.lanes))
    return sched
