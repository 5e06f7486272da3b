"""Memoised search: groups of equal structure, such as those of equal layers, are searched once.

The result of a search (block_search.py) depends only on what the equations do, on the types of
values, and on which value is whose operand. A group that equals an earlier one in these gets its
result, and so does a group that tries to take in an equation: one in six of the searches for the
gradient of eight equal layers remains. Requests are computed again, for the group's own values, on
first use.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import field

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process.context_values import during
from pbkern.fuse.access.blocks import LaterRequests, Unfusable
from pbkern.fuse.access.equation_kinds import EquationKinds, current_kinds
from pbkern.fuse.access.rules import Access, NeedsWhole
from pbkern.fuse.cost.model import Cost, CostModel

from .block_search import root_first, search, tall_blocks
from .one_program import grown, in_front
from .online_analysis import chunks_are_allowed
from .schedule import Schedule, schedule_at, schedule_more


@dataclass(frozen=True)
class _SearchedBlocks:
    """A schedule without the values of its group."""

    grid: tuple[int, ...]
    blocks: tuple[int, ...]
    accesses: tuple[Access, ...]
    cost: Cost

    @classmethod
    def of(cls, schedule: Schedule) -> _SearchedBlocks:
        return cls(
            schedule.grid,
            schedule.blocks,
            tuple(access for _, access in schedule.outputs),
            schedule.cost,
        )

    def schedule(self, eqns: Sequence, outputs: Sequence) -> Schedule:
        placed = tuple(zip(outputs, self.accesses, strict=True))
        return Schedule(self.grid, self.blocks, placed, LaterRequests(eqns, placed), self.cost)


@dataclass(frozen=True)
class _BlocksInChunks:
    """A schedule with reductions in chunks, which are computed for each group."""

    blocks: tuple[int, ...]


@dataclass
class _Searches:
    """Memo of one plan.

    Attributes:
      kinds: of equations.
      results: key of a question about a group -> answer.
    """

    kinds: EquationKinds
    results: dict[tuple, _SearchedBlocks | _BlocksInChunks | Unfusable | NeedsWhole | None] = field(
        default_factory=dict
    )


_current: contextvars.ContextVar[_Searches | None] = contextvars.ContextVar(
    "searches of one plan", default=None
)


def searches_memoised() -> AbstractContextManager:
    """In a `with` block, groups of equal structure are searched once.

    The machine must stay the same within.
    """
    return during(_current, _Searches(current_kinds() or EquationKinds()))


def memoised_search(
    eqns: Sequence,
    outputs: Sequence,
    machine: CostModel,
    accept: Callable[[Cost], bool] | None = None,
) -> Schedule:
    """Memoised `search`; raises as it does. Each `accept` has results of its own."""
    outputs = root_first(outputs)
    schedule = _once(
        (accept,),
        eqns,
        outputs,
        lambda: search(eqns, outputs, machine, accept),
        lambda blocks: schedule_at(eqns, outputs, blocks, machine),
    )
    assert schedule is not None, "a search raises where it finds nothing"
    return schedule


def tall_blocks_once(eqns: Sequence, schedule: Schedule, machine: CostModel) -> Schedule | None:
    """Remembers results of `tall_blocks`."""
    outputs = [var for var, _ in schedule.outputs]
    return _once(
        ("tall", schedule.online is None),
        eqns,
        outputs,
        lambda: tall_blocks(eqns, schedule, machine),
        lambda blocks: schedule_at(eqns, outputs, blocks, machine),
    )


def memoised_extension(eqns: Sequence, schedule: Schedule, machine: CostModel) -> Schedule | None:
    """Remembers results of `schedule_more`. Raises as that does."""
    outputs, accesses = zip(*schedule.outputs)

    def look(*_) -> Schedule | None:
        return schedule_more(eqns, schedule, machine)

    return _once(("more", schedule.blocks, accesses), eqns, outputs, look, look)


def memoised_growth(
    eqns: Sequence, outputs: Sequence, schedule: Schedule, machine: CostModel
) -> Schedule | None:
    """Remembers results of `grown`, except where growing takes less time than looking up. Raises as that does."""
    outputs = root_first(outputs)
    if in_front(eqns, outputs, schedule) is not None:
        return grown(eqns, outputs, schedule, machine)

    def look(*_) -> Schedule | None:
        return grown(eqns, outputs, schedule, machine)

    return _once(("one program",), eqns, outputs, look, look)


def _once(
    what: tuple,
    eqns: Sequence,
    outputs: Sequence,
    look: Callable[[], Schedule | None],
    with_runs: Callable[[tuple], Schedule | None],
) -> Schedule | None:
    """look(), or its result for an earlier group of equal structure.

    `outputs`: in placement order; `with_runs`: the schedule for known blocks, if reductions are
    taken in chunks.
    """  # fmt: skip
    searches = _current.get()
    if searches is None:
        return look()
    key = what, chunks_are_allowed(), searches.kinds.group(eqns, outputs)
    if key not in searches.results:
        try:
            result = look()
        except (Unfusable, NeedsWhole) as e:
            searches.results[key] = e.without_frames()
            raise
        if result is None:
            searches.results[key] = None
        elif result.online is not None:
            searches.results[key] = _BlocksInChunks(result.blocks)
        else:
            searches.results[key] = _SearchedBlocks.of(result)
        return result
    match searches.results[key]:
        case Unfusable() | NeedsWhole() as error:
            raise error.without_frames()
        case _BlocksInChunks(blocks):
            return with_runs(blocks)
        case _SearchedBlocks() as known:
            return known.schedule(eqns, outputs)
    return None
