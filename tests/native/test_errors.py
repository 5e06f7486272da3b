"""What the CPU target cannot lower is said in one error with the user's line, the values and a way out."""

import jax
import jax.numpy as jnp
import pytest

import pbkern
from pbkern.core.errors import OutOfBoundsError, UnsupportedOp


def test_dtype_without_registers():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((4,), jnp.float8_e3m4))
    def same(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    with pytest.raises(UnsupportedOp) as e:
        same(jnp.ones(4, jnp.float8_e3m4))
    assert "input 0 (`x_ref`) of kernel `same` has a dtype that this target lacks" in str(e.value)
    assert "float8_e3m4[4]" in e.value.why
    assert "test_errors.py" in e.value.at
    assert "outside the kernel" in e.value.hint


def test_store_outside_the_block_in_interpret_mode():
    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)
    def poke(i_ref, o_ref):
        o_ref[...] = jnp.zeros(8, jnp.float32)
        o_ref[i_ref[0]] = 1.0

    with pytest.raises(OutOfBoundsError) as e:
        poke(jnp.array([11], jnp.int32))
    assert "access outside the block of output 0 (`o_ref`)" in str(e.value)
    assert "index 11" in e.value.why
    assert "test_errors.py" in e.value.at
    assert "mask" in e.value.hint


def test_compiled_dynamic_index_outside_the_block_stays_inside():
    """Compiled kernels clamp, as lax.dynamic_slice does: no memory outside the block is touched."""

    @pbkern.kernel(out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
    def poke(i_ref, o_ref):
        o_ref[...] = jnp.zeros(8, jnp.float32)
        o_ref[i_ref[0]] = 1.0

    assert poke(jnp.array([1000000], jnp.int32)).tolist() == [0] * 7 + [1]
    assert poke(jnp.array([-1000000], jnp.int32)).tolist() == [1] + [0] * 7
