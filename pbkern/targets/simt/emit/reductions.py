"""Accumulators of the threads of a team become one.

Threads of a warp exchange accumulators by a butterfly; warps of a block meet in shared memory. The
order is always the same, so results repeat, and afterwards every thread of the team has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pbkern.lower.mlir.element_types import BITS
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Reduction
from pbkern.lower.nest.reductions import combine, row_of, width
from pbkern.targets.simt.device import VendorCode

# Bytes of shared memory through which warps exchange one accumulator: 8 for each of at most 32
# warps.
SLOT_BYTES = 8


class Team:
    """Combines accumulators of the threads of a team.

    Args:
      slots: name of the shared memory through which warps exchange, a memref of i64.
      barrier: emits one.
    """

    def __init__(
        self,
        text: Text,
        device: VendorCode,
        threads: int,
        thread: str,
        slots: str,
        slots_type: str,
        barrier: Callable[[Block], None],
    ):
        self.text, self.device, self.threads, self.thread = text, device, threads, thread
        self.slots, self.slots_type, self.barrier = slots, slots_type, barrier
        self.uses_slots = False

    def joined(
        self, block: Block, reductions: Sequence[Reduction], accs: Sequence[Ssa], team: int
    ) -> list[Ssa]:
        """Joins the values of all threads of each team, in every one of them."""
        distance = 1
        while distance < min(team, self.device.warp):
            accs = self._butterfly(block, reductions, accs, distance)
            distance *= 2
        return (
            self._across_warps(block, reductions, list(accs))
            if team > self.device.warp
            else list(accs)
        )

    def _butterfly(
        self, block: Block, reductions: Sequence[Reduction], accs: Sequence[Ssa], distance: int
    ) -> list[Ssa]:
        """Combines with the thread whose number differs in one bit: always the lower one's accumulators first."""
        b, at, out = self.text.builder(block, 0), 0, []
        put = partial(self.text.put, block)
        bit = put("arith.andi", (self.thread, self.text.index(distance)), "index")
        lower = Ssa(put("arith.cmpi", (bit, self.text.index(0)), "index", " eq, %s, %s"), "i1", 0)
        for reduction in reductions:
            mine = accs[at : at + width(reduction)]
            other = [self._exchanged(block, acc, distance) for acc in mine]
            if row_of(reduction).is_symmetric and not reduction.is_search:
                out += combine(b, reduction, mine, other)
            else:
                first = [b.select(lower, x, y) for x, y in zip(mine, other)]
                second = [b.select(lower, y, x) for x, y in zip(mine, other)]
                out += combine(b, reduction, first, second)
            at += width(reduction)
        return out

    def _exchanged(self, block: Block, value: Ssa, distance: int) -> Ssa:
        b, put = self.text.builder(block, 0), partial(self.text.put, block)
        words = _words(b, value)
        return _value(
            b,
            [word._replace(name=self.device.exchange(put, word.name, distance)) for word in words],
            value.el,
        )

    def _across_warps(
        self, block: Block, reductions: Sequence[Reduction], accs: list[Ssa]
    ) -> list[Ssa]:
        """One slot per warp and accumulator; then every thread adds up all of them."""
        self.uses_slots = True
        b, put, mlir_text = (
            self.text.builder(block, 0),
            partial(self.text.put, block),
            self.text,
        )
        warps, warp = self.threads // self.device.warp, mlir_text.index(self.device.warp)
        mine = put("arith.divui", (self.thread, warp), "index")
        lane = put("arith.remui", (self.thread, warp), "index")
        first = put("arith.cmpi", (lane, mlir_text.index(0)), "index", " eq, %s, %s")

        def place(number: int) -> str:
            return mlir_text.index(number) if number else mlir_text.index(0)

        def store(inner: Block) -> None:
            one = mlir_text.builder(inner, 0)
            for k, acc in enumerate(accs):
                at = mlir_text.put(inner, "arith.addi", (mine, place(k * warps)), "index")
                inner.add("memref.store", (_word64(one, acc).name, self.slots, at), self.slots_type)

        mlir_text.when(block, first, store)
        self.barrier(block)
        partials = [
            [
                _from64(
                    b,
                    Ssa(
                        put("memref.load", (self.slots, place(k * warps + n)), self.slots_type),
                        "i64",
                        0,
                    ),
                    acc.el,
                )
                for k, acc in enumerate(accs)
            ]
            for n in range(warps)
        ]
        total = partials[0]
        for other in partials[1:]:
            total = self._combined(b, reductions, total, other)
        self.barrier(block)  # the next reduction stores to the same slots
        return total

    def _combined(
        self, b: Builder, reductions: Sequence[Reduction], x: list[Ssa], y: list[Ssa]
    ) -> list[Ssa]:
        at, out = 0, []
        for reduction in reductions:
            count = width(reduction)
            out += combine(b, reduction, x[at : at + count], y[at : at + count])
            at += count
        return out


def slots(reductions: Sequence[Reduction], warps: int) -> int:
    """Slots that a block's reduction takes."""
    return warps * sum(map(width, reductions))


def _words(b: Builder, value: Ssa) -> list[Ssa]:
    """A value as words of 32 bits."""
    bits = BITS[value.el]
    whole = b.bitcast(value, f"i{bits}") if value.el != "i1" else value
    if bits <= 32:
        return [b.int_resize(whole, "i32", unsigned=True)]
    return [b.int_resize(whole, "i32"), b.int_resize(b.shr(whole, b.c(32, "i64")), "i32")]


def _value(b: Builder, words: list[Ssa], el: str) -> Ssa:
    if BITS[el] <= 32:
        small = b.int_resize(words[0], "i1" if el == "i1" else f"i{BITS[el]}")
        return small if el == "i1" else b.bitcast(small, el)
    low, high = (b.int_resize(word, "i64", unsigned=True) for word in words)
    return b.bitcast(b.or_(low, b.shl(high, b.c(32, "i64"))), el)


def _word64(b: Builder, value: Ssa) -> Ssa:
    return b.int_resize(
        value if value.el == "i1" else b.bitcast(value, f"i{BITS[value.el]}"), "i64", unsigned=True
    )


def _from64(b: Builder, value: Ssa, el: str) -> Ssa:
    small = b.int_resize(value, "i1" if el == "i1" else f"i{BITS[el]}")
    return small if el == "i1" else b.bitcast(small, el)
