"""Blocks of groups whose scores an index mask cuts, as in causal attention: fewer rows per program, less masked work.

Lowering skips keys that are masked for all rows of a program, strip by strip (dead tiles). The more
rows a program takes, the more of its work is masked. Works on the final groups of partitioner.py.
"""

from __future__ import annotations

from jax.extend import core as jex

from pbkern.fuse.access.blocks import Requests
from pbkern.fuse.cost.kinds import CONTRACTIONS
from pbkern.fuse.tiling.block_search import Schedule, alternatives

# How many schedules are compared.
COMPARED = 8


def trim_masked(parts) -> None:
    """Chooses the blocks of the masked groups of `parts`, a Partitioner, again."""
    for g in parts.nodes:
        if g.kind == "group" and overhang(g.schedule.requests, parts.machine.sizes.mask_strip):
            outputs = [v for v, _ in g.schedule.outputs]
            near = alternatives(g.eqns, outputs, g.schedule.blocks, parts.machine, COMPARED)
            g.schedule = min(
                [g.schedule, *near], key=lambda s: _seconds(s, parts.machine.sizes.mask_strip)
            )


def _seconds(schedule: Schedule, strip: int) -> float:
    return schedule.cost.seconds * (1 + overhang(schedule.requests, strip))


def overhang(requests: Requests, strip: int) -> float:
    """The part of all scores between two products that is masked but computed, as `strip` keys are left out together."""
    if sum(s.eqn.primitive.name in CONTRACTIONS for s in requests.steps) < 2:
        return 0.0
    indices: set = set()
    for s in requests.steps:
        if all(isinstance(a, jex.Literal) or a in indices for a in s.eqn.invars):
            indices.update(s.eqn.outvars)
        elif s.eqn.primitive.name == "select_n" and s.eqn.invars[0] in indices and len(s.out) >= 2:
            return max(s.out[-2].size, strip) / s.eqn.outvars[0].aval.shape[-1]
    return 0.0
