"""Complex numbers whose parts lie side by side, along a last dimension of 2, as in memory."""

from __future__ import annotations

import numpy as np
from jax import lax

from .arithmetic import Complex


def part_type(dtype) -> np.dtype:
    """Type of the parts: float32 of complex64."""
    return np.finfo(dtype).dtype


def deinterleave(x, whole=None) -> Complex:
    """complex[...] of real[..., 2] (deinterleave); `whole` is the complex array, if one exists."""
    re, im = (lax.index_in_dim(x, n, x.ndim - 1, keepdims=False) for n in range(2))
    return Complex(re, im, x, whole)


def interleave(z: Complex):
    """real[..., 2]: both parts interleaved."""
    if z.interleaved is not None:
        return z.interleaved
    rank = np.ndim(z.some)
    return lax.concatenate([lax.expand_dims(part, [rank]) for part in z.parts], rank)
