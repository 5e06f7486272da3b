"""Arrays of structures: strided accesses as whole vectors (targets/cpu/schedule/interleaved_access.py), small dimensions
apart (lower/passes/unroll_small_dims.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.arrays import array


def same(f, *args, tolerance=1e-6):
    """Compares with plain JAX, computed in float64 where operands are floats."""
    got = jax.tree.leaves(pbkern.jit(f)(*args))
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a)
            for a in args
        ]
        want = jax.tree.leaves(jax.jit(f)(*wide))
    for g, x in zip(got, want, strict=True):
        assert g.shape == x.shape
        if x.size:
            x = np.asarray(x, np.float64)
            np.testing.assert_allclose(
                np.asarray(g, np.float64), x, rtol=0, atol=tolerance * max(np.abs(x).max(), 1)
            )


def numbers(shape, dtype):
    found = np.random.default_rng(7).integers(0, 100, shape)
    return array(found, dtype)


def channels_turned(x):
    """Every component from all others, and back in place."""
    parts = [x[..., k] for k in range(x.shape[-1])]
    return jnp.stack([parts[k - 1] + parts[k] * (k % 3) for k in range(len(parts))], -1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "int32", "int16", "uint8"]
)
def test_components(dtype):
    xs = [
        np.asarray(numbers(shape, "int32") % 17) for shape in [(1, 3), (37, 2), (1000, 3), (333, 5)]
    ]
    with jax.enable_x64(True):
        args = [jnp.asarray(x, dtype) for x in xs]
        got, want = (
            jit(lambda *xs: [*map(channels_turned, xs)])(*args) for jit in (pbkern.jit, jax.jit)
        )
    for g, x in zip(got, want, strict=True):
        assert g.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(g, np.float64), np.asarray(x, np.float64))


@pytest.mark.parametrize("step", [9, 17])
def test_many_components(step):
    same(channels_turned, numbers((65, step), "float32"))


@pytest.mark.parametrize(
    "shape", [(0, 5, 3), (1, 1, 3), (3, 31, 1), (3, 31, 2), (40, 101, 4), (40, 101, 7)]
)
def test_an_operand_without_channels(shape):
    *size, channels = shape
    a, b, m = (
        numbers((*size, channels), "uint8"),
        numbers((*size, channels), "uint8"),
        numbers((*size, 1), "uint8"),
    )
    got = pbkern.jit(
        lambda a, b, m: (a * m.astype(jnp.uint16) + b * (255 - m.astype(jnp.uint16))) // 255
    )(a, b, m)
    a, b, m = (np.asarray(v, np.int64) for v in (a, b, m))
    np.testing.assert_array_equal(got, (a * m + b * (255 - m)) // 255)


@pytest.mark.parametrize("step", [2, 3, 17])
def test_every_few_elements(step):
    x = numbers((5, 1003), "float32")
    same(lambda x: (x[:, ::step] * 2, x[:, 1::step] - x[:, 1::step] ** 2), x)
    same(lambda x: jnp.zeros((5, 1003 * step)).at[:, ::step].set(x), x)


def test_only_some_components_are_written():
    x = numbers((500, 3), "float32")
    same(lambda x: x.at[:, 1].add(x[:, 0] * x[:, 2]), x)
    same(lambda x: x.at[:, :2].multiply(3.0).at[:, 2].set(x[:, 0]), x)


def lorenz(y):
    def f(y):
        return jnp.stack(
            [
                10 * (y[:, 1] - y[:, 0]),
                y[:, 0] * (28 - y[:, 2]) - y[:, 1],
                y[:, 0] * y[:, 1] - y[:, 2],
            ],
            1,
        )

    return jax.lax.fori_loop(0, 2, lambda _, y: y + 0.01 * f(y + 0.005 * f(y)), y)


@pytest.mark.parametrize("points", [1, 515])
def test_equations_of_components_are_one_nest(points):
    y = numbers((points, 3), "float32") / 50
    same(lorenz, y, tolerance=1e-5)
    text = pbkern.jit(lorenz).as_text(jax.ShapeDtypeStruct((515, 3), jnp.float32), stage="nests")
    assert text.count("nest [") == 1, text


@pytest.mark.parametrize("width", [2, 3, 5])
def test_sums_over_components(width):
    x, m = numbers((300, width), "float32"), numbers((width, width), "float32")
    same(lambda x: (x.sum(1), x.max(1), x.min(1), x.prod(1), x.argmax(1), (x * x).mean(1)), x)
    same(lambda x, m: (jnp.einsum("ni,nj,ij->n", x, x, m), x @ m), x, m)
    same(lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1), x)


def test_sums_over_components_keep_nan_infinities_and_signed_zeros():
    x = jnp.asarray(
        [[np.nan, 1, 2], [np.inf, -np.inf, 0], [-0.0, -0.0, -0.0], [0.0, -0.0, -1]] * 20,
        jnp.float32,
    )
    for f in (
        lambda x: x.sum(1),
        lambda x: x.max(1),
        lambda x: x.min(1),
        lambda x: jnp.concatenate([x[:, 1:], x[:, :1]], 1),
    ):
        got, want = np.asarray(pbkern.jit(f)(x)), np.asarray(jax.jit(f)(x))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_indices_of_points_need_no_memory():
    """A gather by several indices, each computed where it is used."""

    def bilinear(a, y, x):
        i, j = jnp.floor(y).astype(int), jnp.floor(x).astype(int)
        return sum(
            a[i + p, j + q] * abs(1 - p - (y - i)) * abs(1 - q - (x - j))
            for p in (0, 1)
            for q in (0, 1)
        )

    a = numbers((50, 60), "float32")
    y, x = (
        jnp.asarray(np.random.default_rng(k).uniform(0, 40, (70, 33)), jnp.float32) for k in (1, 2)
    )
    np.testing.assert_allclose(pbkern.jit(bilinear)(a, y, x), jax.jit(bilinear)(a, y, x), rtol=1e-5)
    text = pbkern.jit(bilinear).as_text(a, y, x, stage="nests")
    assert text.count("nest [") == 1, text


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("shape", [(40, 33), (7, 200), (64, 64), (129, 5), (17, 31)])
def test_every_second_element_turned(dtype, shape):
    """Rows and columns exchanged, of arrays of pairs and of every second column: squares that are turned in registers."""

    def f(x, y):
        turned = jnp.swapaxes(x, 0, 1)
        swapped = jnp.stack([turned[..., 1] * 2, turned[..., 0]], -1)
        return turned + 1, swapped, turned[..., 1], y[:, ::2].T + 1, y[:, 1::2].T * 2

    with jax.enable_x64(True):
        x, y = numbers((*shape, 2), dtype), numbers(shape, dtype)
        for got, want in zip(pbkern.jit(f)(x, y), jax.jit(f)(x, y), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
