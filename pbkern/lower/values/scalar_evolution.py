"""Integer and bool scalars that follow from constants, grid indices and loop counters.

They need no memory: branches by constants are taken while the body is built, loops of a constant
number of turns have it, and starts of slices stay affine in grid indices and counters. What is not
affine, such as the quotients and remainders by which kernels order their blocks, is bounded by
trying all grid indices and counters where they are few.
"""

from __future__ import annotations

import math

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.lower.nest.conditions.index_tests import Folder, interval
from pbkern.lower.nest.ir import Const, Expr, IndexValue, InRange, Op, nodes

from .values import Lazy, Literal, Value

# Every place that wants a known scalar computes it: taller ones are stored.
MOST_SCALAR_HEIGHT = 24
# Grid indices and counters that are tried.
MOST_TRIED_POINTS = 1 << 14


def known(builder, value: Value) -> Expr | None:
    """The value of a scalar as an expression without loads, None where it is not known."""
    if isinstance(value, Literal):
        return value.at(builder.pool, (), False)
    if isinstance(value, Lazy) and value.shape == () and not value.operands and value.index_only:
        return value.combine(builder.pool, (), [])
    return None


def simplified(builder, value: Lazy) -> Value:
    """A scalar without operands, if all of those are known; a constant where it is one."""
    operands: list[Expr] = []
    for operand in value.operands:
        scalar = known(builder, operand)
        if scalar is None or scalar.dtype.kind not in "biu":
            return value
        operands.append(scalar)
    expr = Folder(builder.pool, builder.bounds)(value.combine(builder.pool, (), operands))
    if isinstance(expr, Const):
        return Literal((), value.dtype, expr.value)
    if isinstance(expr, Op) and (
        expr.dtype == np.bool_ or all(isinstance(arg, Const) for arg in expr.args)
    ):
        bounds = bounds_of(builder, expr)
        if bounds is not None and bounds[0] == bounds[1]:
            return Literal((), value.dtype, value.dtype.type(bounds[0]))
    if expr.height > MOST_SCALAR_HEIGHT:
        return value
    return Lazy((), value.dtype, (), lambda ix: (), lambda pool, ix, xs: expr, index_only=True)


def known_index(builder, value: Value, clamp: int | None) -> Affine | None:
    """A known integer scalar as an affine expression; None where it is none or may be outside [0, clamp]."""
    expr = known(builder, value)
    if expr is None or not isinstance(expr, Const | IndexValue):
        return None
    if isinstance(expr, Const):
        constant = int(expr.value)
        return Affine((), constant if clamp is None else min(max(constant, 0), clamp))
    bounds = None if clamp is None else interval(expr.affine, builder.bounds)
    return (
        expr.affine
        if clamp is None or (bounds is not None and bounds[0] >= 0 and bounds[1] <= clamp)
        else None
    )


def known_bounds(builder, value: Value, clamp: int) -> tuple[int, int]:
    """(smallest, largest) value of an integer scalar, kept in [0, clamp]."""
    expr = known(builder, value)
    low, high = (None if expr is None else bounds_of(builder, expr)) or (0, clamp)
    return min(max(low, 0), clamp), min(max(high, 0), clamp)


def bounds_of(builder, expr: Expr) -> tuple[int, int] | None:
    """(smallest, largest) value of an expression without loads, over all grid indices and counters; None if not known."""
    if isinstance(expr, IndexValue):
        return interval(expr.affine, builder.bounds)
    ranges = [builder.bounds.get(symbol) for symbol in sorted(expr.symbols)]
    if None in ranges or math.prod(high - low + 1 for low, high in ranges) > MOST_TRIED_POINTS:
        return None
    axes = np.meshgrid(*(np.arange(low, high + 1) for low, high in ranges), indexing="ij")
    values = values_at(expr, dict(zip(sorted(expr.symbols), axes)))
    return None if values is None or not values.size else (int(values.min()), int(values.max()))


def _is_known(primitive: str) -> bool:
    """Whether values may be computed before the kernel runs: the same as it computes, and without a report."""
    row = ELEMENTWISE.get(primitive)
    return row is not None and row.meaning is not None and row.is_exact and not row.reports


def values_at(expr: Expr, symbols: dict[str, np.ndarray]) -> np.ndarray | None:
    """Values of an expression of integers at all points of `symbols`; None if it loads."""
    values: dict[int, np.ndarray] = {}
    for node in nodes([expr]):
        args = [values[id(arg)] for arg in node.args]
        value: np.ndarray | np.generic
        if isinstance(node, Const):
            value = node.value
        elif isinstance(node, IndexValue | InRange):
            affine = node.affine
            place = sum(
                (symbols[symbol] * coeff for symbol, coeff in affine.terms), np.int64(affine.const)
            )
            value = place
            if isinstance(node, InRange):
                value = (node.low <= place) & (place < node.high)
        elif isinstance(node, Op) and _is_known(node.info.primitive):
            info = node.info
            value = ELEMENTWISE[info.primitive].computed(args, info.params, info.out_dtype)
        else:
            return None
        values[id(node)] = np.asarray(value).astype(node.dtype)
    return values[id(expr)]
