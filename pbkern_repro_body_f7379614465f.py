"""CheckError in kernel `body`.

This file holds the kernel, its operands and the call that failed. They are those of the failed call.
"""

import base64
import zlib

import numpy as np

import jax
import jax.numpy as jnp
from jax import lax

import pbkern

@pbkern.kernel(
    grid=(4,),
    in_specs=[pbkern.BlockSpec((8,), lambda i: (i,))],
    out_specs=[pbkern.BlockSpec((8,), lambda i: (i,))],
    in_types=[jax.ShapeDtypeStruct((32,), jnp.float32)],
    out_shape=[jax.ShapeDtypeStruct((32,), jnp.float32)],
)
def body(x_ref, o_ref):
    a = x_ref[...]
    b = a < 20.0
    c = lax.reduce_and(b, axes=(0,))
    d = lax.reduce_max(a, axes=(0,))
    e = ~c
    @pbkern.when(e)
    def _():
        pbkern.fail('{} is not below {limit}', d, limit=jnp.float32(20.0))
    f = a * 2.0
    o_ref[...] = f


def packed(text, dtype, shape):
    """An array from its compressed bytes."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)


RNG = np.random.default_rng(0)
ARGS = [
    packed("eNoVxKEZQGAYhdFvBCMYwQbYwAhGMMIfRVEURVEURVEURVF03Oc9N+JfKl0lEhMbF1FHZOQUVDS0dCR6BkYmZhZWNnYOTi5uHt76AyF6GNg=", jnp.float32, (32,)),
]
pbkern.interpret(body.trace(), *ARGS, check_races=True)
