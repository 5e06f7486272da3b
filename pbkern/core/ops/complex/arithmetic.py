"""Arithmetic and functions of complex numbers as real operations on their two parts.

A part that is None is known to be zero: the imaginary part of a number that was real. It costs
nothing and takes no part in products, so infinity times 1 + 0i stays infinite, as with the real
types of C (ISO C, Annex G). Functions scale their arguments where squares would leave the range.
Errors are relative to the modulus: a part much smaller than the other is no more exact. Equations
on arrays of complex numbers are pairs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from pbkern.core.lazy_dataclass import dataclass

Part = Any  # an array or a NumPy scalar


@dataclass(frozen=True)
class Complex:
    """Complex numbers as two parts of one type. At most one is None: known to be zero.

    Attributes:
      interleaved: both parts, as real[..., 2], if such an array exists.
      whole: the complex array, if one exists.
      mirror: the conjugates, if known.
    """

    re: Part | None
    im: Part | None
    interleaved: Part | None = None
    whole: Part | None = None
    mirror: Complex | None = None

    @property
    def some(self) -> Part:
        """A part that exists."""
        return self.im if self.re is None else self.re

    @property
    def parts(self) -> tuple[Part, Part]:
        """Both parts, zeros where None."""
        zeros = lax.full_like(self.some, 0) if self.re is None or self.im is None else None
        return zeros if self.re is None else self.re, zeros if self.im is None else self.im


# Operands and results of loops and branches are two arrays.
jax.tree_util.register_pytree_node(
    Complex, lambda z: (z.parts, None), lambda _, parts: Complex(*parts)
)


# ---- sums and products of parts that may be None


def plus(x: Part | None, y: Part | None) -> Part | None:
    if x is None or y is None:
        return y if x is None else x
    return x + y


def minus(x: Part | None, y: Part | None) -> Part | None:
    return plus(x, negated(y)) if x is None or y is None else x - y


def times(x: Part | None, y: Part | None) -> Part | None:
    return None if x is None or y is None else x * y


def negated(x: Part | None) -> Part | None:
    return None if x is None else -x


# ---- helpers on real parts


def choose(which: Part, x: Part, y: Part) -> Part:
    """x where `which`, else y; scalars repeat."""
    return lax.select_n(
        which,
        *(lax.broadcast(case, np.shape(which)) if np.ndim(case) == 0 else case for case in (y, x)),
    )


def is_negative(x: Part) -> Part:
    """Whether the sign bit is set, also of a zero."""
    integer = np.dtype(f"int{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x, integer) < np.zeros((), integer)


def with_sign(magnitude: Part, x: Part) -> Part:
    """The magnitude, negated where the sign bit of x is set."""
    return choose(is_negative(x), -magnitude, magnitude)


def is_infinite(x: Part) -> Part:
    return lax.abs(x) == constant(np.inf, x)


def constant(x: float, like: Part) -> np.floating:
    # NumPy's hints do not know that an array without dimensions, indexed by (), is a scalar.
    return cast(np.floating, np.asarray(x, like.dtype)[()])


def scaled(a: Part, b: Part) -> tuple[Part, Part, Callable[[Callable], Part]]:
    """(a s, b s, of_scale): s is 1, or an even power of two where squares would leave the range.

    of_scale(f) is f(s). A square that still vanishes is below half a unit in the last place of the
    other.
    """
    quarter = np.finfo(a.dtype).maxexp // 4  # 32 of float32
    p, q = lax.abs(a), lax.abs(b)
    size = choose(p > q, p, q)  # one instruction, where a maximum keeps NaN by several
    large, small = (
        size > constant(2.0 ** (2 * quarter - 2), a),
        size < constant(2.0 ** (-quarter - 8), a),
    )

    def of_scale(function: Callable) -> Part:
        at_large, at_small, else_ = (
            constant(function(scale), a)
            for scale in (2.0 ** (-2 * quarter - 2), 2.0 ** (3 * quarter + 4), 1.0)
        )
        return choose(large, at_large, choose(small, at_small, else_))

    s = of_scale(lambda s: s)
    return a * s, b * s, of_scale


def power_of_size(a: Part, b: Part) -> tuple[Part, Part]:
    """(s, 1 / s): s is a power of two that takes the larger one of |a| and |b| to 2 <= |x| < 4, normal numbers.

    s is 0 where one is infinite or NaN. By bits: comparisons and selects would begin where multiply-adds do.
    """
    form = np.finfo(a.dtype)
    integer = np.dtype(f"int{form.bits}")
    unit = 1 << form.nmant  # of the exponent's bits

    def bits(x: Part) -> Part:
        return lax.bitcast_convert_type(lax.abs(x), integer)

    def whole(n: int) -> Part:
        return np.asarray(n, integer)[()]

    everything = (1 << form.nexp) - 1
    exponent = lax.max(bits(a), bits(b)) & whole(everything * unit)
    exponent = lax.max(exponent, whole(2 * unit))
    s = lax.bitcast_convert_type(whole(everything * unit) - exponent, a.dtype)
    return s, lax.bitcast_convert_type(exponent - whole(unit), a.dtype)


# ---- arithmetic


def one(like: Complex) -> Complex:
    return Complex(lax.full_like(like.some, 1), None)


def add(x: Complex, y: Complex) -> Complex:
    return Complex(plus(x.re, y.re), plus(x.im, y.im))


def sub(x: Complex, y: Complex) -> Complex:
    return Complex(minus(x.re, y.re), minus(x.im, y.im))


def neg(x: Complex) -> Complex:
    return Complex(negated(x.re), negated(x.im))


def conj(x: Complex) -> Complex:
    return Complex(x.re, negated(x.im), mirror=x) if x.mirror is None else x.mirror


def mul(x: Complex, y: Complex) -> Complex:
    """A number times its conjugate is real: the rounded products of its imaginary part would not cancel."""
    if x.mirror is y or y.mirror is x:
        return Complex(plus(times(x.re, x.re), times(x.im, x.im)), None)
    return Complex(
        minus(times(x.re, y.re), times(x.im, y.im)),
        plus(times(x.re, y.im), times(x.im, y.re)),
    )


def square(x: Complex) -> Complex:
    """(re - im) (re + im) + 2 re im i: closer than re^2 - im^2, and in a wider range."""
    if x.re is None or x.im is None:
        return mul(x, x)
    product = x.re * x.im
    # Adding zero makes +0 of -0: the difference of two squares is never -0.
    re = (x.re - x.im) * (x.re + x.im) + constant(0, x.re)
    return Complex(re, product + product)


def times_i(x: Complex) -> Complex:
    """i x."""
    return Complex(negated(x.im), x.re)


def over_i(x: Complex) -> Complex:
    """-i x."""
    return Complex(x.im, negated(x.re))


def div(x: Complex, y: Complex) -> Complex:
    """Smith 1962, "Algorithm 116: Complex division": divides by the larger part first, so that no square is needed.

    A divisor on one of the axes divides each part alone, and so does an infinite one.
    """
    if y.im is None:
        return Complex(
            None if x.re is None else x.re / y.re,
            None if x.im is None else x.im / y.re,
        )
    if y.re is None:
        return over_i(div(x, Complex(y.im, None)))
    c, d = y.parts
    a, b = x.parts
    steep = (lax.abs(c) < lax.abs(d)) | (c != c)
    p, q = choose(steep, d, c), choose(steep, c, d)
    alone = (q == 0) | is_infinite(p)
    ratio = choose(alone, constant(0, p), q / p)
    divisor = choose(alone, p, p + q * ratio)
    # (a + bi) / (p + qi), or for a steep divisor (b - ai) / (p - qi). Dividing before adding keeps
    # sums from overflowing.
    first, second = choose(steep, b, a) / divisor, choose(steep, -a, b) / divisor
    ratio = choose(steep, -ratio, ratio)
    return Complex(
        choose(alone, first, first + second * ratio), choose(alone, second, second - first * ratio)
    )


def integer_pow(x: Complex, n: int) -> Complex:
    """Raises to a power by squaring and multiplying."""
    result, power, left = None, x, abs(n)
    while left:
        if left & 1:
            result = power if result is None else mul(result, power)
        left >>= 1
        power = square(power) if left else power
    if result is None:
        return one(x)
    return result if n >= 0 else div(one(x), result)


# ---- modulus, logarithms, roots


def modulus(x: Complex) -> Part:
    """sqrt(re^2 + im^2); infinite where a part is, even beside NaN (as hypot of ISO C)."""
    if x.re is None or x.im is None:
        return lax.abs(x.some)
    s, back = power_of_size(x.re, x.im)
    a, b = x.re * s, x.im * s
    size = lax.sqrt(a * a + b * b) * back
    return choose(is_infinite(x.re) | is_infinite(x.im), constant(np.inf, size), size)


def sign(x: Complex) -> Complex:
    """x / |x|; 0 for 0, NaN for infinity."""
    a, b, _ = scaled(*x.parts)
    length = lax.sqrt(a * a + b * b)
    length = choose(length == 0, constant(1, length), length)
    return Complex(a / length, b / length)


def log_modulus(a: Part, b: Part) -> Part:
    """log |a + bi|, near 1 by log1p of |a + bi|^2 - 1: as exact as |a + bi - 1| allows."""
    big, small = lax.max(lax.abs(a), lax.abs(b)), lax.min(lax.abs(a), lax.abs(b))
    square = big * big + small * small
    near = (square > 0.5) & (square < 3)
    over = lax.log1p(choose(near, (big - 1) * (big + 1) + small * small, constant(0, a)))
    p, q, of_scale = scaled(big, small)
    logarithm = choose(near, over, lax.log(p * p + q * q)) * 0.5 - of_scale(np.log)
    return choose(is_infinite(a) | is_infinite(b), constant(np.inf, a), logarithm)


def log(x: Complex) -> Complex:
    a, b = x.parts
    return Complex(log_modulus(a, b), lax.atan2(b, a))


def log1p(x: Complex) -> Complex:
    """log(1 + x), near 0 as exact as |x| allows."""
    a, b = x.parts
    near = lax.max(lax.abs(a), lax.abs(b)) < 0.25
    over = lax.log1p(choose(near, a * (a + 2) + b * b, constant(0, a))) * 0.5
    return Complex(choose(near, over, log_modulus(a + 1, b)), lax.atan2(b, a + 1))


def sqrt(x: Complex) -> Complex:
    """The root in the right half-plane, on its edge the one with im's sign.

    An infinite imaginary part makes both infinite.
    """
    re, im = x.parts
    a, b, of_scale = scaled(re, im)
    large = lax.sqrt((lax.abs(a) + lax.sqrt(a * a + b * b)) * 0.5)
    small = lax.abs(b) / choose(large == 0, constant(1, large), large * 2)
    left, infinite, back = is_negative(a), is_infinite(im), of_scale(lambda s: s**-0.5)
    inf = constant(np.inf, re)
    found_re, found_im = choose(left, small, large) * back, choose(left, large, small) * back
    return Complex(choose(infinite, inf, found_re), with_sign(choose(infinite, inf, found_im), im))


def rsqrt(x: Complex) -> Complex:
    return div(one(x), sqrt(x))


def power(x: Complex, y: Complex) -> Complex:
    """|x|^c e^(-d angle) at the angle c angle(x) + d log |x|, for y = c + di."""
    a, b = x.parts
    c, d = y.parts[0], y.im
    size, angle = modulus(x), lax.atan2(b, a)
    length, turn = lax.pow(size, c), c * angle
    if d is not None:
        length, turn = length * lax.exp(-d * angle), turn + d * log_modulus(a, b)
    # x^0 is 1; 0^y is 0 for c > 0 and else undefined.
    nothing = size == 0
    zeroth = c == 0 if d is None else (c == 0) & (d == 0)
    undefined = choose(c > 0, constant(0, a), constant(np.nan, a))
    re, im = (choose(nothing, undefined, length * part) for part in (lax.cos(turn), lax.sin(turn)))
    return Complex(choose(zeroth, constant(1, a), re), choose(zeroth, constant(0, a), im))


# ---- exponentials and functions by them


def _half_of_range(a: Part) -> int:
    """A number k whose e^k is a little less than the root of the largest number."""
    return int(np.log(np.finfo(a.dtype).max)) // 2 - 4


def _exponential(function: Callable, a: Part) -> tuple[Part, Part]:
    """(function(a - k), e^k) for function exp or expm1. k is 0 unless e^a is near or beyond the largest number."""
    k = _half_of_range(a)
    high = a > 2 * k
    return function(choose(high, a - k, a)), choose(
        high, constant(np.exp(constant(k, a)), a), constant(1, a)
    )


def exp(x: Complex) -> Complex:
    """e^re (cos im + i sin im), finite even where only e^re overflows; real where im is zero."""
    if x.re is None:
        return Complex(lax.cos(x.some), lax.sin(x.some))
    if x.im is None:
        return Complex(lax.exp(x.re), None)
    length, factor = _exponential(lax.exp, x.re)
    im = length * lax.sin(x.im) * factor
    return Complex(length * lax.cos(x.im) * factor, choose(x.im == 0, x.im, im))


def expm1(x: Complex) -> Complex:
    """e^re cos im - 1 as (e^re - 1) cos im - (1 - cos im): without cancellation near 0."""
    a, b = x.parts
    grown, factor = _exponential(lax.expm1, a)
    cos, sin = lax.cos(b), lax.sin(b)
    versine = choose(cos > 0, sin * sin / (1 + cos), 1 - cos)
    im = (grown + 1) * sin * factor
    return Complex((grown * cos - versine) * factor, choose(b == 0, b, im))


def exp2(x: Complex) -> Complex:
    return exp(mul(x, Complex(constant(np.log(2), x.some), None)))


def logistic(x: Complex) -> Complex:
    return div(one(x), add(one(x), exp(neg(x))))


def _hyperbolic(a: Part) -> tuple[Part, Part, Part]:
    """(s, c, factor): sinh a is s times the factor, cosh a is c times it; s and c are finite where only these are too large.

    Far from zero both are half of e^|a|, so that a smaller argument gives them but for a constant factor.
    """
    k = _half_of_range(a)
    far = lax.abs(a) > 2 * k
    near = choose(far, a - with_sign(constant(k, a), a), a)
    factor = choose(far, constant(np.exp(constant(k, a)), a), constant(1, a))
    return lax.sinh(near), lax.cosh(near), factor


def sinh(x: Complex) -> Complex:
    a, b = x.parts
    rise, size, factor = _hyperbolic(a)
    return Complex(rise * lax.cos(b) * factor, choose(b == 0, b, size * lax.sin(b) * factor))


def cosh(x: Complex) -> Complex:
    """A part of the argument that is zero makes the imaginary part zero, whatever the other part is."""
    a, b = x.parts
    rise, size, factor = _hyperbolic(a)
    sin = lax.sin(b)
    im = choose(b == 0, with_sign(b, a), rise * sin * factor)
    return Complex(size * lax.cos(b) * factor, choose(a == 0, with_sign(a, sin), im))


def tanh(x: Complex) -> Complex:
    """(sinh 2a + i sin 2b) / (cosh 2a + cos 2b), both divided by e^|2a|: nothing overflows."""
    a, b = x.parts
    rise = -lax.expm1(-2 * lax.abs(a))  # 1 - e^-|2a|
    rest = 1 - rise
    undefined = (rest == 0) & (b - b != 0)  # the angle of an infinity, which has no weight there
    b = choose(undefined, with_sign(constant(0, b), b), b)
    sin, cos = lax.sin(b), lax.cos(b)
    divisor = rise * rise + 4 * rest * cos * cos
    return Complex(
        with_sign(rise * (1 + rest) / divisor, a), choose(b == 0, b, 4 * rest * sin * cos / divisor)
    )


def sin(x: Complex) -> Complex:
    return over_i(sinh(times_i(x)))


def cos(x: Complex) -> Complex:
    return cosh(times_i(x))


def tan(x: Complex) -> Complex:
    return over_i(tanh(times_i(x)))
