"""The table of PTX's instructions that compute: name -> function of NumPy arrays.

An array has a lane per element. Source: PTX ISA 8.7, section 9. What touches memory or other lanes
is in instructions/, what branches or waits in machine.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np

TYPES = {
    **{
        f"{kind}{bits}": np.dtype(f"{'int' if kind == 's' else 'uint'}{bits}")
        for kind in "sub"
        for bits in (8, 16, 32, 64)
    },
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "pred": np.dtype(bool),
}
Function = Callable[..., np.ndarray]


class Unknown(Exception):
    """No instruction of this name and these modifiers."""


def unsigned(nbytes: int) -> np.dtype:
    return np.dtype(f"uint{8 * nbytes}")


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype == TYPES["bf16"]


def _wide(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"{'int' if dtype.kind == 'i' else 'uint'}{16 * dtype.itemsize}")


# ---------------------------------------------------------------- arithmetic


# Types whose subnormal numbers .ftz makes zeros, and those whose results hold one NaN, whatever the
# operands hold (PTX ISA, half precision instructions); of single precision the ISA leaves it open.
_FLUSHED = (TYPES["f16"], TYPES["f32"])
_ONE_NAN = (TYPES["f16"], TYPES["bf16"])
# The bits of that NaN (PTX ISA, half precision instructions).
_NAN16 = np.uint16(0x7FFF)
# Instructions that only change or copy signs, of NaN as well.
_SIGNS = {"mov", "abs", "neg"}


def _zeroed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers as zeros."""
    if x.dtype not in _FLUSHED:
        return x
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def _flushed(function: Function, op: tuple[str, ...], dtype: np.dtype) -> Function:
    """Modifiers .ftz, .sat and .relu of floats, and the NaN of results that have 16 bits."""
    has_one_nan = dtype in _ONE_NAN and op[0] not in _SIGNS
    if not is_float(dtype) or (not has_one_nan and not {"ftz", "sat", "relu"} & set(op)):
        return function

    def modified(*xs: np.ndarray) -> np.ndarray:
        result = _zeroed(function(*map(_zeroed, xs))) if "ftz" in op else function(*xs)
        if "relu" in op:
            result = np.where(result < 0, dtype.type(0), result)
        if "sat" in op:
            return np.nan_to_num(np.clip(result, dtype.type(0), dtype.type(1)), nan=0)
        return _with_one_nan(result) if has_one_nan else result

    return modified


def _with_one_nan(x: np.ndarray) -> np.ndarray:
    bad = np.isnan(x)
    if not bad.any():
        return x
    return np.where(bad, _NAN16, np.ascontiguousarray(x).view(np.uint16)).view(x.dtype)


def missing(op: tuple[str, ...], dtype: np.dtype) -> str:
    """Which modifiers change what the table's functions do, in a way that they do not; "" if there are none."""
    if "cc" in op:
        return "carries"
    if is_float(dtype):
        return "rounding" if {"rz", "rm", "rp"} & set(op) else ""
    return "saturation" if "sat" in op else ""


def fma(dtype: np.dtype) -> Function:
    """x * y + z, rounded once."""
    if dtype == np.float64:
        return _fma64
    if dtype.itemsize == 2:

        def half(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
            total = _sum_to_odd(x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64))
            single = total.astype(np.float32)  # NumPy's bfloat16 is made of a float32
            return _to_odd(single, total - single).astype(dtype)

        return half

    def single(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        product = np.multiply(x, y, dtype=np.float64)
        total = product + z
        in_the_middle = (total.view(np.int64) & _BELOW_F32) == _HALF_F32
        if (in_the_middle | (np.abs(total) < _NORMAL_F32)).any():
            total = _sum_to_odd(product, z.astype(np.float64))
        return total.astype(np.float32)

    return single


# A mask of the bits of a float64 that a float32 lacks.
_BELOW_F32 = np.int64((1 << 29) - 1)
# The value of these bits halfway between two float32.
_HALF_F32 = np.int64(1 << 28)
# The smallest normal float32.
_NORMAL_F32 = 2.0**-126
# Magnitudes between which the steps of _fma64 neither overflow nor lose digits.
_SAFE = 2.0**-450, 2.0**450


def _two_sum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x + y as (rounded, what rounding lost), exactly (Knuth)."""
    s = x + y
    t = s - x
    return s, (x - (s - t)) + (y - t)


def _to_odd(s: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """s + lost, which is s to nearest, rounded to odd: rounded again to two bits less, it is as if rounded once.

    S. Boldo, G. Melquiond, "Emulation of a FMA and correctly rounded sums", 2008.
    """
    is_even = s.view(f"i{s.itemsize}") & 1 == 0
    moves = is_even & (lost != 0) & np.isfinite(s)
    return np.where(moves, np.nextafter(s, np.copysign(np.inf, lost).astype(s.dtype)), s)


def _sum_to_odd(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _to_odd(*_two_sum(x, y))


def _fma64(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    x, y, z = np.broadcast_arrays(x, y, z)
    p = x * y
    split = lambda v: (h := v * 134217729.0, h - (h - v))[1]
    (xh, yh) = split(x), split(y)
    xl, yl = x - xh, y - yh
    low = ((xh * yh - p) + xh * yl + xl * yh) + xl * yl
    high, lowest = _two_sum(z, low)
    s, lost = _two_sum(p, high)
    total = s + _sum_to_odd(lost, lowest)
    magnitudes = np.abs([x, y, z, p])
    is_safe = ((magnitudes >= _SAFE[0]) & (magnitudes <= _SAFE[1])).all(0)
    # Zeros, infinities and NaN are what two roundings make of them.
    result = np.where(is_safe, total, p + z)
    is_finite = (magnitudes[:3] > 0).all(0) & np.isfinite(magnitudes[:3]).all(0)
    if (rest := is_finite & ~is_safe).any():
        result[rest] = [
            _fma_of_rationals(*map(float, xyz)) for xyz in zip(x[rest], y[rest], z[rest])
        ]
    return result


def _fma_of_rationals(x: float, y: float, z: float) -> float:
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    try:
        return float(exact)
    except OverflowError:
        return math.copysign(math.inf, exact)


def _mul(op: tuple[str, ...], dtype: np.dtype) -> Function:
    if is_float(dtype):
        return _flushed(np.multiply, op, dtype)
    if "wide" in op:
        return lambda x, y: x.astype(_wide(dtype)) * y.astype(_wide(dtype))
    return _high(dtype) if "hi" in op else np.multiply


def _high(dtype: np.dtype) -> Function:
    if dtype.itemsize == 8:
        return _high64(dtype)
    wide, bits = _wide(dtype), 8 * dtype.itemsize
    return lambda x, y: ((x.astype(wide) * y.astype(wide)) >> wide.type(bits)).astype(dtype)


def _high64(dtype: np.dtype) -> Function:
    def high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        a, b = x.view(np.uint64), y.view(np.uint64)
        low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
        a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
        middle = a1 * b0 + (a0 * b0 >> half)
        other = a0 * b1 + (middle & low)
        product = a1 * b1 + (middle >> half) + (other >> half)
        if dtype.kind == "i":
            product = product - np.where(x < 0, b, np.uint64(0)) - np.where(y < 0, a, np.uint64(0))
        return product.view(dtype)

    return high


def _mad(op: tuple[str, ...], dtype: np.dtype) -> Function:
    if is_float(dtype):
        return _flushed(fma(dtype), op, dtype)
    product = _mul(op, dtype)
    return lambda x, y, z: product(x, y) + z


def _div(op: tuple[str, ...], dtype: np.dtype) -> Function:
    if is_float(dtype):
        return _flushed(np.divide, op, dtype)

    def quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        safe = np.where(y == 0, dtype.type(1), y)
        result = x // safe
        result = (
            result + ((x % safe != 0) & ((x < 0) != (safe < 0))) if dtype.kind == "i" else result
        )
        return np.where(
            y == 0, dtype.type(-1) if dtype.kind == "i" else np.iinfo(dtype).max, result
        ).astype(dtype)

    return quotient


def _rem(op: tuple[str, ...], dtype: np.dtype) -> Function:
    quotient = _div(op, dtype)
    return lambda x, y: np.where(y == 0, x, x - quotient(x, y) * y).astype(dtype)


def _extreme(number: Function, strict: Function) -> Callable[[tuple[str, ...], np.dtype], Function]:
    """max, min: of a NaN and a number the number, or NaN with .NaN; -0 is less than +0."""

    def make(op: tuple[str, ...], dtype: np.dtype) -> Function:
        if not is_float(dtype):
            return strict
        pick, up = (strict if "NaN" in op else number), strict is np.maximum

        def choose(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            result = pick(x, y)
            zeros = (x == 0) & (y == 0)
            if zeros.any():
                sign = np.signbit(x) & np.signbit(y) if up else np.signbit(x) | np.signbit(y)
                result = np.where(zeros, np.where(sign, dtype.type(-0.0), dtype.type(0.0)), result)
            return result

        return _flushed(choose, op, dtype)

    return make


def _unary(function: Function) -> Callable[[tuple[str, ...], np.dtype], Function]:
    """A function of one float, rounded once."""

    def make(op: tuple[str, ...], dtype: np.dtype) -> Function:
        wide = np.float64 if dtype.itemsize < 8 else dtype
        return _flushed(lambda x: function(x.astype(wide)).astype(dtype), op, dtype)

    return make


def _shift(left: bool) -> Callable[[tuple[str, ...], np.dtype], Function]:
    def make(op: tuple[str, ...], dtype: np.dtype) -> Function:
        bits = 8 * dtype.itemsize

        def shift(x: np.ndarray, count: np.ndarray) -> np.ndarray:
            count = count.view(np.uint32) if count.dtype.itemsize == 4 else count
            if not left and dtype.kind == "i":
                return x >> np.minimum(count, bits - 1).astype(dtype)
            distance = np.minimum(count, bits - 1).astype(dtype)
            return np.where(count < bits, x << distance if left else x >> distance, dtype.type(0))

        return shift

    return make


def _funnel(op: tuple[str, ...], dtype: np.dtype) -> Function:
    def shift(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> np.ndarray:
        count = np.minimum(count, 32) if "clamp" in op else count & 31
        both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        shifted = (
            both >> count.astype(np.uint64)
            if "r" in op
            else (both << count.astype(np.uint64)) >> np.uint64(32)
        )
        return shifted.astype(np.uint32)

    return shift


# ---------------------------------------------------------------- bits


def _popc(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(x).astype(np.uint32)


def _clz(op: tuple[str, ...], dtype: np.dtype) -> Function:
    bits = 8 * dtype.itemsize

    def count(x: np.ndarray) -> np.ndarray:
        for n in (1 << k for k in range(bits.bit_length() - 1)):
            x = x | x >> dtype.type(n)
        return (bits - np.bitwise_count(x)).astype(np.uint32)

    return count


def _brev(op: tuple[str, ...], dtype: np.dtype) -> Function:
    def reverse(x: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(np.ascontiguousarray(x)[..., None].view(np.uint8), axis=-1)
        return np.packbits(bits[..., ::-1], axis=-1).view(dtype)[..., 0]

    return reverse


def _bfe(op: tuple[str, ...], dtype: np.dtype) -> Function:
    bits = 8 * dtype.itemsize

    def extract(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        start, length = (
            np.minimum(field.astype(np.int64) & 255, bits) for field in (start, length)
        )
        room = np.minimum(length, bits - start)
        up = np.clip(bits - start - room, 0, bits - 1).astype(dtype)
        down = np.clip(bits - room, 0, bits - 1).astype(dtype)
        beyond = (
            np.where(length == 0, dtype.type(0), x >> dtype.type(bits - 1))
            if dtype.kind == "i"
            else dtype.type(0)
        )
        return np.where(room == 0, beyond, x << up >> down)

    return extract


def _bfi(op: tuple[str, ...], dtype: np.dtype) -> Function:
    bits = 8 * dtype.itemsize

    def insert(
        inserted: np.ndarray, base: np.ndarray, start: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        start, length = (
            np.minimum(field.astype(np.int64) & 255, bits) for field in (start, length)
        )
        room = np.minimum(length, bits - start)
        whole = (1 << bits) - 1
        mask = np.where(
            room >= bits,
            dtype.type(whole),
            (dtype.type(1) << np.minimum(room, bits - 1).astype(dtype)) - dtype.type(1),
        )
        at = np.minimum(start, bits - 1).astype(dtype)
        return np.where(room == 0, base, base & ~(mask << at) | (inserted & mask) << at)

    return insert


def _prmt(op: tuple[str, ...], dtype: np.dtype) -> Function:
    if op[-1] != "b32":
        raise Unknown(".".join(op))

    def permute(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        result = low & np.uint32(0)
        for k in range(4):
            which = selector >> np.uint32(4 * k)
            byte = (both >> (np.uint64(8) * (which & np.uint32(7)).astype(np.uint64))).astype(
                np.uint32
            ) & np.uint32(255)
            byte = np.where(
                which & np.uint32(8),
                np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)),
                byte,
            )
            result = result | byte << np.uint32(8 * k)
        return result

    return permute


def _lop3(op: tuple[str, ...], dtype: np.dtype) -> Function:
    def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
        number, result = int(np.asarray(table).flat[0]), a & np.uint32(0)
        for k in range(8):
            if number >> k & 1:
                result = result | (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        return result

    return logic


# ---------------------------------------------------------------- comparison

_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(name: str, dtype: np.dtype) -> Function:
    """Makes the comparison of setp and set.

    Ordered ones are false with NaN; those that end in u are true.
    """
    if name == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name.endswith("u") and name[:-1] in _COMPARE:
        compare = _COMPARE[name[:-1]]
        return lambda x, y: compare(x, y) | np.isnan(x) | np.isnan(y)
    if name not in _COMPARE:
        raise Unknown(f"setp.{name}")
    compare = _COMPARE[name]
    if name == "ne" and is_float(dtype):
        return lambda x, y: compare(x, y) & ~np.isnan(x) & ~np.isnan(y)
    return compare


# ---------------------------------------------------------------- conversion

_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def conversion(op: tuple[str, ...]) -> tuple[np.dtype, np.dtype, Function]:
    """(type of the result, type of the operand, function) of cvt."""
    to, source = TYPES[op[-2]], TYPES[op[-1]]
    rounding = next((modifier for modifier in op if modifier in _ROUND), None)
    if is_float(to) and ({"rm", "rp"} & set(op) or ("rz" in op and not is_float(source))):
        raise Unknown("rounding")

    def convert(x: np.ndarray) -> np.ndarray:
        if is_float(source):
            wide = x.astype(np.float64)
            if rounding:
                wide = _ROUND[rounding](wide)
            if is_float(to):
                return wide.astype(to) if "rz" not in op else _toward_zero(wide, to)
            return _saturated(wide, to, source)
        if is_float(to):
            return x.astype(to) if to.itemsize >= 4 else x.astype(np.float64).astype(to)
        if "sat" in op:
            return np.clip(x.astype(object), np.iinfo(to).min, np.iinfo(to).max).astype(to)
        return x.astype(to)

    if "ftz" in op and source == np.float32 and not is_float(to):
        return to, source, lambda x: convert(_zeroed(x))
    return to, source, _flushed(convert, op, to)


def _saturated(x: np.ndarray, to: np.dtype, source: np.dtype) -> np.ndarray:
    """Rounded numbers of a type as integers.

    NaN becomes the highest bit where either type has 64 bits, else 0 (PTX, cvt).
    """
    info = np.iinfo(to)
    inside = np.clip(
        np.nan_to_num(x, nan=0.0),
        float(info.min),
        np.nextafter(float(info.max), 0) if to.itemsize == 8 else info.max,
    )
    integers = inside.astype(to)
    integers = np.where(x >= float(info.max), info.max, integers).astype(to)
    if source.itemsize < 8 and to.itemsize < 8:
        return integers
    highest = np.array(1 << 8 * to.itemsize - 1, unsigned(to.itemsize)).view(to)
    return np.where(np.isnan(x), highest, integers)


def _toward_zero(x: np.ndarray, to: np.dtype) -> np.ndarray:
    y = x.astype(to)
    return np.where(
        np.abs(y.astype(np.float64)) > np.abs(x), np.nextafter(y, to.type(0)), y
    ).astype(to)


# ---------------------------------------------------------------- the table

Maker = Callable[[tuple[str, ...], np.dtype], Function]


def _plain(function: Function) -> Maker:
    return lambda op, dtype: _flushed(function, op, dtype) if is_float(dtype) else function


TABLE: dict[str, Maker] = {
    "mov": _plain(lambda x: x),
    "add": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _mul,
    "mad": _mad,
    "fma": _mad,
    "div": _div,
    "rem": _rem,
    "abs": _plain(np.abs),
    "neg": _plain(np.negative),
    "max": _extreme(np.fmax, np.maximum),
    "min": _extreme(np.fmin, np.minimum),
    "sqrt": _unary(np.sqrt),
    "rsqrt": _unary(lambda x: 1 / np.sqrt(x)),
    "rcp": _unary(lambda x: 1 / x),
    "sin": _unary(np.sin),
    "cos": _unary(np.cos),
    "ex2": _unary(np.exp2),
    "lg2": _unary(np.log2),
    "tanh": _unary(np.tanh),
    "copysign": lambda op, dtype: lambda sign, x: np.copysign(x, sign),
    "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or),
    "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert),
    "cnot": lambda op, dtype: lambda x: np.where(x == 0, dtype.type(1), dtype.type(0)),
    "shl": _shift(True),
    "shr": _shift(False),
    "shf": _funnel,
    "popc": lambda op, dtype: _popc,
    "clz": _clz,
    "brev": _brev,
    "bfe": _bfe,
    "bfi": _bfi,
    "prmt": _prmt,
    "lop3": _lop3,
    "sad": lambda op, dtype: lambda x, y, z: np.where(x > y, x - y, y - x) + z,
}
# Which operands, counted from the first source, are 32-bit counts.
COUNTS = {"shl": {1}, "shr": {1}, "bfe": {1, 2}, "bfi": {2, 3}, "shf": {2}}
# How many operands, from the first source on, have 16 bits and are widened, where two types follow one another, as in
# `add.f32.f16 d, a, c`. Source: PTX ISA 8.7, mixed precision floating point instructions.
WIDENED = {"add": 1, "sub": 1, "fma": 2}
