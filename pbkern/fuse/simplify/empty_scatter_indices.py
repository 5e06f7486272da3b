"""Scatter at no index -> scatter at index 0 of one dimension, which is the same place.

    scatter-add(x[2,4], indices[n,0], updates[n,4])      ->      scatter-add(x[2,4], zeros[n,1], updates[n,4])

XLA on CPUs (jaxlib 0.10.2) takes the updates of an empty index vector for one update of all the
operand: several updates count once, and rows that no window reaches change.
"""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp


def index_first_elements(eqn, operands):
    """Rewrite of scatters, see rewrites.py."""
    x, indices, updates = operands
    if indices.shape[-1]:
        return None
    numbers = eqn.params["dimension_numbers"]
    scalar = not x.shape
    if scalar:  # one element, in a dimension that can be indexed
        x, numbers = lax.reshape(x, (1,)), numbers._replace(inserted_window_dims=(0,))
    free = [axis for axis in range(x.ndim) if axis not in numbers.operand_batching_dims]
    if not free:
        return None
    # A dimension without extent in the windows, where there is one: every place in it is a valid
    # start.
    along = next((dim for dim in numbers.inserted_window_dims if dim in free), free[0])
    zeros = jnp.zeros((*indices.shape[:-1], 1), indices.dtype)
    params = eqn.params | {
        "dimension_numbers": numbers._replace(scatter_dims_to_operand_dims=(along,))
    }
    result = eqn.primitive.bind(x, zeros, updates, **params)
    return [lax.reshape(result, ()) if scalar else result]
