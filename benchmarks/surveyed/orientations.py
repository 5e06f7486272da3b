"""Rows, normalisations, pooling and attention along every axis: arrays are stored in all orders that people use."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

# One shape for two and one for three dimensions, of about two million elements.
MATRIX = "f32[1500,1200]"
CUBE = "f32[60,200,150]"
# Two orders of images and their channels, and the spatial axes of each.
IMAGES = {"nchw": ("f32[8,32,56,56]", 1, (2, 3)), "nhwc": ("f32[8,56,56,32]", 3, (1, 2))}


def layer_norm(x, axis):
    centred = x - x.mean(axis, keepdims=True)
    return centred * lax.rsqrt((centred * centred).mean(axis, keepdims=True) + 1e-5)


def rms_norm(x, axis):
    return x * lax.rsqrt((x * x).mean(axis, keepdims=True) + 1e-6)


def softmax_gradient(x, axis):
    return jax.grad(lambda x: (jax.nn.softmax(x, axis) ** 2).sum())(x)


ALONG = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "logsumexp": jax.nn.logsumexp,
    "cumsum": jnp.cumsum,
    "argmax": jnp.argmax,
    "softmax_gradient": softmax_gradient,
    "sum": jnp.sum,
    "max": jnp.max,
    "var": jnp.var,
}


def _along(function, axis):
    return lambda x: function(x, axis)


def _per_channel(x, channel, scale):
    return scale.reshape([-1 if axis == channel else 1 for axis in range(x.ndim)])


def batch_norm(channel, x, scale, shift):
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    x = (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)
    return x * _per_channel(x, channel, scale) + _per_channel(x, channel, shift)


def instance_norm(spatial, x):
    return (x - x.mean(spatial, keepdims=True)) * lax.rsqrt(x.var(spatial, keepdims=True) + 1e-5)


def group_norm(channel, x):
    shape = x.shape
    x = x.reshape(*shape[:channel], 8, -1, *shape[channel + 1 :])
    axes = tuple(axis for axis in range(1, x.ndim) if axis != channel)
    x = (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)
    return x.reshape(shape)


def pool(spatial, reducer, initial, x):
    window = tuple(2 if axis in spatial else 1 for axis in range(x.ndim))
    return lax.reduce_window(x, initial, reducer, window, window, "VALID")


def pool_overlapping(spatial, x):
    window, strides = (
        tuple(size if axis in spatial else 1 for axis in range(x.ndim)) for size in (3, 2)
    )
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")


def attention(scores, result, causal, q, k, v):
    weights = jnp.einsum(scores, q, k) / q.shape[-1] ** 0.5
    if causal:
        weights = jnp.where(jnp.tril(jnp.ones(weights.shape[-2:], bool)), weights, -jnp.inf)
    return jnp.einsum(result, jax.nn.softmax(weights), v)


# Heads before and after the sequence, and the sequence last.
ATTENTIONS = {
    "heads_first": ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd", "f32[2,8,512,64]"),
    "heads_last": ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "f32[2,512,8,64]"),
    "sequence_first": ("qbhd,kbhd->bhqk", "bhqk,kbhd->qbhd", "f32[512,2,8,64]"),
}

CASES = {
    **{f"{name}_0_of_2": (_along(f, 0), MATRIX) for name, f in ALONG.items()},
    **{
        f"{name}_{axis}_of_3": (_along(f, axis), CUBE)
        for name, f in ALONG.items()
        for axis in range(3)
    },
    "sort_0_of_2": (_along(jnp.sort, 0), "f32[300,400]"),
    **{f"sort_{axis}_of_3": (_along(jnp.sort, axis), "f32[40,50,60]") for axis in range(3)},
    **{
        f"{name}_{'_'.join(map(str, axes))}_of_3": (_along(ALONG[name], axes), CUBE)
        for name in ("sum", "max", "var")
        for axes in itertools.combinations(range(3), 2)
    },
    **{
        f"{name}_{order}": case
        for order, (shape, channel, spatial) in IMAGES.items()
        for name, case in {
            "batch_norm_images": (functools.partial(batch_norm, channel), shape, "f32[32]", "f32[32]"),
            "instance_norm": (functools.partial(instance_norm, spatial), shape),
            "group_norm_images": (functools.partial(group_norm, channel), shape),
            "max_pool_images": (functools.partial(pool, spatial, lax.max, -jnp.inf), shape),
            "sum_pool_images": (functools.partial(pool, spatial, lax.add, 0.0), shape),
            "max_pool_3_images": (functools.partial(pool_overlapping, spatial), shape),
            "mean_of_images": (_along(jnp.mean, spatial), shape),
            "softmax_of_channels": (_along(jax.nn.softmax, channel), shape),
            "argmax_of_channels": (_along(jnp.argmax, channel), shape),
        }.items()
    },
    **{
        f"attention_{order}{'_causal' * causal}": (
            functools.partial(attention, scores, result, causal),
            *(shape,) * 3,
        )
        for order, (scores, result, shape) in ATTENTIONS.items()
        for causal in (False, True)
    },
}  # fmt: skip
