"""Operations of several points of a tile, one point after the other -> the same operations interleaved.

    a1; a2; a3; b1; b2; b3   ->   a1; b1; a2; b2; a3; b3

Where their vectors are more than the registers hold, runs of operations take turns that leave one vector of a point to be read:

    a1; .. a9; a10; .. a18; b1; .. b9; b10; .. b18   ->   a1; .. a9; b1; .. b9; a10; .. a18; b10; .. b18

A long point alone may consist of several chains, whose operations take turns too, each as soon as it could begin.

A point is often one long chain of dependent operations, and a processor looks only some sixty
vector operations ahead. LLVM keeps the order that it is given. Measured on Zen 4 with 4 points:
Newton's iterations 1.35 times as fast, Black-Scholes 1.4, mish and powers 1.2, gelu 1.1; short
points, which are under way together anyway, gain nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from pbkern.lower.mlir.operation import Operation
from pbkern.lower.mlir.text import Block
from pbkern.targets.cpu.schedule.nest_schedule import overwritten_by

from .addressing import NestWalk, Point

# Operations of the shortest points that are interleaved: shorter points are under way together
# anyway.
SHORTEST_INTERLEAVED = 20
# Most points of a group. Measured with 4 on Zen 4, see above.
MOST_INTERLEAVED = 4
# Twice as many are a group if at most so large a part of the registers holds vectors that are still to be read: the rest is
# for constants. Ten steps of Newton's method take 0.70 ms with 8 points, 0.85 with 4 (Zen 4, 32 registers).
FEW_LIVE = 13 / 16
# Most vectors of a group that are still to be read, where the processor has 32 registers: the rest comes from the first cache.
MOST_LIVE = 48
# Ten steps of Newton's method with 8 points take 0.73 ms operation by operation, 0.59 in runs; with 16 registers 0.99 and 0.61.
# Powers with 4 points take 4.6 ms in runs, 3.2 operation by operation.
# Operations of the longest run that takes turns with those of other points: eight of them are as many as the processor looks
# ahead, and some more.
LONGEST_RUN = 16
# Operations of the shortest point whose order is when they could begin: some more than the processor looks ahead. Measured on
# Zen 4 as x86-64-v3, 25 exponentials in a point of 840 operations, 400 x 400 points: 2.18 ms in the order of the expression,
# 1.81 so; with 32 registers 1.02 and 1.00.
SHORTEST_SORTED = 100
# Operations before an earlier one. Measured the same way: 40 to 160 take the same time.
AHEAD = 60
# Vector operations that begin in a cycle, for that order: multiply-adds of most processors.
BEGUN_IN_A_CYCLE = 2
# Cycles from an operation to one that reads its value, where more than one; loads count as begun long before. Source: assumed.
CYCLES = {
    "arith.addf": 3,
    "arith.subf": 3,
    "arith.mulf": 3,
    "math.fma": 4,
    "arith.divf": 11,
    "math.sqrt": 15,
}
# Operations that make no value.
EFFECTS = ("vector.store", "vector.maskedstore", "memref.prefetch")


def interleave_points(
    walk: NestWalk, block: Block, points: list[Point], fill: Callable[[int, Point], None]
) -> None:
    """fill(number, point) for each, with operations of several points interleaved where none reads what another stores."""
    before, filled = block.operations, []
    for k, point in enumerate(points):
        block.operations = []
        fill(k, point)
        filled.append(block.operations)
    free = (
        walk.sched.vector is not None
        and not walk.nest.ordered
        and not overwritten_by(walk.nest)
        and not walk.reads_other_points
    )
    block.operations = before + (
        interleaved(filled, walk.sched.registers) if free else [x for one in filled for x in one]
    )


def interleaved(points: list[list[Operation]], registers: int) -> list[Operation]:
    """The operations of independent points, for so many registers.

    Those with branches stay as they are: they end what LLVM schedules together.
    """
    if (
        not all(map(_is_plain, (operation for operations in points for operation in operations)))
        or max(map(len, points)) < SHORTEST_INTERLEAVED
    ):
        return [operation for operations in points for operation in operations]
    if len(points) == 1:
        return _as_they_can_begin(points[0])
    size, few = 2 * MOST_INTERLEAVED, FEW_LIVE * registers

    def grouped(run: Sequence[int] = ()) -> list[list[Operation]]:
        return [_interleave_points(points[k : k + size], run) for k in range(0, len(points), size)]

    groups = grouped()
    if len(points) > MOST_INTERLEAVED and max(map(_most_live, groups)) > few:
        runs = _runs(max(points, key=len))  # others may share all that they compute
        groups = grouped(runs) if max(runs) <= LONGEST_RUN else groups
    if max(map(_most_live, groups)) > few:
        size = MOST_INTERLEAVED
        groups = grouped()
    while size > 1 and max(map(_most_live, groups)) > MOST_LIVE:
        size //= 2
        groups = grouped()
    return [x for group in groups for x in group]


def _as_they_can_begin(point: list[Operation]) -> list[Operation]:
    """A long point's operations in the order in which they could begin; none moves over one without a value."""
    if len(point) < SHORTEST_SORTED:
        return point
    order = list[Operation]()
    for is_effect, run in itertools.groupby(point, lambda operation: operation.name in EFFECTS):
        operations = list(run)
        order += operations if is_effect else _begun_in_turn(operations)
    return order


def _begun_in_turn(operations: list[Operation]) -> list[Operation]:
    """Operations that make a value each: a few begin in a cycle, when their operands are there, the first ones first.

    None begins more than AHEAD operations before an earlier one, so that few values wait to be read.
    """
    makers = {operation.value: k for k, operation in enumerate(operations)}
    readers: list[list[int]] = [[] for _ in operations]
    unmet = [0] * len(operations)
    for reader, operation in enumerate(operations):
        for maker in {makers[name] for name in operation.operands if name in makers}:
            readers[maker].append(reader)
            unmet[reader] += 1
    ready = [k for k, count in enumerate(unmet) if not count]  # a heap
    under_way = list[tuple[float, int]]()  # a heap: when there is a value, and whose
    time, order, first, begun = 0.0, list[Operation](), 0, [False] * len(operations)
    while len(order) < len(operations):
        while under_way and under_way[0][0] <= time:
            for reader in readers[heapq.heappop(under_way)[1]]:
                unmet[reader] -= 1
                if not unmet[reader]:
                    heapq.heappush(ready, reader)
        while begun[first]:
            first += 1
        if not ready or ready[0] > first + AHEAD:
            time = under_way[0][0]
            continue
        k = heapq.heappop(ready)
        begun[k] = True
        order.append(operations[k])
        heapq.heappush(under_way, (time + CYCLES.get(operations[k].name, 1), k))
        time += 1 / BEGUN_IN_A_CYCLE
    return order


def _is_plain(op: Operation) -> bool:
    """Whether it makes one value, stores a vector or asks for a line."""
    return op.name in EFFECTS or (op.value is not None and not op.regions)


def _runs(operations: list[Operation]) -> list[int]:
    """Lengths of the runs of a point's operations behind which at most one vector is still to be read."""
    ends = [k + 1 for k, (_, left) in enumerate(_live(operations)) if left <= 1]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _interleave_points(points: list[list[Operation]], runs: Sequence[int]) -> list[Operation]:
    """A run of operations of each point after the other, as long as `runs` says; without, one operation.

    What a point needs of an earlier one, such as a load, comes before.
    """
    defined = {operation.result for operations in points for operation in operations}
    known: set[str] = set()
    waiting, order = [list(reversed(operations)) for operations in points], list[Operation]()
    for run in itertools.chain(runs, itertools.repeat(1)):
        if not any(waiting):
            return order
        for operations in filter(None, waiting):
            for _ in range(run):
                if not operations or not known.issuperset(
                    defined.intersection(operations[-1].operands)
                ):
                    break
                known.update(operations[-1].defined)
                order.append(operations.pop())
    raise AssertionError("turns do not end by themselves")


def _most_live(operations: list[Operation]) -> int:
    """The most vectors that are made and still to be read."""
    return max((live for live, _ in _live(operations)), default=0)


def _live(operations: list[Operation]) -> Iterator[tuple[int, int]]:
    """Vectors that are made and still to be read, with each operation's result, and behind it."""
    last = {name: k for k, op in enumerate(operations) for name in op.names}
    live: set[str] = set()
    for k, op in enumerate(operations):
        value = op.value
        if value is not None and "vector<" in op.types and not op.types.endswith("xi1>"):
            live.add(value)
        count = len(live)
        live = {value for value in live if last[value] > k}
        yield count, len(live)
