"""Recursions of lax.associative_scan that become loops (fuse/loops/associative_trees.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern

RATE = np.linspace(0.2, 0.9, 12).astype(np.float32)


def linear(before, after):
    return before[0] * after[0], after[0] * before[1] + after[1]


def max_plus(before, after):
    return before[0] + after[0], jnp.maximum(before[1] + after[0], after[1])


def with_constants(before, after):
    """Associative: a sum under a change of variables that both arguments share."""
    scale = jnp.exp(jnp.asarray(RATE))
    return (before * scale + after * scale) / scale


def matrices(before, after):
    return jnp.einsum("nij,njk->nik", after, before)


def segmented_maximum(before, after):
    """The maximum since the last flag."""
    begins = before[0] | after[0]
    return begins, jnp.where(after[0] > 0, after[1], jnp.maximum(before[1], after[1]))


def sequential(f, xs, reverse):
    """In float64, one element after the other."""
    xs = [np.asarray(x, np.float64 if x.dtype.kind == "f" else x.dtype) for x in xs]
    order = range(len(xs[0]))[:: -1 if reverse else 1]
    carry, out = None, [np.zeros_like(x) for x in xs]
    for place in order:
        element = tuple(x[place : place + 1] for x in xs)
        carry = element if carry is None else f(carry, element)
        for result, value in zip(out, carry):
            result[place] = value[0]
    return out


def rows(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 1.0, shape).astype(np.float32)


def jaxpr_text(f, *args):
    return pbkern.jit(f).as_text(*args, stage="jaxpr:trees to scans")


def is_loop(f, *args):
    text = jaxpr_text(f, *args)
    assert ("scan[" in text) != ("pad[" in text)
    return "scan[" in text


@given(
    n=st.integers(16, 150),
    width=st.integers(8, 40),
    combined=st.sampled_from([linear, max_plus]),
    which=st.sampled_from([(0,), (1,), (0, 1)]),
    reverse=st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_pairs_of_arrays(n, width, combined, which, reverse):
    x, y = rows(n, width), rows(n, width, seed=1)

    def f(x, y):
        results = lax.associative_scan(combined, (x, y), reverse=reverse)
        return [results[k] for k in which]

    with jax.enable_x64(True):
        want = sequential(combined, (x, y), reverse)
    assert is_loop(f, x, y)
    for got, k in zip(pbkern.jit(f)(x, y), which):
        np.testing.assert_allclose(got, want[k], rtol=2e-5)


@pytest.mark.parametrize("n", [16, 17, 64, 101, 1024])
@pytest.mark.parametrize("reverse", [False, True])
def test_sums(n, reverse):
    x = rows(n, 12)
    got = pbkern.jit(lambda x: lax.associative_scan(jnp.add, x, reverse=reverse))(x)
    turned = x[::-1] if reverse else x
    want = np.cumsum(turned.astype(np.float64), 0)
    np.testing.assert_allclose(got, want[::-1] if reverse else want, rtol=1e-6)
    assert is_loop(lambda x: lax.associative_scan(jnp.add, x, reverse=reverse), x)


def test_functions_that_read_other_values():
    x = rows(40, 12)

    def f(x):
        return lax.associative_scan(with_constants, x)

    assert is_loop(f, x)
    np.testing.assert_allclose(pbkern.jit(f)(x), np.cumsum(x.astype(np.float64), 0), rtol=1e-5)


def test_values_from_outside_that_others_read():
    x, scale = rows(40, 12), rows(12)

    def f(x, scale):
        shared = jnp.exp(scale)
        y = lax.associative_scan(lambda a, b: (a * shared + b * shared) / shared, x)
        return y, shared

    assert is_loop(f, x, scale)
    got, shared = pbkern.jit(f)(x, scale)
    np.testing.assert_allclose(got, np.cumsum(x.astype(np.float64), 0), rtol=1e-5)
    np.testing.assert_allclose(shared, np.exp(scale), rtol=1e-6)


def test_matrices():
    x = rows(37, 3, 3) / 1.7
    want, carry = [], np.eye(3)
    for matrix in x.astype(np.float64):
        carry = matrix @ carry
        want.append(carry)
    f = lambda x: lax.associative_scan(matrices, x)
    assert is_loop(f, x)
    np.testing.assert_allclose(pbkern.jit(f)(x), want, rtol=1e-5)


def test_integers_and_selects():
    rng = np.random.default_rng(3)
    flags = (rng.random((50, 9)) < 0.1).astype(np.int32)
    values = rng.integers(-9, 9, (50, 9)).astype(np.int32)
    f = lambda x, y: lax.associative_scan(segmented_maximum, (x, y))
    assert is_loop(f, flags, values)
    begins, maxima = pbkern.jit(f)(flags, values)
    np.testing.assert_array_equal(begins, np.maximum.accumulate(flags))
    want = values.copy()
    for row in range(1, 50):
        last = np.maximum(want[row - 1], values[row])
        want[row] = np.where(flags[row] > 0, values[row], last)
    np.testing.assert_array_equal(maxima, want)


def test_inside_of_loops_and_calls():
    x = rows(3, 32, 10)

    @jax.jit
    def inner(x):
        return lax.associative_scan(jnp.add, x)

    def f(x):
        return lax.scan(lambda total, block: (total + 1, inner(block) + total), 0.0, x)[1]

    want = np.cumsum(x.astype(np.float64), 1) + np.arange(3)[:, None, None]
    assert "pad[" not in jaxpr_text(f, x)
    np.testing.assert_allclose(pbkern.jit(f)(x), want, rtol=1e-5)


def test_tangents():
    x, y = rows(33, 9), rows(33, 9, seed=1)

    def f(x, y):
        return jax.jvp(lambda x: lax.associative_scan(linear, (x, y))[1], (x,), (jnp.ones_like(x),))

    for got, want in zip(pbkern.jit(f)(x, y), jax.jit(f)(x, y)):
        np.testing.assert_allclose(got, want, rtol=2e-5)


def test_values_that_the_function_broadcasts():
    x = rows(40, 12)
    f = lambda x: lax.associative_scan(lambda a, b: a + b + 0 * jnp.ones_like(a), x)
    assert is_loop(f, x)
    np.testing.assert_allclose(pbkern.jit(f)(x), np.cumsum(x.astype(np.float64), 0), rtol=1e-6)


def test_long_sums_are_accurate():
    x = rows(8192, 8)
    got = pbkern.jit(lambda x: lax.associative_scan(jnp.add, x))(x)
    np.testing.assert_allclose(got, np.cumsum(x.astype(np.float64), 0), rtol=6e-7)


def test_infinities_and_nans_stay_in_their_columns():
    x = rows(40, 16)
    x[3, 2], x[7, 5] = np.inf, np.nan
    got = np.asarray(pbkern.jit(lambda x: lax.associative_scan(jnp.add, x))(x))
    want = np.cumsum(x.astype(np.float64), 0)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


def mean_of_all(before, after):
    return before + after - jnp.mean(before, 0, keepdims=True)


def of_two_kinds(x):
    """A recursion by hand whose innermost level multiplies."""
    if len(x) < 2:
        return x
    f = jnp.multiply if len(x) < 4 else jnp.add
    odd = of_two_kinds(f(x[0:-1:2], x[1::2]))
    even = f(odd[: (len(x) - 1) // 2], x[2::2])
    even = jnp.concatenate([x[:1], even])
    config = lambda low, high: ((low, high, 1), (0, 0, 0))
    ragged = len(x) % 2
    return lax.pad(even, 0.0, config(0, 1 - ragged)) + lax.pad(odd, 0.0, config(1, ragged))


def without_odd(x):
    """A recursion by hand whose even elements combine elements of this level alone."""
    if len(x) < 2:
        return x
    pairs, ragged = x[0:-1:2], len(x) % 2
    odd = without_odd(pairs + x[1::2])
    even = jnp.concatenate([x[:1], pairs[: (len(x) - 1) // 2] + x[2::2]])
    config = lambda low, high: ((low, high, 1), (0, 0, 0))
    return lax.pad(even, 0.0, config(0, 1 - ragged)) + lax.pad(odd, 0.0, config(1, ragged))


def gradient(x):
    return jax.grad(lambda x: lax.associative_scan(linear, (x, x * x))[1].sum())(x)


def shared_rates(x):
    """vmap of a scan of which one array is not mapped."""
    rates = x[:, 0]
    return jax.vmap(lambda x: lax.associative_scan(linear, (rates, x))[1], in_axes=1, out_axes=1)(x)


def weighted_by_place(x):
    return lax.associative_scan(lambda a, b: a + b * x[: len(a)], x)


def of_other_columns(x):
    return lax.associative_scan(lambda a, b: a + b + 0 * jnp.flip(a, 0), x)


@pytest.mark.parametrize(
    "f",
    [
        gradient,
        of_two_kinds,
        without_odd,
        shared_rates,
        weighted_by_place,
        lambda x: lax.associative_scan(lambda a, b: a + b + jnp.cumsum(jnp.ones_like(a), 0), x),
        lambda x: lax.associative_scan(lambda a, b: a + b + jnp.sum(jnp.ones_like(a)), x),
        lambda x: without_odd(x[:31]),
        lambda x: of_two_kinds(x[:31]),
        of_other_columns,
        lambda x: lax.associative_scan(mean_of_all, x),
        lambda x: lax.associative_scan(jnp.add, x[:, 0]),
        lambda x: lax.associative_scan(jnp.add, x, axis=1),
        lambda x: lax.associative_scan(jnp.add, x[:8]),
    ],
)
def test_what_stays(f):
    x = rows(32, 16)
    assert "scan[" not in jaxpr_text(f, x)
    np.testing.assert_allclose(pbkern.jit(f)(x), jax.jit(f)(x), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(41, 3, 3), (33, 70, 2, 2), (20, 300, 3, 3)])
def test_products_of_matrices_as_people_write_them(shape):
    """jnp.matmul leaves out batch dimensions of one element, which calls on one element have."""
    x = rows(*shape) / shape[-1]
    want, carry = [], np.eye(shape[-1])
    for matrix in x.astype(np.float64):
        carry = matrix @ carry
        want.append(carry)
    f = lambda x: lax.associative_scan(lambda before, after: after @ before, x)
    assert "scan[" in jaxpr_text(f, x)
    np.testing.assert_allclose(pbkern.jit(f)(x), want, rtol=2e-5)


@given(
    n=st.integers(16, 60),
    width=st.integers(250, 700),
    combined=st.sampled_from([linear, max_plus]),
    reverse=st.booleans(),
)
@settings(deadline=None, max_examples=10)
def test_wide_steps_are_shared_by_programs(n, width, combined, reverse):
    x, y = rows(n, width), rows(n, width, seed=1)
    f = lambda x, y: lax.associative_scan(combined, (x, y), reverse=reverse)
    assert is_loop(f, x, y)
    for got, want in zip(pbkern.jit(f)(x, y), sequential(combined, (x, y), reverse), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_wide_steps_whose_elements_need_each_other_stay():
    f = lambda x: lax.associative_scan(lambda a, b: a + b - 0.0 * (a + b).sum(-1, keepdims=True), x)
    assert not is_loop(f, rows(40, 300))
