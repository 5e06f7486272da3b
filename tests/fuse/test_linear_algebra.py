"""Factorisations and triangular solves of small matrices: in fused functions, loops and bodies of kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern
from pbkern.core.ops.linear_algebra import LARGEST_SIZE, MOST_WRITTEN_STEPS
from pbkern.fuse.simplify.driver import Simplify
from pbkern.targets.cpu.costs import CpuCosts
from pbkern.targets.cpu.machines.devices import device_of

from .checking import planned

SIZES = st.sampled_from([1, 2, 3, 5, MOST_WRITTEN_STEPS, MOST_WRITTEN_STEPS + 1, 13])
BATCHES = st.sampled_from([(), (3,), (2, 2), (Simplify().most_per_program + 1,)])
DTYPES = st.sampled_from([np.float32, np.float64])
few_examples = settings(max_examples=8, deadline=None, derandomize=True)


def matrices(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def definite(*shape, dtype=np.float64):
    a = matrices(*shape)
    return (a @ np.swapaxes(a, -1, -2) + shape[-1] * np.eye(shape[-1])).astype(dtype)


def ours(f, *args):
    """The results of a function of which nothing is left to XLA."""
    with jax.enable_x64(args[0].dtype == np.float64):
        assert not planned(f, *args).left_to_xla()
        return jax.tree.map(lambda x: np.asarray(x, np.float64), pbkern.jit(f)(*args))


def close(got, want, dtype, factor=1.0):
    tolerance = factor * (2e-5 if dtype == np.float32 else 1e-12)
    np.testing.assert_allclose(
        got, want, rtol=tolerance, atol=tolerance * max(1, np.abs(want).max())
    )


@few_examples
@given(size=SIZES, batch=BATCHES, dtype=DTYPES)
def test_cholesky(size, batch, dtype):
    a = definite(*batch, size, size, dtype=dtype)
    close(ours(jnp.linalg.cholesky, a), np.linalg.cholesky(a.astype("f8")), dtype)


@settings(few_examples, max_examples=16)
@given(
    size=SIZES,
    batch=BATCHES,
    dtype=DTYPES,
    columns=st.sampled_from([1, 3]),
    lower=st.booleans(),
    left=st.booleans(),
    turned=st.booleans(),
    unit=st.booleans(),
)
def test_triangular_solve(size, batch, dtype, columns, lower, left, turned, unit):
    a = (matrices(*batch, size, size) / size + 2 * np.eye(size)).astype(dtype)
    b = matrices(*batch, *((size, columns) if left else (columns, size)), dtype=dtype, seed=1)

    def f(a, b):
        return lax.linalg.triangular_solve(
            a, b, left_side=left, lower=lower, transpose_a=turned, unit_diagonal=unit
        )

    triangle = (np.tril if lower else np.triu)(a.astype("f8"))
    if unit:
        triangle = triangle - triangle * np.eye(size) + np.eye(size)
    triangle = np.swapaxes(triangle, -1, -2) if turned else triangle
    want = (
        np.linalg.solve(triangle, b)
        if left
        else np.swapaxes(
            np.linalg.solve(np.swapaxes(triangle, -1, -2), np.swapaxes(b, -1, -2)), -1, -2
        )
    )
    close(ours(f, a, b), want, dtype)


@few_examples
@given(size=SIZES, more=st.sampled_from([-1, 0, 2]), batch=BATCHES, dtype=DTYPES)
def test_lu(size, more, batch, dtype):
    height = max(size + more, 1)
    a = matrices(*batch, height, size, dtype=dtype)
    factors, pivots, order = ours(lax.linalg.lu, a)
    for got, rows, exchanged, exact in zip(
        factors.reshape(-1, height, size),
        order.reshape(-1, height),
        pivots.reshape(-1, min(height, size)),
        a.astype("f8").reshape(-1, height, size),
    ):
        count = min(height, size)
        lower = np.tril(got[:, :count], -1) + np.eye(height, count)
        close(lower @ np.triu(got[:count]), exact[rows.astype(int)], dtype)
        assert np.abs(lower).max() <= 1
        swapped = np.arange(height)
        for k, other in enumerate(exchanged.astype(int)):
            swapped[[k, other]] = swapped[[other, k]]
        np.testing.assert_array_equal(swapped, rows)


@few_examples
@given(size=SIZES, more=st.sampled_from([-1, 0, 2]), full=st.booleans(), dtype=DTYPES)
def test_qr(size, more, full, dtype):
    a = matrices(3, max(size + more, 1), size, dtype=dtype)
    q, r = ours(lambda a: lax.linalg.qr(a, full_matrices=full), a)
    for got_q, got_r, exact in zip(q, r, a.astype("f8")):
        want_q, want_r = scipy.linalg.qr(exact, mode="full" if full else "economic")
        close(got_q, want_q, dtype, 5)
        close(got_r, want_r, dtype, 5)


@few_examples
@given(size=SIZES, more=st.sampled_from([0, 2]), batch=BATCHES)
def test_orders_of_rows_that_pivots_make(size, more, batch):
    height = size + more
    rng = np.random.default_rng(size)
    pivots = rng.integers(np.arange(size), height, (*batch, size)).astype(np.int32)
    orders = ours(lambda p: lax.linalg.lu_pivots_to_permutation(p, height), pivots)
    for got, exchanged in zip(orders.reshape(-1, height), pivots.reshape(-1, size)):
        want = np.arange(height)
        for k, other in enumerate(exchanged):
            want[[k, other]] = want[[other, k]]
        np.testing.assert_array_equal(got, want)


@settings(few_examples, max_examples=12)
@given(
    size=SIZES,
    more=st.sampled_from([0, 2]),
    batch=BATCHES,
    dtype=DTYPES,
    left=st.booleans(),
    turned=st.booleans(),
)
def test_products_with_reflectors(size, more, batch, dtype, left, turned):
    height = size + more
    a = matrices(*batch, height, size, dtype=dtype)
    c = matrices(*batch, *((height, 3) if left else (3, height)), dtype=dtype, seed=1)

    def f(a, c):
        reflectors, factors = jnp.linalg.qr(a, mode="raw")
        return lax.linalg.ormqr(reflectors.mT, factors, c, left=left, transpose=turned)

    for got, matrix, other in zip(
        ours(f, a, c).reshape(-1, *c.shape[-2:]),
        a.astype("f8").reshape(-1, height, size),
        c.astype("f8").reshape(-1, *c.shape[-2:]),
    ):
        q = scipy.linalg.qr(matrix)[0]
        q = q.T if turned else q
        close(got, q @ other if left else other @ q, dtype, 5)


def test_tall_matrices_are_factored_in_loops_alone():
    """Least squares of more rows than LARGEST_SIZE, as steps of Gauss and Newton have them."""
    a, b = matrices(60, 3), matrices(60, seed=1)

    def fit(a, b):
        q, r = jnp.linalg.qr(a)
        return lax.linalg.triangular_solve(r, (q.T @ b)[:, None], left_side=True)[:, 0]

    def loop(a, b):
        return lax.fori_loop(0, 4, lambda _, x: x + fit(a, b - a @ x), jnp.zeros(3, a.dtype))

    close(ours(loop, a, b), np.linalg.lstsq(a, b, rcond=None)[0], a.dtype)
    assert planned(fit, a.astype("f4"), b.astype("f4")).left_to_xla()


@few_examples
@given(size=SIZES, batch=BATCHES, dtype=DTYPES, lower=st.booleans())
def test_symmetric_eigenvalues(size, batch, dtype, lower):
    """Only one triangle is read; eigenvectors have no sign of their own."""
    a = definite(*batch, size, size, dtype=dtype)
    half = (np.tril if lower else np.triu)(a)
    vectors, values = ours(lambda a: lax.linalg.eigh(a, lower=lower, symmetrize_input=False), half)
    close(values, np.linalg.eigvalsh(a.astype("f8")), dtype, 3)
    turned = np.swapaxes(vectors, -1, -2)
    close(turned @ vectors, np.broadcast_to(np.eye(size), a.shape), dtype, 3)
    close(vectors * values[..., None, :] @ turned, a.astype("f8"), dtype, 3)


@pytest.mark.parametrize("size", [3, 11])
def test_solutions_inverses_and_determinants(size):
    a, b = matrices(4, size, size), matrices(4, size, 2, seed=1)
    close(ours(jnp.linalg.solve, a, b), np.linalg.solve(a, b), a.dtype, 100)
    close(ours(jnp.linalg.inv, a), np.linalg.inv(a), a.dtype, 100)
    close(ours(jnp.linalg.det, a), np.linalg.det(a), a.dtype, 100)
    for got, want in zip(ours(jnp.linalg.slogdet, a), np.linalg.slogdet(a)):
        close(got, want, a.dtype, 100)


def test_singular_matrices_and_nan_are_as_jax_has_them():
    a = definite(3, 4, 4, dtype=np.float32)
    a[0, 2, 2], a[1, 1, 1] = -1, np.nan
    for f in (jnp.linalg.cholesky, jnp.linalg.eigh):
        for got, want in zip(jax.tree.leaves(ours(f, a)), jax.tree.leaves(f(a))):
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    singular = np.ones((4, 4), np.float32)
    for got, want in zip(ours(lax.linalg.lu, singular), lax.linalg.lu(singular)):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(
        ours(jnp.linalg.qr, np.zeros((3, 3), "f4")), (np.eye(3), np.zeros((3, 3)))
    ):
        np.testing.assert_array_equal(got, want)


def test_rows_that_overflow_when_squared_have_a_factorisation():
    a = matrices(4, 4, dtype=np.float32) * np.float32(1e25)
    q, r = ours(jnp.linalg.qr, a)
    close(q @ r / 1e25, a / 1e25, a.dtype)


def test_large_and_complex_matrices_stay_with_lapack():
    one, many = LARGEST_SIZE + 1, Simplify().largest_factored_of_many + 1
    for a in (definite(one, one), definite(2, many, many), np.eye(3) * (1 + 0j)):
        with jax.enable_x64(True):
            left = planned(lax.linalg.cholesky, a).left_to_xla()
        assert [x.op for x in left if x.op == "cholesky"] == ["cholesky"]


def filtered(transition, observed, start, covariance, values):
    """A Kalman filter: estimates, and the likelihood of each value."""
    one, two = jnp.eye(len(start)) * 0.1, jnp.eye(len(observed)) * 0.2

    def step(state, value):
        estimate, spread = state
        estimate, spread = transition @ estimate, transition @ spread @ transition.T + one
        factor = jnp.linalg.cholesky(observed @ spread @ observed.T + two)
        gain = jax.scipy.linalg.solve_triangular(factor, observed @ spread, lower=True)
        rest = jax.scipy.linalg.solve_triangular(factor, value - observed @ estimate, lower=True)
        likelihood = -0.5 * rest @ rest - jnp.log(jnp.diagonal(factor)).sum()
        return (estimate + gain.T @ rest, spread - gain.T @ gain), (estimate, likelihood)

    return lax.scan(step, (start, covariance), values)


@pytest.mark.parametrize(("states", "observations"), [(4, 2), (12, 10)])
def test_loops_with_factorisations_are_ours_with_their_gradients(states, observations):
    args = (
        0.9 * np.eye(states) + 0.05 * matrices(states, states),
        matrices(observations, states, seed=1),
        np.zeros(states),
        np.eye(states),
        matrices(20, observations, seed=2),
    )
    loss = lambda *args: filtered(*args)[1][1].sum()
    for f in (filtered, jax.grad(loss, (0, 1))):
        with jax.enable_x64(True):
            want = jax.tree.leaves(jax.jit(f)(*args))
        for got, exact in zip(jax.tree.leaves(ours(f, *args)), want):
            close(got, exact, np.float64, 100)


@pytest.mark.parametrize("size", [4, 12])
def test_bodies_of_kernels_have_factorisations(size):
    a = definite(5, size, size, dtype=np.float32)

    @pbkern.kernel(
        grid=(5,),
        in_specs=[pbkern.BlockSpec((1, size, size), lambda i: (i, 0, 0))],
        out_specs=[pbkern.BlockSpec((1, size, size), lambda i: (i, 0, 0))] * 2,
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype)] * 2,
    )
    def solved(x, factor, inverse):
        factor[0] = jnp.linalg.cholesky(x[0])
        inverse[0] = jnp.linalg.inv(x[0])

    for run in (solved, pbkern.jit(solved)):
        factor, inverse = run(a)
        close(np.asarray(factor, "f8"), np.linalg.cholesky(a.astype("f8")), a.dtype)
        close(np.asarray(inverse, "f8"), np.linalg.inv(a.astype("f8")), a.dtype)


@pytest.mark.parametrize(("name", "at_once"), [("haswell", 16), ("znver5", 32), ("neoverse-n1", 8)])
def test_a_program_factors_as_many_matrices_as_two_vectors_have_lanes(name, at_once):
    costs = CpuCosts.of(device_of(name).machine)
    x = jax.ShapeDtypeStruct((320, 12, 12), "float32")
    kernels = planned(lambda x: lax.linalg.lu(x)[0], x, machine=costs).kernels()
    assert kernels[0].grid == (320 // at_once,)
