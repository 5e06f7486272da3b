"""Solvers of jax.scipy: loops of ours, with the derivatives that JAX defines for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.jaxprs.walks import equations
from pbkern.dsl.host_program import Cond, Copy, HostWhile

from .checking import compare, loops_stay_outside, planned, rand


def laplacian(u):
    p = jnp.pad(u, 1)
    return 4.5 * u - (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])


def conjugate_gradients(b):
    return jax.scipy.sparse.linalg.cg(laplacian, b, maxiter=60, tol=1e-6)[0]


def dense(a, b):
    return jax.scipy.sparse.linalg.bicgstab(lambda v: a @ v, b, maxiter=40, tol=1e-6)[0]


def test_conjugate_gradients_are_ours():
    b = rand(40, 56)
    plan = planned(conjugate_gradients, b)
    assert not plan.left_to_xla()
    assert not any(
        e.primitive.name in ("custom_linear_solve", "device_put") for e in equations(plan.jaxpr)
    )
    solution = np.asarray(pbkern.jit(conjugate_gradients)(b), np.float64)
    p = np.pad(solution, 1)
    product = 4.5 * solution - (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])
    np.testing.assert_allclose(product, b, atol=2e-5)


def test_of_a_matrix_with_derivatives():
    a = np.eye(30, dtype=np.float32) * 30 + rand(30, 30)
    b = rand(30, seed=1)
    loss = jax.grad(lambda a, b: (dense(a, b) ** 2).sum(), (0, 1))
    by_a, by_b = pbkern.jit(loss)(a, b)
    wide = np.asarray(a, np.float64)
    x = np.linalg.solve(wide, b)
    along_b = np.linalg.solve(wide.T, 2 * x)
    np.testing.assert_allclose(by_b, along_b, rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(by_a, -np.outer(along_b, x), rtol=2e-4, atol=1e-6)


def test_direct_solutions_of_large_systems_stay_with_lapack():
    a = np.eye(40, dtype=np.float32) * 40 + rand(40, 40)
    plan = planned(jnp.linalg.solve, a, rand(40, seed=1))
    assert {"lu", "triangular_solve"} <= {x.op for x in plan.left_to_xla()}
    np.testing.assert_allclose(
        pbkern.jit(jnp.linalg.solve)(a, rand(40, seed=1)),
        np.linalg.solve(a, rand(40, seed=1)),
        rtol=1e-5,
    )


def relaxed(count: int):
    """Steps until nothing changes, or `count`."""

    def run(u):
        def step(state):
            u, _, k = state
            new = 0.2 * (4.5 * u - laplacian(u)) + 0.1 * jnp.cumsum(u, 1) / u.shape[1]
            return new, jnp.abs(new - u).max(), k + 1

        return jax.lax.while_loop(
            lambda s: (s[1] > 0) & (s[2] < count), step, (u, jnp.float32(1), 0)
        )

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_large_carries_of_while_loops_alternate(count):
    x = rand(70, 80)
    plan = planned(relaxed(count), x)
    compare(plan, relaxed(count), (x,), 1e-5)
    for got, expected in zip(pbkern.jit(relaxed(count))(x), jax.jit(relaxed(count))(x)):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    (loop,) = (s for s in plan.programs()[0].steps if isinstance(s, HostWhile))
    *turn, second = loop.steps
    assert isinstance(second, Cond)
    assert not any(isinstance(s, Copy) for s in (*turn, *second.branches[1]))


def test_small_carries_are_copied():
    with loops_stay_outside():
        plan = planned(relaxed(3), rand(5, 6))
    (loop,) = (s for s in plan.programs()[0].steps if isinstance(s, HostWhile))
    assert not any(isinstance(s, Cond) for s in loop.steps)
