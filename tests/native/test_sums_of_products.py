"""Products that are added up one after the other: each is added where its accumulators end, to sums in one place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.targets.cpu.codegen.kernel import lower_kernel

from .running import native


def draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convolve(x, w, flat, dtype=jnp.float32, bias=False):
    """A kernel that adds nine shifted products, over rows of pixels or over pixels."""

    def body(x_ref, w_ref, o_ref):
        rows, columns, features = o_ref.shape[1:]
        total = jnp.zeros((rows * columns, features) if flat else (rows, columns, features), dtype)
        for dy in range(3):
            for dx in range(3):
                window = x_ref[0, dy : dy + rows, dx : dx + columns]
                window = window.reshape(rows * columns, -1) if flat else window
                total += jnp.dot(window, w_ref[dy, dx], preferred_element_type=dtype)
        total = jax.nn.relu(total + 1) if bias else total
        o_ref[0] = total.reshape(rows, columns, features).astype(o_ref.dtype)

    n, rows, columns, channels = x.shape
    kernel = pbkern.kernel(
        body, grid=(n,), out_shape=jax.ShapeDtypeStruct((n, rows - 2, columns - 2, w.shape[-1]), x.dtype),
        in_specs=[pbkern.BlockSpec((1, rows, columns, channels), lambda i: (i, 0, 0, 0)), pbkern.BlockSpec()],
        out_specs=[pbkern.BlockSpec((1, rows - 2, columns - 2, w.shape[-1]), lambda i: (i, 0, 0, 0))],
    )  # fmt: skip
    return kernel.trace(x, w)


def convolution(x, w):
    """In float64."""
    rows, columns = x.shape[1] - 2, x.shape[2] - 2
    x, w = np.float64(x), np.float64(w)
    return sum(x[:, i : i + rows, j : j + columns] @ w[i, j] for i in range(3) for j in range(3))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(13, 15, 8, 24), (9, 12, 33, 16), (5, 6, 1, 3), (20, 7, 40, 1)])
def test_shifted_products(flat, bias, size):
    rows, columns, channels, features = size
    x, w = draw((2, rows, columns, channels), 1), draw((3, 3, channels, features), 2)
    (got,) = native(convolve(x, w, flat, bias=bias), x, w)
    want = convolution(x, w)
    np.testing.assert_allclose(
        got, np.maximum(want + 1, 0) if bias else want, atol=1e-4 * np.abs(want).max(), rtol=0
    )


@pytest.mark.parametrize("flat", [False, True])
def test_their_sum_lies_in_one_place(flat):
    nests = lower_kernel(
        convolve(draw((1, 22, 23, 32), 1), draw((3, 3, 32, 32), 2), flat), "k"
    ).nests
    sums = set(re.findall(r"(%\w+)\[[^\]]*\] = add\(.*acc0\)  \(after\)", nests))
    assert nests.count(" dot= ") == nests.count("acc0)  (after)") == 9
    assert len([s for s in sums if s.startswith("%t")]) == 1


def test_of_narrow_sums():
    x, w = (
        jnp.asarray(draw(s, k), jnp.bfloat16)
        for k, s in enumerate([(1, 12, 12, 16), (3, 3, 16, 16)])
    )
    (got,) = native(convolve(x, w, False, jnp.bfloat16), x, w)
    want = convolution(x, w)
    np.testing.assert_allclose(np.float64(got), want, atol=3e-2 * np.abs(want).max(), rtol=0)


def test_partial_sums_that_are_read_again():
    """What one more reader wants is kept."""

    def body(x_ref, w_ref, o_ref, p_ref):
        first = x_ref[...] @ w_ref[0] + 1
        second = first + x_ref[...] @ w_ref[1]
        third = second + x_ref[...] @ w_ref[2]
        o_ref[...] = third + x_ref[...] @ w_ref[3]
        p_ref[...] = second * first

    x, w = draw((24, 20), 1), draw((4, 20, 28), 2)
    shape = jax.ShapeDtypeStruct((24, 28), jnp.float32)
    got = native(pbkern.kernel(body, out_shape=[shape, shape]).trace(x, w), x, w)
    products = np.float64(x) @ np.float64(w)
    np.testing.assert_allclose(got[0], products.sum(0) + 1, atol=1e-4)
    np.testing.assert_allclose(
        got[1], (products[0] + 1 + products[1]) * (products[0] + 1), atol=1e-3
    )


def test_partial_sums_seen_elsewhere():
    """A sum that reads the one before turned around is not stored over it."""

    def body(x_ref, w_ref, o_ref):
        total = x_ref[...] @ w_ref[0] + 1
        total = total.T + x_ref[...] @ w_ref[1]
        total = total[::-1] + x_ref[...] @ w_ref[2]
        o_ref[...] = total + x_ref[...] @ w_ref[3]

    x, w = draw((24, 20), 1), draw((4, 20, 24), 2)
    (got,) = native(
        pbkern.kernel(body, out_shape=jax.ShapeDtypeStruct((24, 24), jnp.float32)).trace(x, w), x, w
    )
    p = np.float64(x) @ np.float64(w)
    np.testing.assert_allclose(got, ((p[0] + 1).T + p[1])[::-1] + p[2] + p[3], atol=1e-4)
