"""jax.new_ref and pl.empty_ref_like in bodies of Pallas kernels: scratch that starts anew wherever it is made."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

X = np.arange(32, dtype="f4")
STRUCT = jax.ShapeDtypeStruct((32,), jnp.float32)


def test_a_ref_of_a_value_is_written_read_and_frozen():
    def kernel(x_ref, o_ref):
        total = jax.new_ref(x_ref[...] * 2)
        total[:16] += 1
        o_ref[...] = jax.freeze(total)

    want = X * 2 + (np.arange(32) < 16)
    block = pl.BlockSpec((32,), lambda i: (0,))
    f = pl.pallas_call(kernel, grid=(2,), out_shape=STRUCT, in_specs=[block], out_specs=block)
    np.testing.assert_array_equal(f(X), want)


def test_a_ref_made_in_a_loop_starts_anew_each_time():
    def kernel(x_ref, o_ref):
        def step(k, total):
            count = jax.new_ref(jnp.float32(0))
            count[...] += x_ref[k]
            return total + count[...]

        o_ref[...] = jnp.full(32, jax.lax.fori_loop(0, 5, step, jnp.float32(0)))

    np.testing.assert_array_equal(pl.pallas_call(kernel, out_shape=STRUCT)(X), 10)


def test_empty_refs_of_jax():
    def kernel(x_ref, o_ref):
        made = jax.empty_ref(jax.ShapeDtypeStruct((32,), jnp.float32), memory_space=pltpu.VMEM)
        made[...] = x_ref[...] + 1
        o_ref[...] = made[...] * 2

    x = jnp.arange(32, dtype=jnp.float32)
    got = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((32,), jnp.float32))(x)
    np.testing.assert_array_equal(got, (x + 1) * 2)


def test_empty_refs_and_semaphores():
    def kernel(x_ref, o_ref):
        buffer, sem = (
            pl.empty_ref_like(pltpu.VMEM((32,), jnp.float32)),
            pl.empty_ref_like(pltpu.SemaphoreType.DMA(())),
        )
        copy = pltpu.make_async_copy(x_ref, buffer, sem)
        copy.start()
        copy.wait()
        o_ref[...] = buffer[...] + 1

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    np.testing.assert_array_equal(
        pl.pallas_call(kernel, out_shape=STRUCT, in_specs=[anywhere])(X), X + 1
    )
