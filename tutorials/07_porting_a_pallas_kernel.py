"""Porting a Pallas kernel.

Kernels that were written for a TPU or GPU compile for the CPU as they are, after one call. This tutorial takes one of them
through that call, looks at what became of it, and then writes it again in this language to see what differs: little.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pbkern
import pbkern.pallas

# A matmul as one would write it for a TPU: blocks of 128, a float32 accumulator in VMEM that is kept over the steps of
# the last grid dimension, and dimension_semantics that say which dimensions a second core may share.

BLOCK = 128


def matmul_body(x_ref, y_ref, o_ref, total_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        total_ref[...] = jnp.zeros_like(total_ref)

    total_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = jax.nn.relu(total_ref[...]).astype(o_ref.dtype)


def matmul_relu(x, y):
    (m, k), (_, n) = x.shape, y.shape
    return pl.pallas_call(
        matmul_body,
        name="matmul_relu",
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // BLOCK, n // BLOCK, k // BLOCK),
        in_specs=[
            pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
            pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((BLOCK, BLOCK), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )(x, y)


# One call, before the first use. From then on pallas_call on the CPU means native code; grad, vmap and jit around it work
# as before, and interpret=True still reaches JAX's own interpreter.

pbkern.pallas.install()

rng = np.random.default_rng(0)
x, y = (jnp.asarray(rng.standard_normal((512, 512)), jnp.float32) for _ in range(2))
want = np.maximum(np.asarray(x) @ np.asarray(y), 0)
np.testing.assert_allclose(jax.jit(matmul_relu)(x, y), want, rtol=1e-3, atol=1e-3)

# What became of it? Inside a decorated function, `explain` lists it, and says for every dimension of its grid whether
# programs run on several threads and why. Here the author said so.

f = pbkern.jit(lambda x, y: matmul_relu(x, y) * 0.5)
plan = f.explain(x, y)
print(plan)
(call,) = plan.written
assert call.origin == "Pallas"
assert call.lines[0].startswith("grid dimension 0 of 4: parallel")
assert call.lines[2].startswith("grid dimension 2 of 4: in order")

# The port. The words are the same: Ref, BlockSpec, when, program_id. What differs:
#
#   - scratch has no memory space: pbkern.Scratch(shape, dtype) is memory of one thread;
#   - blocks need not divide the array, and `in_bounds` says where it ends;
#   - no dimension_semantics are needed where programs write disjoint blocks and keep nothing: that is proved. This kernel
#     keeps a sum, so we say it.
#
# The last block of 500 columns reaches over the edge, where the sum must not go.


@pbkern.kernel(
    grid=(4, 4, 4),
    in_specs=[
        pbkern.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
        pbkern.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j)),
    ],
    out_specs=pbkern.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j)),
    out_shape=jax.ShapeDtypeStruct((500, 500), jnp.float32),
    scratch_shapes=[pbkern.Scratch((BLOCK, BLOCK), jnp.float32)],
    compiler_params=pbkern.cpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
)
def ported(x, y, out, total):
    @pbkern.when(pbkern.program_id(2) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    inside = pbkern.in_bounds(x, 1)
    total[...] += jnp.where(inside, x[...], 0) @ jnp.where(inside[:, None], y[...], 0)

    @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
    def _():
        out[...] = jax.nn.relu(total[...])


a, b = x[:500, :500], y[:500, :500]
np.testing.assert_allclose(
    ported(a, b), np.maximum(np.asarray(a) @ np.asarray(b), 0), rtol=1e-3, atol=1e-3
)

# Not everything has a counterpart. Remote copies and barriers between devices are refused, at your line and with
# what to do; docs/pallas.md is the list.


def meets_others(x_ref, o_ref):
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, device_id=1)
    pl.semaphore_wait(barrier)
    o_ref[...] = x_ref[...]


try:
    params = pltpu.CompilerParams(collective_id=0)
    pl.pallas_call(
        meets_others, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), compiler_params=params
    )(x[:8, :128])
except pbkern.errors.PbkernError as e:
    print(e)
else:
    raise AssertionError("a barrier between devices has no counterpart")
