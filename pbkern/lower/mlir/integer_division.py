"""Quotients of integers, and upper halves of their products, from the operations that vectors have."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from .element_types import BITS, NUMPY_FLOAT
from .value import Ssa


class Arithmetic(Protocol):
    """The operations of ops.Builder from which these are made."""

    lanes: int
    known: Any
    emit: Callable[[str], str]

    def with_lanes(self, lanes: int) -> Arithmetic: ...
    def c(self, x: Any, el: str) -> Ssa: ...
    def number(self, value: Ssa) -> Any: ...
    def same(self, op: str, *xs: Ssa) -> Ssa: ...
    def cast(self, op: str, value: Ssa, el: str) -> Ssa: ...
    def add(self, value: Ssa, y: Ssa) -> Ssa: ...
    def sub(self, value: Ssa, y: Ssa) -> Ssa: ...
    def mul(self, value: Ssa, y: Ssa) -> Ssa: ...
    def neg(self, value: Ssa) -> Ssa: ...
    def and_(self, value: Ssa, y: Ssa) -> Ssa: ...
    def or_(self, value: Ssa, y: Ssa) -> Ssa: ...
    def shr(self, value: Ssa, n: Ssa) -> Ssa: ...
    def sar(self, value: Ssa, n: Ssa) -> Ssa: ...
    def cmp(self, predicate: str, value: Ssa, y: Ssa) -> Ssa: ...
    def select(self, mask: Ssa, value: Ssa, y: Ssa) -> Ssa: ...
    def int_resize(self, value: Ssa, el: str, *, unsigned: bool = False) -> Ssa: ...
    def int_to_float(self, value: Ssa, el: str, *, unsigned: bool = False) -> Ssa: ...


def quotient(b: Arithmetic, value: Ssa, y: Ssa, unsigned: bool) -> tuple[Ssa, Ssa, Ssa | None]:
    """(quotient as XLA defines it, divisor without zero, where y is zero or None if its zeros have been reported).

    Up to 32 bits the quotient comes from a float division, which vectors have: if x / y is no integer it
    is 1 / |y| away from one, relatively at least 2**-16 (16 bits, f32) or 2**-32 (32 bits, f64), so
    rounding never reaches it.
    """
    by_zero = b.cmp("eq", y, b.c(0, y.el))
    divisor = b.select(by_zero, b.c(1, y.el), y)
    width = BITS[value.el]
    if b.number(y) and width <= 32:
        return _by_constant(b, value, int(b.number(y)), unsigned), y, by_zero
    if width == 64:
        if unsigned:
            result = b.same("arith.divui", value, divisor)
        else:  # the least integer / -1 would trap
            minus = b.cmp("eq", y, b.c(-1, y.el))
            result = b.same("arith.divsi", value, b.select(minus, b.c(1, y.el), divisor))
            result = b.select(minus, b.neg(value), result)
    else:
        float_el = "f64" if width == 32 else "f32"
        wide = "i64" if width == 32 else "i32"
        fx, fy = (
            b.int_to_float(operand, float_el, unsigned=unsigned) for operand in (value, divisor)
        )
        result = b.int_resize(b.cast("arith.fptosi", b.same("arith.divf", fx, fy), wide), value.el)
    if y.name in b.known.divisors:
        return result, divisor, None
    return b.select(by_zero, b.c(-1, value.el), result), divisor, by_zero


def _by_constant(b: Arithmetic, value: Ssa, y: int, unsigned: bool) -> Ssa:
    """x / y for a number y: times its reciprocal, which is rounded away from zero.

    Multiples of y are then right or a little too large. All others are 1 / |y| away from an integer, and the error is
    less: relatively two units of the last place, where x has fewer bits by more than that.
    """
    y = y % (1 << BITS[value.el]) if unsigned else y
    if abs(y) == 1:
        return value if y == 1 else b.neg(value)
    float_el = "f64" if BITS[value.el] == 32 else "f32"
    number = NUMPY_FLOAT[float_el](1.0) / NUMPY_FLOAT[float_el](y)
    if abs(fractions.Fraction(float(number)) * y) < 1:
        number = np.nextafter(number, NUMPY_FLOAT[float_el](np.copysign(np.inf, y)))
    product = b.mul(b.int_to_float(value, float_el, unsigned=unsigned), b.c(number, float_el))
    return b.int_resize(b.cast("arith.fptosi", product, "i32"), value.el)


def upper_half(b: Arithmetic, value: Ssa, y: Ssa, unsigned: bool) -> Ssa:
    """The upper half of the double-width product."""
    width = BITS[value.el]
    if width == 64:
        return _upper_half_64(b, value, y, unsigned)
    if width == 32 and unsigned and value.lanes and value.lanes % 2 == 0:
        return _upper_half_pairs(b, value, y)
    wide = f"i{2 * width}"
    product = b.mul(*(b.int_resize(factor, wide, unsigned=unsigned) for factor in (value, y)))
    return b.int_resize(b.shr(product, b.c(width, wide)), value.el)


def _upper_half_pairs(whole: Arithmetic, x: Ssa, y: Ssa) -> Ssa:
    """Multiplies unsigned 32-bit lanes: even ones and odd ones, which one instruction multiplies to 64 bits each."""
    lanes = x.lanes
    b = whole.with_lanes(lanes // 2)
    x, y = (
        operand._replace(
            name=b.emit(f"vector.bitcast {operand.name} : {operand.type} to vector<{b.lanes}xi64>"),
            el="i64",
            lanes=b.lanes,
        )
        for operand in (x, y)
    )
    half, low, high = b.c(32, "i64"), b.c(0xFFFFFFFF, "i64"), b.c(0xFFFFFFFF << 32, "i64")
    even, odd = b.mul(b.and_(x, low), b.and_(y, low)), b.mul(b.shr(x, half), b.shr(y, half))
    both = b.or_(b.shr(even, half), b.and_(odd, high))
    name = b.emit(f"vector.bitcast {both.name} : {both.type} to vector<{lanes}xi32>")
    return both._replace(name=name, el="i32", lanes=lanes)


def _upper_half_64(b: Arithmetic, value: Ssa, y: Ssa, unsigned: bool) -> Ssa:
    """From four 32-bit products; a negative factor counts 2**64 too much, which costs the other one."""
    half, low = b.c(32, "i64"), b.c(0xFFFFFFFF, "i64")
    (x0, x1), (y0, y1) = ((b.and_(factor, low), b.shr(factor, half)) for factor in (value, y))
    middle = b.add(b.mul(x1, y0), b.shr(b.mul(x0, y0), half))
    other = b.add(b.mul(x0, y1), b.and_(middle, low))
    high = b.add(b.mul(x1, y1), b.add(b.shr(middle, half), b.shr(other, half)))
    if unsigned:
        return high
    sign = b.c(63, "i64")
    return b.sub(high, b.add(b.and_(b.sar(value, sign), y), b.and_(b.sar(y, sign), value)))
