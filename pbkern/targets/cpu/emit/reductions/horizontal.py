"""The lanes of accumulators whose vectors run along a reduced dimension -> one number per row, or one vector of many rows.

A row by itself takes log2(lanes) steps; each leaves half of the lanes unused, and what follows is
scalar. As many rows as a vector has lanes take turns: every step adds one half of each of two
vectors to the other half,

    a0 a1 a2 a3     b0 b1 b2 b3     ->      a0+a2  b0+b2  a1+a3  b1+b3

until one vector holds all sums in the order of the rows. That is one step per row, and what follows
is computed in vectors.
"""

from __future__ import annotations

import itertools
from functools import partial

from pbkern.lower.mlir.element_types import BITS, int_el
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Reduction
from pbkern.lower.nest.reductions import combine, identity, is_rounded_sum, row_of, width
from pbkern.targets.cpu.emit.addressing import NestWalk

# Bits within which instructions interleave elements.
BLOCK_BITS = 128


class HorizontalReductions:
    """Owns what becomes of the lanes of accumulators."""

    def __init__(self, text: Text):
        self.text = text

    def fold(
        self, walk: NestWalk, block: Block, parts: list[list[Ssa]], *, exact: bool
    ) -> list[Ssa]:
        """Accumulators of several vectors -> one scalar per accumulator. `exact`: also of what their sums lose."""
        b, at, out = self.text.builder(block, walk.sched.lanes), 0, []
        for reduction in walk.nest.reductions:
            count = width(reduction)
            mine = [part[at : at + count] for part in parts]
            if exact and is_rounded_sum(reduction):
                out.append(self._fold_exactly(block, [vector for (vector,) in mine]))
                at += count
                continue
            merged_parts = by_halves(mine, partial(combine, b, reduction))
            out += (
                self._reduce_lanes(block, reduction, merged_parts)
                if count == 1
                else self._reduce_lanes_arg(block, reduction, merged_parts)
            )
            at += count
        return out

    def _fold_exactly(self, block: Block, parts: list[Ssa]) -> Ssa:
        """The sum of the lanes of vectors, and what is lost by adding them up."""
        b = self.text.builder(block, parts[0].lanes)
        pair = by_halves(
            [(part, b.c(0, part.el)) for part in parts], lambda x, y: _with_lost(b, x, y)
        )
        half = parts[0].lanes // 2
        while half:
            pair = _with_lost(b, pair, tuple(self._rotated(block, vector, half) for vector in pair))
            half //= 2
        return b.first_lane(whole(b, *pair))

    def _rotated(self, block: Block, value: Ssa, by: int) -> Ssa:
        return self._shuffled(
            block, value, value, [(k + by) % value.lanes for k in range(value.lanes)]
        )

    def reduced_rows(self, walk: NestWalk, block: Block, rows: list[list[Ssa]]) -> list[Ssa]:
        """Accumulators of up to as many rows as a vector has lanes -> a vector of each, a row in every lane."""
        lanes, at, out = walk.sched.lanes, 0, []
        b = self.text.builder(block, lanes)
        for reduction in walk.nest.reductions:
            count = width(reduction)
            mine = [accs[at : at + count] for accs in rows]
            mine += [identity(b, reduction)] * (lanes - len(mine))
            at += count
            if reduction.op in ("max", "min") and mine[0][0].el in ("f32", "f64"):
                ordered = [[_ordered(b, reduction.op, vector)] for (vector,) in mine]
                (best,) = self._permuted_together(
                    block, ordered, lambda x, y, fold=reduction: [getattr(b, fold.op)(x[0], y[0])]
                )
                out.append(b.bitcast(_sign_magnitude(b, best), mine[0][0].el))
                continue
            out += self._permuted_together(block, mine, partial(combine, b, reduction))
        return out

    def _permuted_together(self, block: Block, rows: list[list[Ssa]], join) -> list[Ssa]:
        """Joins as many vectors as each has lanes to one, whose lane k has all of row k.

        `join` adds up accumulators.
        """
        lanes, done = rows[0][0].lanes, 1
        while done < lanes:
            low, high = butterfly_halves(lanes, done, BLOCK_BITS // BITS[rows[0][0].el])
            rows = [
                join(
                    *(
                        [self._shuffled(block, x, y, order) for x, y in zip(row, other)]
                        for order in (low, high)
                    )
                )
                for row, other in zip(rows[::2], rows[1::2])
            ]
            done *= 2
        return rows[0]

    def _shuffled(self, block: Block, value: Ssa, y: Ssa, order: list[int]) -> Ssa:
        return self.text.builder(block, value.lanes).shuffle(value, y, order)

    def _reduce_lanes(self, block: Block, reduction: Reduction, x: list[Ssa]) -> list[Ssa]:
        value, sign = x[0], "u" if reduction.dtype.kind == "u" else "s"
        if reduction.op in ("max", "min") and value.el in ("f32", "f64"):
            return [self._extreme_of_lanes(block, reduction.op, value)]
        if reduction.op == "maxnum":
            return [self._greatest_number(block, reduction, value)]
        kind = row_of(reduction).across
        assert kind is not None, reduction.op
        return [self._reduced(block, kind.format(sign=sign), value)]

    def _reduced(self, block: Block, kind: str, value: Ssa) -> Ssa:
        scalar = value._replace(lanes=0)
        reduced = self.text.put(
            block,
            "vector.reduction",
            (value.name,),
            f"{value.type} into {scalar.type}",
            f" <{kind}>, %s",
        )
        return scalar._replace(name=reduced)

    def _extreme_of_lanes(self, block: Block, op: str, value: Ssa) -> Ssa:
        """The extreme of the lanes, found among integers in the order of the floats.

        NaN is behind all. A comparison of floats takes four instructions each time, for NaN and
        zeros of both signs.
        """
        one = self.text.builder(block, 0)
        best = self._reduced(
            block, f"{op}si", _ordered(self.text.builder(block, value.lanes), op, value)
        )
        return one.bitcast(_sign_magnitude(one, best), value.el)

    def _greatest_number(self, block: Block, reduction: Reduction, value: Ssa) -> Ssa:
        """The greatest of lanes that hold numbers, by comparing halves with each other.

        LLVM makes three instructions for each lane of vector.reduction <maxnumf> on x86, all of which wait for one another:
        a pass over 8192 rows of 32,000 in strips takes 50.8 ms with them, 45.6 without. Zen 4, 27 November 2026
        """
        b, half = self.text.builder(block, value.lanes), value.lanes // 2
        while half:
            (value,) = combine(b, reduction, [value], [self._rotated(block, value, half)])
            half //= 2
        return b.first_lane(value)

    def _reduce_lanes_arg(self, block: Block, reduction: Reduction, x: list[Ssa]) -> list[Ssa]:
        """The best of the lanes, and the smallest of the indices that have it."""
        b, (value, i) = self.text.builder(block, x[0].lanes), x
        op, sign, el = (
            reduction.op.removeprefix("arg"),
            "u" if reduction.args[0].dtype.kind == "u" else "s",
            value.el,
        )
        if el in ("f32", "f64"):
            value = _ordered(b, op, b.add(value, b.c(0, el)))  # zeros of both signs are equal
        elif el == "i1":
            value, sign = b.int_resize(value, "i8", unsigned=True), "u"
        best = self._reduced(block, f"{op}{sign}i", value)
        none = b.c((1 << (BITS[i.el] - 1)) - 1, i.el)
        index = self._reduced(
            block, "minsi", b.select(b.cmp("eq", value, b.broadcast(best)), i, none)
        )
        one = self.text.builder(block, 0)
        if el in ("f32", "f64"):
            return [one.bitcast(_sign_magnitude(one, best), el), index]
        return [one.int_resize(best, el), index]


def butterfly_halves(lanes: int, done: int, block: int) -> tuple[list[int], list[int]]:
    """Lanes of two vectors that are to be added to one another, those of the second vector counted from `lanes` on.

    `done`: how many rows each vector holds side by side. Elements are interleaved within blocks of
    `block` lanes first, which takes an instruction each; then whole blocks change places.
    """
    block = min(block, lanes)
    if done < block:
        first = [at + k * done for at in range(0, lanes, block) for k in range(block // 2 // done)]
        low = [source + at + k for at in first for source in (0, lanes) for k in range(done)]
        return low, [lane + block // 2 for lane in low]
    low = [
        source + at + k
        for source in (0, lanes)
        for at in range(0, lanes, 2 * block)
        for k in range(block)
    ]
    return low, [lane + block for lane in low]


def _sign_magnitude(b: Builder, value: Ssa) -> Ssa:
    """Sign and magnitude to two's complement, and back."""
    return b.xor(
        value,
        b.and_(
            b.sar(value, b.c(BITS[value.el] - 1, value.el)),
            b.c((1 << (BITS[value.el] - 1)) - 1, value.el),
        ),
    )


def _ordered(b: Builder, op: str, value: Ssa) -> Ssa:
    """Integers in the order of floats, -0 before 0; NaN wins, whether `op` is max or min."""
    el = int_el(value.el)
    most = (1 << (BITS[el] - 1)) - 1
    return b.select(
        b.is_nan(value),
        b.c(most if op == "max" else ~most, el),
        _sign_magnitude(b, b.bitcast(value, el)),
    )


def by_halves(parts: list, join):
    """All parts joined in pairs, pairs of pairs and so on."""
    while len(parts) > 1:
        pairs = itertools.zip_longest(parts[::2], parts[1::2])
        parts = [x if y is None else join(x, y) for x, y in pairs]
    return parts[0]


def lost_in(b: Builder, value: Ssa, y: Ssa, total: Ssa) -> Ssa:
    """Error of rounding total = value + y. Source: Knuth, TAOCP 2, 4.2.2, theorem B."""
    added = b.sub(total, value)
    return b.add(b.sub(value, b.sub(total, added)), b.sub(y, added))


def _with_lost(b: Builder, x: tuple[Ssa, ...], y: tuple[Ssa, ...]) -> tuple[Ssa, Ssa]:
    """(sum, what it lacks) of two such pairs."""
    total = b.add(x[0], y[0])
    return total, b.add(b.add(x[1], y[1]), lost_in(b, x[0], y[0], total))


def whole(b: Builder, total: Ssa, lost: Ssa) -> Ssa:
    """The sum and what it lacks; of infinite sums that is no number."""
    return b.select(b.cmp("eq", lost, lost), b.add(total, lost), total)
