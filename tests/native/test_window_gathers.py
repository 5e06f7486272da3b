"""Windows of arrays whose starts outer dimensions tell (lower/passes/window_gathers.py), beside plain JAX."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.arrays import array


def crops(size):
    """`size` windows of each image: starts that would leave the image are moved into it."""

    def crop(image, start):
        return lax.dynamic_slice(image, (*start, *(0,) * (image.ndim - start.size)), size)

    return lambda images, starts: jax.vmap(crop)(images, starts)


def images(*shape, dtype=np.float32):
    return array(np.random.default_rng(1).integers(0, 200, shape), dtype)


def starts(*shape, low=-9, high=60):
    return array(np.random.default_rng(2).integers(low, high, shape), jnp.int32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((6, 40, 50, 3), (31, 29, 3)),
        ((5, 33, 41, 2), (20, 41, 2)),
        ((3, 64, 64, 1), (56, 56, 1)),
        ((4, 30, 30, 3), (30, 30, 3)),
        ((7, 9, 31, 40, 3), (4, 16, 18, 3)),
        ((4, 90, 3), (70, 3)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, jnp.bfloat16])
def test_crops(shape, size, dtype):
    x, at = images(*shape, dtype=dtype), starts(shape[0], len(size) - 1)
    f = crops(size)
    np.testing.assert_array_equal(np.asarray(pbkern.jit(f)(x, at)), np.asarray(jax.jit(f)(x, at)))


def test_a_crop_is_a_loop_over_images_with_rows_and_channels_in_one():
    text = pbkern.jit(crops((56, 56, 3))).as_text(
        images(16, 64, 64, 3), starts(16, 2), stage="nests"
    )
    assert re.search(r"for %w\d+ < \d+:\n  let .*\n  let .*\n  nest \[d\d+<56, d\d+<168\]", text), (
        text
    )


def test_crops_that_are_cast_scaled_and_summed():
    def f(x, at):
        y = (crops((24, 24, 3))(x, at).astype(jnp.float32) - 120) / 55
        return y, y.mean((1, 2)), y[:, ::-1].sum(1)

    x, at = images(9, 32, 32, 3, dtype=np.uint8), starts(9, 2)
    for got, want in zip(pbkern.jit(f)(x, at), jax.jit(f)(x, at), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-4)


def test_windows_of_two_images_and_starts_of_both_dimensions():
    def f(a, b, at):
        one = crops((25, 30, 3))
        return one(a, at) + one(b, at[:, ::-1])

    a, b, at = images(5, 40, 44, 3), images(5, 64, 64, 3), starts(5, 2)
    np.testing.assert_array_equal(
        np.asarray(pbkern.jit(f)(a, b, at)), np.asarray(jax.jit(f)(a, b, at))
    )
