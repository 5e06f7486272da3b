"""Vectors of several short rows (targets/cpu/emit/interleaved_rows.py), and elements a few apart backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.arrays import array

DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int16", "uint8", "bool")


def numbers(shape, dtype="float32"):
    found = np.random.default_rng(5).integers(-100, 100, shape)
    return array(
        found > 0 if dtype == "bool" else found % 100 if dtype == "uint8" else found, dtype
    )


def same(f, *args):
    got, want = (jax.tree.leaves(jit(f)(*args)) for jit in (pbkern.jit, jax.jit))
    for g, x in zip(got, want, strict=True):
        assert g.shape == x.shape
        assert g.dtype == x.dtype
        wide = np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        np.testing.assert_array_equal(np.asarray(g, wide), np.asarray(x, wide))


def shuffles(f, *args) -> int:
    """Of whole vectors, in the program's text; no element may be addressed by itself."""
    text = pbkern.jit(f).as_text(*args, stage="mlir")
    assert "vector.gather" not in text, text
    assert "vector.scatter" not in text, text
    return text.count("vector.shuffle")


def flipped(x):
    return x[:, ::-1]


def flipped_and_cut(x):
    return x[:, 1:-1][:, ::-1]


def both_ways(x):
    return x[::-1, ::-1]


def channels(x):
    return x[:, ::-1, ::-1]


def every_second(x):
    return x[:, ::-2]


def every_third(x):
    return x[:, ::3, 1:]


FUNCTIONS = (flipped, flipped_and_cut, both_ways, channels, every_second, every_third)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 0, 3), (2, 3, 2), (5, 16, 3), (4, 31, 3), (3, 131, 4), (2, 65, 5), (2, 77, 7),
                                   (3, 40, 9), (2, 50, 15), (2, 33, 16), (2, 40, 17)], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_duplicate_producers(shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        for f in FUNCTIONS:
            x = numbers(shape, dtype)
            got = pbkern.jit(f)(x)
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(got), f(np.asarray(x)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [2, 3, 4, 6, 11])
def test_arithmetic_of_turned_rows(width):
    """What belongs to an element, to a component, to a row, and to nothing of both."""
    x, y = numbers((7, 83, width)), numbers((7, 83, width)) + 1
    scale, row, number = numbers((width,)), numbers((83,)), jnp.float32(3)

    def f(x, y, scale, row, number):
        return x[:, ::-1] * scale - y + number * row[:, None], jnp.where(y[:, ::-1] > x, x, 2.0)

    same(f, x, y, scale, row, number)
    same(lambda x, row: x[:, ::-1] + jnp.abs(row)[:, None] * 2, x, row)
    same(lambda x: (x[:, ::-1].astype(jnp.int32) >> 1, x[:, ::-1] > 3), x)


def test_components_that_several_writes_fill():
    x = numbers((9, 45, 3))
    same(lambda x: jnp.stack([x[:, ::-1, 1], x[:, ::-1, 0] * 2, x[..., 2]], -1), x)
    same(lambda x: (x[:, ::-1], x[:, ::-1, 1] + x[..., 0]), x)


def test_lines_of_one_dimension():
    for n in (0, 1, 2, 31, 64, 1001):
        x = numbers((n,))
        same(lambda x: (x[::-2], x[::-3] + 1, x[::-17], x[::-1] * 2), x)


def test_repeated_elements():
    for repeats in (2, 3, 5):
        same(lambda x, n=repeats: jnp.repeat(x, n, 1) * 2, numbers((5, 61)))


def test_sums_of_elements_that_lie_apart_backwards():
    same(lambda x: (x[:, ::-1] * jnp.asarray([1.0, 2, 4])).sum(-1), numbers((6, 75, 3)))
    same(lambda x: x[:, ::-3].sum(1), numbers((6, 75)))


def test_one_shuffle_or_two_per_vector():
    """Rows of 3 in threes of vectors: two of them need elements of two vectors, the one between of three.

    Rows of 4 are whole vectors where these have 128 bits, and are stored as they are.
    """
    x = jax.ShapeDtypeStruct((8, 256, 3), jnp.float32)
    assert shuffles(lambda x: x[:, ::-1], x) == 4
    assert shuffles(lambda x: x[:, ::-1] * jnp.asarray([1.0, 2, 3]) + 1, x) <= 4 + 3
    expected = 0 if pbkern.cpu.machine().lanes(4) == 4 else 4
    fours = jax.ShapeDtypeStruct((8, 256, 4), jnp.float32)
    assert shuffles(lambda x: x[:, ::-1], fours) == expected


def test_full_rows_are_not_woven():
    assert shuffles(lambda x: x[:, ::-1], jax.ShapeDtypeStruct((8, 64, 16), jnp.float32)) == 0


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3), (3, 3), (4, 2), (17, 2), (2, 17)])
def test_rows_of_one_write_beside_rows_of_several(shape, parts):
    """One result is turned: its row is all points of a dimension, while a row of the other is one point of each write."""
    x, y = numbers((*shape, parts)), numbers((shape[1], parts))

    def body(x, y, turned, straight):
        x, y = x[...], y[...]
        turned[...] = jnp.stack([x[..., n].T for n in range(parts)], -1)
        straight[...] = jnp.stack([x[..., n] * y[:, n - 1] + n for n in range(parts)], -1)

    shapes = (shape[1], shape[0], parts), (*shape, parts)
    kernel = pbkern.kernel(body, out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    turned, straight = kernel(x, y)
    np.testing.assert_array_equal(turned, np.asarray(x).swapaxes(0, 1))
    wanted = np.asarray(x) * np.roll(np.asarray(y), 1, -1) + np.arange(parts)
    np.testing.assert_array_equal(straight, wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 17])
def test_complex_products_with_their_own_transposes(size):
    rng = np.random.default_rng(size)
    a, w = (rng.standard_normal((*s, 2)) @ [1, 1j] for s in ((size, size), (size,)))
    f = lambda a, w: (a * w) @ a.T
    np.testing.assert_allclose(
        pbkern.jit(f)(np.complex64(a), np.complex64(w)), (a * w) @ a.T, atol=1e-4
    )
