"""ClosedJaxpr -> the same with sums over a product's columns turned into sums over the dimension that it contracts.

    sum_k(p[q, k] * dot(g, v)[q, k])  ->  sum_d(g[q, d] * dot(p, v)[q, d])        where dot(p, v) is known

Attention's gradient has such sums: each goes over a row of scores, and becomes one over a row of
the result. Two of the gradient's products disappear. Source: Dao et al. 2022, "FlashAttention",
section B.4.

Conversions between float32 and floats of 16 bits do not hide such sums: weights are rounded before they are multiplied,
and so are derivatives of rounded weights. The new sum is of derivatives that are not rounded. Elsewhere these are then not
rounded, either: the gradient of softmax is a difference of each of them and the sum, which is zero where a row has one key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.calls import has_calls
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import atoms, inner_of, primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace

# Types between which values are followed, rounded or not.
FOLLOWED = frozenset(("float32", "float16", "bfloat16"))
# Operations whose results have the factors of their operands.
FOLLOWED_THROUGH = frozenset(("mul", "div", "transpose", "convert_element_type"))


@dataclass(frozen=True)
class SumResults:
    """Rewrites jaxprs that hold products of exponentials and sums. Changes rounding."""

    times_shorter: float = threshold(
        2, "times fewer elements of the new sum, at least. Source: not recorded"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        if not primitive_names(closed) >= {"exp", "dot_general", "reduce_sum", "mul"}:
            return closed
        if not _sums_products(closed.jaxpr) and not has_calls(closed):
            return closed
        names = ["mul", "div", "transpose", "dot_general", "reduce_sum"]
        if not getattr(options, "rounds", False):
            names.append("convert_element_type")
        first = _Reassociation(self)
        rewritten = retrace(closed, {name: getattr(first, name) for name in names})
        if not first.rounded:
            return rewritten
        seen = _Reassociation(self, first.rounded)
        return retrace(closed, {name: getattr(seen, name) for name in names})


def _sums_products(jaxpr: jex.Jaxpr) -> bool:
    """Whether an element of a sum has a factor that is a result of a dot_general."""
    of_products: set[jex.Var] = set()
    for eqn in jaxpr.eqns:
        name, reads = eqn.primitive.name, not of_products.isdisjoint(atoms(eqn))
        if name == "reduce_sum" and reads:
            return True
        if name == "dot_general" or (name in FOLLOWED_THROUGH and reads):
            of_products.update(eqn.outvars)
    return any(_sums_products(inner.jaxpr) for inner in inner_of(jaxpr))


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
    """Remembers, by value: factors, products, and of which values others are transposes and conversions."""

    def __init__(self, limits: SumResults, unrounded: frozenset[int] = frozenset()) -> None:
        """`unrounded`: ids of conversions back to the type of a product, which give the product itself."""
        self.limits = limits
        self.unrounded = unrounded
        # Ids of such conversions of products that are reassociated.
        self.rounded: frozenset[int] = frozenset()
        self.notes = Notes()
        self.products: list[_Product] = []

    def _factors(self, x, shape) -> _Factors:
        if jnp.shape(x) != shape:
            return _Factors((), (x,))
        factors = self.notes.find("factors", x)
        return factors[0] if factors else _Factors((x,))

    def _origin(self, x) -> tuple[Any, tuple[int, ...]]:
        """(the value of which x is a transpose or a conversion, its dimension for each dimension of x)."""
        return self.notes.find("origin", x) or (x, tuple(range(x.ndim)))

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
        x, before = self._origin(operands[0])
        order = tuple(before[dim] for dim in eqn.params["permutation"])
        (result,) = self.notes.bound("origin", eqn, operands, x, order)
        conversion = self.notes.find("conversion", operands[0])
        return self.notes.note("conversion", result, *conversion) if conversion else [result]

    def convert_element_type(self, eqn, operands):
        types = {operands[0].dtype.name, np.dtype(eqn.params["new_dtype"]).name}
        if not types <= FOLLOWED:
            return None
        origin, order = self._origin(operands[0])
        if id(eqn) in self.unrounded:
            return [lax.transpose(origin, order)]
        (result,) = self.notes.bound("origin", eqn, operands, origin, order)
        if origin.dtype == result.dtype and origin is not operands[0]:
            self.notes.note("conversion", result, id(eqn))
        factors = self.notes.find("factors", operands[0])
        return self.notes.note("factors", result, *factors) if factors else [result]

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
        axes = eqn.params["axes"]
        if any(
            jnp.ndim(x) and any(x.shape[axis] != 1 for axis in axes)
            for x in (*factors[0].over, *factors[0].under)
        ):
            return None
        for p, y in (factors[0].whole, factors[0].whole[::-1]):
            conversion = self.notes.find("conversion", y) or ()
            y, order = self._origin(y)
            product = self.notes.find("product", y)
            for side in (0, 1) if product else ():
                total = self._over_results(p, product[0], side, order, axes)
                if total is not None:
                    self.rounded |= frozenset(conversion)
                    total = _scaled(total, factors[0], axes)
                    return [lax.convert_element_type(total, eqn.outvars[0].aval.dtype)]
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
                and _is_as_exact(known.result, product.result, p)
            ):
                dtype = jnp.float32 if p.dtype.name in FOLLOWED else p.dtype
                left, right = (
                    _as(lax.transpose(x, [labels.index(dim) for dim in order]), dtype)
                    for x, labels in ((self._unrounded(g), of_g), (known.result, of_known))
                )
                return lax.reduce_sum(
                    lax.mul(left, right), tuple(range(len(order) - len(contracted), len(order)))
                )
        return None

    def _unrounded(self, x):
        """The value before conversions, in the order of dimensions that it has now."""
        origin, order = self._origin(x)
        return lax.transpose(origin, order)

    def _labels_of(self, known: _Product, p, v, of_v: tuple) -> tuple | None:
        """Labels of the result of `known`, if it is a product of p and v with these labels; else None."""
        (origin, place), (values, place_of_v) = self._origin(p), self._origin(v)
        for side in (0, 1):
            x, order = self._origin(known.operands[side])
            y, order_of_y = self._origin(known.operands[1 - side])
            if x is not origin or y is not values:
                continue
            of_y = tuple(of_v[place_of_v.index(dim)] for dim in order_of_y)
            labels = dict(zip(known.labels[side], map(place.index, order))) | {
                y: label
                for y, label in zip(known.labels[1 - side], of_y)
                if not isinstance(label, int)
            }
            if tuple(labels.get(y) for y in known.labels[1 - side]) == of_y:
                return tuple(labels.get(y) for y in known.of_result)
        return None


def _has(labels: Sequence, wanted: Sequence) -> bool:
    """Whether an array has just these dimensions."""
    return len(labels) == len(wanted) and set(labels) == set(wanted)


def _is_as_exact(known, product, p) -> bool:
    """Whether a known product of p is rounded no more than the one that it takes the place of."""
    types = [x.dtype for x in (known, product, p)]
    if len(set(types)) == 1:
        return True
    return {dtype.name for dtype in types} <= FOLLOWED and (
        jnp.finfo(types[0]).nmant >= jnp.finfo(types[1]).nmant
    )


def _as(x, dtype):
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _scaled(x, factors: _Factors, axes: Sequence[int]):
    """A sum, times the factors that do not vary along its axes."""

    def without(y):
        return _as(lax.squeeze(y, axes), x.dtype) if jnp.ndim(y) else y

    for y in factors.over:
        x = lax.mul(x, without(y)) if jnp.ndim(y) else lax.mul(x, lax.full_like(x, y))
    for y in factors.under:
        x = lax.div(x, without(y)) if jnp.ndim(y) else lax.div(x, lax.full_like(x, y))
    return x
