"""A nest -> one with more points, which store nothing, or add nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import BOOL, Expr, For, InRange, Load, Nest, Op, Pool

from .rename import renamed


def guarded(expr: Expr, pool: Pool) -> Expr:
    """The expression with loads that may lie outside of their buffers."""

    def guard(node: Expr) -> Expr | None:
        return pool.load(node.dtype, *node.access, True) if isinstance(node, Load) else None

    return pool.rewrite(expr, guard)


def grown(nest: Nest, sizes: Mapping[str, int], context: Any) -> Nest:
    """The nest with more points along dimensions that are not reduced; the new ones store nothing.

    nest [i<77]               grown(i: 128)      nest [i<128]
      y[i] = x[i] * 2.0            ->              y[i]? = x[i]? * 2.0  if (0 <= i < 77)
    """
    mask: Expr | None = None
    for dim, size in sizes.items():
        if size != nest.dims[dim]:
            inside = context.pool.in_range(Affine.symbol(dim), 0, nest.dims[dim])
            mask = inside if mask is None else context.op("and", BOOL, mask, inside)
    if mask is None:
        return nest
    larger = nest.mapped(lambda expr: guarded(expr, context.pool))
    stores = tuple(
        replace(
            store,
            guard=True,
            mask=mask if store.mask is None else context.op("and", BOOL, store.mask, mask),
        )
        for store in larger.stores
    )
    return replace(larger, dims={**nest.dims, **sizes}, stores=stores)


def in_steps(nest: Nest, dim: str, size: int, context: Any) -> For:
    """A loop over equal parts of a reduced dimension; what lies behind its end adds zeros.

        nest [k<100*]                          for %o < 4:
          acc0 dot= a[k], b[k]                   nest [k<32*]
          c[0] = c[0] + acc0  (after)    ->        acc0 dot= (a[32*%o + k]? if 0 <= 32*%o + k < 100 else 0.0), ...
                                                   c[0] = c[0] + acc0  (after)

    Legal for sums and sums of products that the nest adds to a buffer.
    """
    counter = context.names("%o")
    place = Affine.symbol(counter, size) + Affine.symbol(dim)
    inside = context.pool.in_range(place, 0, nest.dims[dim])
    part = renamed(nest, {dim: place}, {**nest.dims, dim: size}, context.pool)

    def term(expr: Expr) -> Expr:
        zero = context.const(0, expr.dtype)
        return context.select(inside, guarded(expr, context.pool), zero)

    reductions = tuple(reduction.mapped(term) for reduction in part.reductions)
    trips = -(-nest.dims[dim] // size)
    return For(counter, trips, (replace(part, reductions=reductions),))


def zero_filled(expr: Expr, ranges: Mapping[str, tuple[int, int]], context: Any) -> Expr:
    """The expression with zeros in place of what guarded loads find outside of their buffers.

        a[i, k]?  with k<32 of an array of 8 x 40      ->      (a[i, k]? if (0 <= i < 8) else 0.0)

    `ranges`: smallest and largest value of symbols at which the expression is asked for. Tests that it makes itself are not
    made again.
    """
    given = {node.args[0] for node in _selects(expr) if isinstance(node.args[0], InRange)}

    def may_be_outside(place: Affine, size: int) -> bool:
        low = high = place.const
        for symbol, coefficient in place.terms:
            if symbol not in ranges:
                return True
            ends = [coefficient * end for end in ranges[symbol]]
            low, high = low + min(ends), high + max(ends)
        return low < 0 or high >= size

    def filled(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or not node.guard:
            return None
        value: Expr = node
        for place, size in zip(node.index, node.buf.shape):
            test = context.pool.in_range(place, 0, size)
            if test not in given and may_be_outside(place, size):
                value = context.select(test, value, context.const(0, node.dtype))
        return value

    return context.pool.rewrite(expr, filled)


def _selects(expr: Expr) -> list[Op]:
    """The selects that an expression is, one inside the other."""
    selects: list[Op] = []
    while isinstance(expr, Op) and expr.info.primitive == "select_n":
        selects.append(expr)
        expr = expr.args[-1]
    return selects
