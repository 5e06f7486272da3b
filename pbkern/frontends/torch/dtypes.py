"""Torch's dtypes <-> NumPy's, and which tensors kernels can read."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import torch

from pbkern.core.errors import UnsupportedOp

NUMPY = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.bool: np.dtype(np.bool_),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
TORCH = {numpy_type: dtype for dtype, numpy_type in NUMPY.items()}


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Raises UnsupportedOp for types that kernels lack, such as 8-bit floats."""
    if dtype not in NUMPY:
        raise UnsupportedOp(
            f"tensors of dtype {dtype} are not compiled",
            why="kernels have no such numbers",
            hint=f"one of {', '.join(str(supported).removeprefix('torch.') for supported in NUMPY)}",
        )
    return NUMPY[dtype]


@functools.lru_cache(maxsize=1024)
def torch_dtype(dtype: np.dtype) -> torch.dtype:
    return TORCH[np.dtype(dtype)]


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this computer's memory lists the elements that are not zero."""
    return tensor.layout is not torch.strided and tensor.device.type == "cpu"


def check_tensor(tensor: torch.Tensor, what: str, place: str = "cpu") -> None:
    """Raises UnsupportedOp for a tensor whose elements do not lie one after the other in memory of a place, "cpu" or "cuda"."""
    if tensor.device.type != place:
        target = "cpu" if place == "cpu" else "nvgpu"
        raise UnsupportedOp(
            f"{what} is on device `{tensor.device}`",
            why=f"functions are compiled for target {target!r}",
            hint=f"x.{place}()"
            if tensor.device.type != "meta"
            else "meta tensors have no elements",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantised" if tensor.is_quantized else str(tensor.layout)
        raise UnsupportedOp(
            f"{what} is {kind}",
            why="kernels read dense arrays",
            hint="x.dequantize()" if tensor.is_quantized else "x.to_dense()",
        )
    numpy_dtype(tensor.dtype)
