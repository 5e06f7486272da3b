"""16-bit floats that are compared with a reduction of themselves: both sides are the same number, stored or not."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pbkern
from pbkern.core.ops.ordered_values import ordered_values

DTYPES = (ml_dtypes.bfloat16, np.float16)
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# None of them gives a 16-bit float.
MAKERS = {"sin": jnp.sin, "tanh": lambda x: jnp.tanh(x / 2), "square": lambda x: x * x}


def softmax(v):
    e = jnp.exp(v - v.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmin(v):
    e = jnp.exp(v.min(-1, keepdims=True) - v)
    return e / e.sum(-1, keepdims=True)


READERS = {
    "softmax": softmax,
    "softmax in float32": lambda v: softmax(v.astype(jnp.float32)).astype(v.dtype),
    "softmin": softmin,
    "the greatest": lambda v: v.max(-1, keepdims=True) * jnp.ones_like(v),
    "equal to the greatest": lambda v: jnp.where(v == v.max(-1, keepdims=True), v * 2, v * v),
    "not below the greatest": lambda v: jnp.where(v - v.max(-1, keepdims=True) >= 0, v * 2, v * v),
    "above the first": lambda v: jnp.maximum(v, v[..., :1]),
    "place of the greatest": lambda v: v * jax.nn.one_hot(v.argmax(-1), v.shape[-1], dtype=v.dtype),
    "above the third": lambda v: jnp.where(v >= jnp.sort(v, -1)[..., -3:-2], v * 2, v * v),
}


def numbers(dtype, width):
    rng = np.random.default_rng(width)
    return [rng.uniform(-a, a, (5, width)).astype(np.float32).astype(dtype) for a in (3, 1)]


def gradient(make, read, stored=lambda v: v):
    """(gradient, values, what is read of them); `stored`: how the values are rounded."""

    def f(x, c):
        def loss(x):
            v = stored(make(x))
            y = read(v)
            return (y * c).astype(jnp.float32).sum(), (v, y)

        grad, (v, y) = jax.grad(loss, has_aux=True)(x)
        return grad, v, y

    return f


def check(made, expected, dtype):
    for one, other in zip(made, expected, strict=True):
        assert one.dtype == dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert not np.isnan(one).any()
        np.testing.assert_allclose(
            one, other, rtol=16 * EPS[dtype.name], atol=4 * EPS[dtype.name] * abs(other).max()
        )


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_float32(dtype, read):
    """The reference runs operation by operation in float32, on values of 16 bits: so equal elements are equal there, too."""
    dtype = np.dtype(dtype)

    def stored(v):
        return v + lax.stop_gradient(v.astype(dtype).astype(np.float32) - v)

    for make in MAKERS.values():
        for width in (8, 20, 300):
            x, c = numbers(dtype, width)
            made = pbkern.jit(gradient(make, READERS[read]))(x, c)
            wide = (x.astype(np.float32), c.astype(np.float32))
            check(made, gradient(make, READERS[read], stored)(*wide), dtype)


@pytest.mark.parametrize("read", ["softmax", "not below the greatest", "place of the greatest"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bodies_of_kernels(dtype, read):
    dtype, block = np.dtype(dtype), pbkern.BlockSpec((1, 20), lambda i: (i, 0))

    @pbkern.kernel(
        grid=(5,), in_specs=[block], out_specs=block, out_shape=jax.ShapeDtypeStruct((5, 20), dtype)
    )
    def kernel(x, o):
        o[...] = READERS[read](jnp.sin(x[...]))

    def stored(v):
        return v + lax.stop_gradient(v.astype(dtype).astype(np.float32) - v)

    x, c = numbers(dtype, 20)
    wide = (x.astype(np.float32), c.astype(np.float32))
    _, _, expected = gradient(jnp.sin, READERS[read], stored)(*wide)
    interpreted = pbkern.call_kernel(kernel.trace(x), x, interpret=True)[0]
    check([kernel(x), interpreted], [expected] * 2, dtype)
    if read == "softmax":
        expected = gradient(jnp.sin, lambda v: softmax(jnp.sin(v)))(*wide)
        check(pbkern.jit(gradient(jnp.sin, kernel))(x, c), expected, dtype)


@pytest.mark.parametrize("read", ["softmax", "not below the greatest"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_on_gpus(dtype, read):
    dtype = np.dtype(dtype)
    x, c = numbers(dtype, 20)

    def f(x, c):
        return gradient(jnp.sin, READERS[read])(x, c)

    check(pbkern.simulate(pbkern.jit(f), x, c).results, pbkern.jit(f)(x, c), dtype)


def test_what_needs_no_rounding():
    x = jnp.zeros((4, 8), jnp.bfloat16)

    def count(f):
        return len(ordered_values(jax.make_jaxpr(f)(x).jaxpr))

    assert count(lambda x: softmax(jnp.sin(x))) == 0  # nothing is compared
    assert count(lambda x: x == x.max()) == 0  # it was loaded
    assert count(lambda x: jnp.sin(x) > 0.5) == 0
    assert count(lambda x: jnp.sin(x.astype(jnp.float32)).argmax()) == 0
    assert count(lambda x: jnp.sin(x).argmax()) == 1
    assert count(lambda x: (y := jnp.sin(x)) == y.max()) == 0  # the comparison rounds
    assert count(jax.jit(lambda x: jnp.where((y := jnp.sin(x)) - y.max() < 0, y, 0))) == 1
    assert count(lambda x: (y := jnp.sin(x).astype(jnp.float32)) == y.max()) == 1
