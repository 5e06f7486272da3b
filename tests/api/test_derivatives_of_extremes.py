"""Derivatives of maxima and minima ask which operand won, not for the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern

CASES = {
    "equals its maximum": lambda x: x == jnp.maximum(x, 0),
    "maximum": jax.grad(lambda x: jnp.maximum(x, 0).sum()),
    "minimum": jax.grad(lambda x: jnp.minimum(x, 0.5).sum()),
    "clip": jax.grad(lambda x: jnp.clip(x, -0.5, 0.5).sum()),
    "outer product": jax.grad(lambda x: jnp.maximum(jnp.outer(x, x), 0.1).sum()),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_extremes_that_nothing_reads_are_dropped(name, dtype):
    x = jnp.asarray([-1.0, 0.0, 0.25, 0.5, 3.0], dtype)
    got, want = (np.asarray(jit(CASES[name])(x), np.float32) for jit in (pbkern.jit, jax.jit))
    np.testing.assert_allclose(got, want, rtol=1e-2)
