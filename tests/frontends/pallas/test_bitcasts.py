"""16-bit floats that a body only moves keep every bit, those of signalling NaNs too: people keep bytes in such arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

BITS = np.arange(1 << 16, dtype=np.uint16)


def scattered(x, o):
    for i in range(0x7F80, 0x7F88):  # element by element, infinity and signalling NaNs of bfloat16
        o[i] = x[i]
    o[:0x7F80] = x[:0x7F80]
    o[0x7F88:] = x[0x7F88:]


MOVES = {
    "copy": lambda x: x,
    "transpose": lambda x: x.reshape(256, 256).T.reshape(-1),
    "reverse": lambda x: x[::-1],
    "select": lambda x: jnp.where(lax.iota(jnp.int32, x.size) >= 77, x, 0),
    "choose": lambda x: jnp.where(lax.iota(jnp.int32, x.size) % 2 == 0, x, x[::-1]),
    "pad": lambda x: jnp.pad(x, (3, 5)),
    "concatenate": lambda x: jnp.concatenate([x[1000:], x[:1000]]),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, v: jnp.where(i == 1, v[::-1], v), x),
    "broadcast": lambda x: jnp.broadcast_to(x[0x7F80:0x7F90, None], (16, 40)),
}


def moved(move, x):
    def kernel(x_ref, o_ref):
        o_ref[...] = move(x_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.eval_shape(move, x))(x)


def same_bits(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", MOVES)
def test_moves_keep_every_bit(name, dtype):
    move, x = MOVES[name], jnp.asarray(BITS.view(dtype))
    want = np.asarray(move(jnp.asarray(BITS)))
    same_bits(moved(move, x), want)
    same_bits(moved(lambda b: lax.bitcast_convert_type(move(b), dtype), BITS), want)
    same_bits(moved(lambda v: lax.bitcast_convert_type(move(v), jnp.uint16), x), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_single_elements_keep_every_bit(dtype):
    x = jnp.asarray(BITS.view(dtype))
    same_bits(pl.pallas_call(scattered, out_shape=jax.ShapeDtypeStruct(x.shape, dtype))(x), BITS)
