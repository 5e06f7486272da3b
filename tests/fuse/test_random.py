"""Random op graphs: any shapes, dtypes and blocks; fused plans equal plain JAX."""

import random

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pbkern.fuse.tiling import block_search

from .checking import check, random_blocks

UNARY = [
    jnp.tanh,
    jnp.abs,
    lambda x: x * 0.5 + 1,
    lambda x: jnp.where(x > 0, x, 0.1 * x),
    lambda x: jnp.exp(-jnp.abs(x)),
]


def unary(rng, xs):
    return rng.choice(UNARY)(rng.choice(xs))


def binary(rng, xs):
    a, b = rng.choice(xs), rng.choice(xs)
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        b = b.mean()
    return rng.choice([jnp.add, jnp.multiply, jnp.maximum, jnp.subtract])(a, b)


def reduction(rng, xs):
    x = rng.choice(xs)
    if not x.ndim:
        return x + 1
    axis, keep = rng.randrange(x.ndim), rng.random() < 0.6
    return rng.choice([jnp.mean, jnp.max, jnp.min])(x, axis=axis, keepdims=keep)


def movement(rng, xs):
    x = rng.choice(xs)
    if not x.ndim:
        return x * 2
    d = rng.randrange(x.ndim)
    n = x.shape[d]
    cut = rng.randrange(n)
    return rng.choice(
        [
            lambda: jnp.transpose(x, rng.sample(range(x.ndim), x.ndim)),
            lambda: jnp.roll(x, cut, d),
            lambda: jnp.flip(x, d),
            lambda: jnp.concatenate([x, lax.slice_in_dim(x, cut, n, axis=d)], d),
            lambda: jnp.pad(
                x,
                [(rng.randrange(3), rng.randrange(3)) if k == d else (0, 0) for k in range(x.ndim)],
            ),
            lambda: lax.slice_in_dim(x, cut, n, axis=d, stride=rng.choice([1, 2])),
            lambda: x.reshape(-1),
            lambda: x.reshape(*x.shape[:d], 1, *x.shape[d:]),
            lambda: jnp.cumsum(x, d) * 0.1,
            lambda: x + jnp.arange(n).reshape([n if k == d else 1 for k in range(x.ndim)]),
        ]
    )()


def contraction(rng, xs):
    x = rng.choice([x for x in xs if x.ndim >= 1])
    return (
        jnp.tensordot(x, x, axes=([0], [0])) * 0.1
        if x.ndim < 3
        else jnp.einsum("...i,...i->...", x, x)
    )


def cast(rng, xs):
    x = rng.choice(xs)
    return rng.choice(
        [
            lambda: x.astype(jnp.bfloat16).astype(jnp.float32),
            lambda: jnp.clip(x, -50, 50).astype(jnp.int32).astype(jnp.float32),
            lambda: (x > 0).astype(jnp.float32),
        ]
    )()


MAKERS = [unary, unary, binary, binary, reduction, movement, movement, contraction, cast]


def random_function(seed, count):
    """A function of two arrays made of `count` random ops; returns one to three of its values."""

    def f(x, y):
        rng, xs = random.Random(seed), [x, y]
        for _ in range(count):
            made = rng.choice(MAKERS)(rng, xs)
            if 0 < made.size <= 4000 and made.ndim <= 4:
                xs.append(made)
        return [xs[-1], *rng.sample(xs, rng.randrange(3))]

    return f


@pytest.mark.parametrize("blocks", ["chosen", "odd"])
@given(
    seed=st.integers(0, 1 << 30),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    count=st.integers(1, 12),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_random_graphs_equal_jax(blocks, seed, shape, count):
    rng = np.random.default_rng(seed)
    x, y = (jnp.asarray(rng.integers(-8, 9, size=shape) / 4, jnp.float32) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        if blocks == "odd":
            patch.setattr(block_search, "_descend", random_blocks(seed))
        f = random_function(seed, count)
        # Casts to integers and bf16 turn one rounding into a step: values are quarters, tolerance wide.
        check(f, x, y, tolerance=2e-2, left=True)
