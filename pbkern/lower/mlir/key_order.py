"""Which of two elements comes first in a sorted line: floats by their numbers, subnormal ones too, -0 equal to 0, NaN last.

Keys are compared as integers: comparisons of floats take subnormal numbers for zeros on XLA's
threads, and do not elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .element_types import BITS, int_el, is_float
from .ops import Builder
from .value import Ssa

# Bits of the mantissa, below those of the exponent.
MANTISSA = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7}


def rising(b: Builder, x: Ssa, dtype: np.dtype) -> Ssa:
    """A stored key -> an unsigned integer of the same width that rises as the keys do."""
    if is_float(x.el):
        return _rising_bits(b, x)
    if x.el == "i1":
        return b.int_resize(x, "i8", unsigned=True)
    if np.dtype(dtype).name.startswith("int"):
        return b.xor(x, b.c(1 << (BITS[x.el] - 1), x.el))
    return x


def risen(b: Builder, word: Ssa, dtype) -> Ssa:
    """An integer as it is stored, from its word: the inverse of `rising`."""
    width = 8 * np.dtype(dtype).itemsize
    x = b.int_resize(word, f"i{width}", unsigned=True)
    return b.xor(x, b.c(1 << (width - 1), x.el)) if np.dtype(dtype).name.startswith("int") else x


def _rising_bits(b: Builder, value: Ssa) -> Ssa:
    """Negative floats, whose bits rise as the numbers fall, are complemented; zeros are one number, and all NaNs."""
    width, el = BITS[value.el], int_el(value.el)
    sign = 1 << (width - 1)
    infinity = sign - (1 << MANTISSA[value.el])
    bits = b.bitcast(value, el)
    size = b.and_(bits, b.c(sign - 1, el))
    bits = b.select(b.cmp("eq", size, b.c(0, el)), b.c(0, el), bits)
    bits = b.select(b.cmp("lt", b.c(infinity, el), size, unsigned=True), b.c(sign - 1, el), bits)
    return b.xor(bits, b.or_(b.sar(bits, b.c(width - 1, el)), b.c(sign, el)))


def compare(b: Builder, x: Ssa, y: Ssa) -> tuple[Ssa, Ssa]:
    """(x < y, x == y) of two rising keys."""
    return b.cmp("lt", x, y, unsigned=True), b.cmp("eq", x, y)


def compared(b: Builder, keys: Iterable[tuple[Ssa, Ssa]]) -> tuple[Ssa, Ssa]:
    """(whether x comes before y, whether they are equal), by (x's rising key, y's rising key), in order."""
    less: Ssa | None = None
    equal: Ssa | None = None
    for x, y in keys:
        lt, eq = compare(b, x, y)
        less = lt if less is None or equal is None else b.or_(less, b.and_(equal, lt))
        equal = eq if equal is None else b.and_(equal, eq)
    assert less is not None, "lines are sorted by some key"
    assert equal is not None, "lines are sorted by some key"
    return less, equal
