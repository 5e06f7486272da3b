"""Strided loads and stores as whole vectors and shuffles.

They are far cheaper than gathers and scatters (targets/cpu/schedule/interleaved_access.py).
"""

from __future__ import annotations

from pbkern.core.affine import Affine
from pbkern.lower.mlir.element_types import BITS, storage_el
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.ir import Buf
from pbkern.targets.cpu.emit.addressing import Addressing, NestWalk, Tail, memref
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.schedule.interleaved_access import Run

Lane = tuple[int, int]  # (number of a vector, lane in it)


class StridedAccesses:
    """Owns accesses at strides: whole vectors, shuffled."""

    def __init__(self, places: Addressing, vectors: Vectors):
        self.text, self.places, self.vectors = places.text, places, vectors

    def load(
        self,
        walk: NestWalk,
        block: Block,
        buf: Buf,
        flat: Affine,
        place: int,
        tail: Tail | None,
        lanes: int,
    ) -> Ssa:
        """The elements at `place` and every step behind it.

        Reads nothing outside the run's own elements.
        """
        step, live = flat.coefficient(walk.sched.vector), tail.live if tail else lanes
        low, high = (
            (place, place)
            if buf.root in walk.written
            else walk.runs[buf.root, flat.linear()][place]
        )
        wanted = [place + k * step for k in range(live)]
        return self.load_places(
            walk,
            block,
            buf,
            flat,
            (low - place + min(wanted), high - place + max(wanted)),
            wanted,
            lanes,
        )

    def load_places(
        self,
        walk: NestWalk,
        block: Block,
        buf: Buf,
        flat: Affine,
        run: Run,
        wanted: list[int],
        lanes: int,
    ) -> Ssa:
        """The elements at the wanted places, of whole vectors that cover a run of places."""
        low, count = run[0], run[1] - run[0] + 1
        # As wide as a register; side by side but for the last, which ends at the last element.
        width = max(
            lanes,
            min(self.vectors.bits // BITS[storage_el(buf.dtype)], 1 << count.bit_length() - 1),
        )
        starts = [min(at, max(count - width, 0)) for at in range(0, count, width)]

        def lane(at: int) -> Lane:
            vector = min(at // width, len(starts) - 1)
            return vector, at - starts[vector]

        chosen = [lane(place - low) for place in wanted]
        vectors = {
            n: self.load_whole(walk, block, buf, flat, low + starts[n], min(count, width), width)
            for n, _ in chosen
        }
        return self.picked(block, vectors, chosen, lanes)

    def load_whole(
        self,
        walk: NestWalk,
        block: Block,
        buf: Buf,
        flat: Affine,
        place: int,
        live: int,
        lanes: int,
    ) -> Ssa:
        key = ("strided", buf.root, flat.linear(), place, live)
        if key not in block.memo or buf.root in walk.written:
            el, mem_type = storage_el(buf.dtype), memref(buf)
            _, address = self.text.affine(block, flat, place - flat.const)
            mask = self.places.tail_mask(Tail(live), lanes) if live < lanes else None
            at = (buf.root.name, address)
            block.memo[key] = self.text.load_vector(block, at, mem_type, el, lanes, mask)
        return block.memo[key]

    def picked(self, block: Block, vectors: dict[int, Ssa], wanted: list[Lane], lanes: int) -> Ssa:
        """One vector of chosen lanes of others; those behind the last chosen one are unspecified."""
        used = sorted({vector for vector, _ in wanted})
        vector, have = vectors[used[0]], {used[0]}
        if (
            len(used) == 1
            and vector.lanes == lanes
            and all(k == lane for k, (_, lane) in enumerate(wanted))
        ):
            return vector
        for other in used[1:] or used:
            # Chosen lanes of the first vector are where they were until the first shuffle moves
            # them.
            order = [
                vector.lanes + lane
                if source == other
                else (lane if len(have) == 1 else k)
                if source in have
                else 0
                for k, (source, lane) in enumerate(wanted)
            ]
            size = lanes if other == used[-1] else vector.lanes
            order += [0] * (size - len(order))
            vector = self.text.builder(block, lanes).shuffle(vector, vectors[other], order)
            have.add(other)
        return vector

    def interlaced(self, block: Block, parts: list[Ssa], count: int) -> list[Ssa]:
        """Vectors of the first elements of all parts, the second ones of all parts, ...: so many elements in all."""
        lanes, step, every = parts[0].lanes, len(parts), dict(enumerate(parts))
        wanted = [divmod(k, step)[::-1] for k in range(count)]
        return [
            self.picked(block, every, wanted[k : k + lanes], lanes) for k in range(0, count, lanes)
        ]

    def store(
        self, block: Block, buf: Buf, flat: Affine, place: int, vectors: list[Ssa], count: int
    ) -> None:
        """Stores the first `count` elements of vectors side by side."""
        for start, vector in zip(range(0, count, vectors[0].lanes), vectors):
            _, address = self.text.affine(block, flat, place + start - flat.const)
            cut = start + vector.lanes > count
            mask = self.places.tail_mask(Tail(count - start), vector.lanes) if cut else None
            self.text.store_vector(block, vector, (buf.root.name, address), memref(buf), mask)
