"""Operations of several points of a tile, one point after the other -> the same operations interleaved.

    a1; a2; a3; b1; b2; b3   ->   a1; b1; a2; b2; a3; b3

A point is often one long chain of dependent operations, and a processor looks only some sixty
vector operations ahead. LLVM keeps the order that it is given. Measured on Zen 4 with 4 points:
Newton's iterations 1.35 times as fast, Black-Scholes 1.4, mish and powers 1.2, gelu 1.1; short
points, which are under way together anyway, gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from pbkern.lower.mlir.operation import Operation
from pbkern.lower.mlir.text import Block
from pbkern.targets.cpu.schedule.nest_schedule import overwritten_by

from .addressing import NestWalk, Point

# Operations of the shortest points that are interleaved: shorter points are under way together
# anyway.
SHORTEST_INTERLEAVED = 20
# Most points of a group. Measured with 4 on Zen 4, see above.
MOST_INTERLEAVED = 4
# Twice as many are a group if their vectors that are still to be read leave so many registers free, which constants take.
# Ten steps of Newton's method take 0.64 ms with 8 points, 0.73 with 4.
CONSTANT_REGISTERS = 6
# Operations during whose 10 to 20 cycles a vector goes to the first cache and comes back: with them, twice as many points are
# a group if registers hold half of their vectors. The same steps with 16 registers of 256 bits: 0.77 ms with 8 points, 0.98
# with 4.
LONG_LATENCY = ("arith.divf", "math.sqrt")
# Most vectors of a group that are still to be read, of each two registers: what registers do not hold comes from the first
# cache.
MOST_LIVE_OF_TWO = 3
STORES = ("vector.store", "vector.maskedstore")


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
        and not walk.rewrites
    )
    block.operations = before + (
        interleaved(filled, walk.sched.registers)
        if free and len(points) > 1
        else [x for one in filled for x in one]
    )


def interleaved(points: list[list[Operation]], registers: int) -> list[Operation]:
    """The operations of independent points, for a processor with so many vector registers.

    Those with branches stay as they are: they end what LLVM schedules together.
    """
    if (
        not all(map(_is_plain, (operation for operations in points for operation in operations)))
        or max(map(len, points)) < SHORTEST_INTERLEAVED
    ):
        return [operation for operations in points for operation in operations]
    size = 2 * MOST_INTERLEAVED
    groups = [_interleave_points(points[k : k + size]) for k in range(0, len(points), size)]
    most = MOST_LIVE_OF_TWO * registers // 2
    waits = any(op.name in LONG_LATENCY for op in points[0])
    if max(map(_most_live, groups)) > (2 * registers if waits else registers - CONSTANT_REGISTERS):
        size = MOST_INTERLEAVED
        groups = [_interleave_points(points[k : k + size]) for k in range(0, len(points), size)]
    while 1 < size <= MOST_INTERLEAVED and max(map(_most_live, groups)) > most:
        size //= 2
        groups = [_interleave_points(points[k : k + size]) for k in range(0, len(points), size)]
    return [x for group in groups for x in group]


def _is_plain(op: Operation) -> bool:
    """Whether it makes one value, or stores a vector."""
    return op.name in STORES or (op.value is not None and not op.regions)


def _interleave_points(points: list[list[Operation]]) -> list[Operation]:
    """One operation of each point after the other.

    What a point needs of an earlier one, such as a load, comes before.
    """
    defined = {operation.result for operations in points for operation in operations}
    known: set[str] = set()
    waiting, order = [list(reversed(operations)) for operations in points], []
    while any(waiting):
        for operations in filter(None, waiting):
            op = operations[-1]
            if known.issuperset(defined.intersection(op.operands)):
                known.update(op.defined)
                order.append(operations.pop())
    return order


def _most_live(operations: list[Operation]) -> int:
    """The most vectors that are made and still to be read. Those that loads have no part in are the same in all points."""
    last = {name: k for k, op in enumerate(operations) for name in op.names}
    live: set[str] = set()
    varying: set[str] = set()
    most = 0
    for k, op in enumerate(operations):
        value = op.value
        if value is not None and (op.indexes or not varying.isdisjoint(op.operands)):
            varying.add(value)
            if "vector<" in op.types and not op.types.endswith("xi1>"):
                live.add(value)
        most = max(most, len(live))
        live = {value for value in live if last[value] > k}
    return most
