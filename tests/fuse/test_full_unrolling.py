"""Short scans of element-wise steps, and any of one step, are written out, and fuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.jaxprs.walks import equations

from .checking import compare, planned, rand

X = rand(3000)


def polynomial(x):
    return jnp.tanh(jnp.polyval(jnp.arange(1.0, 8.0), x * 0.5))


def backwards(x, rows, scale):
    """Walks over rows from the last, with a carry of integers beside."""

    def step(carry, row):
        y, n = carry
        return (y * scale + row, jnp.where(y > row, n + 1, n)), None

    return lax.scan(step, (x, jnp.zeros(x.shape, jnp.int32)), rows, reverse=True)[0]


def newton(x):
    """Roots by a fixed number of steps, counted."""
    target = jnp.abs(x) + 1
    return lax.fori_loop(0, 5, lambda i, y: 0.5 * (y + target / y) + 1e-6 * i, target)


def nested(x):
    """A short loop inside the turns of a long one."""
    return lax.fori_loop(
        0, 50, lambda i, y: jnp.roll(lax.fori_loop(0, 3, lambda k, z: z * 0.9 + k, y), 1), x
    )


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (polynomial, (X,)),
        (backwards, (X, rand(4, 3000), rand())),
        (newton, (X,)),
        (polynomial, (rand(),)),
    ],
)
def test_short_loops_are_one_kernel(f, args):
    plan = planned(f, *args)
    assert not any(e.primitive.name == "scan" for e in plan.jaxpr.eqns)
    assert len(list(plan.kernels())) == 1
    compare(plan, f, args, 2e-6)


def test_of_nothing():
    compare(planned(newton, rand(0)), newton, (rand(0),), 0)


def test_a_short_loop_in_a_long_one():
    loops = [e for e in equations(planned(nested, X).jaxpr) if e.primitive.name == "scan"]
    assert [e.params["length"] for e in loops] == [50]
    np.testing.assert_allclose(pbkern.jit(nested)(X), jax.jit(nested)(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(
            lambda x: lax.fori_loop(0, 5, lambda i, y: jnp.roll(y, 1) * 0.5 + y, x), id="neighbours"
        ),
        pytest.param(lambda x: lax.fori_loop(0, 500, lambda i, y: y * 0.5 + x, x), id="long"),
        pytest.param(
            lambda x: lax.scan(lambda y, _: (y * 0.5, y), x, None, length=3), id="stacked results"
        ),
    ],
)
def test_other_loops_stay(f):
    plan = planned(f, X)
    assert any(e.primitive.name == "scan" for e in plan.jaxpr.eqns)
    compare(plan, f, (X,), 2e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_one_step_of_any_kind_is_no_loop(reverse):
    def layers(x, weights):
        x, sums = lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum(0)), x, weights, reverse=reverse)
        return jnp.roll(lax.fori_loop(0, 1, lambda i, x: jnp.cumsum(x, 1) + i, x), 1, 0), sums

    args = rand(40, 30), rand(1, 30, 30, seed=1)
    plan = planned(layers, *args)
    assert not any(e.primitive.name in ("scan", "while") for e in equations(plan.jaxpr))
    compare(plan, layers, args, 1e-5)


def test_loops_that_stack_and_reduce_where_the_user_asks_for_it():
    def steps(x, rows, unroll):
        def step(carry, row):
            carry = carry * row + jnp.sum(carry) * 1e-3
            return carry, carry * 2

        return lax.scan(step, x, rows, unroll=unroll)

    x, rows, given = rand(300), rand(5), rand(5, 300)

    def gradients(unroll):
        return lambda x, rows, given: jax.vjp(lambda *xs: steps(*xs, unroll), x, rows)[1](
            (x, given)
        )

    for f in (lambda x, rows, given: steps(x, rows, True), gradients(5)):
        plan = planned(f, x, rows, given)
        assert not any(e.primitive.name == "scan" for e in plan.jaxpr.eqns)
        compare(plan, f, (x, rows, given), 2e-5)
    assert any(e.primitive.name == "scan" for e in planned(gradients(2), x, rows, given).jaxpr.eqns)
