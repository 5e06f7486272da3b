"""Privatisation: scatters of many updates into a small result -> private results of chunks, and their sum (product, ...).

Where indices choose every dimension of a result, as in a histogram, all programs would walk all
updates, and one program uses one core. Instead, chunks of the updates are scattered in parallel,
each into an array of its own, and these are combined with the operand. Sums are reassociated.
"""

from __future__ import annotations

import math

import numpy as np
from jax import lax

from pbkern.core.ops.scatter import SCATTERS
from pbkern.fuse.access.windows_contractions import REDUCERS, reducer_params
from pbkern.fuse.cost.model import CostModel

from .chunks import in_chunks, near_divisor

# Scatter -> (scatter of a chunk, reduction of the private results, combination with the operand).
STAGES = {
    "add": (lax.scatter_add, "reduce_sum", lax.add),
    "sub": (lax.scatter_add, "reduce_sum", lax.sub),
    "mul": (lax.scatter_mul, "reduce_prod", lax.mul),
    "min": (lax.scatter_min, "reduce_min", lax.min),
    "max": (lax.scatter_max, "reduce_max", lax.max),
}


def runs_of(eqn, machine: CostModel) -> tuple[int, int] | None:
    """(dimension of the indices to cut, elements per run) of a scatter to be split, or None."""
    if SCATTERS.get(eqn.primitive.name, "set") == "set":
        return None
    operand, indices, updates = (var.aval for var in eqn.invars)
    dn = eqn.params["dimension_numbers"]
    count = updates.size
    little = machine.scatter_cycles(eqn) < machine.sizes.scatter_cycles
    if little or not operand.size or operand.dtype.kind == "b":
        return None
    batch = math.prod(operand.shape[dim] for dim in dn.operand_batching_dims)
    free = [
        axis for axis in range(indices.ndim - 1) if axis not in dn.scatter_indices_batching_dims
    ]
    stays_near = operand.size * operand.dtype.itemsize <= machine.near_bytes // 2
    wanted = min(
        (4 if stays_near else 1) * machine.cores,
        count // (machine.sizes.updates_per_result * operand.size),
    )
    if batch >= 2 * machine.cores or wanted < 2 or not free:
        return None
    cut = max(free, key=lambda dim: indices.shape[dim])
    block = near_divisor(indices.shape[cut], -(-indices.shape[cut] // wanted))
    return (cut, block) if 2 * block <= indices.shape[cut] else None


def split_scatter(eqn, operands, machine: CostModel):
    """Rewrite: the results of the scatter, or None to keep it."""
    choice = runs_of(eqn, machine)
    if choice is None:
        return None
    operand, indices, updates = operands
    (cut, block), dn = choice, eqn.params["dimension_numbers"]
    scatter, reducer, combine = STAGES[SCATTERS[eqn.primitive.name]]
    reduce, identity = REDUCERS[reducer]
    along = [axis for axis in range(updates.ndim) if axis not in dn.update_window_dims][cut]
    neutral = identity(np.dtype(operand.dtype))
    private = lax.full((-(-indices.shape[cut] // block), *operand.shape), neutral, operand.dtype)
    # Padding of the last chunk is the identity: it changes nothing wherever it goes.
    runs = (
        in_chunks(indices, cut, block, np.zeros((), indices.dtype)),
        in_chunks(updates, along, block, neutral),
    )
    scattered = scatter(private, *runs, _batched(dn, cut, along), mode=eqn.params["mode"])
    return [combine(operand, reduce.bind(scattered, **reducer_params(reducer, (0,))))]


def _batched(dn: lax.ScatterDimensionNumbers, cut: int, along: int) -> lax.ScatterDimensionNumbers:
    """`dn` with a batch dimension: the operand's first, dimension `cut` of the indices, `along` of the updates."""

    def later(dims, start: int) -> tuple[int, ...]:
        return tuple(int(dim) + (dim >= start) for dim in dims)

    return lax.ScatterDimensionNumbers(
        update_window_dims=later(dn.update_window_dims, along),
        inserted_window_dims=later(dn.inserted_window_dims, 0),
        scatter_dims_to_operand_dims=later(dn.scatter_dims_to_operand_dims, 0),
        operand_batching_dims=(0, *later(dn.operand_batching_dims, 0)),
        scatter_indices_batching_dims=(cut, *later(dn.scatter_indices_batching_dims, cut)),
    )
