"""Reductions of rows beside single elements of the same rows, for all short rows: results of jax.jit, compiled in seconds."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.lowered import lowered

FUNCTIONS = {
    "sum_and_first": lambda a: a.sum(1) - a[:, 0],
    "max_and_last": lambda a: a.max(1) + a[:, -1],
    "trapezoid": lambda a: jnp.trapezoid(a, axis=1),
    "sorted_centred": lambda a: jnp.sort(a - a.mean(1, keepdims=True), axis=1),
    "median": lambda a: jnp.median(a, axis=1),
    "quantile": lambda a: jnp.quantile(a, 0.3, axis=1),
}
SHAPES = [(m, k) for m in (2, 4, 16, 100, 4096) for k in range(2, 34)]


@pytest.mark.sampled(96)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_agrees(name, shape):
    f, a = (
        FUNCTIONS[name],
        np.random.default_rng(shape[0] * shape[1]).normal(size=shape).astype("f4"),
    )
    started = time.perf_counter()
    got = np.asarray(pbkern.jit(f)(a))
    seconds = time.perf_counter() - started
    np.testing.assert_allclose(got, jax.jit(f)(a), rtol=1e-5, atol=1e-5)
    assert seconds < 20  # 2 on an idle machine


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows", [2, 100])
def test_every_length_lowers_for_wide_vectors(name, rows):
    for length in (2, 3, 5, 8, 13, 16, 17, 31, 32, 33):
        assert (
            len(
                lowered(
                    FUNCTIONS[name], jax.ShapeDtypeStruct((rows, length), jnp.float32), stage="mlir"
                )
            )
            < 400_000
        )


def test_what_follows_sums_is_written_once():
    """A sorting network after a reduction is a graph with shared nodes: its text is as long as the graph, not as its paths."""
    sizes = [
        len(
            lowered(
                FUNCTIONS["median"], jax.ShapeDtypeStruct((12, k, 35), jnp.float32), stage="mlir"
            )
        )
        for k in (4, 8)
    ]
    assert sizes[0] < 100_000
    assert sizes[1] < 8 * sizes[0]
