"""Emission of loops that keep scratch in registers (targets/cpu/schedule/register_promotion.py).

It is loaded before, carried through, stored behind.
"""

from __future__ import annotations

from collections.abc import Callable

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import Buf, For
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.schedule.register_promotion import (
    WORKING_REGISTERS,
    PromotionPlan,
    RegisterSpan,
)

from .addressing import Addressing, Point, Tail, memref


@dataclass
class PromotedBuffers:
    """State while a loop is emitted.

    outside: the block around it; written: what it changes; room: registers that are left for what
    it only reads; values: of carried elements, by buffer and place.
    """

    outside: Block
    written: set[Buf]
    room: int
    values: dict[tuple[Buf, int], Ssa]


class PromotedLoops:
    """Owns what loops keep in registers. buffers: of the loop that is emitted, if one is."""

    def __init__(self, places: Addressing, vectors: Vectors):
        self.text, self.places, self.vectors = places.text, places, vectors
        self.buffers: PromotedBuffers | None = None

    def emit(
        self,
        block: Block,
        loop: For,
        trips: int | str,
        plan: PromotionPlan,
        emit: Callable[..., object],
    ) -> None:
        """Appends a loop as it is planned.

        trips: how many, or the name of their number. emit: appends a nest.
        """
        parts = [
            (b, at)
            for b, span in plan.carried.items()
            for at in range(span.start, span.start + span.size, max(span.lanes, 1))
        ]

        def fill(inner: Block, values: list[Ssa]) -> list[Ssa]:
            free = self.vectors.registers - WORKING_REGISTERS - len(parts)
            self.buffers = PromotedBuffers(
                block, effects.written(loop.body), free, dict(zip(parts, values))
            )
            for nest, schedule in zip(loop.body, plan.schedules):
                emit(inner, nest, schedule)
            after, self.buffers = [self.buffers.values[part] for part in parts], None
            return after

        before = [self._load_part(block, b, at, plan.carried[b]) for b, at in parts]
        after = self.text.loop(block, loop.counter, 0, trips, 1, fill, before)
        for (buf, at), value in zip(parts, after):
            self._store_part(block, buf, at, plan.carried[buf], value)

    def _load_part(self, block: Block, buf: Buf, at: int, place: RegisterSpan) -> Ssa:
        el, kind, where = storage_el(buf.dtype), memref(buf), (buf.name, self.text.index(at))
        if not place.lanes:
            return Ssa(self.text.put(block, "memref.load", where, kind), el, 0)
        live = place.live(at)
        mask = self.places.tail_mask(Tail(live), place.lanes) if live < place.lanes else None
        return self.text.load_vector(block, where, kind, el, place.lanes, mask)

    def _store_part(self, block: Block, buf: Buf, at: int, place: RegisterSpan, value: Ssa) -> None:
        kind, where, live = memref(buf), (buf.name, self.text.index(at)), place.live(at)
        if not place.lanes:
            block.add("memref.store", (value.name, *where), kind)
        else:
            mask = self.places.tail_mask(Tail(live), place.lanes) if live < place.lanes else None
            self.text.store_vector(block, value, where, kind, mask)

    def carried(self, block: Block, buf: Buf, index: tuple, point: Point) -> Ssa | None:
        """The value of an access, if it is buffers."""
        return (
            self.buffers.values[self._part(block, buf, index, point)]
            if self.buffers and self.keeps(buf)
            else None
        )

    def carry(self, block: Block, buf: Buf, index: tuple, point: Point, value: Ssa) -> bool:
        """Takes the value of an access, if it is kept; whether it is."""
        if self.buffers and self.keeps(buf):
            self.buffers.values[self._part(block, buf, index, point)] = value
            return True
        return False

    def keeps(self, buf: Buf) -> bool:
        return self.buffers is not None and any(root is buf.root for root, _ in self.buffers.values)

    def _part(self, block: Block, buf: Buf, index: tuple, point: Point) -> tuple[Buf, int]:
        flat = flat_index(buf, index)
        at = flat.const + sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        for symbol, coeff in flat.terms:
            _, value = block.lookup(symbol)
            assert isinstance(value, int)  # a loop of one trip
            at += coeff * value
        return buf.root, at

    def outside(self, block: Block, where: Block, root: Buf) -> Block:
        """The block in which to load a vector whose address is known in `where`."""
        buffers = self.buffers
        if (
            buffers is None
            or root in buffers.written
            or where.depth > buffers.outside.depth
            or not buffers.room
        ):
            return block
        buffers.room -= 1
        return buffers.outside
