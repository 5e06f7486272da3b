"""A product that several sums read is one number: the same in each of them, wherever it is computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pbkern
from pbkern.core.ops.shared_products import shared_products
from tests.lowered import lowered

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 30000)).astype("f4")


def test_a_difference_that_cannot_be_negative():
    got = pbkern.jit(lambda x, y: jnp.sqrt(jnp.maximum(x * y, 0) - x * y))(X, Y)
    assert not np.isnan(got).any()


@pytest.mark.parametrize("shape", [(30000,), (300, 100), (3, 10000), (3750, 8)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_greatest_product_less_itself_is_zero(shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, y = (a.astype(dtype).reshape(shape) for a in (X, Y))
        got = np.asarray(pbkern.jit(lambda x, y: x * y - (x * y).max(-1, keepdims=True))(x, y))
    assert (got.max(-1) == 0).all()
    assert (got <= 0).all()


def test_squares_and_views():
    got = np.asarray(
        pbkern.jit(lambda x: (x * x)[::-1][1:] - (x * x)[::-1][:-1])(np.full(1000, 1.1, "f4"))
    )
    assert (got == 0).all()


def test_bodies_of_kernels():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct(X.shape, "float32"))
    def kernel(x, y, o):
        p = x[...] * y[...]
        o[...] = jnp.sqrt(jnp.maximum(p, 0) - p)

    assert not np.isnan(np.asarray(kernel(X, Y))).any()


def test_loops():
    def f(x, y):
        def step(c, _):
            return jnp.maximum(c * y, 0) - c * y, ()

        return jax.lax.scan(step, x, length=3)[0]

    assert (np.asarray(pbkern.jit(f)(X, Y)) >= 0).all()


def test_one_reader_stays_a_multiply_add():
    assert not shared_products(jax.make_jaxpr(lambda x, y: x * y + 1)(X, Y).jaxpr)
    assert not shared_products(jax.make_jaxpr(lambda x, y: (x * y + 1, jnp.sin(x)))(X, Y).jaxpr)
    assert not shared_products(
        jax.make_jaxpr(lambda x, y: (x * y + 1, x * y))(X, Y).jaxpr
    )  # two products, as traced

    def both(x, y):
        p = x * y
        return p + 1, p

    assert len(shared_products(jax.make_jaxpr(both)(X, Y).jaxpr)) == 1
    assert "fma" in lowered(lambda x, y: x * y + 1, X, Y, stage="mlir")
    assert "fma" not in lowered(both, X, Y, stage="mlir")
