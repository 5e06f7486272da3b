"""Choices for the kernels of a partition, made by tuning: candidates for each group, and groups with a choice applied.

A partition's groups come in an order that its jaxpr decides, so that a tuple of choices, one per
group, belongs to a jaxpr. The search with measured times is api/tune.py: it takes `candidates`, and
hands choices to `plan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pbkern.core.errors import ScheduleError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import Kernel
from pbkern.fuse.access.blocks import Unfusable
from pbkern.fuse.access.rules import NeedsWhole
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.graph import Node, Partition
from pbkern.fuse.tiling.block_search import alternatives
from pbkern.fuse.tiling.schedule import Schedule, input_places, schedule_at

from .host_program import emit_scheduled


@dataclass(frozen=True)
class Choice:
    """For one kernel.

    Attributes:
      blocks: block size per dimension of the root output; None: the model's.
      params: fields of the target's CompilerParams that differ from a fused kernel's, by name.
    """

    blocks: tuple[int, ...] | None = None
    params: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        said = [f"blocks {list(self.blocks)}"] if self.blocks is not None else []
        return (
            ", ".join([*said, *(f"{k}={value}" for k, value in self.params)])
            or "the model's choice"
        )


def groups_of(nodes: Iterable[Node]) -> list[Node]:
    """The groups that choices are for, in their order."""
    return Partition(list(nodes), []).groups()


def apply(groups: Sequence[Node], choices: Sequence[Choice], machine: CostModel) -> None:
    """Gives each group the schedule that was chosen. Raises ScheduleError where one does not fit."""
    if choices and len(choices) != len(groups):
        raise ScheduleError(
            "these choices belong to another program",
            why=f"{len(choices)} for {len(groups)} kernels",
        )
    for node, choice in zip(groups, choices):
        node.schedule = chosen(node, choice, machine)


def chosen(node: Node, choice: Choice, machine: CostModel) -> Schedule:
    """A group's schedule under a choice. Raises ScheduleError."""
    model = node.own_schedule
    schedule: Schedule | None = model
    if choice.blocks is not None:
        fits = (
            model.wave is None
            and model.loop is None
            and len(choice.blocks) == len(model.blocks)
            and all(block > 0 for block in choice.blocks)
        )
        try:
            outputs = [var for var, _ in model.outputs]
            schedule = schedule_at(node.eqns, outputs, choice.blocks, machine) if fits else None
        except (NeedsWhole, Unfusable):
            schedule = None
    if schedule is None:
        raise ScheduleError(
            "a kernel cannot have these blocks",
            why=f"{choice}; the model's are {model.blocks}",
        )
    ordered = schedule.with_inputs_like(input_places(model))
    return dataclasses.replace(ordered, params=choice.params)


def candidates(node: Node, machine: CostModel, count: int) -> list[Choice]:
    """Up to `count` choices of blocks, the one that the group has first, then by the model's price.

    Fronts and loops have none.
    """
    model = node.own_schedule
    if model.wave is not None or model.loop is not None:
        return [Choice()]
    outputs = [var for var, _ in model.outputs]
    schedules = alternatives(node.eqns, outputs, model.blocks, machine, count)
    return [
        Choice(),
        *(Choice(schedule.blocks) for schedule in schedules if schedule.blocks != model.blocks),
    ][:count]


def kernel_at(node: Node, choice: Choice, machine: CostModel, params_for: Callable) -> Kernel:
    """The group's kernel under a choice."""
    schedule = chosen(node, choice, machine)
    return emit_scheduled(
        node.kernel, schedule, dict(params_for(schedule.semantics, **dict(schedule.params)))
    )
