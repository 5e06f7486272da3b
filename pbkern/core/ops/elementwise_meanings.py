"""Elementwise primitives on NumPy arrays, as XLA defines them.

Integers wrap around, a quotient by zero has all bits set, a remainder by zero is the dividend, and a shift by the width or
more shifts everything out. Zeros are ordered: 0 is larger than -0. Functions that are not exact are computed in float64 and
rounded once. Operands broadcast. Parameters of equations are keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from . import special_functions

# Types of 16 bits that are computed in float32.
HALF = ("float16", "bfloat16")
Function = Callable[..., np.ndarray]


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def _unsigned(x: np.ndarray) -> np.ndarray:
    """The bits of integers, or of floats, as numbers without sign."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)


# --- numbers


def _int_quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Rounded toward zero. The quotient that overflows wraps: the least number by -1 is itself."""
    by_zero = y == 0
    divisor = np.where(by_zero, np.ones_like(y), y)
    floor, rest = np.floor_divide(x, divisor), np.remainder(x, divisor)
    quotient = floor + ((rest != 0) & ((x < 0) != (divisor < 0))).astype(floor.dtype)
    return np.where(by_zero, np.zeros_like(quotient) - quotient.dtype.type(1), quotient)


def div(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    return _int_quotient(x, y)


def rem(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The remainder has the sign of the dividend."""
    if x.dtype.kind not in "iu":
        return np.fmod(x, y)
    return np.where(y == 0, x, x - _int_quotient(x, y) * y)


def sign(x: np.ndarray) -> np.ndarray:
    """-1, 0 or 1; NaN and both zeros of floats are their own sign."""
    if x.dtype.kind in "iu":
        return np.sign(x)
    return np.where(np.abs(x) > 0, np.copysign(np.ones_like(x), x), x)


def integer_pow(x: np.ndarray, *, y: int) -> np.ndarray:
    """Squares and products; a negative exponent inverts the result."""
    product, power, bits = np.ones_like(x), x, abs(y)
    while bits:
        if bits & 1:
            product = product * power
        bits >>= 1
        if bits:
            power = power * power
    return div(np.ones_like(x), product) if y < 0 else product


def round_(x: np.ndarray, *, rounding_method: int) -> np.ndarray:
    """Ties away from zero (0) or to even (1)."""
    if int(rounding_method) == 1:
        return np.rint(x)
    whole = np.trunc(x)
    is_tie_or_above = np.abs(x - whole) >= 0.5
    return np.where(is_tie_or_above, whole + np.copysign(np.ones_like(x), x), whole)


def max_(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The larger number; NaN if either is."""
    if x.dtype.kind == "b":
        return x | y
    larger = np.maximum(x, y)
    return larger if x.dtype.kind in "iu" else np.where((x == 0) & (y == 0), x + y, larger)


def min_(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The smaller number; NaN if either is."""
    if x.dtype.kind == "b":
        return x & y
    smaller = np.minimum(x, y)
    return smaller if x.dtype.kind in "iu" else np.where((x == 0) & (y == 0), -(-x - y), smaller)


def clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return min_(max_(x, low), high)


def mulhi(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The upper half of the product."""
    bits = 8 * x.dtype.itemsize
    if bits < 64:
        wide = np.dtype(np.int64 if x.dtype.kind == "i" else np.uint64)
        return ((x.astype(wide) * y.astype(wide)) >> bits).astype(x.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    (x_high, x_low), (y_high, y_low) = (
        (word >> half, word & low) for word in map(_unsigned, (x, y))
    )
    middle = x_high * y_low + (x_low * y_low >> half)
    carried = x_low * y_high + (middle & low)
    high = x_high * y_high + (middle >> half) + (carried >> half)
    if x.dtype.kind == "u":
        return high
    return high.view(np.int64) - np.where(x < 0, y, 0) - np.where(y < 0, x, 0)


def nextafter(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The neighbour of x toward y in the operands' own format."""
    return np.where(x == y, y, np.nextafter(x, y))


# --- bits


def _count_is_inside(x: np.ndarray, count: np.ndarray) -> np.ndarray:
    return (count >= 0) & (count < 8 * x.dtype.itemsize)


def shift_left(x: np.ndarray, count: np.ndarray) -> np.ndarray:
    inside = _count_is_inside(x, count)
    return np.where(inside, np.left_shift(x, np.where(inside, count, 0).astype(x.dtype)), 0)


def shift_right_logical(x: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Zeros come in from above."""
    inside = _count_is_inside(x, count)
    bits = _unsigned(x)
    shifted = np.right_shift(bits, np.where(inside, count, 0).astype(bits.dtype))
    return np.where(inside, shifted, 0).astype(bits.dtype).view(x.dtype)


def shift_right_arithmetic(x: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Copies of the highest bit come in from above, also of numbers without sign."""
    inside = _count_is_inside(x, count)
    bits = _unsigned(x).view(f"i{x.dtype.itemsize}")
    last = 8 * x.dtype.itemsize - 1
    return np.right_shift(bits, np.where(inside, count, last).astype(bits.dtype)).view(x.dtype)


def population_count(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(_unsigned(x)).astype(x.dtype)


def clz(x: np.ndarray) -> np.ndarray:
    """The number of zeros above the highest bit that is set."""
    word, shift, width = _unsigned(x), 1, 8 * x.dtype.itemsize
    while shift < width:
        word = word | (word >> word.dtype.type(shift))
        shift *= 2
    return (width - np.bitwise_count(word).astype(np.int64)).astype(x.dtype)


def not_(x: np.ndarray) -> np.ndarray:
    return np.logical_not(x) if x.dtype.kind == "b" else np.invert(x)


# --- comparison and choice


def select_n(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    """The case numbered `which`: false, true, or an integer, of which those outside mean the nearest case."""
    chosen = np.broadcast_to(
        cases[-1], np.broadcast_shapes(*(np.shape(operand) for operand in (which, *cases)))
    )
    for position in reversed(range(len(cases) - 1)):
        chosen = np.where(np.less_equal(which, position), cases[position], chosen)
    return chosen


def total_order(compare: Function) -> Function:
    """A comparison of floats by sign, then size: -NaN < -inf < ... < -0 < 0 < ... < NaN."""

    def compared(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if not is_float(x.dtype):
            return compare(x, y)
        signed = np.dtype(f"i{x.dtype.itemsize}")
        keys = [_unsigned(operand).view(signed) for operand in (x, y)]
        return compare(*(np.where(key < 0, key ^ np.iinfo(signed).max, key) for key in keys))

    return compared


# --- formats


def same(x: np.ndarray) -> np.ndarray:
    return x


def convert(x: np.ndarray, *, new_dtype: np.dtype) -> np.ndarray:
    """Integers wrap; floats become the nearest integer that the type holds after rounding toward zero, and NaN becomes 0."""
    target = np.dtype(new_dtype)
    if target.kind == "b":
        return x != 0
    if is_float(x.dtype) and not is_float(target):
        return _saturated(x.astype(np.float64), target)
    if target.name == "bfloat16" and x.dtype != np.float32:
        return x.astype(np.float32).astype(target)
    return x.astype(target)


def _saturated(x: np.ndarray, target: np.dtype) -> np.ndarray:
    limits = ml_dtypes.iinfo(target)
    # float64 rounds the largest numbers of 64 bits up to the next power of two, which is too large.
    too_large, too_small = x >= float(limits.max), x <= float(limits.min)
    inside = np.where(too_large | too_small | np.isnan(x), 0, x)
    wide = np.dtype(np.uint64 if limits.min == 0 else np.int64)
    clipped = np.where(
        too_large,
        wide.type(limits.max),
        np.where(too_small, wide.type(limits.min), inside.astype(wide)),
    )
    return clipped.astype(target)


def bitcast(x: np.ndarray, *, new_dtype: np.dtype) -> np.ndarray:
    """Reads the bits as another type of the same width."""
    return np.ascontiguousarray(x).view(new_dtype).reshape(np.shape(x))


# dtype -> (exponent bits, mantissa bits)
FORMATS = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}


def reduce_precision(x: np.ndarray, *, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Rounds to fewer bits, ties to even; numbers that are subnormal in the smaller format become zero."""
    own_exponent, own_mantissa = FORMATS[x.dtype.name]
    exponent, drop = (
        min(exponent_bits, own_exponent),
        own_mantissa - min(mantissa_bits, own_mantissa),
    )
    bits = _unsigned(x)
    word = bits.dtype.type
    sign_bit = bits & word(1 << (8 * x.dtype.itemsize - 1))
    if drop:
        odd = (bits >> word(drop)) & word(1)
        bits = (bits + odd + word((1 << (drop - 1)) - 1)) & ~word((1 << drop) - 1)
    if exponent < own_exponent:
        bias, small = (1 << (own_exponent - 1)) - 1, (1 << (exponent - 1)) - 1
        infinity = word(((1 << own_exponent) - 1) << own_mantissa)
        field = bits & infinity
        bits = np.where(field <= word((bias - small) << own_mantissa), sign_bit, bits)
        bits = np.where(field > word((bias + small) << own_mantissa), sign_bit | infinity, bits)
    return np.where(np.isnan(x), x, bits.astype(word).view(x.dtype))


# --- functions that are not exact


def in_float64(function: Function) -> Function:
    """The function in float64, rounded once to the operand's type."""

    def rounded_once(x: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        wide = (operand.astype(np.float64) for operand in (x, *operands))
        return function(*wide).astype(x.dtype)

    return rounded_once


def _logistic(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small / (1 + small), 1 / (1 + small))


def pow_(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """An integer exponent becomes a float of the base's type first."""
    return in_float64(np.power)(x, y.astype(x.dtype))


rsqrt = in_float64(lambda x: 1 / np.sqrt(x))
logistic = in_float64(_logistic)
erf = in_float64(special_functions.erf)
erfc = in_float64(special_functions.erfc)
erf_inv = in_float64(special_functions.erf_inv)
lgamma = in_float64(special_functions.lgamma)
digamma = in_float64(special_functions.digamma)
