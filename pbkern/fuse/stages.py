"""Reductions of little parallelism -> two stages: partial results over runs of one axis, then the rest.

A reduction whose outputs are few, or whose reduced block outgrows the cache, cannot be tiled by its output
alone. `reduce(x, axes)` becomes `reduce(partial_reduce(x, axis, block), 0)`: the first is parallel over runs
of `block` elements along one axis and takes the producers of x with it, the second is small. Sums are
reassociated.
"""

from __future__ import annotations

import math

import numpy as np
from jax.extend import core as jex

from ..machine import Machine
from .access_windows import REDUCERS, partial_reduce_p, reducer_params
from .simplify import retrace

# Elements of one program of the first stage.
RUN_ELEMENTS = 1 << 16
# Below this many bytes a second kernel costs more than one core alone.
SMALL_BYTES = 1 << 18


def split_reductions(closed: jex.ClosedJaxpr, machine: Machine) -> jex.ClosedJaxpr:
    """Splits the reductions that need it."""
    if not any(_choose(e, machine) for e in closed.jaxpr.eqns):
        return closed

    def split(eqn, operands):
        choice = _choose(eqn, machine)
        if choice is None:
            return None
        axis, block = choice
        name = eqn.primitive.name
        partial = partial_reduce_p.bind(
            operands[0], reducer=name, axis=axis, block=block, axes=tuple(eqn.params["axes"])
        )
        return [eqn.primitive.bind(partial, **reducer_params(name, (0,)))]

    return retrace(closed, dict.fromkeys(REDUCERS, split))


def _choose(eqn, machine: Machine) -> tuple[int, int] | None:
    """(axis, elements per run) of a reduction to be split, or None."""
    if eqn.primitive.name not in REDUCERS:
        return None
    shape, axes = eqn.invars[0].aval.shape, eqn.params["axes"]
    itemsize = np.dtype(eqn.invars[0].aval.dtype).itemsize
    if math.prod(shape) * itemsize < SMALL_BYTES or not axes:
        return None
    kept = [n for d, n in enumerate(shape) if d not in axes]
    reduced = math.prod(shape[d] for d in axes)
    # One vector of outputs is the least that a program makes when the last dimension stays.
    width = min(shape[-1], machine.lanes(itemsize)) if len(shape) - 1 not in axes else 1
    enough = math.prod(kept) // width >= 2 * machine.cores
    if enough and reduced * width * itemsize <= machine.l2_bytes // 2:
        return None
    axis = next((d for d in sorted(axes) if shape[d] >= 4 * machine.cores), None)
    if axis is None:
        return None
    line = math.prod(shape[d] for d in axes if d != axis) * (shape[-1] if width > 1 else 1)
    block = max(1, min(RUN_ELEMENTS // line, -(-shape[axis] // (4 * machine.cores))))
    return axis, _near_divisor(shape[axis], block)


def _near_divisor(n: int, block: int) -> int:
    """A divisor of n near `block` (within a factor of two), so that no run is ragged; else `block`."""
    found = (
        [b for b in range(max(1, block // 2), min(n, 2 * block) + 1) if n % b == 0] if block < 1 << 20 else []
    )
    return min(found, key=lambda b: abs(b - block), default=block)
