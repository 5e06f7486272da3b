"""Traces of launches of TensorFlow's functions."""

import pytest

import pbkern
from tests.api.test_profile import check, kernel_names, names

tf = pytest.importorskip("tensorflow")


def test_a_function_of_tensors():
    f = pbkern.polyblocks_jit_tf(lambda x: tf.nn.softmax(x) @ tf.transpose(x))
    x = tf.random.normal((48, 32))
    want = f(x).numpy()
    trace = pbkern.profile(f, x, calls=2)
    check(trace, calls=2)
    assert names(trace, "kernel") == kernel_names(f, x)
    assert (f(x).numpy() == want).all()
