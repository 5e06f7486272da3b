"""Powers by small multiples of a half: their values against long doubles, special cases as XLA has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pbkern

from .checking import planned, rand

EXPONENTS = (0.5, 1.5, -0.5, 2.5, -1.5, 1.0, 2.0, 3.0, 4.0, -1.0, -2.0, -3.0, 3.5, -3.5)
SPECIAL = (-np.inf, -0.0, 0.0, np.inf, np.nan, -1.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers(dtype, exponent):
    numbers = np.exp(np.random.default_rng(0).uniform(-20, 20, 3000))
    with jax.enable_x64(True):
        x = np.concatenate([SPECIAL, numbers]).astype(dtype)
        f = lambda x: lax.pow(x, jnp.asarray(exponent, x.dtype))
        got, want = np.asarray(pbkern.jit(f)(x)), np.asarray(jax.jit(f)(x))
        assert not any(e.primitive.name == "pow" for e in planned(f, jnp.asarray(x)).jaxpr.eqns)
    few = slice(0, len(SPECIAL))
    np.testing.assert_array_equal(got[few], want[few])
    np.testing.assert_array_equal(*(np.signbit(x[few]) & ~np.isnan(want[few]) for x in (got, want)))
    exact = x[len(SPECIAL) :].astype(np.longdouble) ** np.longdouble(exponent)
    normal = (exact > np.finfo(dtype).tiny) & (exact < np.finfo(dtype).max)
    error = np.abs(got[len(SPECIAL) :] - exact)[normal] / exact[normal]
    assert float(error.max()) <= 2 * np.finfo(dtype).eps


@pytest.mark.parametrize("exponent", [0.0, 0.3, 5.0, 4.5, np.inf, np.nan])
def test_other_powers_stay(exponent):
    plan = planned(lambda x: lax.pow(x, jnp.asarray(exponent, x.dtype)), rand(40))
    assert any(e.primitive.name == "pow" for e in plan.jaxpr.eqns)


def test_powers_stay_where_rounding_may_not_change():
    f = lambda x: jnp.power(x, 2.5)
    plan = planned(f, rand(40), disable_unsafe_math_canonicalizations=True)
    assert any(e.primitive.name == "pow" for e in plan.jaxpr.eqns)
