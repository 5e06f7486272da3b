"""Loops over small values: one kernel, which has the loop inside, and computes what jax.jit computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pbkern

from .checking import check, planned, rand
from .workloads import f32

STEPS = 300


def logistic(x, r):
    return lax.fori_loop(0, STEPS, lambda _, x: r * x * (1 - x), x)


def lorenz(state):
    def step(state, _):
        x, y, z = state
        return (
            x + 0.1 * (y - x),
            y + 0.01 * (x * (28 - z) - y),
            z + 0.01 * (x * y - 2.5 * z),
        ), None

    return lax.scan(step, state, None, length=STEPS)[0]


def averages(xs):
    def step(mean, x):
        mean = 0.9 * mean + 0.1 * x
        return mean, (mean, x - mean)

    return lax.scan(step, jnp.float32(0), xs)


def backwards(xs):
    return lax.scan(lambda c, x: (c * 0.5 + x, c), jnp.float32(1), xs, reverse=True)


def swapped(a, b):
    return lax.fori_loop(0, STEPS, lambda _, s: (s[1], 0.5 * (s[0] + s[1])), (a, b))


def halvings(n):
    """Values decide how many steps there are."""

    def step(state):
        n, count = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    return lax.while_loop(lambda s: s[0] != 1, step, (n, 0))[1]


def nested(n):
    return lax.fori_loop(0, 200, lambda i, total: total + halvings(i + 1), n)


def bisected(a):
    def halve(state):
        low, high = state
        middle = 0.5 * (low + high)
        below = middle**3 < a
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    return lax.while_loop(lambda s: s[1] - s[0] > 1e-4, halve, (jnp.zeros_like(a), a + 1))


def branching(x, choices):
    def step(c, choice):
        return lax.switch(choice, [lambda c: c + 0.1, jnp.sin, lambda c: 1.9 * c * (1 - c)], c), c

    return lax.scan(step, x, choices)


def runge_kutta(matrix, y):
    def step(y, _):
        k1 = matrix @ y
        k2 = matrix @ (y + 0.05 * k1)
        return y + 0.1 * k2, jnp.abs(y).max()

    return lax.scan(step, y, None, length=STEPS)


def filtered(zs):
    """Kalman's filter of two states and one observation."""
    move, noise = jnp.array([[1.0, 0.1], [0.0, 1.0]]), 0.01 * jnp.eye(2)

    def step(state, z):
        x, p = state
        x, p = move @ x, move @ p @ move.T + noise
        gain = p[:, 0] / (p[0, 0] + 0.1)
        return (x + gain * (z - x[0]), p - jnp.outer(gain, p[0])), x

    return lax.scan(step, (jnp.zeros(2), jnp.eye(2)), zs)


def random_numbers(seed):
    def step(state, _):
        state = state * jnp.uint32(1664525) + jnp.uint32(1013904223)
        return state, (state >> 8).astype(jnp.float32) / (1 << 24)

    return lax.scan(step, seed, None, length=STEPS)


def counted(places):
    return lax.fori_loop(
        0, places.size, lambda i, h: h.at[places[i]].add(1), jnp.zeros(9, jnp.int32)
    )


def without_steps(x):
    return lax.scan(lambda c, x: (c + x, c), x, jnp.zeros((0,)))


LOOPS = {
    "logistic": (logistic, (np.float32(0.3), np.float32(3.7))),
    "lorenz": (lorenz, ((np.float32(1),) * 3,)),
    "averages": (averages, (rand(STEPS),)),
    "backwards": (backwards, (rand(STEPS),)),
    "swapped": (swapped, (np.float32(1), np.float32(3))),
    "halvings": (halvings, (np.int32(27),)),
    "nested": (nested, (np.int32(0),)),
    "bisected": (bisected, (np.float32(3),)),
    "branching": (branching, (np.float32(0.3), np.arange(STEPS, dtype=np.int32) % 3)),
    "runge_kutta": (runge_kutta, (0.1 * rand(3, 3), rand(3))),
    "filtered": (filtered, (rand(STEPS),)),
    "random numbers": (random_numbers, (np.uint32(7),)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_they_agree_in_the_interpreter(name):
    f, args = LOOPS[name]
    plan = check(f, *args)
    assert sum("scan" in k.name or "while" in k.name for k in plan.kernels()) == 1


@pytest.mark.parametrize("name", LOOPS)
def test_they_agree(name):
    f, args = LOOPS[name]
    for got, want in zip(
        jax.tree.leaves(pbkern.jit(f)(*args)), jax.tree.leaves(jax.jit(f)(*args)), strict=True
    ):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("f", [counted, without_steps])
def test_other_loops_agree(f):
    args = np.arange(40, dtype=np.int32) % 9 if f is counted else np.float32(2)
    check(f, args, left=True)


def test_doubles_stay_doubles():
    with jax.enable_x64(True):
        check(logistic, np.float64(0.3), np.float64(3.7), tolerance=1e-12)


def test_a_loop_is_launched_once():
    plan = planned(logistic, f32(), f32())
    ((launch,),) = (program.steps for program in plan.programs())
    assert launch.kernel.grid == ()
    assert f"{STEPS} steps of a loop" in str(plan.explanation)
    assert "mul" in str(plan.explanation)


def test_loops_over_large_values_stay_outside():
    f = lambda x: lax.fori_loop(0, STEPS, lambda _, x: jnp.sin(x) * x.sum(), x)
    assert "run 300 times" in str(planned(f, f32(1 << 16)).explanation)


def test_an_inner_loop_that_fits_is_a_kernel():
    """The outer loop's rows are long; what an inner loop makes of each sum is little."""

    def f(x):
        def step(x, _):
            shift = lax.fori_loop(0, STEPS, lambda _, c: jnp.cos(c), x.sum())
            return x * 0.5 + shift, None

        return lax.scan(step, x, None, length=7)[0]

    plan = check(f, rand(5000))
    assert any("scan" in kernel.name and kernel.grid == () for kernel in plan.kernels())


def test_loops_stay_outside_where_nothing_may_share_a_kernel():
    plan = check(logistic, np.float32(0.3), np.float32(3.7), disable_affine_fusion=True)
    assert not any("scan" in kernel.name for kernel in plan.kernels())


def test_gradients_of_loops_agree():
    xs = rand(STEPS)
    f = lambda x, xs: lax.scan(lambda c, v: (jnp.tanh(c * v + 0.1), c), x, xs)[1].sum()
    got = jax.grad(pbkern.jit(f), (0, 1))(jnp.float32(0.3), xs)
    want = jax.grad(f, (0, 1))(jnp.float32(0.3), xs)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-4, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    steps=st.integers(1, 5),
    rows=st.integers(1, 4),
    columns=st.integers(1, 5),
    reverse=st.booleans(),
    twice=st.booleans(),
)
def test_values_of_steps_agree_with_numpy(steps, rows, columns, reverse, twice):
    """Values of each step go to results, to places in larger ones, and where others read them as well."""
    xs = np.random.default_rng(steps).standard_normal((steps, rows, columns)).astype("f")

    def step(c, x):
        c = 0.5 * c + x
        return c, (c, c.sum(), (c > 0).T)

    def f(xs):
        c, (values, sums, signs) = lax.scan(step, jnp.zeros(xs.shape[1:]), xs, reverse=reverse)
        return c, values, sums + sums[::-1] if twice else sums, signs

    want, c = [], np.zeros((rows, columns))
    for x in xs[::-1] if reverse else xs:
        c = 0.5 * c + x
        want.append((c, c.sum(), (c > 0).T))
    values, sums, signs = map(np.stack, zip(*(want[::-1] if reverse else want)))
    expected = c, values, sums + sums[::-1] if twice else sums, signs
    for got, wanted in zip(pbkern.jit(f)(xs), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5, atol=1e-5)


def test_values_of_steps_are_not_copied():
    text = pbkern.jit(averages).as_text(rand(STEPS), stage="nests")
    assert text.count("nest [") == text.count("nest []"), "a nest over all steps would be a copy"
