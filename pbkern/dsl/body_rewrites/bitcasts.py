"""Bitcasts in bodies between types of any width, narrow floats and packed integers among them, as shifts.

A value of a narrow float type is float32 in the body (narrow_floats.py); one of int4 and its like
has that type. The lowest bits of a wide element are the first narrow one.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from .narrow_floats import FORMATS, decode, encode, is_narrow_float

SUB_BYTE = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}


def width(dtype) -> int:
    """Bits of an element."""
    if np.dtype(dtype).name in FORMATS:
        return FORMATS[np.dtype(dtype).name].bits
    return SUB_BYTE.get(np.dtype(dtype).name, np.dtype(dtype).itemsize * 8)


def is_plain(old, new) -> bool:
    """Whether lax.bitcast_convert_type itself can say it in a body."""
    has_own_form = is_narrow_float(old) or is_narrow_float(new) or np.dtype(old).name in SUB_BYTE
    return width(old) == width(new) and not has_own_form


def convert(x, old, new):
    """lax.bitcast_convert_type of a value of type `old`: a last dimension appears or goes where widths differ."""
    if is_plain(old, new):
        return lax.bitcast_convert_type(x, new)
    bits, wanted = width(old), width(new)
    raw = _raw(x, old)
    if wanted < bits:
        parts = [
            lax.expand_dims(raw >> raw.dtype.type(k * wanted), [raw.ndim])
            for k in range(bits // wanted)
        ]
        raw = lax.concatenate(parts, raw.ndim)
        raw = raw.astype(_word(wanted)) & _word(wanted).type((1 << wanted) - 1)
    elif wanted > bits:
        word = _word(wanted)
        parts = [
            lax.index_in_dim(raw, k, raw.ndim - 1, keepdims=False) for k in range(wanted // bits)
        ]
        raw = sum(
            (part.astype(word) << word.type(k * bits) for k, part in enumerate(parts[1:], 1)),
            parts[0].astype(word),
        )
    return _value(raw, new)


def rows(x, old, new):
    """pltpu.bitcast: where widths differ, the second last dimension (the last of a 1-d value) grows or shrinks."""
    bits, wanted = width(old), width(new)
    if bits == wanted:
        return convert(x, old, new)
    if x.ndim == 1:
        return jnp.squeeze(rows(x[:, None], old, new), 1)
    *lead, height, columns = x.shape
    if bits > wanted:  # [.., r, c] -> [.., r, c, k] -> [.., r * k, c]
        parts = jnp.swapaxes(convert(x, old, new), -1, -2)
        return lax.reshape(parts, (*lead, height * (bits // wanted), columns))
    k = wanted // bits
    return convert(jnp.swapaxes(lax.reshape(x, (*lead, height // k, k, columns)), -1, -2), old, new)


def _word(bits: int) -> np.dtype:
    return np.dtype(f"uint{max(bits, 8)}")


def _raw(x, dtype):
    """The bits of each element in an unsigned word."""
    if is_narrow_float(dtype):
        return encode(x, dtype)
    if np.dtype(dtype).name in SUB_BYTE:
        return x.astype(np.int8).astype(np.uint8) & np.uint8((1 << width(dtype)) - 1)
    return lax.bitcast_convert_type(x, _word(width(dtype)))


def _value(raw, dtype):
    """The value of type `dtype` with these bits."""
    name = np.dtype(dtype).name
    if is_narrow_float(dtype):
        return decode(raw, dtype)
    if name not in SUB_BYTE:
        return lax.bitcast_convert_type(raw, dtype)
    if name.startswith("u"):
        return raw.astype(dtype)
    spare = np.uint8(8 - SUB_BYTE[name])
    return (lax.bitcast_convert_type(raw << spare, np.int8) >> np.int8(spare)).astype(dtype)
