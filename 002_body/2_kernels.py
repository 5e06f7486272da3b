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
    b = a < 24.5
    c = lax.reduce_and(b, axes=(0,))
    d = lax.reduce_max(a, axes=(0,))
    e = ~c
    @pbkern.when(e)
    def _():
        pbkern.fail('{} is not below {limit}', d, limit=jnp.float32(24.5))
    f = a * 2.0
    o_ref[...] = f

