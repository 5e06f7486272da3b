"""Operators that make tensors of nothing. Memory that Torch leaves undefined is zero."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from .table import as_type, op


def _filled(value):
    def rule(call, *args, **_):
        return jnp.full(call.shape, value, call.dtype)

    return rule


op(
    "aten::zeros",
    "aten::zeros_like",
    "aten::new_zeros",
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_permuted",
    "aten::empty_strided",
    "prims::empty_strided",
    "aten::new_empty_strided",
)(_filled(0))
op("aten::ones", "aten::ones_like", "aten::new_ones")(_filled(1))


@op("aten::full", "aten::full_like", "aten::new_full", "aten::fill")
def full(call, *args, **_):
    value = args[-1]
    return jnp.broadcast_to(jnp.asarray(value, call.dtype), call.shape)


@op("aten::scalar_tensor", "prims::scalar_tensor")
def scalar_tensor(call, value, **_):
    return jnp.asarray(value, call.dtype)


@op("aten::arange")
def arange(call, *bounds, **_):
    """Bounds: the end, start and end, or start, end and step.

    Integers are cut before anything is computed with them.
    """
    start, _end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    start, step = (as_type(scalar, call.dtype) for scalar in (start, step))
    return (
        start + jnp.arange(call.shape[0], dtype=call.dtype) * step
        if call.shape[0]
        else jnp.zeros(call.shape, call.dtype)
    )


@op("aten::linspace")
def linspace(call, start, end, steps, **_):
    """From both ends to the middle; steps between integers are float64, and what they reach is cut."""
    start, end = (as_type(scalar, call.dtype) for scalar in (start, end))
    if steps < 2:
        return jnp.broadcast_to(start, call.shape)
    wide = (
        np.dtype(np.float64)
        if call.dtype.kind in "iu"
        else jnp.promote_types(call.dtype, np.float32)
    )
    start, end = start.astype(wide), end.astype(wide)
    step, k = (end - start) / (steps - 1), jnp.arange(steps)
    first = k < steps // 2
    return jnp.where(
        first, start + step * k.astype(wide), end - step * (steps - 1 - k).astype(wide)
    )


@op("aten::eye")
def eye(call, n, m=None, **_):
    return jnp.eye(n, m, dtype=call.dtype)


@op("prims::iota")
def iota(call, length, *, start, step, **_):
    return start + jnp.arange(length, dtype=call.dtype) * step
