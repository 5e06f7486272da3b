"""Loop -> the scratch that it keeps in registers: what its nests read and write at the same few vectors in every round.

    for each row:  t = x[row, :] . w;  s[0:200] = s[0:200] + t * x[row, 0:200]

Here s are 13 vectors, loaded before the loop, carried through it and stored behind it. Operands that every round reads at one
place, such as w, are loaded before the loop as well while registers last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import arena
from .builder import Value as Ssa
from .elements import storage_el
from .flat import flat_index
from .nest import Buf, For, Nest, Write
from .places import Places, Point, Tail, memref
from .schedule import MAX_COLUMN_VECTORS, MAX_TILE_NODES, REGISTERS, NestSchedule, choose
from .text import Block

# Registers that the arithmetic of a round needs beside what is kept; accumulators of one sum, whose rounds overlap.
WORKING, SUM_ACCUMULATORS = 6, 4


class Place(NamedTuple):
    """`size` elements from `start` on, in vectors of `lanes`; one element has 0 lanes."""

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
class Plan:
    """carried: what is kept, by root buffer; schedules: of each nest of the body, whose vectors of it are in one tile."""

    carried: dict[Buf, Place]
    schedules: list[NestSchedule]


def plan(loop: For, vector_bits: int, reassociate: bool) -> Plan | None:
    """What a loop keeps; None if there is nothing."""
    if not all(isinstance(s, Nest) and all(s.dims.values()) and not s.moves() for s in loop.body):
        return None
    nests: list[Nest] = [s for s in loop.body if isinstance(s, Nest)]
    schedules = [choose(n, vector_bits, reassociate) if n.schedule is None else n.schedule for n in nests]
    carried: dict[Buf, Place] = {}
    for buf in _changed(nests):
        places = {p for n, s in zip(nests, schedules) for p in _places(n, s, buf)}
        place = places.pop() if len(places) == 1 else None
        if place is not None and place.vectors + sum(p.vectors for p in carried.values()) <= MAX_COLUMN_VECTORS:
            carried[buf] = place
    if not any(p.lanes for p in carried.values()):
        return None
    return Plan(carried, [_in_one_tile(n, s, carried) for n, s in zip(nests, schedules)])


def _changed(nests: list[Nest]) -> list[Buf]:
    """Scratch that is read before it is written, and written."""
    read: dict[Buf, None] = {}
    changed: dict[Buf, None] = {}
    written: set[Buf] = set()
    for n in nests:
        read |= {e.info[0].root: None for e in n.loads() if e.info[0].root not in written}
        written |= {w.buf.root for w in n.writes}
        changed |= {w.buf.root: None for w in n.writes if w.buf.root in read}
    return [b for b in changed if b.arena]


def _places(nest: Nest, schedule: NestSchedule, buf: Buf) -> list[Place | None]:
    """Where a nest touches a buffer; None for what is not the same in every round, or not of the form of a Place."""
    found = [_place(nest, schedule, e.info[0], e.info[1]) if e.kind == "load" and not e.info[2] else None
             for e in nest.loads() if e.info[0].root is buf]
    return found + [_place(nest, schedule, w.buf, w.index) if _is_plain(nest, schedule, w) else None
                    for w in nest.writes if w.buf.root is buf]


def _place(nest: Nest, schedule: NestSchedule, buf: Buf, index: tuple) -> Place | None:
    flat = flat_index(buf, index)
    moving = [s for s in flat.symbols if nest.dims.get(s) != 1]
    if buf.dtype != buf.root.dtype or not flat.symbols <= nest.dims.keys():
        return None
    if not moving:
        return Place(flat.const, 1, 0)
    vector = schedule.vector
    if moving != [vector] or vector in nest.rdims or flat.coefficient(vector) != 1 or not _is_straight(nest, schedule):
        return None
    place = Place(flat.const, nest.dims[vector], schedule.lanes)
    return place if place.vectors * len(nest.nodes()) <= MAX_TILE_NODES else None


def _is_plain(nest: Nest, schedule: NestSchedule, w: Write) -> bool:
    """Whether a write takes place once at each of its elements."""
    after_sums = not w.inner or all(nest.dims[d] == 1 for d in nest.rdims)
    return after_sums and w.mask is None and not w.guard and _is_straight(nest, schedule)


def _is_straight(nest: Nest, schedule: NestSchedule) -> bool:
    """Whether nothing but reduced dimensions and the one of vectors has a loop."""
    loops = {d for d, n in nest.dims.items() if n > 1} - {schedule.vector, *nest.rdims}
    return not loops and schedule.transpose is None


def _in_one_tile(nest: Nest, s: NestSchedule, carried: dict[Buf, Place]) -> NestSchedule:
    if s.vector is None:
        return s
    if s.vector in nest.rdims:
        if not _is_straight(nest, s) or nest.rdims != (s.vector,):
            return s
        short = -(-nest.dims[s.vector] // s.lanes) <= MAX_COLUMN_VECTORS
        return replace(s, unroll=min(s.unroll, SUM_ACCUMULATORS), straight=short)
    roots = {e.info[0].root for e in nest.loads()} | {w.buf.root for w in nest.writes}
    if any(b in roots and p.lanes for b, p in carried.items()):
        return replace(s, unroll=-(-nest.dims[s.vector] // s.lanes))
    return s


@dataclass
class Kept:
    """State while a loop is emitted. outside: the block around it; written: what it changes; room: registers that are left
    for what it only reads; values: of carried elements, by buffer and place."""

    outside: Block
    written: set[Buf]
    room: int
    values: dict[tuple[Buf, int], Ssa]


class Registers(Places):
    """Emits loops that keep scratch in registers. `emit` appends a nest."""

    kept: Kept | None = None
    emit: Callable[..., object]

    def loop_in_registers(self, block: Block, loop: For, trips: int | str, made: Plan) -> None:
        """Appends a loop of which `made` is the plan. trips: how many, or the name of their number."""
        parts = [(b, at) for b, p in made.carried.items() for at in range(p.start, p.start + p.size, max(p.lanes, 1))]

        def fill(inner: Block, values: list[Ssa]) -> list[Ssa]:
            self.kept = Kept(block, arena.written(loop.body), REGISTERS - WORKING - len(parts), dict(zip(parts, values)))
            for nest, schedule in zip(loop.body, made.schedules):
                self.emit(inner, nest, schedule)
            after, self.kept = [self.kept.values[p] for p in parts], None
            return after

        before = [self._load_part(block, b, at, made.carried[b]) for b, at in parts]
        after = self.text.loop(block, loop.counter, 0, trips, 1, fill, before)
        for (b, at), v in zip(parts, after):
            self._store_part(block, b, at, made.carried[b], v)

    def _load_part(self, block: Block, buf: Buf, at: int, place: Place) -> Ssa:
        el, m, where = storage_el(buf.dtype), memref(buf), f"{buf.name}[{self.text.index(at)}]"
        if not place.lanes:
            return Ssa(self.text.put(block, f"memref.load {where} : {m}"), el, 0)
        t, live = f"vector<{place.lanes}x{el}>", place.live(at)
        if live == place.lanes:
            return Ssa(self.text.put(block, f"vector.load {where} : {m}, {t}"), el, place.lanes)
        mask, zero = self._tail_mask(Tail(live), place.lanes), self.text.builder(block, place.lanes).c(0, el)
        load = f"vector.maskedload {where}, {mask.name}, {zero.name} : {m}, {mask.type}, {t} into {t}"
        return Ssa(self.text.put(block, load), el, place.lanes)

    def _store_part(self, block: Block, buf: Buf, at: int, place: Place, v: Ssa) -> None:
        m, where = memref(buf), f"{buf.name}[{self.text.index(at)}]"
        if not place.lanes:
            block.lines.append(f"memref.store {v.name}, {where} : {m}")
        elif place.live(at) == place.lanes:
            block.lines.append(f"vector.store {v.name}, {where} : {m}, {v.type}")
        else:
            mask = self._tail_mask(Tail(place.live(at)), place.lanes)
            block.lines.append(f"vector.maskedstore {where}, {mask.name}, {v.name} : {m}, {mask.type}, {v.type}")

    def _carried(self, block: Block, buf: Buf, index: tuple, p: Point) -> Ssa | None:
        """The value of an access, if it is kept."""
        return self.kept.values[self._part(block, buf, index, p)] if self.kept and self._keeps(buf) else None

    def _carry(self, block: Block, buf: Buf, index: tuple, p: Point, v: Ssa) -> bool:
        """Takes the value of an access, if it is kept; whether it is."""
        if self.kept and self._keeps(buf):
            self.kept.values[self._part(block, buf, index, p)] = v
            return True
        return False

    def _keeps(self, buf: Buf) -> bool:
        return self.kept is not None and any(b is buf.root for b, _ in self.kept.values)

    def _part(self, block: Block, buf: Buf, index: tuple, p: Point) -> tuple[Buf, int]:
        flat = flat_index(buf, index)
        at = flat.const + sum(flat.coefficient(d) * o for d, o in p.items())
        for symbol, c in flat.terms:
            _, value = block.lookup(symbol)
            assert isinstance(value, int)  # a loop of one trip
            at += c * value
        return buf.root, at

    def _outside(self, block: Block, where: Block, root: Buf) -> Block:
        """The block in which to load a vector whose address is known in `where`."""
        kept = self.kept
        if kept is None or root in kept.written or where.depth > kept.outside.depth or not kept.room:
            return block
        kept.room -= 1
        return kept.outside
