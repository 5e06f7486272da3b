"""Products of rows in groups (lax.ragged_dot): each row is multiplied by its group's matrix, in one kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern

from .checking import ints, rand


def by_hand(x, w, sizes):
    """The product in NumPy: rows behind the last group are zeros."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    out, first = np.zeros((len(x), w.shape[2])), 0
    for group, size in enumerate(np.asarray(sizes)):
        out[first : first + size] = x[first : first + size] @ w[group]
        first += size
    return out


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=5),
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(1, 140),
)
def test_rows_are_multiplied_by_the_matrix_of_their_group(sizes, behind, k, n):
    rows = sum(sizes) + behind
    if not rows:
        return
    x, w, sizes = rand(rows, k), rand(len(sizes), k, n, seed=1), jnp.asarray(sizes, jnp.int32)
    got = pbkern.jit(lax.ragged_dot)(x, w, sizes)
    np.testing.assert_allclose(got, by_hand(x, w, sizes), rtol=1e-4, atol=1e-4)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 140),
    st.integers(1, 30),
)
def test_gradients_are_sums_over_the_rows_of_a_group(sizes, k, n):
    rows = sum(sizes) + 3
    x, w, c = rand(rows, k), rand(len(sizes), k, n, seed=1), rand(rows, n, seed=2)
    sizes = jnp.asarray(sizes, jnp.int32)
    compiled = pbkern.jit(
        jax.grad(lambda x, w: (lax.ragged_dot(x, w, sizes) * c).sum(), argnums=(0, 1))
    )
    dx, dw = compiled(x, w)
    want, first = np.zeros(w.shape), 0
    for group, size in enumerate(np.asarray(sizes)):
        part = slice(first, first + size)
        want[group] = np.asarray(x[part], np.float64).T @ np.asarray(c[part], np.float64)
        first += size
    np.testing.assert_allclose(dw, want, rtol=1e-4, atol=1e-4)
    swapped = np.swapaxes(np.asarray(w), 1, 2)
    np.testing.assert_allclose(dx, by_hand(c, swapped, sizes), rtol=1e-4, atol=1e-4)
    assert not compiled.explain(x, w).left


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int8"])
def test_types(dtype):
    x, w = ints(20, 6, low=-3, high=4).astype(dtype), ints(3, 6, 10, low=-3, high=4).astype(dtype)
    sizes = jnp.array([7, 0, 9], jnp.int32)
    got = pbkern.jit(lax.ragged_dot)(x, w, sizes)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float64), by_hand(x, w, sizes))


def test_sizes_that_exceed_the_rows():
    x, w, sizes = rand(20, 6), rand(3, 6, 10, seed=1), jnp.array([15, 30, 9], jnp.int32)
    got = pbkern.jit(lax.ragged_dot)(x, w, sizes)
    np.testing.assert_allclose(got, by_hand(x, w, sizes), rtol=1e-4, atol=1e-4)


def test_values_of_other_groups_do_not_matter():
    x, w, sizes = rand(40, 6), rand(2, 6, 10, seed=1), jnp.array([19, 21], jnp.int32)
    x = x.at[19:].set(jnp.nan)
    got = pbkern.jit(lax.ragged_dot)(x, w, sizes)
    np.testing.assert_allclose(got[:19], by_hand(x, w, sizes)[:19], rtol=1e-4, atol=1e-4)
    assert np.isnan(got[19:]).all()


def test_explain_counts_the_kernel():
    def f(x, w, sizes):
        return lax.scan(lambda x, _: (lax.ragged_dot(x, w, sizes), None), x, None, length=9)[0]

    x, w, sizes = rand(20, 6), rand(2, 6, 6, seed=1), jnp.array([9, 8], jnp.int32)
    text = str(pbkern.jit(f).explain(x, w, sizes))
    assert "rows_by_group (a grouped product)" in text
    assert "that you wrote" not in text
    assert "0 operation(s) left to XLA" in text
    want = x
    for _ in range(9):
        want = by_hand(want, w, sizes)
    np.testing.assert_allclose(pbkern.jit(f)(x, w, sizes), want, rtol=2e-3, atol=1e-2)
