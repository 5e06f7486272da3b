"""Elementwise work on short rows with what all rows share: as many rows at once as vectors have lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from tests.lowered import lowered


def normalise(x, m, s):
    return (x.astype(jnp.float32) / 255 - m) / s


def nests(f, *args) -> str:
    return lowered(f, *args)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("rows", [1, 100, 128, 1000, 1003, 4099])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 12, 16, 20, 33])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_values(dtype, size, rows, rng):
    x = rng.integers(0, 255, (rows, size)).astype(dtype)
    m, s = (rng.uniform(0.5, 2, size).astype(np.float32) for _ in range(2))
    want = (x.astype(np.float64) / 255 - m) / s
    np.testing.assert_allclose(pbkern.jit(normalise)(x, m, s), want, rtol=1e-6, atol=1e-6)


def test_what_rows_share_is_computed_once(rng):
    x, v, b = rng.standard_normal((4, 30, 40, 3)), rng.uniform(1, 2, 3), rng.standard_normal(3)
    f = lambda x, v, b: x / jnp.sqrt(v) + b
    arguments = [jnp.asarray(a, jnp.float32) for a in (x, v, b)]
    np.testing.assert_allclose(pbkern.jit(f)(*arguments), x / np.sqrt(v) + b, rtol=2e-6, atol=1e-6)
    main = nests(f, *arguments).split("nest ")[-1]
    assert "sqrt" not in main
    assert "<48]" in main


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        pytest.param(lambda x, y: x * y, [(3000, 3), (3000, 1)], id="shared along rows"),
        pytest.param(lambda x, y: x + y, [(3000, 16), (16,)], id="whole vectors"),
        pytest.param(lambda x, y: x + y, [(40, 3), (3,)], id="few rows"),
        pytest.param(
            lambda x, y: x.T + y[:, None], [(3000, 3), (3,)], id="columns of a transposed array"
        ),
        pytest.param(
            lambda x, y: x + y[:, None],
            [(40, 300, 3), (40, 3)],
            id="different from one outer place to the next",
        ),
    ],
)
def test_others_stay(f, shapes, rng):
    arrays = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    np.testing.assert_array_equal(pbkern.jit(f)(*arrays), jax.jit(f)(*arrays))
    assert "<48]" not in nests(f, *arrays)
