"""sin, cos, tan and their inverses on f32 and f64 values; conventions as in math_exp."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from pbkern.lower.mlir.ops import Builder, Ssa

from .exp_log import FORMATS, keep_tiny, sum_with_rest
from .horner import fit

# pi / 2 as a sum of three numbers of each type; 2 / pi in words of 64 bits (OEIS A019669, A060294)
HALF_PI = {
    "f32": (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15),
    "f64": (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33),
}
TWO_OVER_PI = (
    0x0000000000000000,
    0xA2F9836E4E441529,
    0xFC2757D1F534DDC0,
    0xDB6295993C439041,
    0xFE5163ABDEBBC561,
    0xB7246E3A424DD2E0,
    0x06492EEA09D1921C,
    0xFE1DEB1CB129A73E,
    0xE88235F52EBB4484,
    0xE99C7026B45F7E41,
    0x3991D639835339F4,
    0x9C845F8BBDF9283B,
    0x1FF897FFDE05980F,
    0xEF2F118B5A0A6D1F,
    0x6D367ECF27CB09B7,
    0x4F463F669E5FEA2D,
    0x7527BAC7EBE5F17B,
    0x3D0739F78A5292EA,
    0x6BFB5FB11F8D5D08,
    0x56033046FC7B6BAB,
    0xF0CFBC209AF4361D,
)
# Up to here three-term Cody-Waite keeps all digits: n times the third term's error stays below the
# closest a float comes to a multiple of pi / 2.
CODY_WAITE_MAX = {"f32": 1.0e5, "f64": 2.0**24}
LAST_WORD = {"f32": 2, "f64": 16}  # where the largest finite value starts in TWO_OVER_PI


def _reduces(b: Builder, x: Ssa, reduced: Callable[[Builder], Ssa], *, near: Callable) -> Ssa:
    """reduced(builder), or near(builder) of a scalar |x| <= pi / 4, which needs no reduction: a chain of few instructions."""

    def is_near(b: Builder) -> Ssa:
        return b.cmp("le", b.abs(x), b.c(math.pi / 4 * (1 - 2.0**-20), x.el))

    return b.fast_path(x, is_near, near, reduced)


def _by_quadrant(b: Builder, x: Ssa, finish: Callable[[Builder, Ssa, Ssa], Ssa]) -> Ssa:
    """finish(builder, n, r) with x = n pi / 2 + r, |r| <= pi / 4; only the last two bits of n are meant."""

    def near(b: Builder) -> Ssa:
        return finish(b, b.c(0, FORMATS[x.el].int_el), x)

    return _reduces(b, x, lambda b: _by_quadrant_reduced(b, x, finish), near=near)


def _by_quadrant_reduced(b: Builder, x: Ssa, finish: Callable[[Builder, Ssa, Ssa], Ssa]) -> Ssa:
    fmt, el = FORMATS[x.el], x.el
    magic = b.c(1.5 * 2.0**fmt.mantissa, el)
    shifted = b.fma(x, b.c(2 / math.pi, el), magic)
    n, r = b.sub(shifted, magic), x
    for term in HALF_PI[el]:
        r = b.fma(n, b.c(-term, el), r)
    y = finish(b, b.bitcast(shifted, fmt.int_el), r)
    far = b.cmp("gt", b.abs(x), b.c(CODY_WAITE_MAX[el], el))
    return b.rare(far, y, lambda b, x: finish(b, *_reduce_far(b, x)), x, lanes_apart=True)


def _by_quadrant_with_rest(
    b: Builder, x: Ssa, finish: Callable[[Builder, Ssa, Ssa, Ssa], Ssa]
) -> Ssa:
    """finish(builder, n, r, rest): the same, and what the rounding of r took from it."""

    def near(b: Builder) -> Ssa:
        return finish(b, b.c(0, FORMATS[x.el].int_el), x, b.c(0, x.el))

    return _reduces(b, x, lambda b: _by_quadrant_and_rest(b, x, finish), near=near)


def _by_quadrant_and_rest(
    b: Builder, x: Ssa, finish: Callable[[Builder, Ssa, Ssa, Ssa], Ssa]
) -> Ssa:
    fmt, el = FORMATS[x.el], x.el
    magic = b.c(1.5 * 2.0**fmt.mantissa, el)
    shifted = b.fma(x, b.c(2 / math.pi, el), magic)
    n = b.sub(shifted, magic)
    first, second, third = (b.c(term, el) for term in HALF_PI[el])
    start = b.fma(b.neg(n), first, x)
    product = b.mul(n, second)
    near = b.sub(start, product)
    lost = b.sub(b.sub(b.sub(start, near), product), b.fma(n, second, b.neg(product)))
    r, rest = sum_with_rest(b, near, b.fma(b.neg(n), third, lost))
    y = finish(b, b.bitcast(shifted, fmt.int_el), r, rest)
    far = b.cmp("gt", b.abs(x), b.c(CODY_WAITE_MAX[el], el))
    slow = lambda b, x: finish(b, *_reduce_far(b, x, with_rest=True))
    return b.rare(far, y, slow, x, lanes_apart=True)


def _reduce_far(b: Builder, x: Ssa, *, with_rest: bool = False) -> tuple[Ssa, ...]:
    """(n, r), and what the rounding of r took from it if asked for, for large x.

    Multiplies the mantissa by the bits of 2 / pi that matter (Payne and Hanek, 1983).

    x = m 2**e. Bits of 2 / pi above weight 2**(1 - e) contribute multiples of 4 and are skipped;
    192 bits from there on times m give n's last two bits and the fraction.
    """
    i64 = lambda number: b.c(number, "i64")
    wide = b.float_resize(x, "f64")
    bits = b.bitcast(b.abs(wide), "i64")
    m = b.or_(b.and_(bits, i64((1 << 52) - 1)), i64(1 << 52))
    position = b.add(
        b.shr(bits, i64(52)), i64(64 - 1077)
    )  # of the first bit; TWO_OVER_PI starts with a zero word
    index, shift = b.shr(position, i64(6)), b.and_(position, i64(63))

    words = [i64(entry) for entry in TWO_OVER_PI[:4]]
    for j in range(1, LAST_WORD[x.el] + 1):
        here = b.cmp("eq", index, i64(j))
        words = [b.select(here, i64(TWO_OVER_PI[j + k]), word) for k, word in enumerate(words)]
    back = b.sub(i64(63), shift)
    first, second, third = (
        b.or_(b.shl(word, shift), b.shr(b.shr(following, i64(1)), back))
        for word, following in itertools.pairwise(words)
    )
    carry_in = b.mul_high(m, third, unsigned=True)
    low = b.mul(m, second)
    total = b.add(low, carry_in)
    carry = b.int_resize(b.cmp("lt", total, low, unsigned=True), "i64")
    high = b.add(
        b.add(b.mul(m, first), b.mul_high(m, second, unsigned=True)), b.and_(carry, i64(1))
    )

    n = b.shr(b.add(high, i64(1 << 61)), i64(62))
    part = b.sub(high, b.shl(n, i64(62)))
    fraction = b.int_to_float(part, "f64")
    rest = b.mul(b.int_to_float(total, "f64", unsigned=True), b.c(2.0**-64, "f64"))
    unit = b.c(math.pi / 2 * 2.0**-62, "f64")
    both = b.add(fraction, rest)
    r = b.mul(both, unit)
    finite = b.cmp("lt", b.abs(wide), b.c(math.inf, "f64"))
    r = b.select(finite, r, b.c(math.nan, "f64"))

    negative = b.cmp("lt", wide, b.c(0, "f64"))
    signed = b.select(negative, b.neg(r), r)
    rounded = b.float_resize(signed, x.el)
    reduced = b.int_resize(b.select(negative, b.neg(n), n), FORMATS[x.el].int_el), rounded
    if not with_rest:
        return reduced
    if x.el != "f64":
        return *reduced, b.float_resize(b.sub(signed, b.float_resize(rounded, "f64")), x.el)
    unconverted = b.int_to_float(b.sub(part, b.float_to_int(fraction, "i64")), "f64")
    lost = b.add(b.sub(rest, b.sub(both, fraction)), unconverted)
    error = b.fma(both, unit, b.neg(r))
    error = b.add(error, b.fma(lost, unit, b.mul(both, b.c(HALF_PI["f64"][1] * 2.0**-62, "f64"))))
    return *reduced, b.select(negative, b.neg(error), error)


def _sin_cos(b: Builder, r: Ssa) -> tuple[Ssa, Ssa]:
    """Both on [-pi/4, pi/4]."""
    z = b.mul(r, r)
    sine = b.fma(b.mul(r, z), fit(b, z, "sin"), r)
    cosine = b.fma(b.mul(z, z), fit(b, z, "cos"), b.fma(z, b.c(-0.5, r.el), b.c(1, r.el)))
    return sine, cosine


def _sign_bit(b: Builder, n: Ssa, bit: int, el: str) -> Ssa:
    """The given bit of n, moved to the sign position."""
    fmt = FORMATS[el]
    width = 32 if el == "f32" else 64
    return b.shl(b.shr(n, b.c(bit, fmt.int_el)), b.c(width - 1, fmt.int_el))


def _flip(b: Builder, y: Ssa, sign: Ssa) -> Ssa:
    return b.bitcast(b.xor(b.bitcast(y, sign.el), sign), y.el)


def _odd(b: Builder, n: Ssa) -> Ssa:
    return b.cmp("ne", b.and_(n, b.c(1, n.el)), b.c(0, n.el))


def sin(b: Builder, x: Ssa) -> Ssa:
    def finish(b: Builder, quadrant: Ssa, remainder: Ssa) -> Ssa:
        sine, cosine = _sin_cos(b, remainder)
        return _flip(
            b, b.select(_odd(b, quadrant), cosine, sine), _sign_bit(b, quadrant, 1, remainder.el)
        )

    b = b.strict()
    return keep_tiny(b, x, _by_quadrant(b, x, finish), FORMATS[x.el].mantissa // 2 + 2)


def cos(b: Builder, x: Ssa) -> Ssa:
    def finish(b: Builder, quadrant: Ssa, remainder: Ssa) -> Ssa:
        sine, cosine = _sin_cos(b, remainder)
        following = b.add(quadrant, b.c(1, quadrant.el))
        return _flip(
            b, b.select(_odd(b, quadrant), sine, cosine), _sign_bit(b, following, 1, remainder.el)
        )

    b = b.strict()
    return _by_quadrant(b, x, finish)


def tan(b: Builder, x: Ssa) -> Ssa:
    """The quotient of sine and cosine, both with what their rounding took, and that of r: such an error would count twice."""

    def finish(b: Builder, quadrant: Ssa, remainder: Ssa, rest: Ssa) -> Ssa:
        z, one = b.mul(remainder, remainder), b.c(1, remainder.el)
        half = b.mul(z, b.c(0.5, remainder.el))
        near = b.sub(one, half)  # about the cosine, the derivative of the sine
        sine = sum_with_rest(
            b, remainder, b.fma(rest, near, b.mul(b.mul(remainder, z), fit(b, z, "sin")))
        )
        small = b.fma(b.neg(rest), remainder, b.sub(b.sub(one, near), half))
        cosine = sum_with_rest(b, near, b.fma(b.mul(z, z), fit(b, z, "cos"), small))
        odd = _odd(b, quadrant)
        (above, above_rest), (below, below_rest) = (
            [b.select(odd, if_odd, if_even) for if_odd, if_even in zip(*pair)]
            for pair in ((cosine, sine), (sine, cosine))
        )
        inverse = b.div(one, below)
        ratio = b.mul(above, inverse)
        rest = b.add(b.fma(b.neg(ratio), below, above), b.sub(above_rest, b.mul(ratio, below_rest)))
        return _flip(b, b.fma(rest, inverse, ratio), _sign_bit(b, quadrant, 0, remainder.el))

    b = b.strict()
    return keep_tiny(b, x, _by_quadrant_with_rest(b, x, finish), FORMATS[x.el].mantissa // 2 + 2)


# ---------------------------------------------------------------------- inverses


def _atan_of_ratio(b: Builder, small: Ssa, large: Ssa) -> tuple[Ssa, Ssa]:
    """atan(small / large) for 0 <= small <= large -> (multiple of pi / 4, remainder).

    Above tan(pi / 8) it is pi / 4 + atan((small - large) / (small + large)). What rounding takes
    from numerator, denominator and quotient is added with the terms of the series.
    """
    el = small.el
    steep = b.cmp("gt", small, b.mul(large, b.c(math.sqrt(2) - 1, el)))
    zero = b.c(0, el)
    (less, less_rest), (more, more_rest) = (
        sum_with_rest(b, b.neg(large), small),
        sum_with_rest(b, large, small),
    )
    top, top_rest = b.select(steep, less, small), b.select(steep, less_rest, zero)
    bottom, bottom_rest = b.select(steep, more, large), b.select(steep, more_rest, zero)
    quotient = b.div(top, bottom)
    rest = b.add(b.fma(b.neg(quotient), bottom, top), b.sub(top_rest, b.mul(quotient, bottom_rest)))
    rest = b.select(
        b.cmp("eq", rest, rest), b.div(rest, bottom), zero
    )  # of an infinite denominator it is no number
    z = b.mul(quotient, quotient)
    return b.select(steep, b.c(1, el), zero), b.add(
        quotient, b.fma(b.mul(quotient, z), fit(b, z, "atan"), rest)
    )


def _plus_eighths(b: Builder, k: Ssa, rest: Ssa) -> Ssa:
    """k pi / 4 + rest, k a small integer."""
    high, low = (term / 2 for term in HALF_PI[rest.el][:2])
    return b.fma(k, b.c(high, rest.el), b.fma(k, b.c(low, rest.el), rest))


def atan(b: Builder, x: Ssa) -> Ssa:
    b = b.strict()
    el = x.el
    magnitude, one = b.abs(x), b.c(1, el)
    beyond = b.cmp("gt", magnitude, one)
    # 1 / infinity: (1 - inf) / (1 + inf) never arises because 1 is not steep against inf
    eighths, remainder = _atan_of_ratio(
        b, b.select(beyond, one, magnitude), b.select(beyond, magnitude, one)
    )
    eighths = b.select(beyond, b.sub(b.c(2, el), eighths), eighths)
    remainder = b.select(beyond, b.neg(remainder), remainder)
    return b.copysign(_plus_eighths(b, eighths, remainder), x)


def atan2(b: Builder, y: Ssa, x: Ssa) -> Ssa:
    """Angle of the point (x, y), with C99's values on the axes and at infinity.

    XLA's threads take subnormal coordinates for zeros: bits tell which one is on which axis.
    """
    b = b.strict()
    el = x.el
    ax, ay = b.abs(x), b.abs(y)
    infinity, zero = b.c(math.inf, el), b.c(0, el)
    above = b.cmp("gt", ay, ax)
    large, small = b.select(above, ay, ax), b.select(above, ax, ay)
    # Points at infinity become (1, 0) or (1, 1), the origin (1, 0); huge ones are scaled.
    endless = b.cmp("eq", large, infinity)
    both = b.cmp("eq", small, infinity)
    huge = b.cmp("gt", large, b.c(2.0 ** (FORMATS[el].bias - 3), el))
    quarter = b.c(0.25, el)
    small = b.select(huge, b.mul(small, quarter), small)
    large = b.select(huge, b.mul(large, quarter), large)
    one = b.c(1, el)
    small = b.select(endless, b.select(both, one, zero), small)
    large = b.select(b.or_(endless, b.cmp("eq", large, zero)), one, large)
    eighths, remainder = _atan_of_ratio(b, small, large)
    above = b.cmp("gt", *(b.bitcast(part, FORMATS[el].int_el) for part in (ay, ax)))
    eighths = b.select(above, b.sub(b.c(2, el), eighths), eighths)
    remainder = b.select(above, b.neg(remainder), remainder)
    left = b.cmp("lt", b.copysign(one, x), zero)
    eighths = b.select(left, b.sub(b.c(4, el), eighths), eighths)
    remainder = b.select(left, b.neg(remainder), remainder)
    angle = b.copysign(_plus_eighths(b, eighths, remainder), y)
    return b.select(b.cmp("uno", x, y), b.add(x, y), angle)


def _asin_parts(b: Builder, a: Ssa) -> tuple[Ssa, Ssa]:
    """(whether a > 1/2, asin(a) or, there, asin(sqrt((1 - a) / 2)))."""
    el = a.el
    big = b.cmp("gt", a, b.c(0.5, el))
    half = b.fma(a, b.c(-0.5, el), b.c(0.5, el))
    z = b.select(big, half, b.mul(a, a))
    argument = b.select(big, b.sqrt(half), a)
    return big, b.fma(b.mul(argument, z), fit(b, z, "asin"), argument)


def asin(b: Builder, x: Ssa) -> Ssa:
    """Above 1/2: pi / 2 - 2 asin(sqrt((1 - x) / 2)); NaN beyond 1 from the root."""
    b = b.strict()
    big, arcsine = _asin_parts(b, b.abs(x))
    two = b.c(2, x.el)
    y = b.select(big, _plus_eighths(b, two, b.mul(arcsine, b.neg(two))), arcsine)
    return b.copysign(y, x)


def acos(b: Builder, x: Ssa) -> Ssa:
    """2 asin(sqrt((1 - |x|) / 2)) above 1/2, pi minus that below -1/2, pi / 2 - asin(x) between."""
    b = b.strict()
    el = x.el
    big, arcsine = _asin_parts(b, b.abs(x))
    negative = b.cmp("lt", x, b.c(0, el))
    doubled = b.add(arcsine, arcsine)
    rest = b.select(big, doubled, b.neg(arcsine))
    rest = b.select(negative, b.neg(rest), rest)
    four, two, zero = (b.c(multiple, el) for multiple in (4, 2, 0))
    eighths = b.select(big, b.select(negative, four, zero), two)
    return _plus_eighths(b, eighths, rest)
