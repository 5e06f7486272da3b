"""Group, CostModel -> Schedule: coordinate descent over block sizes in the cost model.

One result, the root, is cut into blocks; the other results follow its grid axes (schedule.py). A probe finds the role of
each dimension (root_probe.py), and roles say which sizes are worth a try (block_options.py). Prices are the target's
(fuse/cost/model.py), emission is fuse/emit/group_kernel.py. Blocks never change what a group computes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from pbkern.core.jax_types import array_aval
from pbkern.fuse.access.blocks import Unfusable
from pbkern.fuse.access.rules import NeedsWhole
from pbkern.fuse.cost.model import Cost, CostModel

from .block_options import even_cuts
from .online_analysis import chunks_allowed, chunks_are_allowed
from .root_probe import RootProbe
from .schedule import Schedule, schedule_at

# Work with halos over work without: if it is more, or if scratch outgrows L2, the descent starts again from square
# blocks. Source: not recorded.
HALO_RECOMPUTE = 1.1
# Elements of the blocks from which products are searched a second time, by the role of a dimension.
# Measured: docs/decisions/031-second-block-search.md.
TALL = {"row": 1024, "column": 128}
# Elements: columns of a block that the second search gives are a multiple of them. Measured:
# docs/decisions/031-second-block-search.md.
TALL_TILE = 64


def root_first(outputs: Sequence) -> list:
    """Results in the order in which they are placed."""
    return sorted(
        outputs, key=lambda output: (-len(output.aval.shape), -math.prod(output.aval.shape))
    )


# Root blocks -> their schedule; None where the target or the caller refuses it.
ScheduleOf = Callable[[Sequence[int]], Schedule | None]


def search(
    eqns, outputs: Sequence, machine: CostModel, accept: Callable[[Cost], bool] | None = None
) -> Schedule:
    """The cheapest schedule of a group that the descents meet.

    Args:
      eqns: the group's equations.
      outputs: its results.
      machine: the target's prices.
      accept: refuses schedules by their cost; None accepts all.

    Raises:
      Unfusable: there is no schedule.
    """

    def priced(blocks: Sequence[int]) -> Schedule | None:
        schedule = schedule_at(eqns, outputs, blocks, machine)
        if schedule is None or (accept is not None and not accept(schedule.cost)):
            return None
        return schedule

    met: dict[tuple, Schedule | None] = {}

    def accepted(blocks: Sequence[int]) -> Schedule | None:
        """Several descents meet the same blocks."""
        key = chunks_are_allowed(), *blocks
        if key not in met:
            met[key] = priced(blocks)
        return met[key]

    outputs = root_first(outputs)
    probe = RootProbe.of(eqns, outputs[0], machine)
    while True:
        try:
            best = _best(accepted, probe, machine)
        except NeedsWhole as e:
            probe.least.demand(e, e.axes, array_aval(probe.root).shape)
            continue
        if best is None:
            raise Unfusable(
                "a heavy value would be computed several times, or one program would need too much memory"
            )
        return best


def _best(schedule_of: ScheduleOf, probe: RootProbe, machine: CostModel) -> Schedule | None:
    """The best schedule of several descents. Raises NeedsWhole."""

    def without_chunks(blocks: Sequence[int]) -> Schedule | None:
        """Scores stay in L2, and no second pass computes them again."""
        with chunks_allowed(False):
            schedule = schedule_of(blocks)
        fits = schedule is not None and schedule.cost.scratch <= machine.near_bytes
        return schedule if fits else None

    options, target = probe.options(machine)
    best = _descend(schedule_of, options, target, inner_first=not probe.roles)
    if (
        best is None
        or best.cost.recompute > HALO_RECOMPUTE
        or best.cost.scratch > machine.scratch_bytes
    ):
        squares = _squarish(options, target, machine.sizes.square_side)
        best = _better(best, _descend(schedule_of, options, squares))
    side = machine.sizes.turned_side
    if best is not None and side and not probe.roles and _reads_across_rows(best):
        planes, _ = probe.options(machine, cuts_planes=True)
        best = _better(best, _descend(schedule_of, planes, _squares_across_rows(best, side)))
    if best is not None and best.online is not None:
        best = _better(best, _descend(without_chunks, options, target))
    return best or _equal_cuts(schedule_of, options, probe)


def _equal_cuts(
    schedule_of: ScheduleOf, options: list[list[int]], probe: RootProbe
) -> Schedule | None:
    """The best of schedules with blocks of equal sizes, or else one program.

    Other blocks leave a last one that is mostly outside of the array: too much of a heavy value would be computed for
    nothing.
    """
    shape = array_aval(probe.root).shape
    even = probe.least.multiples_of([even_cuts(*pair) for pair in zip(shape, options)])
    return _descend(schedule_of, even, [option[-1] for option in options]) or schedule_of(shape)


def tall_blocks(eqns, current: Schedule, machine: CostModel) -> Schedule | None:
    """The result of another descent for a group with a product, from blocks of many rows and few columns.

    The rows of such blocks need not be copied into panels. None if the group has no such dimensions, if the descent
    ends at columns that do not fill register tiles, or if there are no other blocks than the current ones.
    """
    outputs = [var for var, _ in current.outputs]
    try:
        probe = RootProbe.of(eqns, outputs[0], machine)
        roles = probe.roles
        if not {"row", "column"} <= set(roles.values()) or current.online is not None:
            return None
        options, target = probe.options(machine)
        start = [TALL.get(roles.get(axis, ""), size) for axis, size in enumerate(target)]
        tall = _descend(lambda blocks: schedule_at(eqns, outputs, blocks, machine), options, start)
    except (NeedsWhole, Unfusable):
        return None
    columns = next(dim for dim, role in roles.items() if role == "column")
    fills_tiles = tall is not None and tall.blocks[columns] % TALL_TILE == 0
    return tall if fills_tiles else None


def _squarish(options: list[list[int]], target: Sequence[int], side: int) -> list[int]:
    """A start from blocks that are square in the last two dimensions with options: these have the smallest halos."""
    free = [axis for axis, option in enumerate(options) if len(option) > 2][-2:]
    return [
        min(side, options[axis][-1]) if axis in free else size for axis, size in enumerate(target)
    ]


def _reads_across_rows(schedule: Schedule) -> bool:
    """Whether the last dimension of an input, along its rows, moves with another dimension of the root than the last."""
    _, access = schedule.outputs[0]
    outer = {symbol for span in access[:-1] for symbol in span.start.symbols}
    return any(hull and hull[-1].start.symbols & outer for _, hull in schedule.requests.inputs)


def _squares_across_rows(schedule: Schedule, side: int) -> list[int]:
    """Root blocks of `side` elements along the root's rows and along the rows of its inputs."""
    root, access = schedule.outputs[0]
    moved = {
        symbol for _, hull in schedule.requests.inputs if hull for symbol in hull[-1].start.symbols
    }
    blocks, run = [1] * len(access), 1
    for dim in reversed(range(len(access))):
        if access[dim].start.symbols & moved:
            blocks[dim] = side
        else:
            blocks[dim] = -(-side // run)
        run *= min(blocks[dim], array_aval(root).shape[dim])
    return blocks


def _better(schedule: Schedule | None, rival: Schedule | None) -> Schedule | None:
    return min(
        (candidate for candidate in (schedule, rival) if candidate is not None),
        key=lambda candidate: candidate.cost.seconds,
        default=None,
    )


def _descend(
    schedule_of: ScheduleOf,
    options: list[list[int]],
    target: Sequence[int],
    inner_first: bool = False,
) -> Schedule | None:
    """Descends from the options nearest to `target`, one step along one dimension at a time.

    Args:
      schedule_of: prices a point.
      options: sizes per dimension, in ascending order.
      target: size per dimension.
      inner_first: whether inner dimensions take their steps first. Where several grow at the same price, blocks are then
        runs of their arrays.

    Returns:
      The schedule at which no step saves 0.5 % of its time; None if no point on the way has a schedule.
    """
    place = [
        min(range(len(option)), key=lambda number: abs(option[number] - size))
        for option, size in zip(options, target)
    ]
    known: dict = {}

    def price(where) -> float:
        key = tuple(where)
        if key not in known:
            known[key] = schedule_of([option[index] for option, index in zip(options, key)])
        return known[key].cost.seconds if known[key] else math.inf

    best, improved = price(place), True
    while improved:
        improved = False
        for axis in reversed(range(len(options))) if inner_first else range(len(options)):
            for step in (1, -1):
                while 0 <= place[axis] + step < len(options[axis]):
                    moved = [index + step * (other == axis) for other, index in enumerate(place)]
                    cost = price(moved)
                    # Where no point had a schedule yet, the walk goes on in the hope of one.
                    is_lost = best == math.inf and cost == math.inf
                    if not (cost < best * 0.995 or is_lost):
                        break
                    place, best, improved = moved, min(cost, best), improved or cost < math.inf
    return known[tuple(place)]


# Schedules priced per schedule that `alternatives` returns.
PRICED_PER_RESULT = 5


def alternatives(
    eqns, outputs: Sequence, blocks: Sequence[int], machine: CostModel, count: int
) -> list[Schedule]:
    """Up to `count` schedules around the one with the given root blocks, cheapest first by the model.

    From the cheapest schedule seen so far, each dimension goes one option up and down. A group that can only be one
    program, as its values would be needed at too many places of smaller blocks, has none.

    Args:
      eqns: the group's equations.
      outputs: its results, the root first.
      blocks: sizes of the root's blocks.
      machine: the target's prices.
      count: most schedules in the list.
    """
    try:
        options, _ = RootProbe.of(eqns, outputs[0], machine).options(machine)
    except Unfusable:
        return []
    options = [sorted({*option, block}) for option, block in zip(options, blocks)]
    start = tuple(option.index(block) for option, block in zip(options, blocks))
    known: dict[tuple[int, ...], Schedule] = {}
    waiting, seen = [(0.0, start)], {start}
    while waiting and len(seen) <= PRICED_PER_RESULT * count:
        _, place = heapq.heappop(waiting)
        for near in _neighbours(place, options):
            if near in seen and near != start:
                continue
            seen.add(near)
            try:
                candidate = schedule_at(
                    eqns, outputs, [option[index] for option, index in zip(options, near)], machine
                )
            except (NeedsWhole, Unfusable):
                continue
            if candidate is not None and near not in known:
                known[near] = candidate
                heapq.heappush(waiting, (candidate.cost.seconds, near))
    return sorted(known.values(), key=lambda schedule: schedule.cost.seconds)[:count]


def _neighbours(place: tuple[int, ...], options: list[list[int]]) -> list[tuple[int, ...]]:
    """The place itself, and those one option away in one dimension."""
    steps = [
        (axis, step)
        for axis, option in enumerate(options)
        for step in (1, -1)
        if 0 <= place[axis] + step < len(option)
    ]
    return [
        place,
        *(
            tuple(index + step * (other == dim) for other, index in enumerate(place))
            for dim, step in steps
        ),
    ]
