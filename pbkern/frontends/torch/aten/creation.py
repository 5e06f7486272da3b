"""Operators that make tensors of nothing. Memory that Torch leaves undefined is zero."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

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

    Integers are cut before anything is computed with them; 16-bit floats are computed in float32.
    """
    start, _end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    wide = call.dtype if call.dtype.kind in "iu" else jnp.promote_types(call.dtype, np.float32)
    start, step = (as_type(scalar, wide) for scalar in (start, step))
    if not call.shape[0]:
        return jnp.zeros(call.shape, call.dtype)
    return start + jnp.arange(call.shape[0], dtype=wide) * step


@op("aten::linspace")
def linspace(call, start, end, steps, **_):
    """From both ends to the middle; steps between integers are float64, and the sums are truncated.

    With 16-bit floats all of it is rounded to that type, as in eager Torch.
    """
    start, end = (as_type(scalar, call.dtype) for scalar in (start, end))
    if steps < 2:
        return jnp.broadcast_to(start, call.shape)
    wide = (
        np.dtype(np.float64)
        if call.dtype.kind in "iu"
        else jnp.promote_types(call.dtype, np.float32)
    )
    start, end = start.astype(wide), end.astype(wide)
    rounded = functools.partial(_rounded, dtype=call.dtype)
    gaps = rounded(jnp.asarray(steps - 1, wide))
    step, k = rounded(rounded(end - start) / gaps), jnp.arange(steps)
    low, high = (rounded(step * rounded(n.astype(wide))) for n in (k, steps - 1 - k))
    return jnp.where(k < steps // 2, start + low, end - high)


def _rounded(x, dtype):
    """Wide numbers rounded to 16-bit floats; other types stay."""
    if dtype.kind in "iu" or dtype.itemsize > 2:
        return x
    form = jnp.finfo(dtype)
    return lax.reduce_precision(x, form.nexp, form.nmant)


@op("aten::eye")
def eye(call, n, m=None, **_):
    return jnp.eye(n, m, dtype=call.dtype)


@op("prims::iota")
def iota(call, length, *, start, step, **_):
    return start + jnp.arange(length, dtype=call.dtype) * step
