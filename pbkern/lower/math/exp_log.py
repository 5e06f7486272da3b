"""exp, log and their relatives on f32 and f64 values.

Each takes a Builder and values and returns a value. No branches, no calls: range reduction, a
polynomial (coefficients.py), special cases by select. Rounding matters in them, so they emit
without contraction. Error bounds are in vector_math.ERROR_ULP. Signs of zero, NaN, infinities and
subnormals are right unless the caller's thread flushes subnormals, as XLA's do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pbkern.lower.mlir.ops import Builder, Ssa

from .horner import fit


class MathFormat(NamedTuple):
    """Figures of an element type that the algorithms need."""

    int_el: str
    mantissa: int  # stored bits
    bias: int
    tiny: float  # least normal number
    exp_low: float  # exp is zero below
    exp_high: float  # exp and sinh are infinite above
    half_high: float  # sinh, cosh are infinite above


FORMATS = {
    "f32": MathFormat("i32", 23, 127, 2.0**-126, -104.5, 89.0, 89.5),
    "f64": MathFormat("i64", 52, 1023, 2.0**-1022, -746.0, 710.0, 710.6),
}
SQRT_HALF_BITS = {"f32": 0x3F3504F3, "f64": 0x3FE6A09E667F3BCD}
# Digits of constants beyond f64 come from splitting decimal expansions (OEIS A002162, A003881).
LN2 = (0.6931471805599453, 2.3190468138462996e-17)


def split(high: float, low: float, el: str) -> tuple[float, float]:
    """A constant given as two f64 -> its value in `el` and the remainder."""
    if el == "f64":
        return high, low
    first = float(np.float32(high))
    return first, (high - first) + low


# ---------------------------------------------------------------------- exponentials


def _power_and_rest(b: Builder, x: Ssa, added: int) -> tuple[Ssa, Ssa]:
    """x = n ln 2 + r, |r| <= ln(2) / 2 -> (a float with n + added in its low bits, r).

    Adding 1.5 * 2**mantissa + added rounds to an integer, which is left in the low bits of the sum.
    """
    magic = b.c(1.5 * 2.0 ** FORMATS[x.el].mantissa + added, x.el)
    shifted = b.fma(x, b.c(1 / math.log(2), x.el), magic)
    n = b.sub(shifted, magic)
    high, low = split(*LN2, x.el)
    return shifted, b.fma(n, b.c(-low, x.el), b.fma(n, b.c(-high, x.el), x))


def _exp_reduce(b: Builder, x: Ssa, shift: int) -> tuple[Ssa, Ssa]:
    """x = n ln 2 + r, |r| <= ln(2) / 2 -> (2**(n - shift), r)."""
    shifted, r = _power_and_rest(b, x, FORMATS[x.el].bias - shift)
    return _scale(b, shifted), r


def _scale(b: Builder, t: Ssa) -> Ssa:
    """Low bits to the exponent field."""
    fmt = FORMATS[t.el]
    return b.bitcast(b.shl(b.bitcast(t, fmt.int_el), b.c(fmt.mantissa, fmt.int_el)), t.el)


def _times_power(b: Builder, x: Ssa, shifted: Ssa) -> Ssa:
    """x * 2**n, rounded once, where `shifted` is what `_power_and_rest` gives for twice the bias.

    Both factors are normal numbers where the result is subnormal or infinite.
    """
    fmt = FORMATS[x.el]
    exponents, place = b.bitcast(shifted, fmt.int_el), b.c(fmt.mantissa, fmt.int_el)
    half = b.shr(exponents, b.c(1, fmt.int_el))
    first, second = b.shl(half, place), b.shl(b.sub(exponents, half), place)
    return b.mul(b.mul(x, b.bitcast(first, x.el)), b.bitcast(second, x.el))


def _exp_tail(b: Builder, r: Ssa, *, scale: float = 1.0) -> Ssa:
    """scale * (exp(r) - 1 - r) / r**2."""
    return fit(b, r, "exp_approx" if b.approx else "exp", scale=scale)


def exp(b: Builder, x: Ssa, *, nonpositive: bool = False) -> Ssa:
    """The polynomial times the power of two, in two factors.

    `nonpositive` promises x <= 0 and may save a clamp. `approx`: degree 4, relative error 6e-6
    (f32); degree 7, 1e-10 (f64); twice the polynomial times half the power of two, so that 2**128 is
    reached by rounding to infinity; results below 2**-125 (2**-1021) may be zero.
    """
    b, fmt = b.strict(), FORMATS[x.el]
    if (special := b.math.lookup("exp", x.el)) is not None:
        return special(b, x)
    flushed = math.log(2) * (
        0.51 - fmt.bias
    )  # the least argument's scale has exponent field 0: it is zero
    x = b.at_least(x, flushed if b.approx else fmt.exp_low)
    if not nonpositive:
        x = b.at_most(x, fmt.exp_high)
    if b.approx:
        scale, remainder = _exp_reduce(b, x, 1)
        return b.mul(_exp_of_rest(b, remainder, 2), scale)
    shifted, remainder = _power_and_rest(b, x, 2 * fmt.bias)
    return _times_power(b, _exp_of_rest(b, remainder, 1), shifted)


def _exp_of_rest(b: Builder, r: Ssa, scale: int) -> Ssa:
    """scale * exp(r)."""
    first = b.c(scale, r.el)
    return b.fma(b.fma(_exp_tail(b, r, scale=scale), r, first), r, first)


def _exp2_parts(b: Builder, x: Ssa, added: int, scale: int) -> tuple[Ssa, Ssa]:
    """(a float with n + added in its low bits, scale * 2**(x - n)) for the integer n nearest to x."""
    magic = b.c(1.5 * 2.0 ** FORMATS[x.el].mantissa + added, x.el)
    shifted = b.add(x, magic)
    r = b.sub(x, b.sub(shifted, magic))
    return shifted, b.fma(fit(b, r, "exp2", scale=scale), r, b.c(scale, x.el))


def exp2(b: Builder, x: Ssa) -> Ssa:
    b, fmt = b.strict(), FORMATS[x.el]
    if (special := b.math.lookup("exp2", x.el)) is not None:
        return special(b, x)
    x = b.at_most(b.at_least(x, fmt.exp_low / math.log(2)), fmt.bias + 1.25)
    shifted, polynomial = _exp2_parts(b, x, 2 * fmt.bias, 1)
    return _times_power(b, polynomial, shifted)


def exp2_unchecked(b: Builder, x: Ssa) -> Ssa:
    """2**x for x and results within the normal range."""
    shifted, polynomial = _exp2_parts(b, x, FORMATS[x.el].bias - 1, 2)
    return b.mul(polynomial, _scale(b, shifted))


def _expm1_unclamped(b: Builder, x: Ssa) -> Ssa:
    """2**n (exp(r) - 1) + (2**n - 1), halved inside so that overflow comes last."""
    scale, r = _exp_reduce(b, x, 1)
    reduced_expm1 = b.fma(_exp_tail(b, r), b.mul(r, r), r)
    return b.mul(b.fma(scale, reduced_expm1, b.sub(scale, b.c(0.5, x.el))), b.c(2, x.el))


def expm1(b: Builder, x: Ssa) -> Ssa:
    b, fmt = b.strict(), FORMATS[x.el]
    clamped = b.at_most(b.at_least(x, -1.9 * fmt.mantissa / 2), fmt.exp_high)
    y = _expm1_unclamped(b, clamped)
    return keep_tiny(b, x, y, fmt.mantissa + 2)


def keep_tiny(b: Builder, x: Ssa, y: Ssa, bits: int) -> Ssa:
    """x where |x| < 2**-bits, for odd functions that are x there (also keeps -0 and subnormals), else y."""
    return b.select(b.cmp("lt", b.abs(x), b.c(2.0**-bits, x.el)), x, y)


def logistic(b: Builder, x: Ssa) -> Ssa:
    """1 / (1 + e) or e / (1 + e) with e = exp(-|x|): neither overflows, small results keep digits."""
    b = b.strict()
    e = exp(b, b.neg(b.abs(x)), nonpositive=True)
    one = b.c(1, x.el)
    return b.div(b.select(b.cmp("lt", x, b.c(0, x.el)), e, one), b.add(one, e))


def tanh(b: Builder, x: Ssa) -> Ssa:
    """e / (e + 2) with e = expm1(2 |x|)."""
    b = b.strict()
    if (special := b.math.lookup("tanh", x.el)) is not None:
        return special(b, x)
    clamped = b.at_most(b.abs(x), 9.5 if x.el == "f32" else 20.0)
    e = _expm1_unclamped(b, b.add(clamped, clamped))
    return b.copysign(b.div(e, b.add(e, b.c(2, x.el))), x)


def _quarter_exp(b: Builder, x: Ssa) -> tuple[Ssa, Ssa]:
    """(exp(|x|) / 4, exp(-|x|) / 4): cosh overflows a factor 2 later than exp."""
    fmt = FORMATS[x.el]
    scale, remainder = _exp_reduce(b, b.at_most(b.abs(x), fmt.half_high), 2)
    one = b.c(1, x.el)
    quarter = b.mul(b.fma(b.fma(_exp_tail(b, remainder), remainder, one), remainder, one), scale)
    return quarter, b.div(b.c(0.0625, x.el), quarter)


def cosh(b: Builder, x: Ssa) -> Ssa:
    b = b.strict()
    up, down = _quarter_exp(b, x)
    return b.mul(b.add(up, down), b.c(2, x.el))


def sinh(b: Builder, x: Ssa) -> Ssa:
    """A polynomial up to 1, where exp(x) - exp(-x) would cancel."""
    b = b.strict()
    up, down = _quarter_exp(b, x)
    large = b.copysign(b.mul(b.sub(up, down), b.c(2, x.el)), x)
    z = b.mul(x, x)
    small = b.fma(b.mul(x, z), fit(b, z, "sinh"), x)
    y = b.select(b.cmp("lt", b.abs(x), b.c(1, x.el)), small, large)
    return keep_tiny(b, x, y, FORMATS[x.el].mantissa // 2 + 2)


# ---------------------------------------------------------------------- logarithms


def _log_split(b: Builder, x: Ssa) -> tuple[Ssa, Ssa]:
    """x = 2**k m with m in [sqrt(1/2), sqrt(2)) -> (k as an integer, m - 1), for normal x > 0."""
    fmt = FORMATS[x.el]
    half = b.c(SQRT_HALF_BITS[x.el], fmt.int_el)
    bits = b.sub(b.bitcast(x, fmt.int_el), half)
    k = b.sar(bits, b.c(fmt.mantissa, fmt.int_el))
    m = b.add(b.and_(bits, b.c((1 << fmt.mantissa) - 1, fmt.int_el)), half)
    return k, b.sub(b.bitcast(m, x.el), b.c(1, x.el))


def _log_sum(b: Builder, k: Ssa, m1: Ssa) -> Ssa:
    """k ln 2 + log(1 + m1).

    f32: m1 - m1**2 / 2 + m1**3 P(m1). f64: s = m1 / (2 + m1), 2 atanh(s), arranged so that the
    leading terms are exact (fdlibm, e_log.c).
    """
    el = m1.el
    high, low = split(*LN2, el)
    square = b.mul(m1, m1)
    if el == "f32":
        tail = b.mul(b.mul(m1, square), fit(b, m1, "log"))
        tail = b.fma(k, b.c(low, el), tail)
        y = b.add(m1, b.fma(square, b.c(-0.5, el), tail))
    else:
        s = b.div(m1, b.add(m1, b.c(2, el)))
        z = b.mul(s, s)
        series = b.mul(z, fit(b, z, "atanh", scale=2))
        half = b.mul(square, b.c(0.5, el))
        tail = b.fma(k, b.c(low, el), b.mul(s, b.add(half, series)))
        y = b.sub(m1, b.sub(half, tail))
    return b.fma(k, b.c(high, el), y)


def _log_specials(b: Builder, x: Ssa, y: Ssa) -> Ssa:
    """y, but log's values at zero (-inf), below (NaN), at infinity and NaN (themselves)."""
    zero, infinity = b.c(0, x.el), b.c(math.inf, x.el)
    y = b.select(
        b.cmp("gt", x, zero),
        y,
        b.select(b.cmp("eq", x, zero), b.c(-math.inf, x.el), b.c(math.nan, x.el)),
    )
    return b.select(b.cmp("eq", x, infinity), infinity, y)


def log_split(b: Builder, x: Ssa) -> tuple[Ssa, Ssa]:
    """Splits like `_log_split`, k as a float and x possibly subnormal, also where it is taken for zero.

    With the exponent of 1 in place of its own, a subnormal number is 1 + x 2**(bias - 1).
    """
    fmt = FORMATS[x.el]
    bits, one = b.bitcast(x, fmt.int_el), b.c(1, x.el)
    small = b.cmp("lt", bits, b.c(1 << fmt.mantissa, fmt.int_el))
    lifted = b.sub(b.bitcast(b.or_(bits, b.bitcast(one, fmt.int_el)), x.el), one)
    k, m1 = _log_split(b, b.select(small, lifted, x))
    k = b.int_to_float(k, x.el)
    return b.select(small, b.sub(k, b.c(fmt.bias - 1, x.el)), k), m1


def log(b: Builder, x: Ssa) -> Ssa:
    b = b.strict()
    if (special := b.math.lookup("log", x.el)) is not None:
        return special(b, x)

    def is_normal(b: Builder) -> Ssa:
        return b.and_(
            b.cmp("ge", x, b.c(FORMATS[x.el].tiny, x.el)), b.cmp("lt", x, b.c(math.inf, x.el))
        )

    def of_normal(b: Builder) -> Ssa:
        k, m1 = _log_split(b, x)
        return _log_sum(b, b.int_to_float(k, x.el), m1)

    return b.fast_path(x, is_normal, of_normal, lambda b: _log_anywhere(b, x))


def _log_anywhere(b: Builder, x: Ssa) -> Ssa:
    return _log_specials(b, x, _log_sum(b, *log_split(b, x)))


def log1p(b: Builder, x: Ssa) -> Ssa:
    """log(u) with u = 1 + x rounded; what rounding lost is added to the reduced argument."""
    b, fmt = b.strict(), FORMATS[x.el]
    if (special := b.math.lookup("log1p", x.el)) is not None:
        return special(b, x)
    one = b.c(1, x.el)
    u = b.add(x, one)
    back = b.sub(u, one)
    lost = b.add(b.sub(x, back), b.sub(one, b.sub(u, back)))  # two-sum
    k, m1 = _log_split(b, u)
    exponent = b.max(
        b.sub(b.c(fmt.bias, fmt.int_el), k), b.c(0, fmt.int_el)
    )  # 2**-k, or 0 where it would not matter
    inverse = b.bitcast(b.shl(exponent, b.c(fmt.mantissa, fmt.int_el)), x.el)
    y = _log_sum(b, b.int_to_float(k, x.el), b.fma(lost, inverse, m1))
    return keep_tiny(b, x, _log_specials(b, u, y), fmt.mantissa + 2)


def _log_of_sum(b: Builder, a: Ssa, excess: Ssa) -> Ssa:
    """log1p(excess) for moderate a; log(a) + ln 2 where a is so large that its square may overflow."""
    huge = b.cmp("gt", a, b.c(2.0 ** (FORMATS[a.el].mantissa + 6), a.el))
    y = log1p(b, b.select(huge, a, excess))
    return b.add(y, b.select(huge, b.c(LN2[0], a.el), b.c(0, a.el)))


def asinh(b: Builder, x: Ssa) -> Ssa:
    """log1p(a + a**2 / (1 + sqrt(1 + a**2))), a = |x|."""
    b = b.strict()
    a, one = b.abs(x), b.c(1, x.el)
    square = b.mul(a, a)
    excess = b.add(a, b.div(square, b.add(one, b.sqrt(b.add(square, one)))))
    return b.copysign(_log_of_sum(b, a, excess), x)


def acosh(b: Builder, x: Ssa) -> Ssa:
    """log1p(t + sqrt(2 t + t**2)), t = x - 1; NaN below 1."""
    b = b.strict()
    t = b.sub(x, b.c(1, x.el))
    root = b.sqrt(b.mul(t, b.add(t, b.c(2, x.el))))
    y = _log_of_sum(b, x, b.add(t, root))
    return b.select(b.cmp("lt", x, b.c(1, x.el)), b.c(math.nan, x.el), y)


def atanh(b: Builder, x: Ssa) -> Ssa:
    """log1p(2 a / (1 - a)) / 2, a = |x|; NaN above 1."""
    b = b.strict()
    a, one = b.abs(x), b.c(1, x.el)
    y = log1p(b, b.div(b.add(a, a), b.sub(one, a)))
    y = b.copysign(b.mul(y, b.c(0.5, x.el)), x)
    return keep_tiny(b, x, y, FORMATS[x.el].mantissa // 2 + 2)


# ---------------------------------------------------------------------- powers


def rsqrt(b: Builder, x: Ssa) -> Ssa:
    if (special := b.math.lookup("rsqrt", x.el)) is not None:
        return special(b, x)
    return b.div(b.c(1, x.el), b.sqrt(x))


def cbrt(b: Builder, x: Ssa) -> Ssa:
    """A third of the bits as a start (5 %), Halley steps (cubic), then Newton with a small correction."""
    b, fmt = b.strict(), FORMATS[x.el]
    el, magnitude = x.el, b.abs(x)
    small = b.cmp("lt", magnitude, b.c(16 * fmt.tiny, el))
    up = 3 * (fmt.mantissa // 3 + 1)
    magnitude = b.select(small, b.mul(magnitude, b.c(2.0**up, el)), magnitude)
    third = b.float_to_int(
        b.mul(b.int_to_float(b.bitcast(magnitude, fmt.int_el), el), b.c(1 / 3, el)), fmt.int_el
    )
    offset = int((fmt.bias - fmt.bias / 3 - 0.03306235651) * 2.0**fmt.mantissa)
    root = b.bitcast(b.add(third, b.c(offset, fmt.int_el)), el)
    quarter = b.c(0.25, el)  # of numerator and denominator, which would overflow
    part = b.mul(magnitude, quarter)
    for _ in range(1 if el == "f32" else 2):
        cube = b.mul(b.mul(root, quarter), b.mul(root, root))
        root = b.mul(root, b.div(b.add(cube, b.add(part, part)), b.add(b.add(cube, cube), part)))
    root = b.fma(b.sub(b.div(magnitude, b.mul(root, root)), root), b.c(1 / 3, el), root)
    root = b.select(small, b.mul(root, b.c(2.0 ** (-up // 3), el)), root)
    odd_ones = b.not_(
        b.and_(b.cmp("gt", b.abs(x), b.c(0, el)), b.cmp("lt", b.abs(x), b.c(math.inf, el)))
    )
    return b.select(odd_ones, x, b.copysign(root, x))


def _log2_f64(b: Builder, x: Ssa) -> Ssa:
    """log2 of f32 values held in f64, to 2**-43 relative: enough for pow in f32."""
    exponent, m1 = _log_split(b, x)
    ratio = b.div(m1, b.add(m1, b.c(2, "f64")))
    return b.fma(ratio, fit(b, b.mul(ratio, ratio), "log2"), b.int_to_float(exponent, "f64"))


def _pow_f32(b: Builder, a: Ssa, y: Ssa) -> Ssa:
    """|x|**y through f64: no care for the last bits is needed there."""
    wide_y = b.float_resize(y, "f64")
    product = b.mul(wide_y, _log2_f64(b, b.float_resize(a, "f64")))
    clamped = b.at_most(b.at_least(product, -200), 200)
    return b.float_resize(exp2_unchecked(b, clamped), "f32")


def _two_product(b: Builder, x: Ssa, y: Ssa) -> tuple[Ssa, Ssa]:
    product = b.mul(x, y)
    return product, b.fma(x, y, b.neg(product))


def sum_with_rest(b: Builder, large: Ssa, small: Ssa) -> tuple[Ssa, Ssa]:
    """large + small, rounded, and what rounding took from it (T. J. Dekker, 1971)."""
    total = b.add(large, small)
    return total, b.sub(small, b.sub(total, large))


def _log_double(b: Builder, x: Ssa) -> tuple[Ssa, Ssa]:
    """log of f64 x > 0 as a sum of two, to about 2**-64 relative.

    2 s + 2 s (z / 3 + z**2 C(z)), s = m1 / (2 + m1), z = s**2: the first terms in double-double.
    """
    k, m1 = log_split(b, x)
    d = b.add(m1, b.c(2, "f64"))
    d_low = b.sub(m1, b.sub(d, b.c(2, "f64")))
    s = b.div(m1, d)
    s_low = b.div(b.fma(b.neg(s), d_low, b.fma(b.neg(s), d, m1)), d)
    z, z_low = _two_product(b, s, s)
    z_low = b.fma(b.add(s, s), s_low, z_low)
    high, low = _two_product(b, z, b.c(1 / 3, "f64"))
    low = b.fma(
        z, b.c(1.850371707708594e-17, "f64"), b.fma(z_low, b.c(1 / 3, "f64"), low)
    )  # 1/3 - fl(1/3)
    high, low = sum_with_rest(b, high, b.fma(b.mul(z, z), fit(b, z, "atanh_rest"), low))
    two_s, two_s_low = b.add(s, s), b.add(s_low, s_low)
    p, p_low = _two_product(b, two_s, high)
    p_low = b.fma(two_s, low, b.fma(two_s_low, high, p_low))
    q, q_low = sum_with_rest(b, two_s, p)
    q_low = b.add(q_low, b.add(p_low, two_s_low))
    n, n_low = _two_product(b, k, b.c(LN2[0], "f64"))
    n_low = b.fma(k, b.c(LN2[1], "f64"), n_low)
    # k = 0 or |k ln 2| > |log m|: either order of this sum is exact
    total = b.add(n, q)
    swap = b.cmp("eq", k, b.c(0, "f64"))
    large, less = b.select(swap, q, n), b.select(swap, n, q)
    error = b.sub(less, b.sub(total, large))
    return sum_with_rest(b, total, b.add(error, b.add(n_low, q_low)))


def _pow_f64(b: Builder, a: Ssa, y: Ssa) -> Ssa:
    fmt = FORMATS["f64"]
    high, low = _log_double(b, a)
    p, p_low = _two_product(b, y, high)
    p_low = b.fma(y, low, p_low)
    clamped = b.at_most(b.at_least(p, fmt.exp_low), fmt.exp_high)
    p_low = b.select(b.cmp("eq", clamped, p), p_low, b.c(0, "f64"))
    shifted, remainder = _power_and_rest(b, clamped, 2 * fmt.bias)
    remainder = b.add(remainder, p_low)
    one = b.c(1, "f64")
    polynomial = b.fma(b.fma(fit(b, remainder, "exp"), remainder, one), remainder, one)
    return _times_power(b, polynomial, shifted)


def pow(b: Builder, x: Ssa, y: Ssa) -> Ssa:
    """exp(y log|x|), then C99's special cases.

    x**0 = 1**y = 1; negative x needs integer y; zeros and infinities go by the sign and parity of
    y.
    """
    b = b.strict()
    el = x.el
    power = (_pow_f32 if el == "f32" else _pow_f64)(b, b.abs(x), y)

    def is_plain(b: Builder) -> Ssa:
        zero, infinity = b.c(0, el), b.c(math.inf, el)
        positive = b.and_(b.cmp("gt", x, zero), b.cmp("lt", x, infinity))
        return b.and_(positive, b.cmp("lt", b.abs(y), infinity))

    return b.fast_path(x, is_plain, lambda b: power, lambda b: _pow_specials(b, x, y, power))


def _pow_specials(b: Builder, x: Ssa, y: Ssa, result: Ssa) -> Ssa:
    """`result`, which is |x|**y where both are finite and x is not zero, but C99's values elsewhere.

    XLA's threads take subnormal operands for zeros, which bits tell apart. Only a subnormal f32 as x counts as zero there:
    `_log2_f64` does not see it, and lifting it took 5 % of all powers (Zen 4, 28 November 2026).
    """
    el, magnitude, size = x.el, b.abs(x), b.abs(y)
    one, infinity = b.c(1, el), b.c(math.inf, el)
    word = FORMATS[el].int_el
    x_bits, y_bits, nothing = b.bitcast(x, word), b.bitcast(y, word), b.c(0, word)
    grows = b.xor(b.cmp("gt", magnitude, one), b.cmp("lt", y_bits, nothing))  # or goes to zero
    limit = b.select(grows, infinity, b.c(0, el))
    is_zero = (
        b.cmp("eq", magnitude, b.c(0, el))
        if el == "f32"
        else b.cmp("eq", b.bitcast(magnitude, word), nothing)
    )
    extreme = b.or_(is_zero, b.cmp("eq", magnitude, infinity))
    edge = b.or_(b.cmp("eq", size, infinity), extreme)
    result = b.select(edge, limit, result)
    result = b.select(b.cmp("uno", x, y), b.add(x, y), result)

    half = b.mul(y, b.c(0.5, el))
    integer = b.cmp("eq", b.bitcast(b.trunc(y), word), y_bits)
    odd = b.and_(integer, b.cmp("ne", b.trunc(half), half))
    result = b.select(odd, b.copysign(result, x), result)
    undefined = b.and_(b.not_(b.or_(integer, extreme)), b.cmp("lt", x_bits, nothing))
    result = b.select(undefined, b.c(math.nan, el), result)
    minus_one = b.and_(b.cmp("eq", magnitude, one), b.cmp("eq", size, infinity))
    no_power = b.cmp("eq", b.bitcast(size, word), nothing)
    return b.select(b.or_(b.or_(b.cmp("eq", x, one), no_power), minus_one), one, result)


# ---------------------------------------------------------------------- remainder


def fmod(b: Builder, x: Ssa, y: Ssa) -> Ssa:
    """x - trunc(x / y) y, exact, with the sign of x.

    With q = trunc(r / y) rounded to a float, r - q y is a float again: r loses one mantissa of size
    per step, exactly. One step nearly always suffices; the loop covers the largest quotient.

    Small divisors are scaled: beside them r - q y, which may be a little below zero, can be too small for a normal number,
    and a processor that flushes those to zero would lose it.
    """
    b, fmt = b.strict(), FORMATS[x.el]
    el = x.el
    ax, ay, zero = b.abs(x), b.abs(y), b.c(0, x.el)
    smallest, scale = 2.0 ** (fmt.mantissa + 4 - fmt.bias), 2.0 ** (2 * fmt.mantissa)

    def step(b: Builder, r: Ssa, modulus: Ssa) -> Ssa:
        divisor, far = modulus, b.c(2.0 ** (fmt.bias - 27), el)
        for _ in range(2):  # multiples that keep the quotient finite
            multiple = b.mul(divisor, far)
            divisor = b.select(b.cmp("gt", b.abs(r), multiple), multiple, divisor)
        return b.fma(b.neg(b.trunc(b.div(r, divisor))), divisor, r)

    def reduced(b: Builder, r: Ssa, modulus: Ssa, bits: int) -> Ssa:
        """r modulo `modulus`, not below zero; their quotient has so many bits."""
        steps = bits // fmt.mantissa + 3
        r = b.repeat(steps, r, lambda b, r: step(b, r, modulus))
        return b.select(b.cmp("lt", r, b.c(0, el)), b.add(r, modulus), r)

    def slow(b: Builder, ax: Ssa, ay: Ssa) -> Ssa:
        is_small, one = b.cmp("lt", ay, b.c(smallest, el)), b.c(1, el)
        up = b.select(is_small, b.c(scale, el), one)
        down = b.select(is_small, b.c(1 / scale, el), one)
        modulus = b.mul(ay, up)
        near = reduced(b, ax, modulus, 2 * fmt.bias + fmt.mantissa)
        return b.mul(reduced(b, b.mul(near, up), modulus, 2 * fmt.mantissa), down)

    first = b.fma(b.neg(b.trunc(b.div(ax, ay))), ay, ax)
    # an infinite quotient makes NaN, hence "not less"
    left = b.not_(b.cmp("lt", b.abs(first), ay))
    left = b.or_(left, b.cmp("lt", ay, b.c(smallest, el)))
    remainder = b.rare(left, first, slow, ax, ay)
    remainder = b.select(b.cmp("lt", remainder, zero), b.add(remainder, ay), remainder)
    fits = b.and_(b.cmp("lt", ax, ay), b.cmp("ord", x, y))
    return b.select(fits, x, b.copysign(remainder, x))
