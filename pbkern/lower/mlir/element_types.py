"""dtype of an array -> MLIR's element types in memory and in registers.

JAX's narrow types live in wider registers: float16 and bfloat16 are computed in f32, bool is i8 in
memory and i1 in registers.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

from pbkern.core.errors import UnsupportedOp

# dtype name -> (element type in memory, element type in registers)
ELEMENTS = {
    "float64": ("f64", "f64"),
    "float32": ("f32", "f32"),
    "float16": ("f16", "f32"),
    "bfloat16": ("bf16", "f32"),
    "int64": ("i64", "i64"),
    "uint64": ("i64", "i64"),
    "int32": ("i32", "i32"),
    "uint32": ("i32", "i32"),
    "int16": ("i16", "i16"),
    "uint16": ("i16", "i16"),
    "int8": ("i8", "i8"),
    "uint8": ("i8", "i8"),
    "bool": ("i8", "i1"),
    "int4": ("i8", "i8"),
    "uint4": ("i8", "i8"),
    "int2": ("i8", "i8"),
    "uint2": ("i8", "i8"),
}
# Bits of the integers that share a byte in XLA's arrays. In registers and scratch they are extended
# to a byte; kernels do not take them as operands.
SUB_BYTE = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}
BITS = {
    "f64": 64,
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "i64": 64,
    "i32": 32,
    "i16": 16,
    "i8": 8,
    "i1": 1,
}
NUMPY_FLOAT = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


# MLIR type of an element type where its name is not the type. LLVM selects instructions of bfloat16
# for few processors, and calls a library's functions on the others even to move such values: memory
# and registers hold the bits.
AS_BITS = {"bf16": "i16"}


def mlir_type(el: str, lanes: int = 0) -> str:
    """The MLIR type of a scalar (0 lanes) or a vector."""
    name = AS_BITS.get(el, el)
    return f"vector<{lanes}x{name}>" if lanes else name


def is_float(el: str) -> bool:
    return "f" in el


def int_el(el: str) -> str:
    """The integer element type as wide as `el`."""
    return f"i{BITS[el]}"


@functools.cache  # asked for with every value; one entry per element type. The name of a dtype takes microseconds to make
def _elements(dtype) -> tuple[str, str]:
    name = np.dtype(dtype).name
    if name not in ELEMENTS:
        raise UnsupportedOp(
            f"dtype {name} has no register type", why=f"covered: {', '.join(ELEMENTS)}"
        )
    return ELEMENTS[name]


def storage_el(dtype) -> str:
    """Element type in memory. Raises UnsupportedOp for complex, fp8, int4 and the like."""
    return _elements(dtype)[0]


def compute_el(dtype) -> str:
    """Element type in registers. Raises UnsupportedOp for complex, fp8, int4 and the like."""
    return _elements(dtype)[1]
