"""What cannot be compiled of TensorFlow, wrong arguments and options: one explained error each."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import pbkern
from pbkern.errors import OptionError, TargetError, UnsupportedOp

X = np.arange(6, dtype="f4")


class Pair(tf.experimental.ExtensionType):
    first: tf.Tensor
    second: tf.Tensor


def appended(x):
    rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    for i in tf.range(3):
        rows = rows.write(i, x)
    return rows.stack()


@pytest.mark.parametrize(("name", "f", "message"), [
    ("python", lambda x: tf.py_function(lambda y: y, [x], tf.float32), "that XLA does not have\n  at .*\n  why  EagerPyFunc"),
    ("print", lambda x: (tf.print(x), x)[1], "that XLA does not have\n  at .*test_mistakes.*\n  why  StringFormat"),
    ("determinant", lambda x: tf.linalg.det(tf.reshape(x[:4], (2, 2))), "why  MatrixDeterminant\n  try  .*tf.linalg.logdet"),
    ("least squares", lambda x: tf.linalg.lstsq(x[:, None], x[:, None], fast=False), "MatrixSolveLs\n  try  .*fast=True"),
    ("type", lambda x: tf.linalg.inv(tf.cast(tf.reshape(x[:4], (2, 2)), tf.complex64)), "why  MatrixInverse of complex64"),
    ("unknown size", lambda x: tf.unique(x)[0], "shape that is known only when it runs"),
    ("shape", lambda x: tf.range(tf.cast(x[0], tf.int32)), "depend on numbers that it is called with"),
    ("branches", lambda x: tf.cond(x[0] > 0, lambda: x, lambda: x[1:]), "branches of `cond` .*line .* of different shapes"),
    ("array", lambda x: tf.TensorArray(tf.float32, 6).unstack(x), "returns a variant"),
    ("longer array", lambda x: tf.TensorArray(tf.float32, 0, True).write(0, x).stack(), "TensorArray with `dynamic_size`"),
    ("longer array in a loop", appended, "TensorArray with `dynamic_size`"),
    ("text", lambda x: tf.constant("a"), "returns a string"),
])  # fmt: skip
def test_operations(name, f, message):
    with pytest.raises(UnsupportedOp, match=message):
        pbkern.polyblocks_jit_tf(f)(X)


def test_tensors_that_kernels_cannot_read():
    f = pbkern.polyblocks_jit_tf(lambda x: x)
    with pytest.raises(UnsupportedOp, match="argument 0 has dtype string"):
        f(tf.constant(["a"]))
    with pytest.raises(UnsupportedOp, match="argument 0 is a SparseTensor"):
        f(tf.sparse.from_dense(X))
    with pytest.raises(UnsupportedOp, match="argument 0 is a RaggedTensor"):
        f(tf.ragged.constant([[1.0], [2.0, 3.0]]))
    with pytest.raises(UnsupportedOp, match="argument 0 is a IndexedSlices"):
        f(tf.IndexedSlices(tf.ones(2), tf.constant([0, 1]), tf.constant([3])))
    with pytest.raises(UnsupportedOp, match="argument 0 is a TensorArray"):
        f(tf.TensorArray(tf.float32, 2).unstack(tf.ones(2)))
    with pytest.raises(UnsupportedOp, match="argument 1 is a Pair"):
        pbkern.polyblocks_jit_tf(lambda x, pair: x + pair.first)(X, Pair(X, X))
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), -1)
    with pytest.raises(UnsupportedOp, match="reads a resource of its scope"):
        pbkern.polyblocks_jit_tf(lambda x: table.lookup(tf.cast(x, tf.int32)))(X)


def test_calls_of_a_function_that_tensorflow_traces():
    f, v = pbkern.polyblocks_jit_tf(lambda x: x * 2.0), tf.Variable([1.0, 2.0])
    g = pbkern.polyblocks_jit_tf(lambda: v * 2.0)
    x = tf.constant(X)
    for call, args in ((f, [x]), (g, [])):
        for _ in range(2):
            with pytest.raises(UnsupportedOp, match="of a function that TensorFlow traces"):
                tf.function(call, autograph=False)(*args)
            call(*args)
    np.testing.assert_array_equal(tf.function(lambda: f(x), autograph=False)(), X * 2)


def test_options():
    for options, message in (
        ({"static_argnums": 0}, "`static_argnums` concerns functions of JAX arrays"),
        ({"aot": True}, "concerns ahead-of-time compilation"),
        ({"torch_polyblocks_select_graphs": (0,)}, "concerns the PyTorch front end"),
        ({"execution_backend": "xla"}, "concerns polymage_jit_tf"),
        ({"tiles": 1}, "unknown compile option `tiles`"),
    ):
        with pytest.raises(OptionError, match=message):
            pbkern.polyblocks_jit_tf(lambda x: x, compile_options=options)
    with pytest.raises(OptionError, match=r"polyblocks_jit_tf decorates a function\n.*given 3"):
        pbkern.polyblocks_jit_tf(3)
    with pytest.raises(OptionError, match="given twice"):
        pbkern.polyblocks_jit_tf(lambda x: x, compile_options={}, runtime_args={})
    with pytest.raises(OptionError, match="`num_iters` cannot act with execution_backend 'xla'"):
        pbkern.polymage_jit_tf(
            lambda x: x, compile_options={"execution_backend": "xla", "num_iters": 3}
        )


def test_strict_target():
    f = lambda x: tf.abs(tf.signal.rfft(x))
    with pytest.raises(UnsupportedOp, match="fft"):
        pbkern.polyblocks_jit_tf(f, compile_options={"strict_target": True})(X)


def test_without_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(
        TargetError, match=r"TensorFlow is not installed\n.*\n.*pip install 'pbkern\[tf\]'"
    ):
        pbkern.polyblocks_jit_tf(lambda x: x)
