"""Stencils whose overlapping loads are made of aligned vectors (lower/lane_shifts.py), against plain JAX in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern


def five_points(a):
    p = jnp.pad(a, 1)
    return 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])


def inner_nine_points(a):
    rows = a[:-2] + a[1:-1] + a[2:]
    return a.at[1:-1, 1:-1].set((rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9)


def far_neighbours(a):
    p = jnp.pad(a, ((0, 0), (17, 17)))
    return 0.5 * a + 0.25 * (p[:, :-34] + p[:, 34:])


def transport(a):
    return a - 0.3 * (a - jnp.roll(a, 1, axis=1)) - 0.2 * (a - jnp.roll(a, 1, axis=0))


def iterate(step, steps):
    return lambda a: jax.lax.fori_loop(0, steps, lambda _, x: step(x), a)


@pytest.mark.parametrize("step", [five_points, inner_nine_points, far_neighbours, transport], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(300, 517), (64, 1000), (129, 33), (260, 272)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps(step, shape, dtype):
    x = np.random.default_rng(3).normal(size=shape)
    with jax.enable_x64(True):
        want = np.asarray(iterate(step, 8)(jnp.asarray(x)))
        got = np.asarray(pbkern.jit(iterate(step, 8))(jnp.asarray(x, dtype)))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=0, atol=np.abs(want).max() * (1e-6 if dtype == "float32" else 1e-14))


@pytest.mark.parametrize("shape", [(5000,), (40, 30, 70)])
def test_other_ranks(shape):
    def step(a):
        inner = tuple(slice(1, -1) for _ in shape)
        around = [a[inner[:k] + (s,) + inner[k + 1 :]] for k in range(a.ndim) for s in (slice(None, -2), slice(2, None))]
        return a.at[inner].set(sum(around) / len(around))

    x = np.random.default_rng(4).normal(size=shape)
    with jax.enable_x64(True):
        want = np.asarray(iterate(step, 6)(jnp.asarray(x)))
    got = np.asarray(pbkern.jit(iterate(step, 6))(jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_integers():
    x = np.random.default_rng(5).integers(-1000, 1000, (200, 300)).astype(np.int32)
    step = lambda a: a.at[1:-1, 1:-1].set(a[1:-1, 1:-1] + a[1:-1, :-2] - a[1:-1, 2:])  # noqa: E731
    np.testing.assert_array_equal(pbkern.jit(iterate(step, 5))(x), jax.jit(iterate(step, 5))(x))


@pytest.mark.skipif(pbkern.cpu.machine().vector_bits < 512, reason="narrower vectors straddle fewer lines")
def test_mechanism_is_at_work():
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    assert "vector.shuffle" in pbkern.jit(iterate(five_points, 50)).as_text(x, stage="mlir")
