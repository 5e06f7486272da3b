"""Sums over windows that are added along one dimension after the other (targets/cpu/locality/window_sums.py)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

RNG = np.random.default_rng(0)
WINDOWS = {
    "box": np.ones((3, 3)),
    "binomial": np.outer([1, 4, 6, 4, 1], [1, 2, 1]) / 64,
    "derivative along rows": np.outer([1, 2, 1], [-1, 0, 1]) / 8,
    "derivative along columns": np.outer([-1, 1], [1, 2, 1]) / 4,
    "both": np.outer([-1, 0, 1], [-1, 2, -1]),
    "negative": -np.outer([1, 2], [3, 1, 3]) / 7,
    "apart": np.outer([1, 0, 0, 2], [1, 0, 0, 1]),
    "no outer product": np.array([[1, 2, 1], [2, 3, 2], [1, 2, 1]]),
}


def windowed(image, weights, keeps_zeros, start):
    """The sum over windows of a two-dimensional array, written term by term."""
    rows, columns = (size - count + 1 for size, count in zip(image.shape, weights.shape))
    total = start
    for i, j in itertools.product(*map(range, weights.shape)):
        if weights[i, j] or keeps_zeros:
            total = total + image.dtype.type(weights[i, j]) * image[i : i + rows, j : j + columns]
    return total


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("keeps_zeros", [False, True])
@pytest.mark.parametrize("shape", [(37, 53), (70, 144)])
def test_windows(name, keeps_zeros, shape):
    image = RNG.standard_normal(shape).astype(np.float32)
    want = windowed(np.float64(image), WINDOWS[name], keeps_zeros, 0.5)
    got = pbkern.jit(lambda x: windowed(x, WINDOWS[name], keeps_zeros, 0.5))(image)
    np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(WINDOWS[name]).sum())


def test_windows_of_windows_share_what_they_read():
    def corners(x):
        dx, dy = (
            windowed(x, WINDOWS[f"derivative along {axis}"], False, 0)
            for axis in ("rows", "columns")
        )
        dx, dy = dx[:, 1:], dy[1:, : dx.shape[1] - 1]
        rows = min(dx.shape[0], dy.shape[0])
        dx, dy = dx[:rows], dy[:rows]
        xx, xy, yy = (windowed(p, WINDOWS["box"], False, 0) for p in (dx * dx, dx * dy, dy * dy))
        return xx * yy - xy * xy

    image = RNG.standard_normal((150, 200)).astype(np.float32)
    want = corners(np.float64(image))
    np.testing.assert_allclose(pbkern.jit(corners)(image), want, atol=1e-5 * np.abs(want).max())


def test_planes_and_doubles():
    with jax.enable_x64():
        image = RNG.standard_normal((5, 40, 60))
        window = np.ones((3, 3))
        got = pbkern.jit(lambda x: jnp.stack([windowed(p, window, False, 0) for p in x]))(image)
        want = np.stack([windowed(p, window, False, 0) for p in image])
        np.testing.assert_allclose(got, want, atol=1e-13)


@pytest.mark.parametrize("keeps_zeros", [False, True])
def test_infinite_elements_of_a_window_reach_its_results_only(keeps_zeros):
    image = RNG.standard_normal((64, 96)).astype(np.float32)
    image[20, 30], image[40, 50] = np.inf, np.nan
    weights = WINDOWS["derivative along rows"]
    with np.errstate(invalid="ignore"):
        want = windowed(np.float64(image), weights, keeps_zeros, 0.0)
    got = np.asarray(pbkern.jit(lambda x: windowed(x, weights, keeps_zeros, 0.0))(image))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))


@pytest.mark.parametrize("terms", [(0.0, "x", "y"), ("x", 0.0, "y")])
def test_sums_that_start_with_zero(terms):
    """One addition less, whichever side the zero is on."""
    x, y = RNG.standard_normal((2, 100)).astype(np.float32)

    def total(x, y):
        first, second, third = ({"x": x, "y": y}.get(term, term) for term in terms)
        return (first + second) + third, (first + second) - y

    for got, want in zip(pbkern.jit(total)(x, y), total(np.float64(x), np.float64(y)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    text = pbkern.jit(lambda x, y: total(x, y)[0]).as_text(x, y, stage="jaxpr")
    assert str(text).count(" add ") == 1


def test_zero_and_one_value_have_no_negative_zero():
    x = jnp.full(5, -0.0)
    got = np.asarray(pbkern.jit(lambda x: 0.0 + x)(x))
    assert not np.signbit(got).any()


def test_sums_keep_their_order_where_asked():
    """Ones beside 1e8: column by column they are lost."""
    image = np.ones((40, 60), np.float32)
    image[::2] = 1e8
    image[1::2, ::3] = -1e8
    kept = pbkern.polyblocks_jit_jax(
        lambda x: windowed(x, WINDOWS["box"], False, 0),
        compile_options={"mlir_disable_fast_math": True},
    )
    want = image[:-2, :-2]
    total = np.zeros_like(want)
    for i, j in itertools.product(range(3), range(3)):
        total = total + image[i : i + 38, j : j + 58]
    np.testing.assert_array_equal(kept(image), total)
