"""ClosedJaxpr -> the same with sums over a product's columns turned into sums over the dimension that it contracts.

    sum_k(p[q, k] * dot(g, v)[q, k])  ->  sum_d(g[q, d] * dot(p, v)[q, d])        where dot(p, v) is known

Attention's gradient has such sums: each goes over a row of scores, and becomes one over a row of
the result. Two of the gradient's products disappear. Source: Dao et al. 2022, "FlashAttention",
section B.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs import primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace
from pbkern.fuse.simplify.facts import Notes


@dataclass(frozen=True)
class SumResults:
    """Rewrites jaxprs that hold products of exponentials and sums. Changes rounding."""

    times_shorter: float = threshold(
        2, "times fewer elements of the new sum, at least. Source: not recorded"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        if not primitive_names(closed) >= {"exp", "dot_general", "reduce_sum", "mul"}:
            return closed
        seen = _Reassociation(self)
        names = ("mul", "div", "transpose", "dot_general", "reduce_sum")
        return retrace(closed, {name: getattr(seen, name) for name in names})


@dataclass(frozen=True)
class _Product:
    """A dot_general: its operands, and a label per dimension of operands and result.

    Dimensions that are contracted with each other share a label, and so do batch dimensions and the
    result's.
    """

    operands: tuple
    labels: tuple[tuple, tuple]
    result: jax.Array
    of_result: tuple

    @classmethod
    def of(cls, eqn, operands, result) -> _Product:
        contracted, batch = eqn.params["dimension_numbers"]
        labels = [
            [(side, axis) for axis in range(operand.ndim)] for side, operand in enumerate(operands)
        ]
        for one, other in (*zip(*contracted), *zip(*batch)):
            labels[1][other] = (0, one)
        free = [
            [
                x
                for axis, x in enumerate(labels[side])
                if axis not in (*contracted[side], *batch[side])
            ]
            for side in (0, 1)
        ]
        return cls(
            tuple(operands),
            (tuple(labels[0]), tuple(labels[1])),
            result,
            (*((0, dim) for dim in batch[0]), *free[0], *free[1]),
        )


@dataclass(frozen=True)
class _Factors:
    """A value as a quotient of products: of whole arrays, and of arrays that repeat along dimensions or of numbers."""

    whole: tuple
    over: tuple = ()
    under: tuple = ()


class _Reassociation:
    """Remembers, by value: factors, products, transposes."""

    def __init__(self, limits: SumResults) -> None:
        self.limits = limits
        self.notes = Notes()
        self.products: list[_Product] = []

    def _factors(self, x, shape) -> _Factors:
        if jnp.shape(x) != shape:
            return _Factors((), (x,))
        factors = self.notes.find("factors", x)
        return factors[0] if factors else _Factors((x,))

    def mul(self, eqn, operands):
        shape = eqn.outvars[0].aval.shape
        left, right = (self._factors(operand, shape) for operand in operands)
        product = _Factors(
            left.whole + right.whole, left.over + right.over, left.under + right.under
        )
        return (
            self.notes.bound("factors", eqn, operands, product)
            if 0 < len(product.whole) <= 2
            else None
        )

    def div(self, eqn, operands):
        shape = eqn.outvars[0].aval.shape
        factors, divisor = self._factors(operands[0], shape), operands[1]
        if jnp.shape(divisor) == shape or not factors.whole:
            return None
        return self.notes.bound(
            "factors",
            eqn,
            operands,
            _Factors(factors.whole, factors.over, (*factors.under, divisor)),
        )

    def transpose(self, eqn, operands):
        order = eqn.params["permutation"]
        x, before = self.notes.find("transposed", operands[0]) or (
            operands[0],
            range(operands[0].ndim),
        )
        return self.notes.bound("transposed", eqn, operands, x, tuple(before[dim] for dim in order))

    def dot_general(self, eqn, operands):
        result = eqn.primitive.bind(*operands, **eqn.params)
        product = _Product.of(eqn, operands, result)
        self.products.append(product)
        return self.notes.note("product", result, product)

    def reduce_sum(self, eqn, operands):
        """The sum of p times a dot_general, if a dot_general of p is known."""
        factors = self.notes.find("factors", operands[0])
        if (
            factors is None
            or len(factors[0].whole) != 2
            or not jnp.issubdtype(operands[0].dtype, jnp.floating)
        ):
            return None
        axes, shape = eqn.params["axes"], operands[0].shape
        if any(
            jnp.ndim(x) and any(x.shape[axis] != 1 for axis in axes)
            for x in (*factors[0].over, *factors[0].under)
        ):
            return None
        for p, y in (factors[0].whole, factors[0].whole[::-1]):
            y, order = self.notes.find("transposed", y) or (y, range(len(shape)))
            product = self.notes.find("product", y)
            for side in (0, 1) if product else ():
                total = self._over_results(p, product[0], side, order, axes)
                if total is not None:
                    return [_scaled(total, factors[0], axes)]
        return None

    def _over_results(
        self, p, product: _Product, side: int, order: Sequence[int], axes: Sequence[int]
    ):
        """sum(p * y) over axes, for a transpose y of `product`, by a known product with its operand on that side; else None."""
        v, g = product.operands[side], product.operands[1 - side]
        place = {
            product.of_result[axis]: n for n, axis in enumerate(order)
        }  # label -> dimension of p
        of_v = tuple(place.get(x, x) for x in product.labels[side])
        of_g = tuple(place.get(x, x) for x in product.labels[1 - side])
        contracted = [x for x in of_v if not isinstance(x, int)]
        terms = math.prod(v.shape[of_v.index(x)] for x in contracted)
        shorter = self.limits.times_shorter * terms <= math.prod(p.shape[axis] for axis in axes)
        order = [*(axis for axis in range(p.ndim) if axis not in axes), *contracted]
        if not shorter or not set(axes) <= set(of_v) or not _has(of_g, order):
            return None
        for known in self.products:
            of_known = self._labels_of(known, p, v, of_v)
            if (
                of_known is not None
                and _has(of_known, order)
                and known.result.dtype == g.dtype == p.dtype
            ):
                left, right = (
                    lax.transpose(x, [labels.index(dim) for dim in order])
                    for x, labels in ((g, of_g), (known.result, of_known))
                )
                return lax.reduce_sum(
                    lax.mul(left, right), tuple(range(len(order) - len(contracted), len(order)))
                )
        return None

    def _labels_of(self, known: _Product, p, v, of_v: tuple) -> tuple | None:
        """Labels of the result of `known`, if it is a product of p and v with these labels; else None."""
        for side in (0, 1):
            x, order = self.notes.find("transposed", known.operands[side]) or (
                known.operands[side],
                range(p.ndim),
            )
            if x is not p or known.operands[1 - side] is not v:
                continue
            labels = dict(zip(known.labels[side], order)) | {
                x: label
                for x, label in zip(known.labels[1 - side], of_v)
                if not isinstance(label, int)
            }
            if tuple(labels.get(x) for x in known.labels[1 - side]) == of_v:
                return tuple(labels.get(x) for x in known.of_result)
        return None


def _has(labels: Sequence, wanted: Sequence) -> bool:
    """Whether an array has just these dimensions."""
    return len(labels) == len(wanted) and set(labels) == set(wanted)


def _scaled(x, factors: _Factors, axes: Sequence[int]):
    """A sum, times the factors that do not vary along its axes."""

    def without(y):
        return lax.squeeze(y, axes) if jnp.ndim(y) else y

    for y in factors.over:
        x = lax.mul(x, without(y)) if jnp.ndim(y) else lax.mul(x, lax.full_like(x, y))
    for y in factors.under:
        x = lax.div(x, without(y)) if jnp.ndim(y) else lax.div(x, lax.full_like(x, y))
    return x
