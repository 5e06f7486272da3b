"""Loads of elements that span several of the buffer they reinterpret."""

from __future__ import annotations

from pbkern.lower.mlir.element_types import BITS, mlir_type, storage_el
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf
from pbkern.targets.cpu.emit.addressing import Addressing, NestWalk, Point, Tail, memref


class WordLoads:
    """Owns loads of elements that are wider than those of the buffer in memory."""

    def __init__(self, places: Addressing):
        self.text, self.places = places.text, places

    def load(
        self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, tail, lanes: int, el: str
    ) -> Ssa:
        """Elements that span several of the buffer they reinterpret: one, or several along the vectors."""
        vector = walk.sched.along
        apart = flat_coefficient(buf, index, vector) if lanes else 0
        if not apart:
            word = self.neighbours(block, buf, index, point, 0, None, el)
            return self.text.builder(block, lanes).broadcast(word) if lanes else word
        if apart == 1:
            return self.neighbours(block, buf, index, point, lanes, tail, el)
        b = self.text.builder(block, lanes)
        live = tail.live if tail else lanes
        points = [{**point, vector: point.get(vector, 0) + lane} for lane in range(live)]
        words = [self.neighbours(block, buf, index, place, 0, None, el).name for place in points]
        words += [b.with_lanes(0).c(0, el).name] * (lanes - live)
        vectors = mlir_type(el, lanes)
        return Ssa(self.text.put(block, "vector.from_elements", tuple(words), vectors), el, lanes)

    def neighbours(
        self, block: Block, buf: Buf, index, point: Point, wide: int, tail: Tail | None, el: str
    ) -> Ssa:
        """An element that spans several of the buffer it reinterprets, or `wide` neighbours."""
        small, name, mem_type = storage_el(buf.root.dtype), buf.root.name, memref(buf)
        count = BITS[el] // BITS[small]
        flat = flat_index(buf, index) * count
        _, address = self.text.affine(
            block, flat, sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        )
        parts = count * max(wide, 1)
        mask = self.places.tail_mask(Tail(count * tail.live), parts) if wide and tail else None
        loaded = self.text.load_vector(block, (name, address), mem_type, small, parts, mask)
        words = mlir_type(el, max(wide, 1))
        word = self.text.put(block, "vector.bitcast", (loaded.name,), f"{loaded.type} to {words}")
        if wide:
            return Ssa(word, el, wide)
        types = f"{mlir_type(el)} from {words}"
        return Ssa(self.text.put(block, "vector.extract", (word,), types, " %s[0]"), el, 0)
