"""8-bit floats of Pallas bodies: a byte each in memory, float32 values in the body, rounded to the format.

Two formats of Micikevicius et al. 2022, "FP8 formats for deep learning": e5m2 is the upper half of a float16;
e4m3fn has no infinity and one NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Format:
    """Mantissa bits, exponent of the smallest normal, the largest value, and what is beyond it."""

    mantissa: int
    smallest: int
    largest: float
    overflow: float


FORMATS = {
    "float8_e5m2": Format(2, -14, 57344.0, np.inf),
    "float8_e4m3fn": Format(3, -6, 448.0, np.nan),
}


def is_float8(dtype) -> bool:
    return np.dtype(dtype).name in FORMATS


def quantise(x, dtype):
    """x: float32, rounded to nearest even among the values of `dtype`."""
    f = FORMATS[np.dtype(dtype).name]
    bits = lax.bitcast_convert_type(x, np.uint32)
    drop = 23 - f.mantissa
    odd = (bits >> np.uint32(drop)) & np.uint32(1)
    kept = np.uint32(2**32 - 2**drop)
    normal = lax.bitcast_convert_type((bits + odd + np.uint32(2 ** (drop - 1) - 1)) & kept, np.float32)
    step = np.float32(2.0 ** (f.smallest - f.mantissa))
    subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    rounded = jnp.where(jnp.abs(x) < np.float32(2.0**f.smallest), subnormal, normal)
    rounded = jnp.where(jnp.abs(rounded) > np.float32(f.largest), jnp.copysign(np.float32(f.overflow), x), rounded)
    return jnp.where(x != x, x, rounded)


def decode(byte, dtype):
    """uint8 -> float32."""
    if np.dtype(dtype).name == "float8_e5m2":
        return lax.bitcast_convert_type(byte.astype(np.uint16) << np.uint16(8), np.float16).astype(np.float32)
    word = byte.astype(np.uint32)
    exponent, mantissa = (word >> np.uint32(3)) & np.uint32(15), word & np.uint32(7)
    normal = lax.bitcast_convert_type(((exponent + np.uint32(120)) << np.uint32(23)) | (mantissa << np.uint32(20)), np.float32)
    size = jnp.where(exponent == 0, mantissa.astype(np.float32) * np.float32(2.0**-9), normal)
    size = jnp.where((word & np.uint32(127)) == 127, np.float32(np.nan), size)
    return jnp.where(word >= 128, -size, size)


def encode(x, dtype):
    """float32 that `quantise` made -> uint8."""
    if np.dtype(dtype).name == "float8_e5m2":
        return (lax.bitcast_convert_type(x.astype(np.float16), np.uint16) >> np.uint16(8)).astype(np.uint8)
    bits = lax.bitcast_convert_type(x, np.uint32)
    sign, size = (bits >> np.uint32(24)) & np.uint32(128), jnp.abs(x)
    normal = ((bits >> np.uint32(20)) & np.uint32(0x7FF)) - np.uint32(120 * 8)
    subnormal = (size * np.float32(512.0)).astype(np.uint32)
    code = jnp.where(size < np.float32(2.0**-6), subnormal, normal)
    return (sign | jnp.where(x != x, np.uint32(127), code)).astype(np.uint8)
