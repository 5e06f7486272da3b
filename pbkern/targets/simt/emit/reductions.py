"""Accumulators: what they start with, how two are combined, and how those of a team become one.

Threads of a warp exchange accumulators by a butterfly; warps of a block meet in shared memory. The
order is always the same, so results repeat, and afterwards every thread of the team has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pbkern.lower.math import elementwise
from pbkern.lower.mlir.element_types import BITS, compute_el
from pbkern.lower.mlir.ops import Builder
from pbkern.lower.mlir.ops import Value as Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Reduction
from pbkern.lower.nest.reductions import IDENTITY

from ..device import Device

SEARCHES = ("argmax", "argmin")
# Bytes of shared memory through which warps exchange one accumulator: 8 for each of at most 32
# warps.
SLOT_BYTES = 8


def identity(b: Builder, r: Reduction) -> list[Ssa]:
    """Values that the accumulators of a reduction start with: of searches, (value, index)."""
    if r.op in SEARCHES:
        value = r.args[0].dtype
        return [
            b.c(IDENTITY[r.op](value), compute_el(value)),
            b.c(np.iinfo(r.dtype).max, compute_el(r.dtype)),
        ]
    return [b.c(IDENTITY[r.op](r.dtype), compute_el(r.dtype))]


def width(r: Reduction) -> int:
    """Accumulators of a reduction."""
    return 2 if r.op in SEARCHES else 1


def is_rounded(r: Reduction) -> bool:
    """Whether the order of additions changes the result, so that long chains of them lose."""
    return r.op in ("sum", "dot") and compute_el(r.dtype) in ("f32", "f64")


def add(b: Builder, r: Reduction, accs: Sequence[Ssa], args: Sequence[Ssa]) -> list[Ssa]:
    """Accumulators after one more point."""
    if r.op == "dot":
        fused = b.contract and args[0].el in ("f32", "f64")
        return [
            b.fma(args[0], args[1], accs[0]) if fused else b.add(accs[0], b.mul(args[0], args[1]))
        ]
    return combine(b, r, accs, args)


def combine(b: Builder, r: Reduction, x: Sequence[Ssa], y: Sequence[Ssa]) -> list[Ssa]:
    """Two sets of accumulators of one reduction as one."""
    if r.op in SEARCHES:
        return _better(b, r, x, y)
    (a,), (c,) = x, y
    unsigned, flag = r.dtype.kind == "u", a.el == "i1"
    match r.op:
        case "dot" | "sum":
            return [b.or_(a, c) if flag else b.add(a, c)]
        case "prod":
            return [b.and_(a, c) if flag else b.mul(a, c)]
        case "max":
            return [b.or_(a, c) if flag else b.max(a, c, unsigned=unsigned)]
        case "min":
            return [b.and_(a, c) if flag else b.min(a, c, unsigned=unsigned)]
        case "and":
            return [b.and_(a, c)]
        case "or":
            return [b.or_(a, c)]
        case "xor":
            return [b.xor(a, c)]
    assert r.op == "logaddexp", r.op
    return [_logaddexp(b, r, a, c)]


def _logaddexp(b: Builder, r: Reduction, x: Ssa, y: Ssa) -> Ssa:
    def call(name: str, v: Ssa) -> Ssa:
        return elementwise.RULES.lookup(name)(
            b, elementwise.EqnInfo(name, {"accuracy": None}, (r.dtype,), r.dtype, None), v
        )

    high = b.max(x, y)
    total = b.add(high, call("log1p", call("exp", b.sub(b.min(x, y), high))))
    return b.select(b.cmp("eq", b.abs(high), b.c(np.inf, high.el)), high, total)


def _better(b: Builder, r: Reduction, x: Sequence[Ssa], y: Sequence[Ssa]) -> list[Ssa]:
    """The larger (smaller) value, NaN above all; among equals the smaller index."""
    (v, i), (u, n), unsigned = x, y, r.args[0].dtype.kind == "u"
    a, c = v, u
    if v.el == "i1":
        a, c, unsigned = (
            b.int_resize(v, "i8", unsigned=True),
            b.int_resize(u, "i8", unsigned=True),
            True,
        )
    wins, ties = (
        b.cmp("gt" if r.op == "argmax" else "lt", c, a, unsigned=unsigned),
        b.cmp("eq", c, a),
    )
    if v.el in ("f32", "f64"):
        wins = b.or_(wins, b.and_(b.is_nan(u), b.not_(b.is_nan(v))))
        ties = b.or_(ties, b.and_(b.is_nan(u), b.is_nan(v)))
    wins = b.or_(wins, b.and_(ties, b.cmp("lt", n, i)))
    return [b.select(wins, u, v), b.select(wins, n, i)]


class Team:
    """Combines accumulators of the threads of a team.

    Args:
      slots: name of the shared memory through which warps exchange, a memref of i64.
      barrier: emits one.
    """

    def __init__(
        self,
        text: Text,
        device: Device,
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
        put = lambda text: self.text.put(block, text)  # noqa: E731
        bit = put(f"arith.andi {self.thread}, {self.text.index(distance)} : index")
        lower = Ssa(put(f"arith.cmpi eq, {bit}, {self.text.index(0)} : index"), "i1", 0)
        for r in reductions:
            mine = accs[at : at + width(r)]
            other = [self._exchanged(block, a, distance) for a in mine]
            if r.op in (
                "sum",
                "dot",
                "prod",
                "max",
                "min",
                "and",
                "or",
                "xor",
            ):  # the same in either order
                out += combine(b, r, mine, other)
            else:
                first = [b.select(lower, x, y) for x, y in zip(mine, other)]
                second = [b.select(lower, y, x) for x, y in zip(mine, other)]
                out += combine(b, r, first, second)
            at += width(r)
        return out

    def _exchanged(self, block: Block, v: Ssa, distance: int) -> Ssa:
        b, put = self.text.builder(block, 0), lambda text: self.text.put(block, text)
        words = _words(b, v)
        return _value(
            b, [w._replace(name=self.device.exchange(put, w.name, distance)) for w in words], v.el
        )

    def _across_warps(
        self, block: Block, reductions: Sequence[Reduction], accs: list[Ssa]
    ) -> list[Ssa]:
        """One slot per warp and accumulator; then every thread adds up all of them."""
        self.uses_slots = True
        b, put, t = self.text.builder(block, 0), lambda text: self.text.put(block, text), self.text
        warps, warp = self.threads // self.device.warp, t.index(self.device.warp)
        mine = put(f"arith.divui {self.thread}, {warp} : index")
        lane = put(f"arith.remui {self.thread}, {warp} : index")
        first = put(f"arith.cmpi eq, {lane}, {t.index(0)} : index")

        def place(n: int) -> str:
            return t.index(n) if n else t.index(0)

        def store(inner: Block) -> None:
            one = t.builder(inner, 0)
            for k, a in enumerate(accs):
                at = t.put(inner, f"arith.addi {mine}, {place(k * warps)} : index")
                inner.add(
                    f"memref.store {_word64(one, a).name}, {self.slots}[{at}] : {self.slots_type}"
                )

        t.when(block, first, store)
        self.barrier(block)
        found = [
            [
                _from64(
                    b,
                    Ssa(
                        put(
                            f"memref.load {self.slots}[{place(k * warps + n)}] : {self.slots_type}"
                        ),
                        "i64",
                        0,
                    ),
                    a.el,
                )
                for k, a in enumerate(accs)
            ]
            for n in range(warps)
        ]
        total = found[0]
        for other in found[1:]:
            total = self._combined(b, reductions, total, other)
        self.barrier(block)  # the next reduction stores to the same slots
        return total

    def _combined(
        self, b: Builder, reductions: Sequence[Reduction], x: list[Ssa], y: list[Ssa]
    ) -> list[Ssa]:
        at, out = 0, []
        for r in reductions:
            n = width(r)
            out += combine(b, r, x[at : at + n], y[at : at + n])
            at += n
        return out


def slots(reductions: Sequence[Reduction], warps: int) -> int:
    """Slots that a block's reduction takes."""
    return warps * sum(map(width, reductions))


def _words(b: Builder, v: Ssa) -> list[Ssa]:
    """A value as words of 32 bits."""
    bits = BITS[v.el]
    whole = b.bitcast(v, f"i{bits}") if v.el != "i1" else v
    if bits <= 32:
        return [b.int_resize(whole, "i32", unsigned=True)]
    return [b.int_resize(whole, "i32"), b.int_resize(b.shr(whole, b.c(32, "i64")), "i32")]


def _value(b: Builder, words: list[Ssa], el: str) -> Ssa:
    if BITS[el] <= 32:
        small = b.int_resize(words[0], "i1" if el == "i1" else f"i{BITS[el]}")
        return small if el == "i1" else b.bitcast(small, el)
    low, high = (b.int_resize(w, "i64", unsigned=True) for w in words)
    return b.bitcast(b.or_(low, b.shl(high, b.c(32, "i64"))), el)


def _word64(b: Builder, v: Ssa) -> Ssa:
    return b.int_resize(v if v.el == "i1" else b.bitcast(v, f"i{BITS[v.el]}"), "i64", unsigned=True)


def _from64(b: Builder, v: Ssa, el: str) -> Ssa:
    small = b.int_resize(v, "i1" if el == "i1" else f"i{BITS[el]}")
    return small if el == "i1" else b.bitcast(small, el)
