"""UnsupportedOp in kernel `stopping`.

This file holds the kernel, its operands and the call that failed. Those are random: any will do.
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
def stopping(x_ref, o_ref):
    a = x_ref[...]
    b = a * 2.0
    o_ref[...] = b
    c = o_ref[...]
    d = lax.reduce_sum(c, axes=(0,))
    e = pbkern.program_id(0)
    f = e == 2
    @pbkern.when(f)
    def _():
        g = x_ref[0]
        pbkern.breakpoint(d, first=g)
    h = o_ref[0]
    i = h + 1.0
    o_ref[0] = i


def packed(text, dtype, shape):
    """An array from its compressed bytes."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)


RNG = np.random.default_rng(0)
ARGS = [
    jnp.asarray(RNG.uniform(0, 4, (32,))).astype(jnp.float32),
]
print(stopping(*ARGS))
