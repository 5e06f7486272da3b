"""Quotients of integers, and upper halves of their products, from the operations that vectors have."""

from __future__ import annotations

from typing import Any, Protocol

from .element_types import BITS
from .operation import Emit
from .value import Ssa


class Arithmetic(Protocol):
    """The operations of ops.Builder from which these are made."""

    lanes: int
    known: Any
    emit: Emit

    def with_lanes(self, lanes: int) -> Arithmetic: ...
    def c(self, x: Any, el: str) -> Ssa: ...
    def number(self, x: Ssa) -> Any: ...
    def same(self, op: str, *xs: Ssa) -> Ssa: ...
    def cast(self, op: str, x: Ssa, el: str) -> Ssa: ...
    def add(self, x: Ssa, y: Ssa) -> Ssa: ...
    def sub(self, x: Ssa, y: Ssa) -> Ssa: ...
    def mul(self, x: Ssa, y: Ssa) -> Ssa: ...
    def neg(self, x: Ssa) -> Ssa: ...
    def and_(self, x: Ssa, y: Ssa) -> Ssa: ...
    def or_(self, x: Ssa, y: Ssa) -> Ssa: ...
    def shr(self, x: Ssa, n: Ssa) -> Ssa: ...
    def sar(self, x: Ssa, n: Ssa) -> Ssa: ...
    def cmp(self, predicate: str, x: Ssa, y: Ssa) -> Ssa: ...
    def select(self, mask: Ssa, x: Ssa, y: Ssa) -> Ssa: ...
    def int_resize(self, x: Ssa, el: str, *, unsigned: bool = False) -> Ssa: ...
    def int_to_float(self, x: Ssa, el: str, *, unsigned: bool = False) -> Ssa: ...


def quotient(b: Arithmetic, x: Ssa, y: Ssa, unsigned: bool) -> tuple[Ssa, Ssa, Ssa | None]:
    """(quotient as XLA defines it, divisor without zero, where y is zero or None if its zeros have been reported).

    Up to 32 bits a quotient by values comes from a float division, which vectors have: if x / y is no integer it
    is 1 / |y| away from one, relatively at least 2**-16 (16 bits, f32) or 2**-32 (32 bits, f64), so
    rounding never reaches it.
    """
    by_zero = b.cmp("eq", y, b.c(0, y.el))
    divisor = b.select(by_zero, b.c(1, y.el), y)
    width = BITS[x.el]
    if b.number(y):
        return _by_constant(b, x, int(b.number(y)), unsigned), y, by_zero
    if width == 64:
        if unsigned:
            result = b.same("arith.divui", x, divisor)
        else:  # the least integer / -1 would trap
            minus = b.cmp("eq", y, b.c(-1, y.el))
            result = b.same("arith.divsi", x, b.select(minus, b.c(1, y.el), divisor))
            result = b.select(minus, b.neg(x), result)
    else:
        float_el = "f64" if width == 32 else "f32"
        wide = "i64" if width == 32 else "i32"
        fx, fy = (b.int_to_float(operand, float_el, unsigned=unsigned) for operand in (x, divisor))
        result = b.int_resize(b.cast("arith.fptosi", b.same("arith.divf", fx, fy), wide), x.el)
    if y.name in b.known.divisors:
        return result, divisor, None
    return b.select(by_zero, b.c(-1, x.el), result), divisor, by_zero


def _by_constant(b: Arithmetic, x: Ssa, y: int, unsigned: bool) -> Ssa:
    """x / y for a number y that is not zero."""
    width = BITS[x.el]
    y = y % (1 << width) if unsigned else y
    if abs(y) == 1:
        return x if y == 1 else b.neg(x)
    # LLVM shifts, and multiplies by the number's reciprocal as an integer, but for vectors of 64 bits.
    if not x.lanes or width <= 32 or abs(y) & (abs(y) - 1) == 0:
        return b.same("arith.divui" if unsigned else "arith.divsi", x, b.c(y, x.el))
    return _by_reciprocal(b, x, y, unsigned)


def _by_reciprocal(b: Arithmetic, x: Ssa, y: int, unsigned: bool) -> Ssa:
    """x / y for a number y, |y| > 1: the upper half of x times its reciprocal as an integer, and shifts.

    Source: Granlund and Montgomery 1994, Division by Invariant Integers using Multiplication, figures 4.1 and 5.2.
    """
    width, size = BITS[x.el], abs(y)
    shift = (size - 1).bit_length()
    if unsigned:
        factor = (1 << width) * ((1 << shift) - size) // size + 1
        high = upper_half(b, x, b.c(factor, x.el), True)
        half = b.shr(b.sub(x, high), b.c(1, x.el))
        return b.shr(b.add(half, high), b.c(shift - 1, x.el))
    factor = (1 << (width + shift - 1)) // size + 1 - (1 << width)
    high = b.add(x, upper_half(b, x, b.c(factor, x.el), False))
    sign = b.sar(x, b.c(width - 1, x.el))
    rounded = b.sar(high, b.c(shift - 1, x.el))
    return b.sub(rounded, sign) if y > 0 else b.sub(sign, rounded)


def upper_half(b: Arithmetic, x: Ssa, y: Ssa, unsigned: bool) -> Ssa:
    """The upper half of the double-width product."""
    width = BITS[x.el]
    if width == 64:
        return _upper_half_64(b, x, y, unsigned)
    if width == 32 and unsigned and x.lanes and x.lanes % 2 == 0:
        return _upper_half_pairs(b, x, y)
    wide = f"i{2 * width}"
    product = b.mul(*(b.int_resize(factor, wide, unsigned=unsigned) for factor in (x, y)))
    return b.int_resize(b.shr(product, b.c(width, wide)), x.el)


def _upper_half_pairs(whole: Arithmetic, x: Ssa, y: Ssa) -> Ssa:
    """Multiplies unsigned 32-bit lanes: even ones and odd ones, which one instruction multiplies to 64 bits each."""
    lanes = x.lanes
    b = whole.with_lanes(lanes // 2)
    x, y = (
        operand._replace(
            name=b.emit(
                "vector.bitcast", (operand.name,), f"{operand.type} to vector<{b.lanes}xi64>"
            ),
            el="i64",
            lanes=b.lanes,
        )
        for operand in (x, y)
    )
    half, low, high = b.c(32, "i64"), b.c(0xFFFFFFFF, "i64"), b.c(0xFFFFFFFF << 32, "i64")
    even, odd = b.mul(b.and_(x, low), b.and_(y, low)), b.mul(b.shr(x, half), b.shr(y, half))
    both = b.or_(b.shr(even, half), b.and_(odd, high))
    name = b.emit("vector.bitcast", (both.name,), f"{both.type} to vector<{lanes}xi32>")
    return both._replace(name=name, el="i32", lanes=lanes)


def _upper_half_64(b: Arithmetic, x: Ssa, y: Ssa, unsigned: bool) -> Ssa:
    """From four 32-bit products; a negative factor counts 2**64 too much, which costs the other one."""
    half, low = b.c(32, "i64"), b.c(0xFFFFFFFF, "i64")
    (x0, x1), (y0, y1) = ((b.and_(factor, low), b.shr(factor, half)) for factor in (x, y))
    middle = b.add(b.mul(x1, y0), b.shr(b.mul(x0, y0), half))
    other = b.add(b.mul(x0, y1), b.and_(middle, low))
    high = b.add(b.mul(x1, y1), b.add(b.shr(middle, half), b.shr(other, half)))
    if unsigned:
        return high
    sign = b.c(63, "i64")
    return b.sub(high, b.add(b.and_(b.sar(x, sign), y), b.and_(b.sar(y, sign), x)))
