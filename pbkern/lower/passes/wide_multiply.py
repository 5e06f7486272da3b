"""Wide products of 32-bit numbers that a body makes of halves -> one operation each.

    xh, xl, yh, yl = x >> 16, x & 0xffff, y >> 16, y & 0xffff
    carry = (xh * yl & 0xffff) + (xl * yh & 0xffff) + (xl * yl >> 16)
    high = xh * yh + (xh * yl >> 16) + (xl * yh >> 16) + (carry >> 16)             # mulhi(x, y)
    low = (carry << 16) + (xl * yl & 0xffff)                                       # x * y

Generators of random numbers are written so where there are no 64-bit integers. That an expression
is such a product is proved, whatever its form. Sums and products are polynomials; a >> k is an
unknown q for which 0 <= a - 2**k * q < 2**k, and a & (2**k - 1) is a - 2**k * q. Then `high` is the
upper half of x * y if 0 <= x * y - 2**32 * high < 2**32, which the bounds of such remainders tell
where nothing is left without them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Const, Expr, Nest, Op, Pool, Stmt, with_nests

UINT32 = np.dtype(np.uint32)
# The number of values of 32 bits: what the upper half of a product is counted in.
UINT32_VALUES = 1 << 32

Monomial = tuple[int, ...]  # sorted numbers of unknowns
Polynomial = dict[Monomial, int]


@dataclass(frozen=True)
class WideProducts:
    """Makes products of sums of halves where they are such, inner statements too."""

    most_terms: int = threshold(12, "terms of a polynomial; a value of more is taken as an unknown")

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        products = _Products(context.pool, context.op, self.most_terms)
        return with_nests(stmts, lambda nest: [_rewritten(nest, products)])


def _rewritten(nest: Nest, products: _Products) -> Nest:
    if not {"mul", "shift_right_logical"} <= _unsigned_operations(nest):
        return nest
    return nest.mapped(products.pool.rewriter(products.replace))


def _unsigned_operations(nest: Nest) -> set[str]:
    return {
        node.info.primitive
        for node in nest.nodes()
        if isinstance(node, Op) and node.dtype == UINT32
    }


@dataclass(frozen=True)
class _Value:
    """An expression as a polynomial modulo 2**32.

    With `most`, it is exactly that, and no larger; None: it may have wrapped.
    """

    terms: Polynomial
    most: int | None


@dataclass(frozen=True)
class _Exact(_Value):
    """An expression that a polynomial is exactly, no larger than `most`."""

    most: int


@dataclass(frozen=True)
class _Quotient:
    """source >> bits."""

    source: Expr
    bits: int


def _sum(left: Polynomial, right: Polynomial, factor: int = 1) -> Polynomial:
    total = dict(left)
    for monomial, coeff in right.items():
        total[monomial] = total.get(monomial, 0) + factor * coeff
    return {m: c for m, c in total.items() if c}


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for (monomial, coeff), (other, dim) in itertools.product(left.items(), right.items()):
        product = _sum(product, {tuple(sorted((*monomial, *other))): coeff * dim})
    return product


class _Products:
    """Finds wide products in expressions of one pool."""

    def __init__(self, pool: Pool, op: Callable[..., Expr], most_terms: int) -> None:
        self.pool, self.op, self._most_terms = pool, op, most_terms
        self._values: dict[Expr, _Value] = {}
        self._unknowns: list[Expr | _Quotient] = []
        self._numbers: dict[Expr | _Quotient, int] = {}

    def replace(self, expr: Expr) -> Expr | None:
        """x * y or mulhi(x, y) for a sum that is it."""
        if not isinstance(expr, Op) or expr.info.primitive != "add" or expr.dtype != UINT32:
            return None
        value = self._value(expr)
        low = {
            monomial: term % UINT32_VALUES
            for monomial, term in value.terms.items()
            if term % UINT32_VALUES
        }
        if low.keys() <= {()}:
            return self._number(low.get((), 0))
        if (
            len(low) == 1
            and (factors := self._factors(*next(iter(low.items()))))
            and expr.height > 3 + factors[0].height
        ):
            return self.op("mul", UINT32, *factors)
        if value.most is not None:
            for x, y in self._candidates(value.terms):
                if self._is_upper_half(
                    _product(self._exact(x).terms, self._exact(y).terms), value.terms
                ):
                    return self.op("mulhi", UINT32, x, y)
        return None

    def _factors(self, monomial: Monomial, coeff: int) -> tuple[Expr, Expr] | None:
        """Two factors of a term, the first one no constant."""
        unknowns = [self._unknowns[index] for index in monomial]
        factors = [factor for factor in unknowns if not isinstance(factor, _Quotient)]
        if (
            len(factors) < len(unknowns)
            or len(factors) not in (1, 2)
            or (len(factors) == 2 and coeff != 1)
        ):
            return None
        return (factors[0], factors[1]) if len(factors) == 2 else (factors[0], self._number(coeff))

    def _number(self, value: int) -> Expr:
        return self.pool.const(UINT32, np.uint32(value))

    def _candidates(self, terms: Polynomial) -> Iterator[tuple[Expr, Expr]]:
        """Factors whose product's upper half a sum could be: it has the product of their upper halves; one may be a number."""
        halves = {
            m: [
                factor
                for index in m
                if isinstance(factor := self._unknowns[index], _Quotient) and factor.bits == 16
            ]
            for m in terms
        }
        for monomial, term in terms.items():
            if len(monomial) == 2 and len(halves[monomial]) == 2 and term == 1:
                yield halves[monomial][0].source, halves[monomial][1].source
            if len(monomial) == 1 and halves[monomial] and 0 < term < 1 << 16:
                lower = {
                    self._exact(halve[0].source).terms.get(monomial)
                    for n, halve in halves.items()
                    if n != monomial and halve
                }
                yield from (
                    (halves[monomial][0].source, self._number(term << 16 | low))
                    for low in lower
                    if low and 0 < low < 1 << 16
                )

    def _is_upper_half(self, product: Polynomial, high: Polynomial) -> bool:
        """Whether 0 <= product - 2**32 * high < 2**32, as a sum of remainders."""
        rest, most = _sum(product, high, -UINT32_VALUES), 0
        while True:
            quotients = [
                (shifted.source.height, monomial[0], shifted)
                for monomial, coeff in rest.items()
                if len(monomial) == 1
                and coeff < 0
                and isinstance(shifted := self._unknowns[monomial[0]], _Quotient)
                and coeff % (1 << shifted.bits) == 0
            ]
            if not quotients:
                return not rest and most < UINT32_VALUES
            _, index, shifted = max(quotients, key=lambda quotient: quotient[:2])
            times = -rest[index,] >> shifted.bits
            rest = _sum(
                rest,
                _sum(self._exact(shifted.source).terms, {(index,): 1 << shifted.bits}, -1),
                -times,
            )
            most += times * ((1 << shifted.bits) - 1)

    # ---- expressions as polynomials

    def _exact(self, expr: Expr) -> _Exact:
        value = self._value(expr)
        if value.most is None:
            return self._unknown(expr, UINT32_VALUES - 1)
        return _Exact(value.terms, value.most)

    def _unknown(self, unknown: Expr | _Quotient, most: int) -> _Exact:
        if unknown not in self._numbers:
            self._numbers[unknown] = len(self._unknowns)
            self._unknowns.append(unknown)
        return _Exact({(self._numbers[unknown],): 1}, most)

    def _value(self, expr: Expr) -> _Value:
        if expr not in self._values:
            value = self._made(expr)
            self._values[expr] = (
                value
                if len(value.terms) <= self._most_terms
                else self._unknown(expr, UINT32_VALUES - 1)
            )
        return self._values[expr]

    def _made(self, expr: Expr) -> _Value:
        if isinstance(expr, Const):
            constant = int(expr.value)
            return _Value({(): constant} if constant else {}, constant)
        if not isinstance(expr, Op) or expr.dtype != UINT32:
            return self._unknown(expr, UINT32_VALUES - 1)
        match expr.info.primitive, expr.args:
            case "add", _:
                affine, other = map(self._value, expr.args)
                return _within(_sum(affine.terms, other.terms), affine, other, lambda x, y: x + y)
            case "mul", _:
                affine, other = map(self._value, expr.args)
                return _within(
                    _product(affine.terms, other.terms), affine, other, lambda x, y: x * y
                )
            case "shift_left", (source, Const(value=count)) if (bits := int(count)) < 32:
                affine = self._value(source)
                return _within(
                    {monomial: term << bits for monomial, term in affine.terms.items()},
                    affine,
                    affine,
                    lambda x, _: x << bits,
                )
            case "shift_right_logical", (source, Const(value=count)) if (bits := int(count)) < 32:
                return self._shifted(source, bits)
            case "and", (source, Const(value=value)) if (mask := int(value)) & (mask + 1) == 0:
                bits, exact = mask.bit_length(), self._exact(source)
                upper = self._shifted(source, bits)
                return _Value(_sum(exact.terms, upper.terms, -1 << bits), min(exact.most, mask))
        return self._unknown(expr, UINT32_VALUES - 1)

    def _shifted(self, expr: Expr, bits: int) -> _Value:
        affine = self._exact(expr)
        if affine.terms.keys() <= {()} or affine.most >> bits == 0:
            constant = affine.terms.get((), 0) >> bits
            return _Value({(): constant} if constant else {}, constant)
        return self._unknown(_Quotient(expr, bits), affine.most >> bits)


def _within(
    terms: Polynomial, left: _Value, right: _Value, largest: Callable[[int, int], int]
) -> _Value:
    most = None if left.most is None or right.most is None else largest(left.most, right.most)
    return _Value(terms, most if most is not None and most < UINT32_VALUES else None)
