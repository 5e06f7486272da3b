"""Squares of elements that are loaded row by row and transposed in registers."""

from __future__ import annotations

from pbkern.core.affine import Affine
from pbkern.lower.mlir.element_types import BITS, mlir_type, storage_el
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Load
from pbkern.targets.cpu.emit.addressing import Addressing, NestWalk, Point, Tail, memref
from pbkern.targets.cpu.schedule.nest_schedule import prefetched_by

from .prefetches import fetch
from .strided import StridedAccesses
from .words import WordLoads

# Bits of the parts of a vector in which instructions interleave elements of two vectors: punpck of x86, zip of Arm.
INTERLEAVED_BITS = 128


def transposed(b: Builder, rows: list[Ssa]) -> list[Ssa]:
    """The columns of a square of as many rows as there are lanes, a power of two.

    First all squares that parts of INTERLEAVED_BITS of neighbouring rows make are transposed: in each step, row i of a square
    is interleaved with the row half a square behind it, and gives rows 2 i and 2 i + 1. Then these squares change places: in
    step s, rows that differ in bit s exchange the parts whose number differs in that bit. Interleaving takes one instruction
    and no constant for elements of every width; exchanges of single elements of 16 bits take three, and a mask in a register,
    which a product behind the copy would miss.
    """
    lanes = len(rows)
    side = min(INTERLEAVED_BITS // BITS[rows[0].el], lanes)
    half = side // 2
    orders = [
        [
            lanes * (k % 2) + part + first + k // 2
            for part in range(0, lanes, side)
            for k in range(side)
        ]
        for first in (0, half)
    ]
    for _ in range(side.bit_length() - 1):
        rows = [
            b.shuffle(rows[square + row], rows[square + row + half], order)
            for square in range(0, lanes, side)
            for row in range(half)
            for order in orders
        ]
    step = side
    while step < lanes:
        low = [k if not k & step else lanes + (k ^ step) for k in range(lanes)]
        high = [k | step if not k & step else lanes + k for k in range(lanes)]
        exchanged = list(rows)
        for row in range(lanes):
            if not row & step:
                for place, order in ((row, low), (row | step, high)):
                    exchanged[place] = b.shuffle(rows[row], rows[row | step], order)
        rows, step = exchanged, step * 2
    return rows


class TransposedLoads:
    """Owns loads of vectors across contiguous rows."""

    def __init__(self, places: Addressing, strided: StridedAccesses, words: WordLoads):
        self.text, self.places = places.text, places
        self.strided, self.words = strided, words

    def load(
        self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, tail, lanes: int
    ) -> Ssa:
        """One vector of a lanes x lanes square that is loaded row by row and transposed in registers, once per square."""
        along, vector = walk.sched.transpose, walk.sched.along
        assert along is not None
        corner = {**point, along: 0}
        flat = flat_index(buf, index)
        key = (
            "square",
            buf.root.name,
            storage_el(buf.dtype),
            flat,
            tuple(sorted(corner.items())),
            tail.live if tail else None,
            walk.transposed_rows,
        )
        if key not in block.memo:
            rows = [
                self._row(
                    walk, block, buf, index, {**corner, vector: corner.get(vector, 0) + r}, lanes
                )
                for r in range(tail.live if tail else lanes)
            ]
            rows += [rows[-1]] * (lanes - len(rows))
            rows = transposed(self.text.builder(block, lanes), rows)
            block.memo[key] = rows
        return block.memo[key][point.get(along, 0)]

    def _row(self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, lanes: int) -> Ssa:
        el, mem_type, name = storage_el(buf.dtype), memref(buf), buf.root.name
        step = flat_coefficient(buf, index, walk.sched.transpose or "")
        if step > 1:
            return self._spread_row(walk, block, buf, flat_index(buf, index), step, point, lanes)
        if BITS[storage_el(buf.root.dtype)] < BITS[el]:
            tail = Tail(walk.transposed_rows) if walk.transposed_rows < lanes else None
            return self.words.neighbours(block, buf, index, point, lanes, tail, el)
        _, address = self.places.address(block, buf, index, point)
        vec_type = mlir_type(el, lanes)
        if buf.root in prefetched_by(walk.nest):
            fetch(self.text, walk, block, buf, index, point, lanes)
        if walk.transposed_rows == lanes:
            return Ssa(
                self.text.put(block, "vector.load", (name, address), f"{mem_type}, {vec_type}"),
                el,
                lanes,
            )
        live = self.places.tail_mask(Tail(walk.transposed_rows), lanes)
        return self.text.load_vector(block, (name, address), mem_type, el, lanes, live)

    def _spread_row(
        self,
        walk: NestWalk,
        block: Block,
        buf: Buf,
        flat: Affine,
        step: int,
        point: Point,
        lanes: int,
    ) -> Ssa:
        """The elements at a point and every step behind it, of whole vectors that loads of the elements between share."""
        place = flat.const + sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        near = [
            other.const - flat.const
            for other in (
                flat_index(load.buf, load.index)
                for load in walk.nest.loads()
                if isinstance(load, Load) and load.buf.root is buf.root
            )
            if other.linear() == flat.linear()
        ]
        near = [
            distance for distance in near if (flat.const + distance) // step == flat.const // step
        ]
        low, count = (
            place + min(near),
            (walk.transposed_rows - 1) * step + max(near) - min(near) + 1,
        )
        wanted = [divmod(place - low + k * step, lanes) for k in range(walk.transposed_rows)]
        vectors = {
            n: self.strided.load_whole(
                walk, block, buf, flat, low + n * lanes, min(lanes, count - n * lanes), lanes
            )
            for n in sorted({n for n, _ in wanted})
        }
        return self.strided.picked(block, vectors, wanted, lanes)
