"""Repetitions along several dimensions (fuse/indexing/repeat_to_broadcast.py) are one nest, and rows backwards whole
vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.arrays import array

from .checking import planned


def numbers(*shape, dtype="float32"):
    return array(np.random.default_rng(3).integers(-50, 50, shape) % 100, dtype)


def agree(f, *args):
    for got, want in zip(
        jax.tree.leaves(pbkern.jit(f)(*args)), jax.tree.leaves(jax.jit(f)(*args)), strict=True
    ):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))


def upsampled(x, n=2, m=2):
    return jnp.repeat(jnp.repeat(x, n, 0), m, 1)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int16"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (0, 4), (4, 0), (7, 33), (40, 130), (1, 50), (50, 1), (5, 31, 3)], ids=str
)
def test_images(shape, dtype):
    x = numbers(*shape, dtype=dtype)
    agree(upsampled, x)
    agree(lambda x: upsampled(x, 3, 5), x)


def test_more_dimensions():
    x = numbers(4, 9, 1, 11)
    agree(lambda x: jnp.repeat(upsampled(x, 2, 3), 2, 3), x)
    agree(lambda x: jnp.broadcast_to(upsampled(x)[None], (3, 8, 18, 1, 11)), x)
    agree(lambda x: jnp.tile(upsampled(x), (1, 2, 1, 3)), x)
    agree(lambda x: jax.lax.map(upsampled, x), x)


def test_readers_of_every_kind():
    x, y = numbers(12, 35), numbers(24, 70)

    def f(x, y):
        u = jnp.repeat(x, 2, 0)
        v = jnp.repeat(u, 2, 1)
        return u, v, v + y, u.sum(0)

    agree(f, x, y)


def means_of_groups(x):
    means = x.reshape(2, 16, 4, 8).mean((1, 3))
    return x - jnp.broadcast_to(jnp.repeat(means, 8, 1)[:, None], x.shape)


def test_one_nest_writes_the_result():
    text = pbkern.jit(upsampled).as_text(
        jax.ShapeDtypeStruct((500, 500), jnp.float32), stage="nests"
    )
    assert text.count("nest [") == 1, text
    assert "%t" not in text, text


def test_small_values_for_arithmetic_stay_small():
    x = numbers(2, 16, 32)
    agree(lambda x: means_of_groups(x).round(3), x)
    made = [
        e.outvars[0].aval
        for e in planned(means_of_groups, x).jaxpr.eqns
        if e.primitive.name == "reshape"
    ]
    assert all(aval.size < x.size for aval in made if aval.shape == (2, 32))
    assert any(aval.shape == (2, 32) for aval in made)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("columns", [1, 2, 3, 15, 16, 17, 63, 64, 65, 131])
def test_rows_backwards(columns, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = numbers(3, columns, dtype=dtype)
        agree(lambda x: (x[:, ::-1], x[::-1, ::-1], x[:, :-1][:, ::-1]), x)


def test_ends_of_rows_backwards_are_no_gathers():
    text = pbkern.jit(lambda x: x[:, ::-1]).as_text(
        jax.ShapeDtypeStruct((64, 1000), jnp.float32), stage="mlir"
    )
    assert "vector.gather" not in text
