"""Cumulative sums and log-sum-exps over long axes: errors like those of XLA's trees, against float64."""

import jax
import numpy as np
import pytest
from jax import lax

import pbkern

RNG = np.random.default_rng(3)


def worst(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max()


SHAPES = [
    ((20000,), 0),
    ((1 << 20,), 0),
    ((5000, 16), 0),
    ((16, 5000), 1),
    ((700, 3, 2), 0),
    ((3, 131), 1),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_cumsum(kind, shape, axis):
    x = getattr(RNG, kind)(size=shape).astype("f4")
    want = np.cumsum(x.astype(np.float64), axis)
    ours, xla = (
        worst(j(lambda x: lax.cumsum(x, axis=axis))(x), want) for j in (pbkern.jit, jax.jit)
    )
    assert ours <= 3 * xla


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "axis"), [((20000,), 0), ((8, 3000), 1), ((3000, 8), 0)])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumlogsumexp(shape, axis, reverse):
    x = RNG.normal(size=shape).astype("f4")
    flip = (lambda a: np.flip(a, axis)) if reverse else (lambda a: a)
    want = flip(np.logaddexp.accumulate(flip(x.astype(np.float64)), axis))
    ours, xla = (
        worst(j(lambda x: lax.cumlogsumexp(x, axis=axis, reverse=reverse))(x), want)
        for j in (pbkern.jit, jax.jit)
    )
    assert ours <= 4 * xla


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 63, 64, 299])
def test_infinities_and_nan_stay(special, at):
    x = np.ones(300, "f4")
    x[at] = special
    np.testing.assert_array_equal(pbkern.jit(lax.cumsum)(x), np.cumsum(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 192, 193, 257])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_lengths_around_runs(length, dtype):
    x = RNG.integers(-2, 3, (5, length)).astype("f4").astype(jax.numpy.dtype(dtype))
    want = np.cumsum(x.astype(np.int64), 1)
    np.testing.assert_array_equal(
        np.asarray(pbkern.jit(lambda x: lax.cumsum(x, axis=1))(x), np.int64), want
    )
