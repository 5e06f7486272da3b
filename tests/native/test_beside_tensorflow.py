"""TensorFlow, whose library exports LLVM's symbols, in one process with the MLIR bindings, whichever is loaded first."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

from pbkern.targets import mlir

PROGRAM = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    import pbkern

    def compile(k):
        x = np.arange(12, dtype="f4").reshape(3, 4)
        np.testing.assert_allclose(pbkern.jit(lambda x: (x * k + 1).sum(0))(x), (x * k + 1).sum(0))

    def tensorflow():
        import tensorflow as tf
        assert float(tf.function(lambda x: x * 2, jit_compile=True)(tf.constant(3.0))) == 6

    for step in sys.argv[1:]:
        tensorflow() if step == "tensorflow" else compile(float(len(step)))
    print("both")
"""


@pytest.mark.parametrize(
    "order", [pytest.param("tensorflow first", marks=pytest.mark.slow), "second tensorflow third"]
)
def test_both_load(order):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    env = os.environ | {
        "PBKERN_CACHE": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *order.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "both" in done.stdout, done.stderr[-3000:]


def test_how_other_libraries_are_loaded_stays():
    before = sys.getdlopenflags()
    with mlir._own_symbols():
        assert sys.getdlopenflags() & os.RTLD_DEEPBIND
    assert sys.getdlopenflags() == before
    with pytest.raises(ImportError), mlir._own_symbols():
        raise ImportError
    assert sys.getdlopenflags() == before
