"""erf, erfc and erf_inv on f32 and f64 values; conventions as in math_exp."""

from __future__ import annotations

import math

from pbkern.lower.mlir.ops import Builder, Ssa

from .exp_log import exp, log
from .horner import fit

# The polynomial "erf_root" is in |x| minus this. Of the numbers tried, from 1.25 to 1.75, the largest error is least with this.
ERF_ROOT_MIDDLE = 1.625


def erf(b: Builder, x: Ssa) -> Ssa:
    """x (1 + E(x**2)) up to 1; beyond, 1 - erfc(|x|)."""
    b = b.strict()
    if (special := b.math.lookup("erf", x.el)) is not None:
        return special(b, x)
    return _erf_by_larger(b, x) if x.el == "f32" else _erf_by_parts(b, x)


def _erf_by_larger(b: Builder, x: Ssa) -> Ssa:
    """The larger of a (1 + E(a**2)) and 1 - Q(a)**4, with a = |x| up to 4 and the sign of x.

    Both are computed, since a polynomial is as short as what selects between two: Q, about erfc(a)**(1/4), is nearly straight.
    Neither needs a test for where it holds: beyond 1 the first polynomial falls below erf, before 1 the second does. The
    fourth power needs less precision of Q the smaller it is, and 1 - Q(4)**4 rounds to 1.
    """
    a = b.at_most(b.abs(x), 4.0)
    small = b.fma(a, fit(b, b.mul(a, a), "erf"), a)
    root = fit(b, b.sub(a, b.c(ERF_ROOT_MIDDLE, a.el)), "erf_root")
    square = b.mul(root, root)
    large = b.fma(b.neg(square), square, b.c(1, a.el))
    y = b.select(b.cmp("gt", small, large), small, large)
    # y has no sign that copysign would have to clear
    sign = b.and_(b.bitcast(x, "i32"), b.c(-(2**31), "i32"))
    return b.bitcast(b.or_(b.bitcast(y, "i32"), sign), x.el)


def _erf_by_parts(b: Builder, x: Ssa) -> Ssa:
    magnitude, one = b.abs(x), b.c(1, x.el)

    def small(b: Builder) -> Ssa:
        return b.fma(x, fit(b, b.mul(x, x), "erf"), x)

    def large(b: Builder) -> Ssa:
        return b.copysign(b.sub(one, _erfc_positive(b, b.at_most(magnitude, 6.0))), x)

    return b.either(b.cmp("lt", magnitude, one), small, large)


def _erfc_positive(b: Builder, a: Ssa) -> Ssa:
    """exp(-a**2) P(t) / (1 + 2 a), t = (a - 2) / (a + 2); the square is kept to twice the digits.

    A target may have a version of its own of all but the exponential.
    """
    el = a.el
    square = b.mul(a, a)
    lost = b.fma(a, a, b.neg(square))
    if (erfcx := b.math.lookup("erfcx", el)) is not None:
        gaussian = exp(b, b.neg(square), nonpositive=True)
        return b.mul(b.fma(b.neg(lost), gaussian, gaussian), erfcx(b, a))
    two = b.c(2, el)
    t = b.div(b.sub(a, two), b.add(a, two))
    polynomial = fit(b, t, "erfcx_short" if el == "f32" else "erfcx")
    quotient = b.div(b.fma(b.neg(lost), polynomial, polynomial), b.fma(a, two, b.c(1, el)))
    return b.mul(exp(b, b.neg(square), nonpositive=True), quotient)


def erfc(b: Builder, x: Ssa) -> Ssa:
    """Keeps its relative accuracy in the tail; 2 - erfc(-x) for negative x."""
    b = b.strict()
    special = b.math.lookup("erfc", x.el)
    return erfc_by_parts(b, x) if special is None else special(b, x)


def erfc_by_parts(b: Builder, x: Ssa) -> Ssa:
    """The shared version; a target may replace parts of it."""
    el = x.el
    y = _erfc_positive(b, b.at_most(b.abs(x), 10.1 if el == "f32" else 27.4))
    return b.select(b.cmp("lt", x, b.c(0, el)), b.sub(b.c(2, el), y), y)


def erf_inv(b: Builder, x: Ssa) -> Ssa:
    """x P(w), w = -log(1 - x**2), and a polynomial in sqrt(w) for large w.

    Source of the method: M. Giles, Approximating the erfinv function, GPU Computing Gems 2, 2011.
    """
    b = b.strict()
    el = x.el
    one = b.c(1, el)
    w = b.neg(log(b, b.mul(b.sub(one, x), b.add(one, x))))
    middle, name = {"f32": (2.5, "erf_inv"), "f64": (3.125, "erf_inv_0")}[el]
    tails = {
        "f32": [(5.0, 3.0, "erf_inv_tail")],
        "f64": [(6.25, 3.25, "erf_inv_1"), (16.0, 5.0, "erf_inv_2")],
    }[el]
    polynomial = fit(b, b.sub(w, b.c(middle, el)), name)
    root = b.sqrt(w)
    for start, middle, name in tails:
        tail = fit(b, b.sub(root, b.c(middle, el)), name)
        polynomial = b.select(b.cmp("ge", w, b.c(start, el)), tail, polynomial)
    y = b.mul(x, polynomial)
    return b.select(b.cmp("eq", b.abs(x), one), b.mul(x, b.c(math.inf, el)), y)
