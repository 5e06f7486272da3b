"""emulate_precision_casts: a fused chain of 16-bit floats beside TensorFlow's own operations, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

import pbkern


def chain(x, y):
    """Products beyond float16's range, and sums that cancel."""
    z = x * y
    w = (z + x) - z
    return z / y, w * w, tf.abs(z * x) - z


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_a_chain(dtype):
    rng = np.random.default_rng(0)
    x, y = (tf.cast(tf.constant(rng.normal(size=(33, 65)) * scale), dtype) for scale in (300, 40))
    expected = [np.asarray(e) for e in chain(x, y)]
    rounded = pbkern.polyblocks_jit_tf(chain, compile_options={"emulate_precision_casts": True})(
        x, y
    )
    for made, e in zip(rounded, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(made), e)
    wide = pbkern.polyblocks_jit_tf(chain)(x, y)
    assert any((np.asarray(m) != e).any() for m, e in zip(wide, expected))
