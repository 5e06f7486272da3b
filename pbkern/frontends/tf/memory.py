"""Tensors of TensorFlow and the memory that they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

LINE_BYTES = 64  # programs write results that start at cache lines


def address(tensor: tf.Tensor) -> int:
    """Of the first element; elements lie one after the other."""
    return np.asarray(tensor).__array_interface__["data"][0]


def new_memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Elements of any value, the first at a cache line."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(nbytes + LINE_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % LINE_BYTES
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def maker(dtype: np.dtype) -> Callable[[np.ndarray], tf.Tensor]:
    """A function that makes a tensor of an array's memory. DLPack knows no truth values of TensorFlow's, and NumPy exports no
    types of others: these pass as integers, truth values are copied."""
    to_tensor: Any = tf.experimental.dlpack.from_dlpack
    if dtype.kind == "b":
        return tf.constant
    if dtype.isbuiltin != 1:
        kind, wanted = np.dtype(f"int{dtype.itemsize * 8}"), tf.dtypes.as_dtype(dtype)
        return lambda a: tf.bitcast(to_tensor(a.view(kind).__dlpack__()), wanted)
    return lambda a: to_tensor(a.__dlpack__())
