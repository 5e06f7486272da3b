"""Rows of scratch are lengthened where caches want it, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.lower.nest.ir import Buf
from pbkern.targets.cpu.packing import row_padding

F32 = np.dtype("float32")


@pytest.mark.parametrize(("shape", "want"), [
    ((32, 1024), (32, 1040)),  # 4 KB apart
    ((2, 16, 512), (2, 16, 528)),  # 2 KB apart
    ((3, 1024), (3, 1024)),  # few rows
        ((8, 1022), (8, 1040)),  # whole vectors, then apart
    ((32, 1000), (32, 1008)),  # whole vectors
    ((32, 1040), (32, 1040)),
])  # fmt: skip
def test_lengths(shape, want):
    buf = Buf("t", shape, F32, arena=True)
    assert row_padding.PadScratchRows()._padded(buf).shape == want


def spilled(q, k):
    """Scores of 128 rows and 1024 columns that are used twice: they lie in scratch."""
    s = q @ k.T
    return s - s.max(-1, keepdims=True), jnp.exp(s - s.max(-1, keepdims=True)).sum(-1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "columns"), [(128, 1024), (100, 512), (33, 2048), (16, 512)])
def test_scores_in_scratch(rows, columns, dtype):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(rows, 16)), rng.normal(size=(columns, 16))
    s = q @ k.T
    want = s - s.max(-1, keepdims=True), np.exp(s - s.max(-1, keepdims=True)).sum(-1)
    with jax.enable_x64(True):
        got = pbkern.jit(spilled)(jnp.asarray(q, dtype), jnp.asarray(k, dtype))
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * 20)
