"""Products over every small extent, of every dtype, with operands that are broadcast."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.lowered import lowered

EXTENTS = (1, 2, 3, 16, 17)
DTYPES = ("float32", "bfloat16", "float16", "int8", "int32", "uint16")
SHAPES = list(itertools.product(EXTENTS, EXTENTS, EXTENTS))


def draw(shape, dtype):
    return np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype("f4").astype(jnp.dtype(dtype))


def broadcast_rows(a, b):
    return jnp.broadcast_to(a[:1], a.shape) @ b


@pytest.mark.sampled(25)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f", [jnp.matmul, broadcast_rows], ids=["matmul", "broadcast"])
def test_products(f, dtype, shape):
    m, n, k = shape
    a, b = (draw(s, "uint8" if dtype == "uint16" else dtype).astype(jnp.dtype(dtype)) for s in ((m, k), (k, n)))
    np.testing.assert_array_equal(np.asarray(pbkern.jit(f)(a, b)), np.asarray(jax.jit(f)(a, b)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
def test_products_lower_for_wide_vectors(dtype):
    for m, n, k in [(42, 2, 1), (16, 2, 1), (1, 1, 1), (17, 3, 2), (3, 17, 1), (64, 3, 1)]:
        assert "scf.for" in lowered(jnp.matmul, draw((m, k), dtype), draw((k, n), dtype), stage="mlir")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channels, results, size", [(1, 1, 1), (1, 2, 3), (3, 1, 16), (2, 16, 5), (17, 3, 7)])
def test_convolutions_of_broadcast_operands(channels, results, size, dtype):
    x, w = draw((2, channels, size, size), dtype), draw((results, channels, 3, 3), dtype)

    def image(x, w):
        return lax.conv_general_dilated(jnp.broadcast_to(x[:1, :, :, :1], x.shape), w, (1, 1), "SAME")

    def kernel(x, w):
        return lax.conv_general_dilated(x, jnp.broadcast_to(w[:, :1, :, :1], w.shape), (1, 1), "SAME")

    for f in (image, kernel):
        np.testing.assert_array_equal(np.asarray(pbkern.jit(f)(x, w)), np.asarray(jax.jit(f)(x, w)))
        assert "scf.for" in lowered(f, x, w, stage="mlir")
