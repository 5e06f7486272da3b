"""How integer expressions move along a dimension (lower/values/dynamic_strides.py)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pbkern
from pbkern.core.affine import Affine
from pbkern.lower.math.elementwise import EqnInfo
from pbkern.lower.nest.ir import Expr, Pool
from pbkern.lower.values.dynamic_strides import steps_along

INT = np.dtype(np.int32)


def op(pool: Pool, name: str, *args: Expr) -> Expr:
    return pool.op(INT, EqnInfo(name, {}, (INT,) * len(args), INT), args)


def index(pool: Pool) -> Expr:
    return pool.index(INT, Affine.symbol("d") * 3)


def test_sums_and_bounds():
    pool = Pool()
    three, one = index(pool), pool.const(INT, np.int32(1))
    assert steps_along(op(pool, "add", three, one), "d").step == 3
    assert steps_along(op(pool, "sub", one, three), "d").step == -3
    assert steps_along(op(pool, "mul", three, one), "d").step == 3
    assert steps_along(op(pool, "max", three, one), "d").step == 3
    assert steps_along(op(pool, "max", three, three), "d").step is None
    assert steps_along(three, "other").step == 0


def test_shared_parts_are_looked_at_once():
    """As a tree this has 2**200 nodes."""
    pool = Pool()
    a = b = index(pool)
    for _ in range(200):
        a, b = op(pool, "add", a, b), op(pool, "sub", a, b)
    assert steps_along(a, "d").step == 3 * 2**100


def test_networks_of_minima_and_maxima_compile():
    """Rows of 16, sorted by a network, of which two elements are read: what they depend on is one half of the network."""
    x = np.random.default_rng(0).standard_normal((2000, 16)).astype(np.float32)
    got = pbkern.jit(
        lambda x: lax.sort((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), num_keys=1)[1][:, :2]
    )(x)
    np.testing.assert_array_equal(got, np.argsort(x, 1, kind="stable")[:, :2])


def test_differences_of_networks_compile():
    """Whether a difference is of scaled numbers is asked of each part once, too."""

    def f(x):
        a, b = x, 2 * x
        for _ in range(60):
            a, b = jnp.minimum(a, b), jnp.maximum(a, b)
        return a - b

    x = jnp.arange(-50.0, 50)
    np.testing.assert_array_equal(pbkern.jit(f)(x), jax.jit(f)(x))
