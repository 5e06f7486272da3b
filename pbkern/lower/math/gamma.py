"""lgamma and digamma on f32 and f64 values; conventions as in math_exp.

Arguments above zero go one of two ways, chosen by select, that share one logarithm and one
reciprocal: Stirling's series, as a polynomial in 1 / x**2 fitted from where it begins (Abramowitz
and Stegun, 6.1.41 and 6.3.18), and below that a polynomial about the zero, reached by the
recurrences lgamma(x + 1) = log(x) + lgamma(x) and digamma(x + 1) = 1 / x + digamma(x) (6.1.15,
6.3.5). Arguments below zero are rare: they are reflected in a branch (6.1.17, 6.3.7).
"""

from __future__ import annotations

import math

from pbkern.lower.mlir.ops import Builder, Ssa

from .exp_log import FORMATS, log, split
from .horner import fit

HALF_LOG_2PI = 0.9189385332046728  # OEIS A075700
# Digamma's positive zero, and what rounding it to f64 loses (OEIS A030169).
DIGAMMA_ZERO = (1.4616321449683622, 9.549995429965697e-17)


def lgamma(b: Builder, x: Ssa) -> Ssa:
    """log|gamma(x)|; infinite at zero, at negative integers and at both infinities.

    Its zeros at 1 and 2 keep full relative accuracy. At those between negative integers two terms cancel: the error is
    relative to lgamma(|x|) there.
    """
    b = b.strict()
    magnitude = b.abs(x)
    y = _lgamma_positive(b, magnitude)
    return b.rare(b.cmp("lt", x, b.c(0, x.el)), y, _lgamma_reflected, magnitude, y)


def _lgamma_positive(b: Builder, a: Ssa) -> Ssa:
    """(a - 1/2) (log(a) - 1) + S(a**-2) / a + a constant from 3.28 on.

    Below, with a = n + d: d P(d) for lgamma(2 + d), and -log(a (a + 1)), -log(a), 0 or log(a - 1)
    as n is 0, 1, 2 or 3.

    d is in [-0.72, 0.28): logarithms that cancel are below 1/4 then and none does where lgamma is
    least, at 1.46. About 1 both terms are multiples of d, and over half of d remains.
    """
    el = a.el
    one, two = b.c(1, el), b.c(2, el)
    n = b.floor(b.add(a, b.c(0.72, el)))
    large = b.cmp("gt", n, b.c(3, el))
    d = b.sub(a, n)
    near = b.mul(d, fit(b, d, "lgamma"))
    reciprocal = b.div(one, a)
    far = b.fma(
        fit(b, b.mul(reciprocal, reciprocal), "stirling"), reciprocal, b.c(HALF_LOG_2PI - 0.5, el)
    )

    argument = b.select(b.cmp("lt", n, one), b.fma(a, a, a), a)
    argument = b.select(b.cmp("eq", n, two), one, argument)
    argument = b.select(b.cmp("eq", n, b.c(3, el)), b.sub(a, one), argument)
    times = b.select(b.cmp("lt", n, two), b.c(-1, el), one)
    times = b.select(large, b.sub(a, b.c(0.5, el)), times)
    logarithm = b.sub(log(b, argument), b.select(large, one, b.c(0, el)))
    return b.fma(times, logarithm, b.select(large, far, near))


def _lgamma_reflected(b: Builder, a: Ssa, y: Ssa) -> Ssa:
    """lgamma(-a) from y = lgamma(a): log(pi / (a |sin(pi a)|)) - y; y itself where they do not differ."""
    el, fmt = a.el, FORMATS[a.el]
    d = b.sub(a, b.roundeven(a))
    z = b.mul(d, d)
    sinc = b.fma(z, fit(b, z, "sinc"), b.c(1, el))  # sin(pi d) / (pi d)
    product = b.mul(b.mul(a, b.abs(d)), sinc)
    reflected = b.sub(b.neg(log(b, product)), y)
    reflected = b.select(b.cmp("lt", a, b.c(2.0 ** (-fmt.mantissa - 2), el)), y, reflected)
    integers = b.cmp(
        "ge", a, b.c(2.0**fmt.mantissa, el)
    )  # nothing else; infinity less infinity is avoided
    return b.select(integers, b.c(math.inf, el), reflected)


def digamma(b: Builder, x: Ssa) -> Ssa:
    """The derivative of lgamma; NaN at zero, negative integers and minus infinity, as in XLA.

    Its positive zero keeps full relative accuracy. At those between negative integers terms of a size of 1 / |x| and
    digamma(|x|) cancel.
    """
    b = b.strict()
    magnitude = b.abs(x)
    y = _digamma_positive(b, magnitude)
    return b.rare(b.cmp("le", x, b.c(0, x.el)), y, _digamma_reflected, magnitude, y)


def _digamma_positive(b: Builder, a: Ssa) -> Ssa:
    """log(a) - 1 / (2 a) - T(a**-2) / a**2 from 3 on.

    Below, by the distance t of the argument from digamma's zero after it was moved into [1, 2): t
    P(t), and -1 / a below 1 or 1 / (a - 1) from 2 on.
    """
    el = a.el
    one, two, three = (b.c(number, el) for number in (1, 2, 3))
    large = b.cmp("ge", a, three)
    floored = b.floor(a)
    high, low = split(*DIGAMMA_ZERO, el)
    t = b.sub(b.sub(b.sub(a, floored), b.c(high - 1, el)), b.c(low, el))
    near = b.mul(t, fit(b, t, "digamma"))

    second = b.cmp("eq", floored, two)
    reciprocal = b.div(one, b.select(second, b.sub(a, one), a))
    square = b.mul(reciprocal, reciprocal)
    far = b.fma(b.neg(square), fit(b, square, "digamma_tail"), log(b, a))
    times = b.select(b.cmp("lt", a, one), b.c(-1, el), b.c(0, el))
    times = b.select(large, b.c(-0.5, el), b.select(second, one, times))
    return b.fma(times, reciprocal, b.select(large, far, near))


def _digamma_reflected(b: Builder, a: Ssa, y: Ssa) -> Ssa:
    """digamma(-a) from y = digamma(a): y + 1 / a + pi / tan(pi a); -y where nothing but 1 / a counts."""
    el, fmt = a.el, FORMATS[a.el]
    distance = b.sub(a, b.roundeven(a))
    high, low = _cotangent(b, distance)
    reflected = b.add(b.add(b.add(y, b.div(b.c(1, el), a)), low), high)
    reflected = b.select(b.cmp("lt", a, b.c(2.0 ** (-fmt.mantissa - 2), el)), b.neg(y), reflected)
    return b.select(b.cmp("eq", distance, b.c(0, el)), b.c(math.nan, el), reflected)


def _cotangent(b: Builder, d: Ssa) -> tuple[Ssa, Ssa]:
    """pi / tan(pi d), |d| <= 1/2, as a sum: up to 1/4 of 1 / d, rounded, and a correction, beyond by the distance from 1/2."""
    el = d.el
    one, to_half = b.c(1, el), b.sub(b.c(0.5, el), b.abs(d))
    reciprocal = b.div(one, d)
    lost = b.mul(reciprocal, b.fma(b.neg(reciprocal), d, one))
    correction = b.fma(b.neg(d), fit(b, b.mul(d, d), "cotangent"), lost)
    flat = b.copysign(b.mul(to_half, fit(b, b.mul(to_half, to_half), "tangent")), d)
    near_half = b.cmp("lt", to_half, b.c(0.25, el))
    return b.select(near_half, flat, reciprocal), b.select(near_half, b.c(0, el), correction)
