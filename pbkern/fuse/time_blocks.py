"""Body of a counted loop that is one cheap kernel -> several steps of it in one kernel, if the model gains.

A stencil iterated in time moves its arrays once per step. Several steps of one tile fit the cache: the tile's halo
grows step by step (blocks.py), is computed again by the neighbours, and memory is passed over once per `steps`.
control.py launches the kernel length // steps times, and a shorter one for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax import lax
from jax.extend import core as jex

from ..errors import UnsupportedOp
from ..machine import Machine
from .access import ELEMENTWISE, NeedsWhole
from .cost import VIEWS
from .nodes import Edge, Inner, Node, Partition
from .schedule import Schedule, Unfusable, search
from .simplify import retrace

# Steps per kernel that are tried, as long as each gains this much over the one before: more steps compile longer.
STEPS = (2, 4, 5, 8, 10)
GAIN = 0.96
# Code size, and with it compile time, is bounded.
MAX_EQUATIONS = 220
# Work repeated in halos.
MAX_RECOMPUTE = 1.25
WINDOWS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min")


@dataclass(frozen=True)
class TimeBlocks:
    """Several steps of a loop's body as one kernel; `rest`, of the remaining ones, is None where there are none."""

    main: Inner
    rest: Inner | None


def is_stencil(parts: Partition, body: jex.Jaxpr) -> bool:
    """One group of cheap equations that makes every array it carries."""
    groups = [n for n in parts.nodes if n.kind == "group"]
    names = {e.primitive.name for n in groups for e in n.eqns}
    local = all(n in ELEMENTWISE or n in VIEWS or n in WINDOWS for n in names)
    return len(groups) == 1 == len(parts.nodes) and local and max(v.aval.ndim for v in body.outvars) > 0


def block_time(
    body: jex.ClosedJaxpr, parts: Partition, counts: tuple[int, int], length: int, machine: Machine
) -> TimeBlocks | None:
    """The number of steps per kernel that the model likes best, or None for one.

    `body` maps (*consts, *carries, *elements of xs) to carries, `counts` says how many consts and carries there are, and
    `parts` is its partition.
    """
    if not is_stencil(parts, body.jaxpr):
        return None
    best, steps = None, 1
    seconds = parts.nodes[0].seconds * length
    for s in (s for s in STEPS if s <= length and s * len(body.jaxpr.eqns) <= MAX_EQUATIONS):
        found = _unrolled(body, counts, s, machine)
        if found is None:
            break
        # The rest is priced as a part of a full turn, and as no less than one.
        total = found.schedule.cost.seconds * (length // s + (1 if length % s else 0))
        if total > seconds * GAIN:
            # One bad number, such as one that does not divide the length, does not end the search.
            if found.schedule.cost.seconds / s > seconds / length:
                break
            continue
        best, steps, seconds = found, s, total
    if best is None:
        return None
    rest = _unrolled(body, counts, length % steps, machine) if length % steps else None
    if length % steps and rest is None:
        return None
    return TimeBlocks(best.inner(), rest and rest.inner())


@dataclass(frozen=True)
class _Unrolled:
    jaxpr: jex.Jaxpr
    outputs: list
    schedule: Schedule
    steps: int

    def inner(self) -> Inner:
        node = Node("group", list(self.jaxpr.eqns), self.outputs, self.schedule)
        why = Edge(self.jaxpr.eqns[-1], True, "steps in time share a kernel", after=self.schedule.cost.seconds)
        return Inner(self.jaxpr, Partition([node], [why]), [node], self.steps)


def _unrolled(body: jex.ClosedJaxpr, counts: tuple[int, int], steps: int, machine: Machine) -> _Unrolled | None:
    """`steps` steps as one group, which takes as many elements of xs at once; None where they cannot be."""
    step: Callable = jex.jaxpr_as_fun(body)
    first, end = counts[0], sum(counts)

    def several(*args):
        consts, carries, xs = args[:first], args[first:end], args[end:]
        for k in range(steps):
            carries = step(*consts, *carries, *(lax.squeeze(lax.slice_in_dim(x, k, k + 1), (0,)) for x in xs))
        return carries

    shapes = [(steps,) * (n >= end) + v.aval.shape for n, v in enumerate(body.jaxpr.invars)]
    avals = [jax.ShapeDtypeStruct(s, v.aval.dtype) for s, v in zip(shapes, body.jaxpr.invars)]
    made = retrace(jax.make_jaxpr(several)(*avals), {})
    jaxpr = made.jaxpr
    computed = {v for e in jaxpr.eqns for v in e.outvars}
    outputs = list(dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, jex.Literal) and v in computed))
    if made.consts or not outputs:
        return None
    try:
        found = search(jaxpr.eqns, outputs, machine, lambda cost: cost.recompute <= MAX_RECOMPUTE)
    except (Unfusable, NeedsWhole, UnsupportedOp, NotImplementedError):
        return None
    return _Unrolled(jaxpr, outputs, found, steps)
