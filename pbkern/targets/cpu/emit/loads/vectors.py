"""Loads of a nest at affine places: one element, whole vectors, masked, guarded, backwards, by halves of words.

Those across rows, at strides and of several stored elements are made by the modules beside this one.
"""

from __future__ import annotations

from pbkern.core.machine import LINE_BYTES
from pbkern.lower.mlir.element_types import BITS, compute_el, mlir_type, storage_el
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Load
from pbkern.targets.cpu.emit.addressing import Addressing, NestWalk, Point, Tail, memref
from pbkern.targets.cpu.emit.promoted_loops import PromotedLoops
from pbkern.targets.cpu.schedule.interleaved_access import is_strided
from pbkern.targets.cpu.schedule.nest_schedule import prefetched_by
from pbkern.targets.cpu.schedule.register_transpose import is_transposed

from .prefetches import fetch, leads
from .squares import TransposedLoads
from .strided import StridedAccesses
from .words import WordLoads


class Loader:
    """Owns loads at affine places."""

    def __init__(self, places: Addressing, promoted: PromotedLoops, strided: StridedAccesses):
        self.text, self.places, self.promoted = places.text, places, promoted
        self.strided, self.words = strided, WordLoads(places)
        self.squares = TransposedLoads(places, strided, self.words)

    def load(
        self, walk: NestWalk, block: Block, expr: Load, point: Point, tail: Tail | None, lanes: int
    ) -> Ssa:
        buf, index, guard = expr.buf, expr.index, expr.guard
        b = self.text.builder(block, lanes)
        carried = self.promoted.carried(block, buf, index, point)
        if carried is not None:
            return b.from_storage(carried, buf.dtype)
        turn = walk.sched.transpose
        if (
            lanes
            and turn
            and buf.root not in walk.written
            and is_transposed(expr, walk.sched.along, turn)
        ):
            return b.from_storage(
                self.squares.load(walk, block, buf, index, point, tail, lanes), buf.dtype
            )
        flat = flat_index(buf, index)
        if walk.moves and walk.first is not None and tail is None and lanes and not guard:
            live = walk.live_lanes(expr, point)
            if live <= 0:
                return b.broadcast(b.c(0, compute_el(buf.dtype)))
            tail = Tail(live) if live < lanes else None
        key = (
            "load",
            buf.root.name,
            storage_el(buf.dtype),
            flat.linear(),
            flat.const + sum(flat.coefficient(dim) * offset for dim, offset in point.items()),
            tail.live if tail else None,
            lanes,
            self._guard_key(index, point) if guard else None,
        )
        if key in block.memo and buf.root not in walk.written:
            return block.memo[key]
        if self._is_half(walk, expr, point, lanes):
            loaded = self._load_half(walk, block, expr, point, lanes)
            block.memo[key] = loaded
            return loaded
        if lanes and not guard and is_strided(buf, index, walk.sched.vector):
            loaded = self.strided.load(walk, block, buf, flat, key[4], tail, lanes)
        else:
            loaded = self._load_storage(walk, block, buf, index, point, tail, lanes, guard)
        loaded = b.from_storage(loaded, buf.dtype)
        block.memo[key] = loaded
        return loaded

    def _is_half(self, walk: NestWalk, expr: Load, point: Point, lanes: int) -> bool:
        """Whether the vector shares words with the next or the last one of its step."""
        vector = walk.sched.along
        if not lanes or not walk.halves or vector not in expr.symbols:
            return False
        return point[vector] // lanes ^ 1 < walk.halves

    def _load_half(self, walk: NestWalk, block: Block, expr: Load, point: Point, lanes: int) -> Ssa:
        """Every other element of two vectors of bfloat16, from the first or the second on, as float32."""
        buf, index, vector = expr.buf, expr.index, walk.sched.along
        number = point[vector] // lanes
        first = {**point, vector: (number & ~1) * lanes}
        _, address = self.places.address(block, buf, index, first)
        key = ("words", buf.root.name, address, lanes)
        b = self.text.builder(block, lanes)
        if key not in block.memo:
            if buf.root in prefetched_by(walk.nest) and leads(walk, buf, index):
                fetch(self.text, walk, block, buf, index, first, 2 * lanes)
            whole = self.text.load_vector(
                block, (buf.root.name, address), memref(buf), "bf16", 2 * lanes, None
            )
            types = f"{whole.type} to {mlir_type('i32', lanes)}"
            words = self.text.put(block, "vector.bitcast", (whole.name,), types)
            block.memo[key] = Ssa(words, "i32", lanes)
        words = block.memo[key]
        high = b.and_(words, b.c(-(1 << 16), "i32")) if number & 1 else b.shl(words, b.c(16, "i32"))
        return b.bitcast(high, "f32")

    def _guard_key(self, index, point: Point):
        return tuple(
            (
                position,
                tuple(
                    (dim, offset)
                    for dim, offset in sorted(point.items())
                    if dim in position.symbols
                ),
            )
            for position in index
        )

    def _load_storage(
        self,
        walk: NestWalk,
        block: Block,
        buf: Buf,
        index,
        point: Point,
        tail,
        lanes: int,
        guard: bool,
    ) -> Ssa:
        """The stored element(s); guarded axes are clamped, or masked along the vector dimension."""
        el, mem_type, name = storage_el(buf.root.dtype), memref(buf), buf.root.name
        wanted = storage_el(buf.dtype)
        if BITS[el] < BITS[wanted]:
            return self.words.load(walk, block, buf, index, point, tail, lanes, wanted)
        if el != wanted:  # the same bits under another type
            root = Buf(name, buf.shape, buf.root.dtype, buf.arena, storage=buf.root)
            stored = self._load_storage(walk, block, root, index, point, tail, lanes, guard)
            return self.text.builder(block, lanes).bitcast(stored, wanted)
        vector = walk.sched.along
        coeff = flat_coefficient(buf, index, vector) if lanes else 0
        masks: list[Ssa] = []
        if guard:
            address, masks = self._guarded_address(walk, block, buf, index, point, lanes)
        else:
            where, address = self.places.address(block, buf, index, point)
            block = self.promoted.outside(block, where, buf.root) if coeff == 1 else block
        if not lanes or coeff == 0:
            ssa = Ssa(self.text.put(block, "memref.load", (name, address), mem_type), el, 0)
            return ssa if not lanes else self.text.builder(block, lanes).broadcast(ssa)
        b = self.text.builder(block, lanes)
        live = self.places.tail_mask(tail, lanes) if tail else None
        for mask in masks:
            live = mask if live is None else b.and_(live, mask)
        vec_type = mlir_type(el, lanes)
        if (
            coeff == 1
            and buf.root in prefetched_by(walk.nest)
            and leads(walk, buf, index)
            and point.get(walk.sched.along, 0) * buf.dtype.itemsize % LINE_BYTES == 0
        ):
            run = min(LINE_BYTES // buf.dtype.itemsize, lanes * walk.sched.unroll)
            fetch(self.text, walk, block, buf, index, point, run)
        if coeff == 1 and live is None:
            return Ssa(
                self.text.put(block, "vector.load", (name, address), f"{mem_type}, {vec_type}"),
                el,
                lanes,
            )
        if coeff == 1 and live is not None:
            return self.text.load_vector(block, (name, address), mem_type, el, lanes, live)
        if coeff == -1 and not masks:
            return self._load_backwards(
                block, address, name, mem_type, tail.live if tail else lanes, b, el
            )
        return self._load_strided(block, (name, address), mem_type, coeff, live, b, el)

    def _load_strided(
        self,
        block: Block,
        place: tuple[str, str],
        mem_type: str,
        stride: int,
        live: Ssa | None,
        b: Builder,
        el: str,
    ) -> Ssa:
        """Elements at a distance from each other, from place = (buffer, index) on; zeros where a mask is not set."""
        zero, lanes, vector = b.c(0, el).name, b.lanes, mlir_type(el, b.lanes)
        kind = f"vector<{lanes}xi32>"
        offsets = self.text.const(f"dense<{[k * stride for k in range(lanes)]}>", kind)
        live = live or self.places.tail_mask(Tail(lanes), lanes)
        operands = (*place, offsets, live.name, zero)
        types = f"{mem_type}, {kind}, {live.type}, {vector} into {vector}"
        return Ssa(self.text.put(block, "vector.gather", operands, types), el, lanes)

    def _load_backwards(
        self, block: Block, address: str, name: str, mem_type: str, count: int, b: Builder, el: str
    ) -> Ssa:
        """The element at an address and so many before it."""
        lanes = b.lanes
        low = self.text.put(block, "arith.subi", (address, self.text.index(count - 1)), "index")
        mask = self.places.tail_mask(Tail(count), lanes) if count < lanes else None
        loaded = self.text.load_vector(block, (name, low), mem_type, el, lanes, mask)
        return b.shuffle(loaded, loaded, [*range(count - 1, -1, -1), *range(count, lanes)])

    def _guarded_address(
        self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, lanes: int
    ) -> tuple[str, list[Ssa]]:
        """Flat address with axes clamped into the buffer; axes along the vector dimension get lane masks instead."""
        vector = walk.sched.along if lanes else ""
        masks: list[Ssa] = []
        parts: list[tuple[Block, str]] = []
        if any(size == 0 for size in buf.shape):
            return self.text.index(0), masks
        for position, extent, stride in zip(index, buf.shape, buf.strides):
            offset = sum(position.coefficient(dim) * shift for dim, shift in point.items())
            where, name = self.text.affine(block, position, offset)
            if not self.places.axis_is_safe(walk, position, extent):
                if vector and position.coefficient(vector):
                    masks.append(
                        self.places.in_range(walk, block, (position, 0, extent), point, lanes)
                    )
                    reached = self.places.reached(walk, block, position, extent, point, lanes)
                    if reached is not None:
                        where = block
                        name = self.text.put(
                            block, "arith.select", (reached, name, self.text.index(0)), "index"
                        )
                else:
                    name = self.text.once(where, "maxsi", name, 0)
                    name = self.text.once(where, "minsi", name, extent - 1)
            parts.append((where, self.text.scaled_index(where, name, stride)))
        _, place = self.text.sum_of_indices(parts or [(self.text.top, self.text.index(0))])
        return place, masks
