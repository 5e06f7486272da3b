"""erf, erfc and erf_inv on f32 and f64 values; conventions as in math_exp."""

from __future__ import annotations

import math

from pbkern.lower.mlir.ops import Builder, Ssa

from .exp_log import exp, exp2_unchecked, log
from .horner import fit


def erf(b: Builder, x: Ssa) -> Ssa:
    """x (1 + E(x**2)) up to 1; beyond, 1 - erfc(|x|), in f32 with erfc as 2**Q(|x|)."""
    b = b.strict()
    if (special := b.math.lookup("erf", x.el)) is not None:
        return special(b, x)
    el = x.el
    magnitude, one = b.abs(x), b.c(1, el)

    def small(b: Builder) -> Ssa:
        return b.fma(x, fit(b, b.mul(x, x), "erf"), x)

    def large(b: Builder) -> Ssa:
        tail = (
            exp2_unchecked(b, fit(b, b.at_most(magnitude, 4.0), "erf_tail"))
            if el == "f32"
            else _erfc_positive(b, b.at_most(magnitude, 6.0))
        )
        return b.copysign(b.sub(one, tail), x)

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
