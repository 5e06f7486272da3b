"""Blocks of groups whose scores a mask of indices silences in part, as in causal attention: fewer rows, less masked work.

Lowering leaves out keys that are masked for all rows of a program, strip by strip. The more rows a program takes, the more
of what it computes is masked. Works on the groups of partitioner.py once they are what they will be.
"""

from __future__ import annotations

from jax.extend import core as jex

from pbkern.core.machine import MASK_STRIP
from pbkern.fuse.access.blocks import Requests
from pbkern.fuse.cost.kinds import CONTRACTIONS
from pbkern.fuse.tiling.block_search import Schedule, alternatives

# Schedules that are compared.
COMPARED = 8


def trim_masked(parts) -> None:
    """Chooses the blocks of the masked groups of `parts`, a Partitioner, anew."""
    for g in parts.nodes:
        if g.kind == "group" and overhang(g.schedule.requests):
            outputs = [v for v, _ in g.schedule.outputs]
            near = alternatives(g.eqns, outputs, g.schedule.blocks, parts.machine, COMPARED)
            g.schedule = min([g.schedule, *near], key=_seconds)


def _seconds(schedule: Schedule) -> float:
    return schedule.cost.seconds * (1 + overhang(schedule.requests))


def overhang(requests: Requests) -> float:
    """Work on masked scores between two products that is not left out, as a part of all scores."""
    if sum(s.eqn.primitive.name in CONTRACTIONS for s in requests.steps) < 2:
        return 0.0
    indices: set = set()
    for s in requests.steps:
        if all(isinstance(a, jex.Literal) or a in indices for a in s.eqn.invars):
            indices.update(s.eqn.outvars)
        elif s.eqn.primitive.name == "select_n" and s.eqn.invars[0] in indices and len(s.out) >= 2:
            return max(s.out[-2].size, MASK_STRIP) / s.eqn.outvars[0].aval.shape[-1]
    return 0.0
