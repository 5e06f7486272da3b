"""Functions in f32 by tables (lookup_values.py) that are one register each, through registers.in_registers.

One lookup takes the place of the constant of a polynomial, and sixteen short polynomials that of a long one with
its cases. On Zen 4 lookups, additions and shifts have pipes beside those of
multiply-adds.
"""

from __future__ import annotations

import math

from pbkern.lower.math.horner import fit
from pbkern.lower.mlir.ops import Builder, Ssa

from .avx512 import exponent, lookup, mantissa, scale, within
from .lookup_values import LN2_HIGH, PIECES, TABLES


def _index(b: Builder, x: Ssa, shift: int) -> Ssa:
    """Bits of x >= 0 above the lowest `shift`; `lookup` takes four of them."""
    return b.shr(b.bitcast(x, "i32"), b.c(shift, "i32"))


def by_pieces(b: Builder, a: Ssa, name: str) -> Ssa:
    """f(a) for a from 0 to the last piece's end: c0 + t (c1 + t (c2 + ...)), t = a - point.

    Points are where f is nearly a float, so that c0 has no error to speak of. NaN stays NaN.
    """
    pieces, (points, *rows) = PIECES[name], TABLES[name]
    shifted = b.add(a, b.c(pieces.offset, a.el))
    index = _index(b, shifted, pieces.shift)
    t = b.sub(a, lookup(b, points, index))
    first, y = lookup(b, rows[0], index), lookup(b, rows[-1], index)
    for row in rows[-2:0:-1]:
        y = b.fma(y, t, lookup(b, row, index))
    if pieces.is_linear:
        first = b.select(b.cmp("lt", shifted, b.c(pieces.second, a.el)), a, first)
    return b.fma(y, t, first)


def odd_by_pieces(b: Builder, x: Ssa, name: str) -> Ssa:
    """f(|x|) with the sign of x."""
    return b.copysign(by_pieces(b, b.at_most(b.abs(x), PIECES[name].last), name), x)


def _log_of_parts(b: Builder, u: Ssa, lost: Ssa | None = None) -> Ssa:
    """log(u + lost) = k ln 2 + log c + log(1 + r), r = m / c - 1, where u = 2**k m, 3/4 <= m < 3/2.

    Tables give 1 / c and log c. The method is that of P. T. P. Tang, "Table-driven implementation
    of the logarithm function", ACM TOMS 16, 1990. The first sum is exact (see LOG_GRID), with the
    high part of ln 2. Around 1, c = 1 and r is exact. Zero, infinity and NaN are right by
    themselves.
    """
    el = u.el
    m = mantissa(b, u)
    minus_k = b.sub(exponent(b, m), exponent(b, u))  # m has the exponent -1 or 0
    index = _index(b, m, 19)
    inverses, logs = (lookup(b, row, index) for row in TABLES["log"])
    r = b.fma(m, inverses, b.c(-1, el))
    if lost is not None:
        # far more than what is ever lost stands for the NaN of u = 0 and u = inf
        r = b.fma(within(b, scale(b, lost, minus_k), 2.0**-22), inverses, r)
    high = b.fma(minus_k, b.c(-LN2_HIGH, el), logs)
    low = b.fma(minus_k, b.c(LN2_HIGH - math.log(2), el), r)
    return b.add(high, b.fma(b.mul(r, r), fit(b, r, "log_by_table"), low))


def log_by_table(b: Builder, x: Ssa) -> Ssa:
    return _log_of_parts(b, x)


def log1p_by_table(b: Builder, x: Ssa) -> Ssa:
    """log of u = 1 + x rounded and of what rounding lost. The sign is that of x, of zeros too."""
    one = b.c(1, x.el)
    u = b.add(x, one)
    return b.copysign(_log_of_parts(b, u, b.sub(x, b.sub(u, one))), x)
