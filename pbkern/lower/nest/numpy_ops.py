"""Elementwise operations of expressions on NumPy arrays, for the interpreter of nests.

float16 and bfloat16 are carried as float32 between the operations of one expression, as
lower/math/elementwise.py has it: only convert_element_type, reduce_precision and comparisons round. What an
operation means is its row's (core/ops/elementwise.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbkern.core.errors import InternalError
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.elementwise_meanings import HALF
from pbkern.core.ops.elementwise_row import rounded
from pbkern.lower.math.elementwise import EqnInfo


def register_dtype(dtype: np.dtype) -> np.dtype:
    """In which values of a dtype are carried."""
    return np.dtype(np.float32) if dtype.name in HALF else dtype


def apply(info: EqnInfo, args: Sequence[np.ndarray]) -> np.ndarray:
    """Register values of operands, which broadcast -> that of the result. Raises InternalError for an unknown operation."""
    row = ELEMENTWISE.get(info.primitive)
    if row is None or row.meaning is None:
        raise InternalError(f"nest: the interpreter has no operation `{info.primitive}`")
    if row.in_memory:
        args = [rounded(arg, dtype) for arg, dtype in zip(args, info.in_dtypes)]
    result = row.computed(args, info.params, info.out_dtype)
    return result.astype(register_dtype(info.out_dtype))
