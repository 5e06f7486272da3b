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
from pbkern.dsl.interpret import NUMPY_RULES
from pbkern.lower.nest.index_tests import Folder, interval
from pbkern.lower.nest.ir import Expr, nodes

from .values import Lazy, Literal, Value

# Every place that wants a known scalar computes it: taller ones are stored.
MAX_HEIGHT = 24
# Grid indices and counters that are tried.
MOST_POINTS = 1 << 14


class _Undefined(Exception):
    """A quotient by zero, a shift by too much."""


def _quotient(p, a, b):
    """Rounded toward zero, as XLA does."""
    if np.any(np.equal(b, 0)):
        raise _Undefined
    return np.abs(a) // np.abs(b) * np.where(np.less(a, 0) == np.less(b, 0), 1, -1)


def _shift(f):
    def shifted(p, a, b):
        if np.any(np.less(b, 0)) or np.any(np.greater_equal(b, 8 * np.asarray(a).dtype.itemsize)):
            raise _Undefined
        return f(a, b)

    return shifted


RULES = NUMPY_RULES | {
    "div": _quotient,
    "rem": lambda p, a, b: a - _quotient(p, a, b) * b,
    "sign": lambda p, a: np.sign(a),
    "clamp": lambda p, low, x, high: np.minimum(np.maximum(x, low), high),
    "shift_left": _shift(np.left_shift),
    "shift_right_arithmetic": _shift(np.right_shift),
    "convert_element_type": lambda p, a: a,
}


def known(builder, v: Value) -> Expr | None:
    """The value of a scalar as an expression without loads, None where it is not known."""
    if isinstance(v, Literal):
        return v.at(builder.pool, (), False)
    if isinstance(v, Lazy) and v.shape == () and not v.operands and v.index_only:
        return v.combine(builder.pool, (), [])
    return None


def simplified(builder, value: Lazy) -> Value:
    """A scalar without operands, if all of those are known; a constant where it is one."""
    operands = [known(builder, v) for v in value.operands]
    if any(e is None or e.dtype.kind not in "biu" for e in operands):
        return value
    e = Folder(builder.pool, builder.bounds)(value.combine(builder.pool, (), operands))
    if e.kind == "const":
        return Literal((), value.dtype, e.info)
    if e.kind == "op" and (e.dtype == np.bool_ or all(a.kind == "const" for a in e.args)):
        found = bounds_of(builder, e)
        if found is not None and found[0] == found[1]:
            return Literal((), value.dtype, value.dtype.type(found[0]))
    if e.height > MAX_HEIGHT:
        return value
    return Lazy((), value.dtype, (), lambda ix: (), lambda pool, ix, xs: e, index_only=True)


def known_index(builder, v: Value, clamp: int | None) -> Affine | None:
    """A known integer scalar as an affine expression; None where it is none or may be outside [0, clamp]."""
    e = known(builder, v)
    if e is None or e.kind not in ("const", "index"):
        return None
    if e.kind == "const":
        n = int(e.info)
        return Affine((), n if clamp is None else min(max(n, 0), clamp))
    found = None if clamp is None else interval(e.info, builder.bounds)
    return (
        e.info
        if clamp is None or found is not None and found[0] >= 0 and found[1] <= clamp
        else None
    )


def known_bounds(builder, v: Value, clamp: int) -> tuple[int, int]:
    """(smallest, largest) value of an integer scalar, kept in [0, clamp]."""
    e = known(builder, v)
    low, high = (None if e is None else bounds_of(builder, e)) or (0, clamp)
    return min(max(low, 0), clamp), min(max(high, 0), clamp)


def bounds_of(builder, e: Expr) -> tuple[int, int] | None:
    """(smallest, largest) value of an expression without loads, over all grid indices and counters; None if not known."""
    if e.kind == "index":
        return interval(e.info, builder.bounds)
    ranges = [builder.bounds.get(s) for s in sorted(e.symbols)]
    if None in ranges or math.prod(high - low + 1 for low, high in ranges) > MOST_POINTS:
        return None
    axes = np.meshgrid(*(np.arange(low, high + 1) for low, high in ranges), indexing="ij")
    found = values_at(e, dict(zip(sorted(e.symbols), axes)))
    return None if found is None or not found.size else (int(found.min()), int(found.max()))


def values_at(e: Expr, symbols: dict[str, np.ndarray]) -> np.ndarray | None:
    """Values of an expression of integers at all points of `symbols`; None if it loads, or is not defined at one."""
    try:
        return _values(e, symbols)
    except _Undefined:
        return None


def _values(e: Expr, symbols: dict[str, np.ndarray]) -> np.ndarray | None:
    made: dict[int, np.ndarray] = {}
    for x in nodes([e]):
        args = [made[id(a)] for a in x.args]
        if x.kind == "const":
            found = x.info
        elif x.kind in ("index", "range"):
            a = x.info if x.kind == "index" else x.info[0]
            found = sum((symbols[s] * c for s, c in a.terms), np.int64(a.const))
            found = found if x.kind == "index" else (x.info[1] <= found) & (found < x.info[2])
        elif x.kind == "op" and x.info.primitive in RULES:
            with np.errstate(over="ignore"):
                found = RULES[x.info.primitive](x.info.params, *args)
        else:
            return None
        made[id(x)] = np.asarray(found).astype(x.dtype)
    return made[id(e)]
