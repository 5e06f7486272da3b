"""Scatters as machine code equal NumPy's, whatever the shapes, types, modes and blocks."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbkern.fuse import schedule
from pbkern.lower.support import supports

from ..fuse import checking
from ..fuse.checking import random_blocks
from ..fuse.test_scatter import CASES, MANY
from .running import native_program


@pytest.mark.parametrize("name", CASES)
def test_scatter(name, monkeypatch):
    f, *args = CASES[name]
    run(f, *args)
    for seed in range(2):
        monkeypatch.setattr(schedule, "_descend", random_blocks(seed))
        run(f, *args)


@pytest.mark.parametrize("name", MANY)
def test_private_results(name):
    f, *args = MANY[name]
    run(f, *args)


def run(f, *args):
    plan = checking.planned(f, *args, supports=supports)
    assert not plan.left_to_xla(), str(plan.explanation)
    got = [np.asarray(x) for x in plan.evaluate(list(args), native_program)]
    for g, w in zip(got, [np.asarray(x) for x in [f(*args)]]):
        assert g.dtype == w.dtype and g.shape == w.shape
        tolerance = 5e-2 if g.dtype.itemsize == 2 else 2e-3
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance)
    return got


COMBINE = {
    "add": np.add.at,
    "subtract": np.subtract.at,
    "multiply": np.multiply.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rows_as_numpy_does(data):
    """x.at[i].combine(v) in float64, one update after the other."""
    rows, count, width = (data.draw(st.integers(1, n)) for n in (9, 20, 40))
    dtype = data.draw(st.sampled_from(["float32", "int32", "int8", "uint8", "bfloat16"]))
    combine = data.draw(st.sampled_from(list(COMBINE)))
    mode = data.draw(st.sampled_from(["drop", "clip"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    x, v = (rng.integers(1, 4, size=(n, width)) for n in (rows, count))
    i = rng.integers(-2 * rows, 2 * rows, size=count)

    def f(x, i, v):
        return getattr(x.at[i], combine)(v, mode=mode)

    args = jnp.asarray(x, dtype), jnp.asarray(i, jnp.int32), jnp.asarray(v, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "_descend", random_blocks(data.draw(st.integers(0, 100))))
        (got,) = run(f, *args)
    want = np.array(np.asarray(args[0]), np.float64 if dtype == "bfloat16" else dtype)
    for k, row in zip(np.where(i < 0, i + rows, i), np.asarray(args[2]).astype(want.dtype)):
        k = min(max(k, 0), rows - 1) if mode == "clip" else k
        if 0 <= k < rows:
            _one(want, k, row, combine)
    tolerance = 0.1 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance)


def _one(a, k, row, combine):
    if combine == "set":
        a[k] = row
    else:
        COMBINE[combine](a, (np.full(len(row), k), np.arange(len(row))), row)
