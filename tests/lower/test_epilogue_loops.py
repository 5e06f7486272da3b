"""What follows the sums of a tile, row by row: its results, its length, and where it stays unrolled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.arrays import array

RNG = np.random.default_rng(3)


def drawn(*shape: int, dtype=jnp.float32) -> jax.Array:
    return array(RNG.standard_normal(shape) * 0.5, dtype)


def mlir(f, *args) -> str:
    return pbkern.jit(f).as_text(*args, stage="mlir")


def wide(f, *args) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(f(*(jnp.asarray(np.asarray(a, np.float64)) for a in args)))


def gelu(a, b):
    return jax.nn.gelu(a @ b)


def scaled_by_rows(a, b, r):
    return jnp.tanh(a @ b) * r[:, None] + jnp.exp(-jnp.abs(a @ b))


def with_residual(a, b, c):
    return jax.nn.silu(a @ b + c) * jnp.sin(c)


SHAPES = [
    (256, 64, 512),
    (37, 19, 65),
    (9, 5, 48),
    (1, 8, 100),
    (2, 8, 16),
    (3, 8, 16),
    (5, 40, 20),
    (64, 640, 17),
    (301, 77, 333),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize(("f", "more"), [(gelu, ""), (scaled_by_rows, "m"), (with_residual, "mn")])
def test_products_with_long_epilogues(f, more, m, k, n):
    args = [drawn(m, k), drawn(k, n)] + (
        [drawn(*({"m": m, "n": n}[d] for d in more))] if more else []
    )
    want = wide(f, *args)
    np.testing.assert_allclose(pbkern.jit(f)(*args), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float64, 1e-13)])
def test_other_types(dtype, tolerance):
    with jax.enable_x64(dtype == jnp.float64):
        a, b = drawn(70, 40, dtype=dtype), drawn(40, 96, dtype=dtype)
        got = np.asarray(pbkern.jit(gelu)(a, b), np.float64)
        np.testing.assert_allclose(got, wide(gelu, a, b), rtol=tolerance, atol=tolerance)


def test_convolution_with_a_mask():
    def f(x, w, keep):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.where(keep, jax.nn.gelu(y), jnp.tanh(y))

    x, w = drawn(2, 11, 13, 24), drawn(3, 3, 24, 40)
    keep = jnp.asarray(RNG.random((2, 11, 13, 40)) < 0.5)
    with jax.enable_x64(True):
        want = f(*(jnp.asarray(np.asarray(a, np.float64)) for a in (x, w)), keep)
    np.testing.assert_allclose(pbkern.jit(f)(x, w, keep), want, rtol=2e-5, atol=5e-5)


def test_a_long_epilogue_is_there_once():
    """The code of a product with gelu is less than three times that of the product alone."""
    a, b = drawn(256, 512), drawn(512, 512)
    short, long = (len(mlir(f, a, b)) for f in (jnp.matmul, gelu))
    assert long < 3 * short


def test_a_short_epilogue_stays_in_registers():
    a, b = drawn(256, 256), drawn(256, 512)
    assert "memref.alloca" not in mlir(lambda a, b: jnp.maximum(a @ b, 0), a, b)
    assert "memref.alloca" in mlir(gelu, a, b)
