"""Contractions of complex arrays as contractions of real ones.

Each number of w, the larger operand, is read once, with its parts interleaved as in memory; o is
rearranged. Where w has its contracted dimensions last, they and the parts are contracted together,
with a table of four numbers for each number of o:

    [w_re w_im] [[o_re o_im], [-o_im o_re]] = [w_re o_re - w_im o_im, w_re o_im + w_im o_re]

Else, where sums are long and o has few rows, these are doubled, and the four products of parts are
combined afterwards:

    [[o_re], [o_im]] [w_re w_im] = [[o_re w_re, o_re w_im], [o_im w_re, o_im w_im]]

Otherwise there are four contractions. Three would do, but then a small part has the error of a
large one. A scalar product is a sum of products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jax import lax

from pbkern.core.lazy_dataclass import dataclass

from . import arithmetic
from .arithmetic import Complex, Part
from .interleaved import deinterleave, interleave

Contract = Callable  # (real lhs, real rhs, dimension numbers) -> real result, as lax.dot_general


@dataclass(frozen=True)
class ComplexOperand:
    """A complex operand with its dimensions: batch, free, contracted."""

    value: Complex
    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracted: tuple[int, ...]

    @classmethod
    def of(cls, x: Complex, batch: Sequence[int], contracted: Sequence[int]) -> ComplexOperand:
        used = {*batch, *contracted}
        free = tuple(axis for axis in range(np.ndim(x.some)) if axis not in used)
        return cls(x, tuple(batch), free, tuple(contracted))

    def extents(self, dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(np.shape(self.value.some)[dim] for dim in dims)

    def count(self, dims: Sequence[int]) -> int:
        return math.prod(self.extents(dims))

    @property
    def preference(self) -> tuple[int, bool]:
        """The operand to leave as it is: the larger one; of equal ones, the one with its contracted dimensions last."""
        return math.prod(np.shape(self.value.some)), self.contracts_last

    @property
    def contracts_last(self) -> bool:
        return _are_last(self.contracted, self.value)

    def arranged(self, x, dims: Sequence[int], *shape: int):
        """real[*batch, *shape] of x, which has this operand's dimensions and maybe its parts; `dims` follow batch."""
        order = (*self.batch, *dims, *range(np.ndim(self.value.some), np.ndim(x)))
        return lax.reshape(lax.transpose(x, order), (*self.extents(self.batch), *shape))


def _are_last(dims: Sequence[int], x: Complex) -> bool:
    rank = np.ndim(x.some)
    return set(dims) == set(range(rank - len(dims), rank))


def contract(
    x: Complex, y: Complex, dimension_numbers, real_contract: Contract, terms_per_row: float
) -> Complex:
    """dot_general of complex numbers by `real_contract`, a dot_general of real ones.

    Rows of o are doubled where each sums at least `terms_per_row` times as many terms as there are rows.
    """
    (xc, yc), (xb, yb) = dimension_numbers
    in_order_of_y = _are_last(yc, y) and not _are_last(xc, x)
    pairs = sorted(zip(xc, yc), key=lambda pair: pair[in_order_of_y])
    lhs, rhs = (
        ComplexOperand.of(x, xb, [i for i, _ in pairs]),
        ComplexOperand.of(y, yb, [j for _, j in pairs]),
    )
    if not lhs.free and not rhs.free:
        return _sum_of_products(lhs, rhs)
    w, o = (rhs, lhs) if rhs.preference > lhs.preference else (lhs, rhs)
    if any(part is None for part in (x.re, x.im, y.re, y.im)):
        return _of_parts(x, y, lambda left, right: real_contract(left, right, dimension_numbers))
    if w.contracts_last:
        product = _with_table(w, o, real_contract)
        return deinterleave(_transposed(product, w, o) if w is rhs else product)
    if terms_per_row * o.count(o.free) <= o.count(o.contracted):
        parts = _with_rows(w, o, real_contract)
        return Complex(*(_transposed(part, o, w) if w is lhs else part for part in parts))
    return _of_parts(x, y, lambda left, right: real_contract(left, right, dimension_numbers))


def _of_parts(x: Complex, y: Complex, product: Callable) -> Complex:
    """Products of the parts that are not None."""

    def of(left, right):
        return None if left is None or right is None else product(left, right)

    return Complex(
        arithmetic.minus(of(x.re, y.re), of(x.im, y.im)),
        arithmetic.plus(of(x.re, y.im), of(x.im, y.re)),
    )


def _sum_of_products(x: ComplexOperand, y: ComplexOperand) -> Complex:
    axis = len(x.batch)

    def aligned(z: ComplexOperand) -> Complex:
        return Complex(
            *(
                None if part is None else z.arranged(part, z.contracted, *z.extents(z.contracted))
                for part in (z.value.re, z.value.im)
            )
        )

    product = arithmetic.mul(aligned(x), aligned(y))
    axes = tuple(range(axis, axis + len(x.contracted)))

    def summed(part: Part | None) -> Part | None:
        return None if part is None else lax.reduce_sum(part, axes)

    return Complex(summed(product.re), summed(product.im))


def _transposed(x, first: ComplexOperand, second: ComplexOperand):
    """[*batch, *free of second, *free of first, ...] of [*batch, *free of first, *free of second, ...]."""
    b, m = len(first.batch), len(first.free)
    rest = b + m + len(second.free)
    return lax.transpose(
        x, (*range(b), *range(b + m, rest), *range(b, b + m), *range(rest, np.ndim(x)))
    )


def _with_table(w: ComplexOperand, o: ComplexOperand, real_contract: Contract):
    """real[*batch, *free of w, *free of o, 2]."""
    b, k, m, n = len(w.batch), w.count(w.contracted), w.count(w.free), o.count(o.free)
    rows = [
        o.arranged(interleave(z), (*o.contracted, *o.free), k, 1, 2 * n)
        for z in (o.value, arithmetic.times_i(o.value))
    ]
    table = lax.reshape(lax.concatenate(rows, b + 1), (*o.extents(o.batch), 2 * k, 2 * n))
    lhs = w.arranged(interleave(w.value), (*w.free, *w.contracted), m, 2 * k)
    product = real_contract(lhs, table, (((b + 1,), (b,)), (tuple(range(b)),) * 2))
    return lax.reshape(product, (*w.extents(w.batch), *w.extents(w.free), *o.extents(o.free), 2))


def _with_rows(w: ComplexOperand, o: ComplexOperand, real_contract: Contract) -> tuple:
    """(re, im), both real[*batch, *free of o, *free of w]."""
    b, k, m, n = len(w.batch), w.count(w.contracted), w.count(w.free), o.count(o.free)
    batch = w.extents(w.batch)
    parts = [o.arranged(part, (*o.free, *o.contracted), n, 1, k) for part in o.value.parts]
    rows = lax.reshape(lax.concatenate(parts, b + 1), (*batch, 2 * n, k))
    rhs = w.arranged(interleave(w.value), (*w.contracted, *w.free), k, 2 * m)
    products = lax.reshape(
        real_contract(rows, rhs, (((b + 1,), (b,)), (tuple(range(b)),) * 2)), (*batch, n, 2, m, 2)
    )

    def product(of_o: int, of_w: int):
        one = lax.index_in_dim(
            lax.index_in_dim(products, of_w, b + 3, keepdims=False), of_o, b + 1, keepdims=False
        )
        return lax.reshape(one, (*batch, *o.extents(o.free), *w.extents(w.free)))

    return product(0, 0) - product(1, 1), product(0, 1) + product(1, 0)
