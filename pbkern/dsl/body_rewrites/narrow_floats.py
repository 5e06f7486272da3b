"""Floats of 8 and 4 bits in bodies: a byte each in memory, float32 values in the body, rounded to the format.

Calculations round after each operation, as XLA's do.

Two formats of Micikevicius et al. 2022, "FP8 formats for deep learning": e5m2 is the upper half of
a float16; e4m3fn has no infinity and one NaN. Two of the OCP Microscaling Formats specification,
2023: e2m1fn has neither infinities nor NaN: what is larger than its largest value becomes that, and
NaN -0, as XLA has it; e8m0fnu is the exponent of a float32, without sign, zero and infinity; 255 is
NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.views import VIEWS


@dataclass(frozen=True)
class FloatFormat:
    """Parameters of a format of floats.

    They are bits of an element and of its mantissa, exponent of the smallest normal, the largest
    value, what is beyond it, and what NaN becomes.
    """

    bits: int
    mantissa: int
    smallest: int
    largest: float
    overflow: float
    nan: float = np.nan


FORMATS = {
    "float8_e5m2": FloatFormat(8, 2, -14, 57344.0, np.inf),
    "float8_e4m3fn": FloatFormat(8, 3, -6, 448.0, np.nan),
    "float4_e2m1fn": FloatFormat(4, 1, 0, 6.0, 6.0, -0.0),
}


EXPONENTS = "float8_e8m0fnu"
# Equations whose results are elements of their operands: rounding those would change nothing.
MOVES = (
    *VIEWS,
    "select_n",
    "dynamic_slice",
    "concatenate",
    "pad",
    "gather",
    "max",
    "min",
)


def is_narrow_float(dtype) -> bool:
    return np.dtype(dtype).name in (*FORMATS, EXPONENTS)


def body_dtype(dtype) -> np.dtype:
    """Type of the values of this type in a body."""
    return np.dtype(np.float32) if is_narrow_float(dtype) else np.dtype(dtype)


def in_body(x):
    """A constant as bodies have it: of float32 for a narrow float type; made in the body if it has no elements.

    JAX updates a whole dimension at an empty array of indices.
    """
    if hasattr(x, "dtype") and _is_small(x.dtype):
        x = np.asarray(x).astype(np.float32)
    return jnp.zeros(x.shape, x.dtype) if getattr(x, "size", 1) == 0 else x


def calculate(eqn, operands) -> list | None:
    """Results of an equation of lax on narrow floats, each rounded to its type; None if it has none of them."""
    if not has_narrow_floats(eqn):
        return None
    results = [var.aval.dtype for var in eqn.outvars]
    params = {
        key: body_dtype(param) if isinstance(param, np.dtype) else param
        for key, param in eqn.params.items()
    }
    computed = eqn.primitive.bind(*operands, **params)
    computed = computed if eqn.primitive.multiple_results else [computed]
    return [
        rounded_value(x, quantise(x, result))
        if _is_small(result) and eqn.primitive.name not in MOVES
        else x
        for x, result in zip(computed, results)
    ]


@jax.custom_jvp
def rounded_value(x, rounded):
    """`rounded`, which is x rounded: the operations on bits that round have no derivative."""
    return rounded


@rounded_value.defjvp
def _(primals, tangents):
    return rounded_value(*primals), tangents[0]


def has_narrow_floats(eqn) -> bool:
    """Whether an equation takes or gives narrow floats."""
    return any(_is_small(getattr(var.aval, "dtype", None)) for var in (*eqn.invars, *eqn.outvars))


def _is_small(dtype) -> bool:
    return isinstance(dtype, np.dtype) and is_narrow_float(dtype)


def to_float32(x):
    """x as float32, such that rounding it once more gives what rounding x itself does.

    What float32 does not hold becomes the neighbour whose last bit is 1: on the same side of every
    number of fewer bits, and of every middle between two of them. Source: Boldo and Melquiond 2008,
    "Emulation of FMA and correctly rounded sums".
    """
    if x.dtype.kind in "iu" and x.dtype.itemsize >= 4:
        x = _to_float64(x)
    near = lax.convert_element_type(x, np.float32)
    if x.dtype != np.float64:
        return near
    back, bits = near.astype(np.float64), lax.bitcast_convert_type(near, np.uint32)
    odd = jnp.where(jnp.abs(back) < jnp.abs(x), bits + np.uint32(1), bits - np.uint32(1))
    exact = (back == x) | (x != x) | (bits & np.uint32(1) == 1)
    return jnp.where(exact, near, lax.bitcast_convert_type(odd, np.float32))


def _to_float64(x):
    """An integer, of more than 53 bits without the lowest, in whose place the last of 53 bits is 1."""
    if x.dtype.itemsize == 8:
        low = x & x.dtype.type(4095)
        odd = (x - low) | x.dtype.type(2048)
        few = x < x.dtype.type(2**53)
        few = few if x.dtype.kind == "u" else few & (x > x.dtype.type(-(2**53)))
        x = jnp.where(few | (low == 0), x, odd)
    return x.astype(np.float64)


def quantise(x, dtype):
    """x: float32, rounded to nearest even among the values of `dtype`."""
    if np.dtype(dtype).name == EXPONENTS:
        return _decode_exponent(_encode_exponent(x))
    float_format = FORMATS[np.dtype(dtype).name]
    bits = lax.bitcast_convert_type(x, np.uint32)
    drop = 23 - float_format.mantissa
    odd = (bits >> np.uint32(drop)) & np.uint32(1)
    mask = np.uint32(2**32 - 2**drop)
    normal = lax.bitcast_convert_type(
        (bits + odd + np.uint32(2 ** (drop - 1) - 1)) & mask, np.float32
    )
    step = np.float32(2.0 ** (float_format.smallest - float_format.mantissa))
    subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    rounded = jnp.where(jnp.abs(x) < np.float32(2.0**float_format.smallest), subnormal, normal)
    rounded = jnp.where(
        jnp.abs(rounded) > np.float32(float_format.largest),
        jnp.copysign(np.float32(float_format.overflow), x),
        rounded,
    )
    return jnp.where(
        x != x, x if np.isnan(float_format.nan) else np.float32(float_format.nan), rounded
    )


def round_at_random(x, random, dtype):
    """x: float32, rounded up or down to a neighbour among the values of `dtype`, bfloat16 or one of FORMATS.

    Up where the uint32 `random` is below 2**32 times the part of the step that is below x; in size,
    for either sign.
    """
    float_format = FORMATS.get(np.dtype(dtype).name)
    drop = 16 if float_format is None else 23 - float_format.mantissa
    bits = lax.bitcast_convert_type(x, np.uint32) + (random >> np.uint32(32 - drop))
    rounded = lax.bitcast_convert_type(bits & np.uint32(2**32 - 2**drop), np.float32)
    if float_format is not None:
        step = np.float32(2.0 ** (float_format.smallest - float_format.mantissa))
        # 24 bits of the draw: a sum with all of them would round.
        part = (random >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
        subnormal = jnp.copysign(jnp.floor(jnp.abs(x) / step + part) * step, x)
        rounded = jnp.where(jnp.abs(x) < np.float32(2.0**float_format.smallest), subnormal, rounded)
        rounded = jnp.where(
            jnp.abs(rounded) > np.float32(float_format.largest),
            jnp.copysign(np.float32(float_format.overflow), x),
            rounded,
        )
    rounded = jnp.where(jnp.isfinite(x), rounded, x if float_format is None else quantise(x, dtype))
    return rounded if float_format is not None else rounded.astype(dtype)


def decode(byte, dtype):
    """uint8 -> float32."""
    if np.dtype(dtype).name == EXPONENTS:
        return _decode_exponent(byte)
    if np.dtype(dtype).name == "float8_e5m2":
        return lax.bitcast_convert_type(byte.astype(np.uint16) << np.uint16(8), np.float16).astype(
            np.float32
        )
    float_format = FORMATS[np.dtype(dtype).name]
    word = byte.astype(np.uint32)
    sign, size = (
        np.uint32(1 << (float_format.bits - 1)),
        word & np.uint32((1 << (float_format.bits - 1)) - 1),
    )
    exponent, mantissa = (
        size >> np.uint32(float_format.mantissa),
        size & np.uint32((1 << float_format.mantissa) - 1),
    )
    bits = ((exponent + np.uint32(float_format.smallest + 126)) << np.uint32(23)) | (
        mantissa << np.uint32(23 - float_format.mantissa)
    )
    subnormal = mantissa.astype(np.float32) * np.float32(
        2.0 ** (float_format.smallest - float_format.mantissa)
    )
    value = jnp.where(exponent == 0, subnormal, lax.bitcast_convert_type(bits, np.float32))
    if np.isnan(float_format.overflow):
        value = jnp.where(size == sign - np.uint32(1), np.float32(np.nan), value)
    return jnp.where(word >= sign, -value, value)


def encode(x, dtype):
    """float32 that `quantise` made -> uint8."""
    if np.dtype(dtype).name == EXPONENTS:
        return _encode_exponent(x)
    if np.dtype(dtype).name == "float8_e5m2":
        return (lax.bitcast_convert_type(x.astype(np.float16), np.uint16) >> np.uint16(8)).astype(
            np.uint8
        )
    float_format = FORMATS[np.dtype(dtype).name]
    bits, high = lax.bitcast_convert_type(x, np.uint32), np.uint32(1 << (float_format.bits - 1))
    sign, size = (bits >> np.uint32(32 - float_format.bits)) & high, jnp.abs(x)
    normal = ((bits & np.uint32(0x7FFFFFFF)) >> np.uint32(23 - float_format.mantissa)) - np.uint32(
        (float_format.smallest + 126) << float_format.mantissa
    )
    subnormal = (size * np.float32(2.0 ** (float_format.mantissa - float_format.smallest))).astype(
        np.uint32
    )
    code = jnp.where(size < np.float32(2.0**float_format.smallest), subnormal, normal)
    code = jnp.where(x != x, high - np.uint32(1), code) if np.isnan(float_format.overflow) else code
    return (sign | code).astype(np.uint8)


def _encode_exponent(x):
    """float32 -> the nearest power of two's exponent; of two at equal distance, the larger. Not positive: NaN."""
    bits = lax.bitcast_convert_type(x, np.uint32)
    # 2**-127 is subnormal: XLA rounds it down, and what is above it up.
    half = jnp.where(bits < np.uint32(1 << 23), np.uint32((1 << 22) - 1), np.uint32(1 << 22))
    positive = (bits - np.uint32(1)) < np.uint32(
        0x7F800000
    )  # `x > 0` may take a subnormal for zero
    return jnp.where(positive, (bits + half) >> np.uint32(23), np.uint32(255)).astype(np.uint8)


def _decode_exponent(byte):
    word = byte.astype(np.uint32)
    power = lax.bitcast_convert_type(
        jnp.where(word == 0, np.uint32(1 << 22), word << np.uint32(23)), np.float32
    )
    return jnp.where(word == 255, np.float32(np.nan), power)
