import jax
import jax.numpy as jnp
from jax import lax

import pbkern
import pbkern.cpu

@pbkern.kernel(
    grid=(),
    in_specs=[pbkern.BlockSpec()],
    out_specs=[pbkern.BlockSpec()],
    in_types=[jax.ShapeDtypeStruct((32,), jnp.float32)],
    out_shape=[jax.ShapeDtypeStruct((32,), jnp.float32)],
    compiler_params=pbkern.cpu.CompilerParams(dimension_semantics=()),
)
def lambda_add0(in0, out0):
    a = in0[...]
    b = a + 1.0
    out0[...] = b
