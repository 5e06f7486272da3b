"""exp and exp2 by a table that is one AVX-512 register.

2**n = s * 2**floor(n) for the n nearest to x among fractions of a power of two, with s from the
table (P. T. P. Tang, "Table-driven implementation of the exponential function", ACM TOMS 15, 1989).
What is left of x is so small that half of the polynomial goes. Scaling takes care of results that
are infinite, zero or subnormal and of NaN; only the rest has to be kept in range there.
"""

from __future__ import annotations

import math

import numpy as np

from pbkern.lower.math.exp_log import FORMATS, LN2, split
from pbkern.lower.math.horner import fit
from pbkern.lower.mlir.ops import Builder, Ssa

from .avx512 import lookup, register_lanes, scale, within


def _table(el: str) -> np.ndarray:
    """2**(k / n) for k < n."""
    n = register_lanes(el)
    return np.exp2(np.arange(n) / n)


def exp_by_table(b: Builder, x: Ssa) -> Ssa:
    """`approx` leaves the low part of ln 2 out: relative error 4e-7 (f32), 1e-15 (f64)."""
    steps, el = register_lanes(x.el), x.el
    high, low = split(*LN2, el)
    magic = b.c(1.5 * 2.0 ** FORMATS[el].mantissa / steps, el)
    shifted = b.fma(x, b.c(1 / math.log(2), el), magic)
    n = b.sub(shifted, magic)
    remainder = b.fma(n, b.c(-high, el), x)
    remainder = remainder if b.approx else b.fma(n, b.c(-low, el), remainder)
    remainder = within(b, remainder, 0.51 / steps * math.log(2))
    poly = b.fma(b.mul(remainder, remainder), fit(b, remainder, "exp_by_table"), remainder)
    power = lookup(b, _table(el), shifted)
    return scale(b, b.fma(poly, power, power), n)


def exp2_by_table(b: Builder, x: Ssa) -> Ssa:
    steps, el = register_lanes(x.el), x.el
    magic = b.c(1.5 * 2.0 ** FORMATS[el].mantissa / steps, el)
    shifted = b.add(x, magic)
    n = b.sub(shifted, magic)
    remainder = within(b, b.sub(x, n), 0.51 / steps)
    power = lookup(b, _table(el), shifted)
    return scale(b, b.fma(b.mul(fit(b, remainder, "exp2_by_table"), remainder), power, power), n)
