"""Operators that combine elements along dimensions: sums, extrema, variances, cumulative ones, sorts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .table import as_type, axes_of, check_real, op


@op("aten::sum", "prims::sum")
def sum_(call, x, dims=None, keepdim=False, dtype=None, **_):
    x = as_type(x, call.dtype)
    axes = axes_of(x, dims)
    if all(x.shape[axis] == 1 for axis in axes):
        x = x + jnp.zeros((), x.dtype)  # Torch adds to +0, also the sum of one -0
    return jnp.sum(x, axis=axes, keepdims=keepdim)


@op("aten::mean")
def mean(call, x, dims=None, keepdim=False, **_):
    return jnp.mean(as_type(x, call.dtype), axis=axes_of(x, dims), keepdims=keepdim)


@op("aten::prod", "prims::prod")
def prod(call, x, dims=None, keepdim=False, dtype=None, **_):
    return jnp.prod(as_type(x, call.dtype), axis=axes_of(x, dims), keepdims=keepdim)


for _name, _e in {"amax": jnp.max, "amin": jnp.min}.items():
    op(f"aten::{_name}")(
        lambda call, x, dims, keepdim, _e=_e: _e(x, axis=axes_of(x, dims), keepdims=keepdim)
    )
for _name, _f in {"any": jnp.any, "all": jnp.all}.items():
    op(f"aten::{_name}")(
        lambda call, x, dims=None, keepdim=False, _f=_f: _f(
            x, axis=axes_of(x, dims), keepdims=keepdim
        )
    )


def _extreme(whole, place):
    def rule(call, x, dim=None, keepdim=False):
        if dim is None:
            return whole(x)
        if hasattr(dim, "dtype"):  # of two tensors
            return (jnp.maximum if whole is jnp.max else jnp.minimum)(x, dim)
        if not x.ndim:
            return x, jnp.zeros((), np.int64)
        return whole(x, axis=dim, keepdims=keepdim), place(x, axis=dim, keepdims=keepdim)

    return rule


op("aten::max")(_extreme(jnp.max, jnp.argmax))
op("aten::min")(_extreme(jnp.min, jnp.argmin))


@op("aten::argmax")
def argmax(call, x, dim, keepdim):
    return jnp.argmax(x, axis=dim, keepdims=keepdim) if x.ndim else jnp.zeros((), np.int64)


@op("aten::argmin")
def argmin(call, x, dim, keepdim):
    return jnp.argmin(x, axis=dim, keepdims=keepdim) if x.ndim else jnp.zeros((), np.int64)


@op("aten::logsumexp")
def logsumexp(call, x, dims, keepdim):
    return jax.nn.logsumexp(as_type(x, call.dtype), axis=axes_of(x, dims), keepdims=keepdim)


def _var(x, dims, correction, keepdim):
    return jnp.var(
        x, axis=axes_of(x, dims), ddof=1 if correction is None else correction, keepdims=keepdim
    )


@op("aten::var")
def var(call, x, dims, correction=1, keepdim=False, **_):
    return _var(x, dims, correction, keepdim)


@op("aten::std")
def std(call, x, dims, correction=1, keepdim=False, **_):
    return jnp.sqrt(_var(x, dims, correction, keepdim))


@op("aten::var_mean")
def var_mean(call, x, dims, correction=1, keepdim=False, **_):
    return _var(x, dims, correction, keepdim), jnp.mean(x, axis=axes_of(x, dims), keepdims=keepdim)


@op("aten::linalg_vector_norm")
def vector_norm(call, x, ord, dims, keepdim, dtype):
    x, axes = as_type(jnp.abs(x), call.dtype), axes_of(x, dims)
    if ord == 2:
        return jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=keepdim))
    if ord in (float("inf"), float("-inf")):
        return (jnp.max if ord > 0 else jnp.min)(x, axis=axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum((x != 0).astype(call.dtype), axis=axes, keepdims=keepdim)
    return jnp.sum(x**ord, axis=axes, keepdims=keepdim) ** (1 / ord)


for _name, _g in {"cumsum": jnp.cumsum, "cumprod": jnp.cumprod}.items():
    op(f"aten::{_name}")(
        lambda call, x, dim, dtype, _g=_g: _g(as_type(x, call.dtype), dim) if x.ndim else x
    )


@op("aten::logcumsumexp")
def logcumsumexp(call, x, dim):
    check_real(x)
    return lax.cumlogsumexp(x, axis=dim % x.ndim) if x.ndim else x


@op("aten::sort")
def sort(call, x, dim, descending, stable=None):
    """Always stable."""
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@op("aten::topk")
def topk(call, x, k, dim, largest, sorted):
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, dim, stable=True, descending=largest)
    order = lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, order, dim), order


@op("aten::median")
def median(call, x, dim=None, keepdim=False):
    """The lower of two in the middle; with a NaN anywhere, the first NaN."""
    if dim is None:
        values, is_nan = x.reshape(-1), x != x
        middle = jnp.sort(values)[(x.size - 1) // 2] if x.size else jnp.full((), np.nan, x.dtype)
        return (
            jnp.where(is_nan.any(), np.asarray(np.nan, x.dtype), middle)
            if call.dtype.kind not in "iu"
            else middle
        )
    if not x.ndim:
        return x, jnp.zeros((), np.int64)
    order = jnp.argsort(x, dim, stable=True)
    place = lax.slice_in_dim(
        order, (x.shape[dim] - 1) // 2, (x.shape[dim] - 1) // 2 + 1, axis=dim % x.ndim
    )
    if jnp.issubdtype(x.dtype, jnp.floating):
        is_nan = x != x
        place = jnp.where(
            is_nan.any(dim, keepdims=True), jnp.argmax(is_nan, dim, keepdims=True), place
        )
    value = jnp.take_along_axis(x, place, dim)
    return (value, place) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(place, dim))
