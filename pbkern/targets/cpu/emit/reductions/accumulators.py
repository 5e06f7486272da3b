"""Reductions of a nest: accumulators in registers, how they are added to, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest import reductions
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, Load, Nest, Reduction
from pbkern.lower.nest.reductions import identities, is_rounded_sum, per_accumulator
from pbkern.targets.cpu.emit.addressing import Addressing, NestWalk, Point, Tail
from pbkern.targets.cpu.emit.expressions import ExpressionValues
from pbkern.targets.cpu.emit.interleave_chains import interleave_points
from pbkern.targets.cpu.emit.promoted_loops import PromotedLoops
from pbkern.targets.cpu.emit.stores import Stores
from pbkern.targets.cpu.schedule.register_tiles.prices import LONGEST_CHAIN_OF_FEW_PRODUCTS
from pbkern.targets.cpu.schedule.vector_dimension import is_long_point

from .cumulative import Cumulative
from .horizontal import by_halves, lost_in, whole

# Sums of rows of more additions to one accumulator keep what rounding loses where runs of them are
# joined.
LONG_ROW = 64
# The longest chains in a run of sums that keep what rounding loses. A join of runs costs 7 operations: as much as the
# additions, with one trip of 8 vectors.
RUN_OF_EXACT_SUMS = 2
# Most additions to one accumulator in a row. A new run starts with a new accumulator. Source: not
# recorded.
LONGEST_CHAIN = 8
# Most additions to one accumulator in a row, of long points: a new run costs them the registers
# that hold their constants.
LONGEST_CHAIN_OF_LONG_POINTS = 64
# Most additions to one accumulator in a row, of sums that are stored in 16 bits: they lose less than 2**-17 of what the
# terms add up to, and rounding the result at least 2**-12.
LONGEST_CHAIN_OF_NARROW_RESULTS = 64
# Most additions to one accumulator in a row, of products whose accumulators fill more than half of
# the registers: a new run costs them memory for accumulators.
LONGEST_CHAIN_OF_PRODUCTS = 640


@dataclass(frozen=True)
class _LongSum:
    """A sum of many terms, as `Reducer.accumulate` is asked for it.

    A local function that calls itself would do as well, but is a cycle: only the garbage collector frees it, with all text.

    Attributes:
      dim, step: the loop's symbol, and how far a trip moves it.
      terms: numbers that a trip adds to every accumulator.
      limit: additions that follow one another at most; 0: any number.
      fill: writes a trip.
    """

    walk: NestWalk
    dim: str
    step: int
    terms: int
    limit: int
    fill: Callable[[Block, list[Ssa]], list[Ssa]]


class Reducer:
    """Owns how accumulators are added to: one step of a reduction, and loops of steps in runs."""

    def __init__(
        self,
        places: Addressing,
        promoted: PromotedLoops,
        expressions: ExpressionValues,
        stores: Stores,
    ):
        self.text, self.places, self.promoted = places.text, places, promoted
        self.expressions, self.stores = expressions, stores
        self.cumulative = Cumulative(places.text)

    def accumulate(
        self,
        walk: NestWalk,
        block: Block,
        loop: tuple[str, int, int, int],
        terms: int,
        fill,
        accs: list[Ssa],
    ) -> list[Ssa]:
        """A loop (symbol, low, high, step); each trip adds `terms` numbers, one after the other, to every accumulator.

        The rounding error of a sum grows with the length of its chain of additions. Where floats
        are summed, accumulators therefore start again with every run of a few additions, and what
        they held is added to others; those are runs of runs where there are many. Source: Higham
        2002, Accuracy and Stability of Numerical Algorithms, section 4.2.
        """
        dim, low, high, step = loop
        limit = self._longest_chain(walk)
        trips = -(-(high - low) // step)
        if not trips:
            return accs
        if terms == 1 and self.cumulative.applies(walk, trips):
            return self.cumulative.accumulate(walk, block, loop, fill, accs)
        if limit == LONGEST_CHAIN_OF_PRODUCTS and trips * terms > limit:
            return self._accumulate_in_memory(
                walk, block, loop, trips, _run_length(trips, terms, limit), fill, accs
            )

        if self.is_exact(walk, trips * terms):
            return self._accumulate_exactly(walk, block, loop, max(limit // terms, 1), fill, accs)

        long_sum = _LongSum(walk, dim, step, terms, limit, fill)
        return self._sweep(long_sum, block, 0, low, trips, accs)

    def _sweep(
        self,
        long_sum: _LongSum,
        scope: Block,
        base: str | int,
        first: int,
        trips: int,
        accs: list[Ssa],
    ) -> list[Ssa]:
        """Adds up `trips` terms from `base` + `first` on, in runs of runs."""
        walk, step = long_sum.walk, long_sum.step
        run = _run_length(trips, long_sum.terms, long_sum.limit) if long_sum.limit else trips

        def one(inner: Block, accs: list[Ssa]) -> list[Ssa]:
            at = self.text.add_indices(inner, base, inner.values[f"{long_sum.dim}'"])
            if run == trips:
                inner.values[long_sum.dim] = at
                return long_sum.fill(inner, accs)
            restarted = self._restarted(walk, inner, accs)
            return self._joined(
                walk, inner, accs, self._sweep(long_sum, inner, at, 0, run, restarted)
            )

        full = trips // run * run
        if run < trips <= 2 * run and accs == self._restarted(
            walk, scope, accs
        ):  # two runs: nothing is added to the first
            accs, full = self._sweep(long_sum, scope, base, first, run, accs), run
        else:
            length = 1 if run == trips else run
            loop = (
                self.text.unrolled
                if walk.sched.straight
                else partial(self.text.loop, unrolls=not _spills_unrolled(walk, long_sum.dim))
            )
            accs = loop(
                scope, f"{long_sum.dim}'", first, first + full * step, length * step, one, accs
            )
        if full == trips:
            return accs
        restarted = self._restarted(walk, scope, accs)
        rest = self._sweep(long_sum, scope, base, first + full * step, trips - full, restarted)
        return self._joined(walk, scope, accs, rest)

    def _accumulate_in_memory(
        self,
        walk: NestWalk,
        block: Block,
        loop: tuple[str, int, int, int],
        trips: int,
        run: int,
        fill,
        accs: list[Ssa],
    ) -> list[Ssa]:
        """Keeps the sums of runs of `run` trips in memory: two sets of many accumulators have no room in registers."""
        dim, low, _, step = loop
        kind = f"memref<{len(accs)}x{accs[0].type}>"
        sums = self.text.local(kind)
        at = [(sums, self.text.index(k)) for k in range(len(accs))]

        def load(scope: Block) -> list[Ssa]:
            return [
                acc._replace(name=self.text.put(scope, "memref.load", place, kind))
                for acc, place in zip(accs, at)
            ]

        def store(scope: Block, values: list[Ssa]) -> None:
            for value, place in zip(values, at):
                scope.add("memref.store", (value.name, *place), kind)

        def whole(length: int):
            def one(outer: Block, _) -> list:
                def trip(inner: Block, carried: list[Ssa]) -> list[Ssa]:
                    inner.values[dim] = self.text.add_indices(
                        inner, outer.values[f"{dim}'"], inner.values[f"{dim}''"]
                    )
                    return fill(inner, carried)

                before = load(outer)
                new = self.text.loop(
                    outer,
                    f"{dim}''",
                    0,
                    length * step,
                    step,
                    trip,
                    self._restarted(walk, outer, before),
                    unrolls=not _spills_unrolled(walk, dim),
                )
                store(outer, self._joined(walk, outer, load(outer), new))
                return []

            return one

        store(block, accs)
        rest = low + trips // run * run * step
        self.text.loop(block, f"{dim}'", low, rest, run * step, whole(run))
        if trips % run:
            self.text.loop(block, f"{dim}'", rest, rest + 1, 1, whole(trips % run))
        return load(block)

    def _accumulate_exactly(
        self,
        walk: NestWalk,
        block: Block,
        loop: tuple[str, int, int, int],
        run: int,
        fill,
        accs: list[Ssa],
    ) -> list[Ssa]:
        """Sums a row in runs of `run` trips; what is lost where they are joined is added at the end.

        A step's vectors beside each other are added to one another first: runs have fewer trips for
        as many additions.
        """
        dim, low, high, step = loop
        trips, lanes = -(-(high - low) // step), accs[0].lanes
        beside = step // lanes if dim == walk.sched.vector else 1
        run = max(RUN_OF_EXACT_SUMS * run // beside, 1)
        rounded, width = (
            per_accumulator(walk.nest.reductions, is_rounded_sum),
            len(per_accumulator(walk.nest.reductions, is_rounded_sum)),
        )
        # Of sums the first of `beside` accumulators holds them all; `exact`: it, and those of other
        # reductions.
        exact = [k for k in range(len(accs)) if not rounded[k % width] or k // width % beside == 0]
        sums = [slot for slot in exact if rounded[slot % width]]

        def joined(scope: Block, carried: list[Ssa], first: str | int, trips: int) -> list[Ssa]:
            def trip(inner: Block, values: list[Ssa]) -> list[Ssa]:
                inner.values[dim] = self.text.add_indices(inner, first, inner.values[f"{dim}''"])
                return fill(inner, values)

            op = self.text.builder(scope, lanes)
            before, lost = dict(zip(exact, carried)), dict(zip(sums, carried[len(exact) :]))
            start = [
                op.c(-0.0, acc.el) if rounded[k % width] else before[k]
                for k, acc in enumerate(accs)
            ]
            new = self.text.loop(scope, f"{dim}''", 0, trips * step, step, trip, start)
            after = {slot: new[slot] for slot in exact}
            for sum_ in sums:
                added = by_halves([new[sum_ + vector * width] for vector in range(beside)], op.add)
                after[sum_] = op.add(before[sum_], added)
                lost[sum_] = op.add(lost[sum_], lost_in(op, before[sum_], added, after[sum_]))
            return [*after.values(), *lost.values()]

        b = self.text.builder(block, lanes)
        carried = [accs[slot] for slot in exact] + [b.c(0, accs[sum_].el) for sum_ in sums]
        full = low + trips // run * run * step
        carried = self.text.loop(
            block,
            f"{dim}'",
            low,
            full,
            run * step,
            lambda scope, values: joined(scope, values, scope.values[f"{dim}'"], run),
            carried,
        )
        if trips % run:
            carried = joined(block, carried, full, trips % run)
        b = self.text.builder(block, lanes)
        after, lost = dict(zip(exact, carried)), dict(zip(sums, carried[len(exact) :]))
        after |= {sum_: whole(b, after[sum_], lost[sum_]) for sum_ in sums}
        return [after.get(k, acc) for k, acc in enumerate(accs)]

    def _longest_chain(self, walk: NestWalk) -> int:
        """Additions to one accumulator in a row; 0 for any number of them.

        The same for all points of a nest, also those of smaller tiles at its ends: programs whose
        blocks overlap must leave the same bits, and there a point is in full tiles of one and at
        the end of the other.
        """
        if (
            not self.text.contract
            or walk.nest.ordered
            or not any(map(is_rounded_sum, walk.nest.reductions))
        ):
            return 0
        if any(reduction.is_product for reduction in walk.nest.reductions):
            many = _fills_registers(walk)
            return LONGEST_CHAIN_OF_PRODUCTS if many else LONGEST_CHAIN_OF_FEW_PRODUCTS
        if is_long_point(walk.nest):
            return LONGEST_CHAIN_OF_LONG_POINTS
        return LONGEST_CHAIN_OF_NARROW_RESULTS if _is_stored_narrow(walk.nest) else LONGEST_CHAIN

    def is_exact(self, walk: NestWalk, additions: int) -> bool:
        """Whether sums along vectors, of so many additions to each lane, keep what rounding loses.

        Where one run holds them all, nothing is lost between runs.
        """
        along = walk.sched.vector in walk.nest.rdims and not walk.sched.straight
        chain = self._longest_chain(walk)
        return (
            along
            and not _is_stored_narrow(walk.nest)
            and chain > 0
            and additions > max(LONG_ROW, RUN_OF_EXACT_SUMS * chain)
        )

    def _restarted(self, walk: NestWalk, block: Block, accs: list[Ssa]) -> list[Ssa]:
        """Accumulators of floating-point sums at zero, the others as they are."""
        zeros = identities(self.text.builder(block, accs[0].lanes), walk.nest.reductions)
        rounded = per_accumulator(walk.nest.reductions, is_rounded_sum)
        return [
            zeros[k % len(zeros)] if rounded[k % len(zeros)] else acc for k, acc in enumerate(accs)
        ]

    def _joined(self, walk: NestWalk, block: Block, before: list[Ssa], run: list[Ssa]) -> list[Ssa]:
        """Accumulators that hold what they held before a run and what they were given in it."""
        b, rounded = (
            self.text.builder(block, before[0].lanes),
            per_accumulator(walk.nest.reductions, is_rounded_sum),
        )
        return [
            b.add(x, y) if rounded[k % len(rounded)] else y
            for k, (x, y) in enumerate(zip(before, run))
        ]

    def step(
        self, walk: NestWalk, block: Block, points: list[Point], tail: Tail | None, accs: list[Ssa]
    ) -> list[Ssa]:
        """One point of every reduction per tile point; returns the next accumulators."""
        width, out = len(accs) // len(points), []
        lanes = walk.sched.lanes
        b = self.text.builder(block, lanes)
        masked = tail is not None and walk.sched.vector in walk.nest.rdims

        def point(number: int, place: Point) -> None:
            mine, at = accs[number * width : (number + 1) * width], 0
            live = tail and tail.of(place, walk.sched.vector)
            for reduction in walk.nest.reductions:
                args = [
                    b.broadcast(self.expressions.value(walk, block, arg, place, live), lanes)
                    for arg in reduction.args
                ]
                count = reductions.width(reduction)
                old = mine[at : at + count]
                new = reductions.add(b, reduction, old, args)
                if tail is not None and masked and not self._adds_zeros(walk, reduction):
                    mask = self.places.tail_mask(tail, lanes)
                    new = [b.select(mask, n, prior) for n, prior in zip(new, old)]
                out.extend(new)
                at += count

        interleave_points(walk, block, points, point)
        if any(store.inner for store in walk.nest.stores):
            self.stores.store_points(
                walk,
                block,
                points,
                tail,
                self.cumulative.with_before(walk, b, out) if walk.nest.ordered else [],
                inner=True,
            )
        return out

    def _adds_zeros(self, walk: NestWalk, reduction: Reduction) -> bool:
        """Whether lanes behind the last element, which loads fill with zeros, leave an accumulator as it is."""

        def zero(expr: Expr) -> bool:
            if not isinstance(expr, Load) or self.promoted.keeps(expr.buf):
                return False
            return flat_coefficient(expr.buf, expr.index, walk.sched.along) == 1

        return (
            (reduction.op == "sum" or reduction.is_product)
            and reduction.dtype.kind != "b"
            and all(map(zero, reduction.args))
        )


def _fills_registers(walk: NestWalk) -> bool:
    """Whether accumulators of products fill more than half of the registers."""
    return (
        any(reduction.is_product for reduction in walk.nest.reductions)
        and 2 * walk.sched.tile * len(walk.nest.reductions) > walk.sched.registers
    )


def _spills_unrolled(walk: NestWalk, dim: str) -> bool:
    """Whether LLVM, which optimises functions with scalar loops beside, would spill accumulators for steps along `dim`.

    It unrolls loops over windows and loads once what several of their steps share: a convolution of 4 x 64 x 28 x 28 by
    3 x 3 takes 5.5 ms so, 2.4 with its loops as they are (Zen 4, 16 registers). Other loops stay as LLVM makes them.
    """
    loads = (
        arg for reduction in walk.nest.reductions for arg in reduction.args if isinstance(arg, Load)
    )
    return _fills_registers(walk) and any(
        dim in position.symbols and not position.symbols.isdisjoint(walk.sched.jam)
        for load in loads
        for position in load.index
    )


def _is_stored_narrow(nest: Nest) -> bool:
    """Whether all results of a nest are stored as floats of 16 bits."""
    return all(
        store.value.dtype.itemsize == 2 and store.value.dtype.kind not in "iub"
        for store in nest.stores
    )


def _run_length(trips: int, terms: int, limit: int) -> int:
    """Trips of one run: all, or a part of them such that sums of runs, runs of runs and so on have `limit` terms at most.

    Runs of equal length are preferred.
    """
    run = max(limit // terms, 1)
    if trips <= run:
        return trips
    while run * limit < trips:
        run *= limit
    parts = -(-trips // run)
    parts = next((count for count in range(parts, 2 * parts) if trips % count == 0), parts)
    return -(-trips // parts)
