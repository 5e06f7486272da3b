"""A first fused function: no kernel is written, pbkern makes them.

`pbkern.jit` (its full name is `polyblocks_jit_jax`) decorates a function of JAX arrays, as jax.jit does. The function
is traced to JAX's own intermediate form, its operations are grouped, and each group becomes a kernel like the one of
the first tutorial.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern


@pbkern.jit
def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


x = jax.random.normal(jax.random.key(0), (1000, 512))
np.testing.assert_allclose(softmax(x), jax.nn.softmax(x), rtol=1e-5)

# Executed one operation at a time, five arrays of two megabytes each would go to memory and back. Here one kernel
# reads a block of rows, does everything to it, and writes the result.

kernels = softmax.kernels(x)
print(f"{len(kernels)} kernel")
print(kernels[0].source())
assert len(kernels) == 1

# The decorated function is still a jax.jit function. It can be differentiated, batched and called from others, and
# JAX's transformations act on the function before kernels are made of it: the derivative is compiled as a whole, too.


@pbkern.jit
def loss(logits, labels):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, labels[:, None], 1).mean()


labels = jnp.arange(1000) % 512
gradient = jax.grad(loss)(x, labels)
expected = (jax.nn.softmax(x) - jax.nn.one_hot(labels, 512)) / 1000
np.testing.assert_allclose(gradient, expected, atol=1e-7)

batched = jax.vmap(softmax)(x.reshape(10, 100, 512))
np.testing.assert_allclose(batched.reshape(1000, 512), softmax(x), rtol=1e-5)

# Options come in a dictionary. Unknown ones are errors, not silence.

unfused = pbkern.jit(
    lambda x: softmax(x), compile_options={"polyblocks_disable_affine_fusion": True}
)
print(f"{len(unfused.kernels(x))} kernels without fusion")
try:
    pbkern.jit(softmax, compile_options={"taget": "cpu"})
except pbkern.errors.OptionError as e:
    print(e)

# A kernel that fusion made can be taken over by hand: save its source, edit it, call it in place of the function.
# Here its text rebuilds it, unedited; tutorial 15 goes on from here.

mine = pbkern.rebuild(kernels[0].source())
np.testing.assert_allclose(mine(x), softmax(x), rtol=1e-6)
