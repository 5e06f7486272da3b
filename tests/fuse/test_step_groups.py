"""Elementwise groups beside a loop are parts of its steps: large values go through memory once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern

from .checking import check, planned, rand

STEPS, N = 23, 1000


def recurrence(a, b, reverse=False):
    return lax.scan(
        lambda h, x: (x[0] * h + x[1],) * 2, jnp.zeros(a.shape[1:]), (a, b), reverse=reverse
    )


def gated(a, b):
    """Both xs are made of what the function is given; the last value is read as well."""
    return recurrence(jax.nn.sigmoid(a), jnp.tanh(b))


def state_space(dt, u, gate):
    """A group makes both xs, with a vector that each step reads; another one reads values of each step."""
    rates = -jnp.arange(1.0, dt.shape[1] + 1) / dt.shape[1]
    return recurrence(jnp.exp(jnp.abs(dt) * rates), dt * u, reverse=True)[1] * jax.nn.silu(gate)


def batches(dt, u, gate):
    """Steps are the second dimension."""
    turned = lambda x: jnp.moveaxis(x, 1, 0)
    h = recurrence(turned(jax.nn.sigmoid(dt)), turned(dt * u))[1]
    return turned(h) * jax.nn.silu(gate)


def normalised(x):
    """A value of each step is a result, and read by the next group, which reads x as well."""
    means = lax.scan(lambda c, x: (0.9 * c + 0.1 * x,) * 2, jnp.zeros(x.shape[1:]), x * x)[1]
    return x * lax.rsqrt(means + 1e-2), means


def of_two_loops(a, b):
    """The group between them belongs to one of them, the one behind reads values of both."""
    first = recurrence(0.9 * jax.nn.sigmoid(a), b)[1]
    second = recurrence(jax.nn.sigmoid(a + 1), jnp.tanh(first))[1]
    return first * second


def doubles(a, b):
    return recurrence(jax.nn.sigmoid(a), b * 2)[1] + 1


def halves(x):
    return (
        lax.scan(lambda h, x: (jnp.tanh(h) + x,) * 2, jnp.zeros(x.shape[1:], x.dtype), x * x)[1] * 2
    )


ONE_KERNEL = {
    "gated": (gated, (rand(STEPS, N), rand(STEPS, N))),
    "state space": (state_space, (rand(STEPS, N), rand(STEPS, N), rand(STEPS, N))),
    "batches": (batches, (rand(3, STEPS, N), rand(3, STEPS, N), rand(3, STEPS, N))),
    "normalised": (normalised, (rand(STEPS, N),)),
    "doubles": (doubles, tuple(np.asarray(rand(STEPS, N), np.float64) for _ in range(2))),
    "halves": (halves, (rand(STEPS, N).astype(jnp.bfloat16),)),
    "one program": (gated, (rand(STEPS, 40), rand(STEPS, 40))),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_groups_beside_a_loop_are_in_its_kernel(name):
    f, args = ONE_KERNEL[name]
    with jax.enable_x64(name == "doubles"):
        plan = check(f, *args)
        assert len(plan.kernels()) == 1
        agree(f, args, tolerance=0.05 if name == "halves" else 2e-4)


def agree(f, args, tolerance=2e-4):
    got, want = (jax.tree.leaves(jit(f)(*args)) for jit in (pbkern.jit, jax.jit))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        g, w = (np.asarray(x).astype(np.float64) for x in (g, w))
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


def test_a_group_between_two_loops():
    args = rand(STEPS, N), rand(STEPS, N)
    assert len(check(of_two_loops, *args).kernels()) <= 3
    agree(of_two_loops, args)


def is_result(a, b):
    """The group's result is one of the function's."""
    z = jax.nn.sigmoid(a)
    return recurrence(z, b)[1], z


def counting(a, b):
    """What a step would compute depends on its number."""
    return recurrence(jnp.tanh(a * jnp.arange(STEPS, dtype=jnp.float32)[:, None]), b)[1]


def shifted(a, b):
    """A step would read rows of two steps."""
    return recurrence(jax.nn.sigmoid(a - jnp.roll(a, 1, 0)), b)[1]


def of_the_last(a, b):
    """A group behind the loop reads the last value, which no step has."""
    last, h = recurrence(a, b)
    return h / (1 + jnp.abs(last))


@pytest.mark.parametrize("f", [is_result, counting, shifted, of_the_last])
def test_other_groups_stay_kernels(f):
    args = 0.5 * rand(STEPS, N), rand(STEPS, N)
    assert len(check(f, *args).kernels()) > 1
    agree(f, args)


def test_scalar_steps_leave_functions_to_vectors():
    f = lambda a, b: recurrence(jax.nn.sigmoid(a), b)[1]
    assert len(planned(f, rand(20000), rand(20000)).kernels()) == 2


def test_loops_in_loops():
    """A group behind an inner loop reads what another kernel of the outer body makes."""

    def f(x):
        def step(c, _):
            h = recurrence(jax.nn.sigmoid(c), 0.5 * c)[1]
            return 0.5 * h + jnp.exp(-jnp.abs(c.mean(1, keepdims=True))) * h, None

        return lax.scan(step, x, None, length=19)[0]

    plan = check(f, rand(STEPS, N), tolerance=1e-3)
    assert len(plan.kernels()) == 2
    agree(f, (rand(STEPS, N),), tolerance=1e-3)


@pytest.mark.parametrize("width", [64, 1000])
@pytest.mark.parametrize("f", [recurrence, gated, doubles])
def test_loops_of_no_steps(f, width):
    nothing = jnp.ones((0, width))
    got, want = pbkern.jit(f)(nothing, nothing), f(nothing, nothing)
    jax.tree.map(np.testing.assert_array_equal, got, want)
