"""Sums of integers add first what points share; dimensions that index arithmetic walks as one are one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.integers(0, 1 << 32, (60, 5), dtype=np.uint32))
KEY = jnp.asarray(RNG.integers(0, 1 << 32, 2, dtype=np.uint32))

SUMS = {
    "number last": (lambda x, k: (x ^ k[1]) + k[0] + 1, "add(%k[0], 1)"),
    "number first": (lambda x, k: 3 + ((x ^ 5) + k[1]), "add(%k[1], 3)"),
    "two numbers": (lambda x, k: (x * 2 + jnp.uint32(2**32 - 6)) + 7, "2), 1)"),
    "three terms": (lambda x, k: ((x ^ 1) + k[0]) + k[1] + 2, "add(add(%k[0], %k[1]), 2)"),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_add_first_what_points_share(name):
    f, shared = SUMS[name]
    np.testing.assert_array_equal(pbkern.jit(f)(X, KEY), f(X, KEY))
    nests = pbkern.jit(f).as_text(X, KEY, stage="nests")
    assert re.sub(r"%a\d", "%k", nests).replace(":uint32", "").count(shared) == 1


def test_sums_of_floats_keep_their_order():
    x = jnp.asarray(RNG.standard_normal(50), jnp.float32)
    f = lambda x, s: (x + s) + 1e7
    np.testing.assert_array_equal(pbkern.jit(f)(x, jnp.float32(0.1)), f(x, jnp.float32(0.1)))


COUNTED = {
    "index": lambda x: x + jnp.arange(300, dtype=jnp.uint32).reshape(60, 5),
    "random numbers": lambda x: (
        x ^ jax.random.bits(jax.random.wrap_key_data(jnp.uint32([1, 2])), (60, 5))
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_rows_that_are_counted_through_are_one(name):
    f = COUNTED[name]
    np.testing.assert_array_equal(pbkern.jit(f)(X), f(X))
    assert "<300]" in pbkern.jit(f).as_text(X, stage="nests")
