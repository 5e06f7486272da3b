"""Subnormal numbers are kept in the block, on a thread of XLA's as well, and the thread has its mode back behind it."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pbkern.core.process.float_mode import subnormals_kept

SUBNORMAL = np.full(4, 71362, np.int32).view(np.float32)  # about 1e-40


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's constant is another")
def test_threads_of_xla():
    equal = []

    def compare(x):
        for mode in (None, subnormals_kept, None):
            if mode is None:
                equal.append(bool((SUBNORMAL == 0).all()))
            else:
                with mode():
                    equal.append(bool((SUBNORMAL == 0).any()))
        return np.asarray(x)

    call = jax.jit(lambda x: jax.pure_callback(compare, jax.ShapeDtypeStruct((3,), "f4"), x))
    jax.block_until_ready(call(jnp.ones(3)))
    before, inside, behind = equal
    assert not inside
    assert before == behind


def test_on_a_thread_that_keeps_them():
    with subnormals_kept():
        assert not (SUBNORMAL == 0).any()
    assert not (SUBNORMAL == 0).any()
