"""Attention: two products with a softmax between them, in one kernel that never stores the scores.

For 1024 tokens, the scores of one head are four megabytes: more than a core's cache. This tutorial looks at what
pbkern makes of the textbook formula, and then writes the same idea as a kernel by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np

import pbkern
from pbkern.testing import assert_kernels


def attention(q, k, v):
    """float32[heads, tokens, width] three times -> the same shape."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1), v)


heads, tokens, width = 4, 512, 64
q, k, v = jax.random.normal(jax.random.key(0), (3, heads, tokens, width))
expected = attention(q, k, v)

fused = pbkern.jit(attention)
np.testing.assert_allclose(fused(q, k, v), expected, atol=1e-5)

# At full length, the scores would leave the cache, and one kernel is what the planner makes.

long = (jax.ShapeDtypeStruct((16, 1024, 64), jnp.float32),) * 3
assert_kernels(fused, long, 1)
print(fused.kernels(*long)[0].source())

# The same by hand, the way FlashAttention does it: keys arrive block by block, and the running maximum, the running
# sum and the unnormalised result stay in scratch memory between programs of the last grid dimension. Whenever the
# maximum grows, what was gathered so far is scaled down.

rows, keys = 128, 128
block_q = pbkern.BlockSpec((None, rows, width), lambda h, i, j: (h, i, 0))
block_kv = pbkern.BlockSpec((None, keys, width), lambda h, i, j: (h, j, 0))


@pbkern.kernel(
    grid=(heads, tokens // rows, tokens // keys),
    in_specs=[block_q, block_kv, block_kv],
    out_specs=block_q,
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    scratch_shapes=[
        pbkern.Scratch((rows, 1), jnp.float32),
        pbkern.Scratch((rows, 1), jnp.float32),
        pbkern.Scratch((rows, width), jnp.float32),
    ],
    compiler_params=pbkern.cpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
)
def flash(q, k, v, out, top, total, gathered):
    @pbkern.when(pbkern.program_id(2) == 0)
    def _():
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        gathered[...] = jnp.zeros_like(gathered)

    scores = q[...] @ k[...].T * (1 / np.sqrt(width))
    higher = jnp.maximum(top[...], scores.max(1, keepdims=True))
    shrink = jnp.exp(top[...] - higher)
    p = jnp.exp(scores - higher)
    total[...] = total[...] * shrink + p.sum(1, keepdims=True)
    gathered[...] = gathered[...] * shrink + p @ v[...]
    top[...] = higher

    @pbkern.when(pbkern.program_id(2) == pbkern.num_programs(2) - 1)
    def _():
        out[...] = gathered[...] / total[...]


np.testing.assert_allclose(flash(q, k, v), expected, atol=1e-5)

# A kernel written by hand takes part in a decorated function like any operation.


@pbkern.jit
def block(x, q, k, v):
    return x + jnp.tanh(flash(q * 2, k, v))


x = jnp.ones_like(q)
np.testing.assert_allclose(block(x, q, k, v), x + jnp.tanh(attention(q * 2, k, v)), atol=1e-5)
print(block.explain(x, q, k, v))

# Gradients need nothing, neither of a fused function nor of a kernel written by hand (tutorial 14).

gradient = jax.grad(lambda q: fused(q, k, v).sum())(q)
np.testing.assert_allclose(gradient, jax.grad(lambda q: attention(q, k, v).sum())(q), atol=1e-4)
