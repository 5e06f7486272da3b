"""Normalisations: over features, groups and batches."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .table import op


def _per_channel(v, x):
    return v.reshape((1, -1) + (1,) * (x.ndim - 2))


@op("aten::native_layer_norm")
def layer_norm(call, x, shape, weight, bias, eps):
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean = x.mean(axes, keepdims=True)
    scale = lax.rsqrt(x.var(axes, keepdims=True) + eps)
    y = (x - mean) * scale
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, scale


@op("aten::native_group_norm")
def group_norm(call, x, weight, bias, batch, channels, plane, groups, eps):
    grouped = x.reshape(batch, groups, x.size // max(batch * groups, 1))
    mean = grouped.mean(-1, keepdims=True)
    scale = lax.rsqrt(grouped.var(-1, keepdims=True) + eps)
    y = ((grouped - mean) * scale).reshape(x.shape)
    y = y if weight is None else y * _per_channel(weight, x)
    return y if bias is None else y + _per_channel(bias, x), mean[..., 0], scale[..., 0]


def _others(x):
    return tuple(d for d in range(x.ndim) if d != 1)


@op("aten::_native_batch_norm_legit_no_training")
def batch_norm(call, x, weight, bias, mean, variance, momentum, eps):
    scale = lax.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    y = (x - _per_channel(mean, x)) * _per_channel(scale, x)
    empty = jnp.zeros((0,), x.dtype)
    return y if bias is None else y + _per_channel(bias, x), empty, empty


@op("aten::_native_batch_norm_legit_functional")
def batch_norm_training(call, x, weight, bias, mean, variance, training, momentum, eps):
    """Results: of the layer, mean and scale of the batch, and the statistics as the layer leaves them."""
    if not training:
        y, *_ = batch_norm(call, x, weight, bias, mean, variance, momentum, eps)
        empty = jnp.zeros((0,), x.dtype)
        return y, empty, empty, mean, variance
    own_mean, own = x.mean(_others(x)), x.var(_others(x))
    scale = lax.rsqrt(own + eps)
    y = (x - _per_channel(own_mean, x)) * _per_channel(scale if weight is None else scale * weight, x)
    y = y if bias is None else y + _per_channel(bias, x)
    n = x.size // x.shape[1]
    unbiased = own * (n / max(n - 1, 1))
    return (y, own_mean, scale, (1 - momentum) * mean + momentum * own_mean.astype(mean.dtype),
            (1 - momentum) * variance + momentum * unbiased.astype(variance.dtype))  # fmt: skip
