"""Operands of tests."""

import jax
import jax.numpy as jnp
import numpy as np

CACHE_LINE_BYTES = 64


def array(values, dtype=None) -> jax.Array:
    """Numbers on the device, by a copy: jnp.asarray compiles a program for each shape, which takes longer than most tests.

    Its memory is JAX's own, so that it can be donated: JAX borrows NumPy's memory where that starts at a cache line.
    """
    values = np.asarray(values)
    return jax.device_put(
        _off_cache_lines(values if dtype is None else values.astype(jnp.dtype(dtype)))
    )


def _off_cache_lines(values: np.ndarray) -> np.ndarray:
    """A copy that starts behind a cache line's start."""
    memory = np.empty(values.nbytes + 2 * CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES + max(values.itemsize, 1)
    moved = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    moved[...] = values
    return moved
