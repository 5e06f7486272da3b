import jax
import jax.numpy as jnp
from jax import lax

import pbkern

@pbkern.kernel(
    grid=(2, 4),
    in_specs=[pbkern.BlockSpec((None, 8), lambda i, j: (i, j))],
    out_specs=[pbkern.BlockSpec((None, 8), lambda i, j: (i, j))],
    in_types=[jax.ShapeDtypeStruct((2, 32), jnp.float32)],
    out_shape=[jax.ShapeDtypeStruct((2, 32), jnp.float32)],
)
def body(x_ref, o_ref):
    @pbkern.loop(0, 8)
    def _(a):
        b = x_ref[a]
        c = b == 13.0
        @pbkern.when(c)
        def _():
            d = x_ref[a]
            pbkern.fail('found {} at {}', d, a)
    e = x_ref[...]
    o_ref[...] = e

