"""Gathers of arithmetic (fuse/indexing/gather_hoisting.py) and readers that move to the makers of large values
(fuse/partition/move_consumers.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from tests.arrays import array
from tests.cores import of_several_cores
from tests.lowered import on


def rand(*shape, dtype=jnp.float32):
    return array(np.random.default_rng(0).normal(size=shape) * 3, dtype)


def ints(*shape, low, high):
    return array(np.random.default_rng(1).integers(low, high, shape), jnp.int32)


def cross_entropy(x, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x, -1), labels[..., None], -1))


def rows(x, i):
    return (jnp.exp(x - x.max(0)) + x.sum(1, keepdims=True))[i]


def columns(x, i):
    return jnp.take(
        (x * 2 + jnp.arange(x.shape[0])[:, None]) / (1 + x.std(1, keepdims=True)), i, axis=1
    )


def scalars(x, i):
    return jnp.where(x > 0, x, -1)[i, i % x.shape[1]]


def with_integers(x, i):
    return (x.astype(jnp.int32) * 3 - 7)[i]


def filled(x, i):
    return (x * 2).at[i].get(mode="fill", fill_value=-5)


def clipped(x, i):
    return jnp.tanh(x).at[i].get(mode="clip")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "f",
    [cross_entropy, rows, columns, scalars, with_integers, filled, clipped],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    ("low", "high"), [(0, 9), (-9, 9), (-40, 60)], ids=["inside", "negative", "outside"]
)
def test_as_jax(f, low, high):
    x, i = rand(31, 17), ints(31 if f is cross_entropy else 7, low=low, high=high)
    got, want = np.asarray(pbkern.jit(f)(x, i)), np.asarray(jax.jit(f)(x, i))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_only_what_is_picked_is_computed():
    x, i = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
    nests = pbkern.jit(cross_entropy).as_text(x, i, stage="nests")
    assert not any(
        "log(" in line and "4096" in line for line in nests.splitlines()
    )  # no pass over all log-probabilities
    pbkern.testing.assert_kernels(cross_entropy, (x, i), 1)


def test_arithmetic_with_other_readers_stays():
    def f(x, i):
        y = jnp.tanh(x)
        return y, y[i]

    x, i = rand(300, 100), ints(5, low=-300, high=300)
    for got, want in zip(pbkern.jit(f)(x, i), jax.jit(f)(x, i)):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_inside_of_loops():
    def f(x, i):
        return lax.fori_loop(0, 3, lambda k, s: s + (x * 2 + k)[i].sum(0), jnp.zeros(x.shape[1]))

    x, i = rand(31, 17), ints(7, low=-31, high=31)
    np.testing.assert_allclose(pbkern.jit(f)(x, i), jax.jit(f)(x, i), rtol=1e-5, atol=1e-5)


def picked_from_sums(x, i):
    return jnp.mean(jnp.take_along_axis(jnp.cumsum(x, 1), i[:, None], 1))


def test_readers_join_the_maker_of_a_large_value():
    x, i = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
    with on():
        found = str(pbkern.jit(picked_from_sums).explain(x, i, verbose=True))
    assert "its readers joined its kernel" in found
    stored = pbkern.jit(picked_from_sums).memory_analysis(x, i)
    assert stored.temp_size_in_bytes < 1 << 20
    x, i = rand(700, 900), ints(700, low=0, high=900)
    want = np.take_along_axis(
        np.cumsum(np.asarray(x, np.float64), 1), np.asarray(i)[:, None], 1
    ).mean()
    np.testing.assert_allclose(pbkern.jit(picked_from_sums)(x, i), want, rtol=1e-4)


@of_several_cores
def test_sums_of_few_partial_results_are_repeated():
    """The sum of partial results belongs to the kernel that reads it: all programs make it, which costs nearly nothing."""
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    pbkern.testing.assert_kernels(lambda x: x / jnp.sqrt(jnp.sum(x * x)), (x,), 2)
    pbkern.testing.assert_kernels(lambda x: (x - x.min()) / (x.max() - x.min()), (x,), 2)


def again(mode, fill=None):
    return lambda x, i, j: (
        x.at[i].get(mode=mode, fill_value=fill).at[:, j].get(mode=mode, fill_value=fill)
    )


TWICE = {
    "rows, columns": lambda x, i, j: x[i][:, j],
    "columns, rows": lambda x, i, j: x[:, j][i],
    "rows of rows": lambda x, i, j: x[i][jnp.clip(j, -7, 6)],
    "three": lambda x, i, j: x[i][:, j][..., jnp.array([1, 0, 4])],
    "clipped": again("clip"),
    "filled": again("fill", 3),
    "filled in two ways": lambda x, i, j: (
        again("fill", 3)(x, i, j) + x.at[i].get(mode="fill", fill_value=3)[:, j]
    ),
    "arithmetic first": lambda x, i, j: jnp.tanh(x)[i][:, j],
    "integers": lambda x, i, j: x.astype(jnp.int32)[i][:, j],
    "unsigned": lambda x, i, j: x[abs(i).astype(jnp.uint32) % 60][:, j],
    "single places": lambda x, i, j: x[i, i % 5][:, j % 5],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TWICE)
def test_gathers_of_gathers(name):
    x, i, j = rand(60, 81, 5), ints(7, low=-70, high=70), ints(4, 3, low=-90, high=90)
    got, want = pbkern.jit(TWICE[name])(x, i, j), jax.jit(TWICE[name])(x, i, j)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_gathers_of_gathers_are_one_of_whole_vectors():
    x = jax.ShapeDtypeStruct((4, 60, 81, 16), jnp.float32)
    resized = pbkern.jit(lambda x: jax.image.resize(x, (4, 100, 135, 16), "nearest"))
    gathering = [row for row in resized.as_text(x, stage="nests").splitlines() if "gather " in row]
    assert len(gathering) == 1
    assert gathering[0].partition("=")[2].count("%a") == 1
    assert "vector.gather" not in resized.as_text(x, stage="mlir")
