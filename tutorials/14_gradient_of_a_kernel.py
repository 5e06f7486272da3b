"""The gradient of a kernel: a kernel, derived from the body.

A kernel written by hand is differentiated like any function. What comes out is a kernel again, to be read and improved.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern

rows, columns, block = 1000, 256, 64
x = jax.random.normal(jax.random.key(0), (rows, columns))
scale, bias = jnp.linspace(0.5, 2, columns)[None], jnp.zeros((1, columns))

tile = pbkern.BlockSpec((block, columns), lambda i: (i, 0))
whole = pbkern.BlockSpec((1, columns), lambda i: (0, 0))


@pbkern.kernel(
    grid=(pbkern.cdiv(rows, block),),
    in_specs=[tile, whole, whole],
    out_specs=tile,
    out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
)
def layer_norm(x, scale, bias, o):
    centered = x[...] - x[...].mean(1, keepdims=True)
    variance = (centered * centered).mean(1, keepdims=True)
    o[...] = centered * jax.lax.rsqrt(variance + 1e-6) * scale[...] + bias[...]


def plain(x, scale, bias):
    centered = x - x.mean(1, keepdims=True)
    variance = (centered * centered).mean(1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + 1e-6) * scale + bias


def loss(f):
    return lambda *xs: (f(*xs) ** 2).sum()


gradients = jax.grad(loss(layer_norm), (0, 1, 2))(x, scale, bias)
for got, want in zip(gradients, jax.grad(loss(plain), (0, 1, 2))(x, scale, bias)):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)

# It is one kernel over the same grid. Each program recomputes what it needs from its rows. Every program reads scale and
# bias: their gradients are sums over all programs, in arrays that begin as zeros.

step = pbkern.jit(jax.grad(loss(layer_norm), (0, 1, 2)))
(backward,) = [k for k in step.kernels(x, scale, bias) if k.name == "layer_norm_backward"]
print(backward.source())
assert backward.grid == (16,)

# The source rebuilds the kernel: a starting point for a backward pass by hand, which jax.custom_vjp puts in its place.

assert pbkern.rebuild(backward.source()).grid == backward.grid

# A kernel whose programs build on each other needs what they left behind. A running product is carried over blocks of rows:


@pbkern.kernel(
    grid=(16,),
    in_specs=[pbkern.BlockSpec((1, 8), lambda i: (i, 0))],
    out_specs=pbkern.BlockSpec((1, 8), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((16, 8), jnp.float32),
    scratch_shapes=[pbkern.Scratch((1, 8), jnp.float32)],
)
def running_product(x, o, carried):
    @pbkern.when(pbkern.program_id(0) == 0)
    def _():
        carried[...] = jnp.ones_like(carried)

    carried[...] *= x[...]
    o[...] = carried[...]


y = 1 + x[:16, :8] / 4
gradient = jax.grad(lambda y: running_product(y).sum())(y)
np.testing.assert_allclose(
    gradient, jax.grad(lambda y: jnp.cumprod(y, 0).sum())(y), rtol=1e-4, atol=1e-5
)

# Now the backward kernel walks the grid from its end, and a second run of the forward kernel saves the product before
# each step, because the derivative of a product reads it. Sums need no such copies.

explanation = str(pbkern.jit(jax.grad(lambda y: running_product(y).sum())).explain(y))
print(explanation)
assert "running_product_saving" in explanation

# Forward mode, batches and second derivatives follow from the same rules.

tangent = jax.jvp(running_product, (y,), (jnp.ones_like(y),))[1]
np.testing.assert_allclose(
    tangent, jax.jvp(lambda y: jnp.cumprod(y, 0), (y,), (jnp.ones_like(y),))[1], rtol=1e-4
)
batched = jax.vmap(jax.grad(lambda y: running_product(y).sum()))(jnp.stack([y, y]))
np.testing.assert_allclose(batched[1], gradient, rtol=1e-6)

# What has no derivative says so at its line.


@pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
def power(exponent, x, o):
    @pbkern.loop(0, exponent[0], init=x[...])
    def value(_, carry):
        return carry * x[...]

    o[...] = value


try:
    jax.grad(lambda x: power(jnp.array([3]), x).sum())(jnp.ones(8))
except pbkern.errors.KernelError as error:
    print(error)
