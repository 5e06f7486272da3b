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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pbkern.lower.nest.ir import Expr, Nest, Pool, Stmt, with_bodies

UINT32 = np.dtype(np.uint32)
# The number of values of 32 bits: what the upper half of a product is counted in.
UINT32_VALUES = 1 << 32
# Most terms of a polynomial; a value of more is taken as an unknown.
MOST_POLYNOMIAL_TERMS = 12

Monomial = tuple[int, ...]  # sorted numbers of unknowns
Polynomial = dict[Monomial, int]


def use_wide_products(stmts: list[Stmt], context) -> list[Stmt]:
    """Statements whose sums of halves are products where they are, inner statements too."""
    found = _Products(context.pool, context.op)
    return [_rewritten(stmt, found) for stmt in stmts]


def _rewritten(s: Stmt, found: _Products) -> Stmt:
    s = with_bodies(s, lambda body: [_rewritten(stmt, found) for stmt in body])
    if not isinstance(s, Nest) or not {"mul", "shift_right_logical"} <= _unsigned_operations(s):
        return s
    return s.mapped(found.pool.rewriter(found.replace))


def _unsigned_operations(nest: Nest) -> set[str]:
    return {
        node.info.primitive for node in nest.nodes() if node.kind == "op" and node.dtype == UINT32
    }


@dataclass(frozen=True)
class _Value:
    """An expression as a polynomial modulo 2**32.

    With `most`, it is exactly that, and no larger; None: it may have wrapped.
    """

    terms: Polynomial
    most: int | None


@dataclass(frozen=True)
class _Quotient:
    """source >> bits."""

    source: Expr
    bits: int


def _sum(a: Polynomial, b: Polynomial, factor: int = 1) -> Polynomial:
    found = dict(a)
    for m, c in b.items():
        found[m] = found.get(m, 0) + factor * c
    return {m: c for m, c in found.items() if c}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for (m, c), (n, dim) in itertools.product(a.items(), b.items()):
        found = _sum(found, {tuple(sorted((*m, *n))): c * dim})
    return found


class _Products:
    """Finds wide products in expressions of one pool."""

    def __init__(self, pool: Pool, op: Callable[..., Expr]):
        self.pool, self.op = pool, op
        self._values: dict[Expr, _Value] = {}
        self._unknowns: list[Expr | _Quotient] = []
        self._numbers: dict[Expr | _Quotient, int] = {}

    def replace(self, expr: Expr) -> Expr | None:
        """x * y or mulhi(x, y) for a sum that is it."""
        if expr.kind != "op" or expr.info.primitive != "add" or expr.dtype != UINT32:
            return None
        value = self._value(expr)
        low = {m: term % UINT32_VALUES for m, term in value.terms.items() if term % UINT32_VALUES}
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

    def _factors(self, monomial: Monomial, c: int) -> tuple[Expr, Expr] | None:
        """Two factors of a term, the first one no constant."""
        found = [self._unknowns[n] for n in monomial]
        if (
            any(isinstance(f, _Quotient) for f in found)
            or len(found) not in (1, 2)
            or len(found) == 2
            and c != 1
        ):
            return None
        return (found[0], found[1]) if len(found) == 2 else (found[0], self._number(c))

    def _number(self, n: int) -> Expr:
        return self.pool.make("const", UINT32, np.uint32(n))

    def _candidates(self, terms: Polynomial) -> Iterator[tuple[Expr, Expr]]:
        """Factors whose product's upper half a sum could be: it has the product of their upper halves; one may be a number."""
        halves = {
            m: [u for n in m if isinstance(u := self._unknowns[n], _Quotient) and u.bits == 16]
            for m in terms
        }
        for m, term in terms.items():
            if len(m) == 2 and len(halves[m]) == 2 and term == 1:
                yield halves[m][0].source, halves[m][1].source
            if len(m) == 1 and halves[m] and 0 < term < 1 << 16:
                lower = {
                    self._exact(halve[0].source).terms.get(m)
                    for n, halve in halves.items()
                    if n != m and halve
                }
                yield from (
                    (halves[m][0].source, self._number(term << 16 | low))
                    for low in lower
                    if low and 0 < low < 1 << 16
                )

    def _is_upper_half(self, product: Polynomial, high: Polynomial) -> bool:
        """Whether 0 <= product - 2**32 * high < 2**32, as a sum of remainders."""
        rest, most = _sum(product, high, -UINT32_VALUES), 0
        while True:
            quotients = [
                (q.source.height, m[0], q)
                for m, c in rest.items()
                if len(m) == 1
                and c < 0
                and isinstance(q := self._unknowns[m[0]], _Quotient)
                and c % (1 << q.bits) == 0
            ]
            if not quotients:
                return not rest and most < UINT32_VALUES
            _, n, q = max(quotients, key=lambda quotient: quotient[:2])
            times = -rest[n,] >> q.bits
            rest = _sum(rest, _sum(self._exact(q.source).terms, {(n,): 1 << q.bits}, -1), -times)
            most += times * ((1 << q.bits) - 1)

    # ---- expressions as polynomials

    def _exact(self, expr: Expr) -> _Value:
        value = self._value(expr)
        return self._unknown(expr, UINT32_VALUES - 1) if value.most is None else value

    def _unknown(self, u: Expr | _Quotient, most: int) -> _Value:
        if u not in self._numbers:
            self._numbers[u] = len(self._unknowns)
            self._unknowns.append(u)
        return _Value({(self._numbers[u],): 1}, most)

    def _value(self, expr: Expr) -> _Value:
        if expr not in self._values:
            value = self._made(expr)
            self._values[expr] = (
                value
                if len(value.terms) <= MOST_POLYNOMIAL_TERMS
                else self._unknown(expr, UINT32_VALUES - 1)
            )
        return self._values[expr]

    def _made(self, expr: Expr) -> _Value:
        if expr.kind == "const":
            n = int(expr.info)
            return _Value({(): n} if n else {}, n)
        if expr.kind != "op" or expr.dtype != UINT32:
            return self._unknown(expr, UINT32_VALUES - 1)
        match expr.info.primitive, [arg.kind == "const" for arg in expr.args]:
            case "add", _:
                affine, b = map(self._value, expr.args)
                return _within(_sum(affine.terms, b.terms), affine, b, lambda x, y: x + y)
            case "mul", _:
                affine, b = map(self._value, expr.args)
                return _within(_product(affine.terms, b.terms), affine, b, lambda x, y: x * y)
            case "shift_left", [_, True] if (k := int(expr.args[1].info)) < 32:
                affine = self._value(expr.args[0])
                return _within(
                    {m: term << k for m, term in affine.terms.items()},
                    affine,
                    affine,
                    lambda x, _: x << k,
                )
            case "shift_right_logical", [_, True] if (k := int(expr.args[1].info)) < 32:
                return self._shifted(expr.args[0], k)
            case "and", [_, True] if (mask := int(expr.args[1].info)) & (mask + 1) == 0:
                k, affine = mask.bit_length(), self._exact(expr.args[0])
                q = self._shifted(expr.args[0], k)
                return _Value(_sum(affine.terms, q.terms, -1 << k), min(affine.most, mask))
        return self._unknown(expr, UINT32_VALUES - 1)

    def _shifted(self, expr: Expr, k: int) -> _Value:
        affine = self._exact(expr)
        if affine.terms.keys() <= {()} or affine.most >> k == 0:
            n = affine.terms.get((), 0) >> k
            return _Value({(): n} if n else {}, n)
        return self._unknown(_Quotient(expr, k), affine.most >> k)


def _within(terms: Polynomial, a: _Value, b: _Value, largest: Callable[[int, int], int]) -> _Value:
    most = None if a.most is None or b.most is None else largest(a.most, b.most)
    return _Value(terms, most if most is not None and most < UINT32_VALUES else None)
