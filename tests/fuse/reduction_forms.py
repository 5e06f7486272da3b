"""Chains of reductions as people write them: name -> (function, small arguments, full-size types, kernels at full size)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .checking import ints, rand
from .workloads import f32, i32


def normalized(x, axes, g=None, b=None):
    """Layer, batch and instance norm, by what they average over."""
    mean = x.mean(axes, keepdims=True)
    y = (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(axes, keepdims=True) + 1e-5)
    return y if g is None else y * g + b


def norm(axes):
    return lambda x, g, b: normalized(x, axes, g, b)


def channels_first(axes):
    return lambda x, g, b: normalized(x, axes, g[:, None, None], b[:, None, None])


def group_norm(x, g, b, groups=4):
    y = x.reshape(*x.shape[:-1], groups, -1)
    return normalized(y, (1, 2, 4)).reshape(x.shape) * g + b


def group_norm_channels_first(x, g, b, groups=4):
    n, c, *space = x.shape
    y = normalized(x.reshape(n, groups, c // groups, *space), (2, 3, 4)).reshape(x.shape)
    return y * g[:, None, None] + b[:, None, None]


def labels(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)[:, 0]


def smoothed(logits, y, e=0.1):
    n = logits.shape[-1]
    return -((jax.nn.one_hot(y, n) * (1 - e) + e / n) * jax.nn.log_softmax(logits)).sum(-1)


def z_loss(logits, y):
    z = jax.nn.logsumexp(logits, -1)
    return z - (logits * jax.nn.one_hot(y, logits.shape[-1])).sum(-1) + 1e-4 * z * z


def accuracy(logits, y):
    return (jnp.argmax(logits, -1) == y).mean()


def greatest(x):
    place = jnp.argmax(x, -1)
    return place, jnp.take_along_axis(x, place[:, None], 1)[:, 0]


def cosine(a, b):
    return (a * b).sum(-1) / (jnp.sqrt((a * a).sum(-1)) * jnp.sqrt((b * b).sum(-1)))


def soft_nearest(a, b):
    return jax.nn.softmax(-((a[:, None] - b) ** 2).sum(-1), -1)


def entropy(logits):
    p = jax.nn.log_softmax(logits)
    return -(jnp.exp(p) * p).sum(-1)


def averaged(f):
    return lambda *args: f(*args).mean()


ROWS, FULL_ROWS = (rand(37, 51),), (f32(4096, 1024),)
IMAGES, FULL_IMAGES = (
    (rand(2, 9, 9, 12), rand(12), rand(12)),
    (f32(8, 56, 56, 64), f32(64), f32(64)),
)
FIRST, FULL_FIRST = (rand(2, 12, 9, 9), rand(12), rand(12)), (f32(8, 64, 56, 56), f32(64), f32(64))
LOGITS, FULL_LOGITS = (rand(13, 57), ints(13, high=57)), (f32(8192, 8000), i32(8192))
MASKED, FULL_MASKED = (
    (rand(37, 51), rand(37, 51) > -0.5),
    (f32(4096, 1024), jax.ShapeDtypeStruct((4096, 1024), bool)),
)
CUBE, FULL_CUBE = (rand(11, 13, 17),), (f32(64, 128, 512),)
SOFT = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax, "logsumexp": jax.nn.logsumexp}

# Where few numbers that take in all rows are read by every row again, that is a second kernel.
FORMS = {
    **{f"{n}, axis {d}": (functools.partial(f, axis=d), CUBE, FULL_CUBE, 1) for n, f in SOFT.items() for d in (1, 2)},
    **{f"{n}, axes": (functools.partial(f, axis=(1, 2)), CUBE, FULL_CUBE, 1) for n, f in SOFT.items()},
    **{f"{n}, where": (lambda x, m, f=f: f(x, axis=-1, where=m), MASKED, FULL_MASKED, 1) for n, f in SOFT.items()},
    "layer norm": (norm(-1), (*ROWS, rand(51), rand(51)), (*FULL_ROWS, f32(1024), f32(1024)), 1),
    "group norm": (group_norm, IMAGES, FULL_IMAGES, 1),
    "group norm, channels first": (group_norm_channels_first, FIRST, FULL_FIRST, 1),
    "instance norm": (norm((1, 2)), IMAGES, FULL_IMAGES, 1),
    "instance norm, channels first": (channels_first((2, 3)), FIRST, FULL_FIRST, 1),
    "batch norm": (norm((0, 1, 2)), IMAGES, FULL_IMAGES, 2),
    "batch norm, channels first": (channels_first((0, 2, 3)), FIRST, FULL_FIRST, 2),
    "labels": (labels, LOGITS, FULL_LOGITS, 1),
    "smoothed labels": (smoothed, LOGITS, FULL_LOGITS, 1),
    "z-loss": (z_loss, LOGITS, FULL_LOGITS, 1),
    "mean over labels": (averaged(labels), LOGITS, FULL_LOGITS, 1),
    "mean of z-loss": (averaged(z_loss), LOGITS, FULL_LOGITS, 1),
    "accuracy": (accuracy, LOGITS, FULL_LOGITS, 1),
    "argmax and value": (greatest, ROWS, FULL_ROWS, 1),
    "variance": (lambda x: x.var(-1), ROWS, FULL_ROWS, 1),
    "mean and deviation": (lambda x: (x.mean(-1), x.std(-1)), ROWS, FULL_ROWS, 1),
    "cosine similarity": (cosine, ROWS * 2, FULL_ROWS * 2, 1),
    "soft nearest": (soft_nearest, (rand(12, 5), rand(17, 5)), (f32(1024, 16),) * 2, 1),
    "entropy": (entropy, ROWS, FULL_ROWS, 1),
}  # fmt: skip
