"""While loops that vmap batches: each ends by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.fuse.partition.leave_layouts_to_xla import REASON as LAYOUT
from pbkern.testing import assert_fused


def collatz(n):
    """(steps to one, at most 200; the largest number on the way)"""

    def step(state):
        n, count, most = state
        n = jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
        return n, count + 1, jnp.maximum(most, n)

    return lax.while_loop(lambda s: (s[0] > 1) & (s[1] < 200), step, (n, 0, n))[1:]


def grown(x, v):
    """Doubles a vector until its sum is large; the inner loop counts."""

    def step(state):
        v, turns = state
        inner = lax.while_loop(lambda k: k < x, lambda k: k * 2 + 1, 0.0)
        return v * 2, turns + inner

    return lax.while_loop(lambda s: s[0].sum() < x, step, (v, 0.0))


@pytest.mark.parametrize("count", [0, 1, 37])
def test_each_loop_ends_by_itself(count):
    n = jnp.arange(count, dtype=jnp.int32)
    f = jax.vmap(collatz)
    for got, want in zip(pbkern.jit(f)(n), jax.jit(f)(n), strict=True):
        np.testing.assert_array_equal(got, want)
    if count:  # XLA makes empty arrays
        assert_fused(pbkern.jit(f), (n,))


def test_nested_loops_over_two_dimensions():
    x = jnp.asarray(np.random.default_rng(0).uniform(0, 30, (5, 4)), jnp.float32)
    v = jnp.asarray(np.random.default_rng(1).uniform(0, 1, (5, 4, 3)), jnp.float32)
    f = jax.vmap(jax.vmap(grown))
    for got, want in zip(pbkern.jit(f)(x, v), jax.jit(f)(x, v), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_in_a_body():
    @pbkern.kernel(grid=(), out_shape=jax.ShapeDtypeStruct((37,), jnp.int32))
    def counts(n, out):
        out[...] = jax.vmap(collatz)(n[...])[0]

    n = jnp.arange(37, dtype=jnp.int32)
    want = jax.vmap(collatz)(n)[0]
    np.testing.assert_array_equal(counts(n), want)
    np.testing.assert_array_equal(pbkern.interpret(counts.trace(n), n)[0], want)


def test_samples_by_rejection_stay_with_xla():
    """Its keys are made again of their words. Nothing is run: XLA compiles these loops for seconds."""
    plan = pbkern.jit(
        lambda key: jax.random.gamma(key, jnp.asarray([0.5, 2.0, 9.0]), (4, 3)) + 1
    ).explain(jax.random.key(0))
    assert [x.op for x in plan.left if x.why != LAYOUT and x.op != "random_wrap"] == [
        "random_gamma"
    ]
    assert len(plan.kernels) == 1
