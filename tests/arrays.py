"""Operands of tests."""

import jax
import jax.numpy as jnp
import numpy as np


def array(values, dtype=None) -> jax.Array:
    """Numbers on the device, by a copy: jnp.asarray compiles a program for each shape, which takes longer than most tests."""
    values = np.asarray(values)
    return jax.device_put(values if dtype is None else values.astype(jnp.dtype(dtype)))
