"""Blocks of groups whose scores an index mask cuts, as in causal attention: fewer rows per program, less masked work.

Lowering skips keys that are masked for all rows of a program, strip by strip (dead tiles). The more
rows a program takes, the more of its work is masked. Works on the final groups of partitioner.py.
"""

from __future__ import annotations

import functools

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.access.blocks import BlockRequests
from pbkern.fuse.cost.kinds import CONTRACTIONS
from pbkern.fuse.graph import Node
from pbkern.fuse.tiling.block_search import alternatives
from pbkern.fuse.tiling.schedule import Schedule

from .partitioner import Partitioner


@dataclass(frozen=True)
class TrimMaskedBlocks:
    """Chooses the blocks of masked groups again."""

    most_compared: int = threshold(8, "schedules of a group that are compared")

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        for node in parts.nodes:
            if node.kind != "group" or not _may_be_masked(node):
                continue
            current, strip = node.own_schedule, parts.machine.sizes.mask_strip
            if overhang(current.requests, strip):
                outputs = [var for var, _ in current.outputs]
                near = alternatives(
                    node.eqns, outputs, current.blocks, parts.machine, self.most_compared
                )
                node.schedule = min([current, *near], key=functools.partial(_seconds, strip=strip))
        return parts


def _may_be_masked(node: Node) -> bool:
    """Whether a group has what `overhang` looks for. Requests of groups like others are not made yet: most need none."""
    schedule = node.own_schedule
    if schedule.wave is not None or schedule.loop is not None:
        return True  # the equations of their requests are others
    names = {eqn.primitive.name for eqn in node.eqns}
    return "select_n" in names and not names.isdisjoint(CONTRACTIONS)


def _seconds(schedule: Schedule, strip: int) -> float:
    """Seconds with the masked work, which prices leave out."""
    return schedule.cost.seconds * (1 + overhang(schedule.requests, strip))


def overhang(requests: BlockRequests, strip: int) -> float:
    """The part of all scores between two products that is masked but computed, as `strip` keys are left out together."""
    if sum(product.eqn.primitive.name in CONTRACTIONS for product in requests.steps) < 2:
        return 0.0
    indices: set = set()
    for step in requests.steps:
        if all(isinstance(var, jex.Literal) or var in indices for var in step.eqn.invars):
            indices.update(step.eqn.outvars)
        elif (
            step.eqn.primitive.name == "select_n"
            and not isinstance(step.eqn.invars[0], jex.Literal)
            and step.eqn.invars[0] in indices
            and len(step.out) >= 2
        ):
            return max(step.out[-2].size, strip) / step.eqn.outvars[0].aval.shape[-1]
    return 0.0
