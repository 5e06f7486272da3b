"""Rounding of values that kernels keep in wider registers."""

from __future__ import annotations

import numpy as np
from jax import lax


def rounded(x):
    """A float16 or bfloat16 as it is in memory: conversions round, and keep subnormal numbers."""
    return lax.convert_element_type(lax.convert_element_type(x, np.float32), x.dtype)
