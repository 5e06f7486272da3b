"""TensorFlow's tensors as arrays of plans that are called with addresses (api/direct_plan.py).

Within a call arrays of NumPy stand for tensors that are not made yet.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf

from pbkern.core.machine import LINE_BYTES

# GCC's runtime, which every system with its C++ has; TensorFlow brings none.
OPENMP = "libgomp.so.1"
WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # a user's own choice
OPENMP_SPINS = "1000"  # some microseconds


def _openmp() -> str | None:
    """The runtime, if the system has it; loaded here for the first time, its waiting threads soon sleep.

    By itself it lets them spin for milliseconds: beside another busy process a softmax of 512 x
    1024 took 4 ms in place of 0.2.
    """
    waits = {} if WAITING & os.environ.keys() else {"GOMP_SPINCOUNT": OPENMP_SPINS}
    os.environ.update(waits)
    try:
        ctypes.CDLL(OPENMP)
    except OSError:
        return None
    finally:
        for name in waits:
            del os.environ[name]
    return OPENMP


class TfMemory:
    """Tensors of this computer's memory, which never change."""

    device: Any = None
    before_call: Callable[[], object] | None = None
    openmp = _openmp()
    address: Callable[[Any], int] = staticmethod(
        lambda array: np.asarray(array).__array_interface__["data"][0]
    )

    def operands(self, dtypes: Sequence[np.dtype]) -> Callable[[Sequence[tf.Tensor]], list[Any]]:
        return list

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[], np.ndarray]:
        nbytes = int(np.prod(shape)) * dtype.itemsize

        def make() -> np.ndarray:
            memory = np.empty(nbytes + LINE_BYTES, np.uint8)
            start = -memory.__array_interface__["data"][0] % LINE_BYTES
            return memory[start : start + nbytes].view(dtype).reshape(shape)

        return make

    def constant(self, value: np.ndarray) -> tf.Tensor:
        return tf.constant(value)

    def copy(self, array: Any) -> Any:
        return array

    def result(self, dtype: np.dtype) -> Callable[[Any], tf.Tensor]:
        """Makes a tensor of an array's memory.

        DLPack knows no truth values of TensorFlow's, and NumPy exports no types of others: these
        pass as integers, truth values are copied.
        """
        to_tensor: Any = tf.experimental.dlpack.from_dlpack
        kind, wanted = (
            np.dtype(f"int{dtype.itemsize * 8}") if dtype.kind != "c" else dtype,
            tf.dtypes.as_dtype(dtype),
        )
        is_known = dtype.isbuiltin == 1

        def make(array: Any) -> tf.Tensor:
            if not isinstance(array, np.ndarray):
                return array
            if dtype.kind == "b":
                return tf.constant(array)
            return (
                to_tensor(array.__dlpack__())
                if is_known
                else tf.bitcast(to_tensor(array.view(kind).__dlpack__()), wanted)
            )

        return make

    def to_jax(self, array: Any) -> jax.Array:
        """Shows the memory to JAX; DLPack has no truth values of TensorFlow's."""
        if isinstance(array, np.ndarray):
            return jax.numpy.asarray(array)
        return (
            jax.numpy.asarray(array.numpy())
            if array.dtype == tf.bool
            else jax.dlpack.from_dlpack(array)
        )

    def from_jax(self, array: jax.Array) -> tf.Tensor:
        return (
            tf.constant(np.asarray(array))
            if array.dtype == bool
            else tf.experimental.dlpack.from_dlpack(array.__dlpack__())
        )
