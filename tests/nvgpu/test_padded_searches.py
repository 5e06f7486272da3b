"""Searches in rows of products that are padded to whole tiles: what is behind a row's end is never found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

# What is subtracted, as far as the type has it: all values are below the lowest int32 then.
FAR = {"float32": 1e12, "float16": 3e4, "int8": 100, "uint8": 0}


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("shape", [(7, 23, 7), (16, 32, 18)])
def test_places_of_extremes(shape, dtype):
    rows, depth, columns = shape
    rng = np.random.default_rng(depth)
    a, b = (
        jnp.asarray(rng.integers(0, 4, s)).astype(dtype) for s in ((rows, depth), (depth, columns))
    )

    def places(a, b):
        product = a @ b - jnp.asarray(FAR[dtype], dtype)
        return jnp.argmax(product, 1), jnp.argmin(product, 0), product.max(1)

    with jax.disable_jit():
        want = places(a, b)
    for got, expected in zip(pbkern.simulate(places, a, b).results, want):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
