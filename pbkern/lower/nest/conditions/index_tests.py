"""Index tests of expressions -> their values, where the bounds of symbols decide them.

A padded or updated array is a select on index ranges. Inside a block most of these tests always
hold: with the bounds of loop dimensions and grid indices they fold away.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import as_affine
from pbkern.lower.nest.ir import (
    Const,
    Expr,
    For,
    Gather,
    IndexValue,
    InRange,
    Load,
    Nest,
    Op,
    Pool,
    Stmt,
    with_bodies,
)

BOOL = np.dtype(bool)
Bounds = Mapping[str, tuple[int, int]]  # symbol -> (smallest, largest)
Interval = tuple[int, int]
# The end of an interval that has none: no index of 32 bits is beyond it.
UNBOUNDED = 2**31 - 1

# comparison of a - b with zero -> (low, high): true where low <= a - b < high
COMPARISONS = {
    "lt": (-UNBOUNDED, 0),
    "le": (-UNBOUNDED, 1),
    "gt": (1, UNBOUNDED),
    "ge": (0, UNBOUNDED),
    "eq": (0, 1),
}


def _products(x: Interval, y: Interval) -> Interval:
    ends = [x_end * y_end for x_end in x for y_end in y]
    return min(ends), max(ends)


def _quotients(x: Interval, y: Interval) -> Interval | None:
    return (x[0] // y[1], x[1] // y[0]) if x[0] >= 0 and y[0] > 0 else None


def _remainders(x: Interval, y: Interval) -> Interval | None:
    return (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None


# Operation -> (smallest, largest) result of operands between theirs, None where that is not known.
INTERVALS: Mapping[str, Callable[..., Interval | None]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _products,
    "div": _quotients,
    "rem": _remainders,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "convert_element_type": lambda x: x,
}


def bounds_inside(stmt: Stmt, bounds: Bounds) -> Bounds:
    """Bounds of symbols inside a statement: a loop of a known number of turns bounds its counter."""
    if isinstance(stmt, For) and isinstance(stmt.trips, int):
        return {**bounds, stmt.counter: (0, max(stmt.trips - 1, 0))}
    return bounds


def with_nests_within(
    stmts: Sequence[Stmt],
    bounds: Bounds,
    change: Callable[[Nest, Bounds], Sequence[Stmt]],
    stays: Callable[[Stmt], bool] = lambda stmt: False,
) -> list[Stmt]:
    """The statements with others in the place of each nest, inner ones too but for those in statements that stay.

    change(nest, what is known around it) gives them.
    """
    out: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, Nest):
            out += change(stmt, bounds)
        elif stays(stmt):
            out.append(stmt)
        else:
            inner = bounds_inside(stmt, bounds)
            again = functools.partial(with_nests_within, bounds=inner, change=change, stays=stays)
            out.append(with_bodies(stmt, again))
    return out


def interval(affine: Affine, bounds: Bounds) -> tuple[int, int] | None:
    """(smallest, largest) value, or None if a symbol is unbounded."""
    low = high = affine.const
    for symbol, coefficient in affine.terms:
        if symbol not in bounds:
            return None
        ends = (coefficient * bounds[symbol][0], coefficient * bounds[symbol][1])
        low, high = low + min(ends), high + max(ends)
    return low, high


# ---------------------------------------------------------------- folding


def simplified(nest: Nest, pool: Pool, bounds: Bounds, assumed: Iterable[Expr] = ()) -> Nest:
    """The nest with its tests folded; `assumed` hold at all of its points."""
    points = {**bounds, **{dim: (0, max(size - 1, 0)) for dim, size in nest.dims.items()}}
    fold = Folder(
        pool, {**bounds, **{dim: (0, max(size - 1, 0)) for dim, size in nest.extents().items()}}
    )
    stored = Folder(pool, points)
    for test in assumed:
        fold.assume(test)
    nest = nest.mapped(fold)
    stores = [
        replace(store, guard=store.guard and not stored.inside(store.buf, store.index))
        for store in nest.stores
    ]
    stores = [
        store if store.mask is None or not _is(store.mask, True) else replace(store, mask=None)
        for store in stores
    ]
    return replace(nest, stores=tuple(stores))


def _moved(end: int, by: int) -> int:
    """The end of a range, which stays where it is none."""
    return end if abs(end) >= UNBOUNDED else end + by


def _holds(dtype: np.dtype, bounds: tuple[int, int]) -> bool:
    info = np.iinfo(dtype)
    return info.min <= bounds[0] and bounds[1] <= info.max


def _is(expr: Expr, value: bool) -> bool:
    return isinstance(expr, Const) and expr.dtype == BOOL and bool(expr.value) is value


class Folder:
    """Rewrites an expression with what is known about its symbols."""

    def __init__(self, pool: Pool, bounds: Bounds):
        self.pool, self.bounds = pool, bounds
        self._assumed: dict[Affine, tuple[int, int]] = {}  # what varies -> low <= it < high
        self._holding: set[Expr] = set()
        self._intervals: dict[Expr, Interval | None] = {}
        self._rewritten: dict[Expr, Expr] = {}

    def assume(self, test: Expr) -> None:
        """From now on, folds as is right wherever `test` holds."""
        self._holding.add(test)
        if isinstance(test, Op) and test.info.primitive == "and":
            for part in test.args:
                self.assume(part)
        elif isinstance(test, InRange):
            affine, low, high = test.affine, test.low, test.high
            before = self._assumed.get(affine.linear(), (-UNBOUNDED, UNBOUNDED))
            bounds = _moved(low, -affine.const), _moved(high, -affine.const)
            self._assumed[affine.linear()] = max(before[0], bounds[0]), min(before[1], bounds[1])
        self._rewritten = {}

    def __call__(self, expr: Expr) -> Expr:
        # A rewriter that stays would be a cycle, which only the garbage collector frees.
        return self.pool.rewriter(self._replace, self._rewritten)(expr)

    def inside(self, buf, index) -> bool:
        """Whether every index is certainly in the buffer."""
        for position, extent in zip(index, buf.shape):
            if position is not None and not _is(self._range(position, 0, extent), True):
                return False
        return True

    def _bool(self, value: bool) -> Expr:
        return self.pool.const(BOOL, np.bool_(value))

    def _replace(self, expr: Expr) -> Expr | None:
        if expr in self._holding and isinstance(expr, Op):
            return self._bool(True)
        if isinstance(expr, InRange):
            return self._range(expr.affine, expr.low, expr.high)
        if isinstance(expr, Load) and expr.guard and self.inside(expr.buf, expr.index):
            return self.pool.load(expr.dtype, expr.buf, expr.index, False)
        if isinstance(expr, Gather):
            return self._gather(expr)
        if not isinstance(expr, Op):
            return None
        name = expr.info.primitive
        if name in COMPARISONS and expr.args[0].dtype != BOOL:
            return self._comparison(name, *expr.args)
        if name in ("and", "or") and expr.dtype == BOOL:
            return self._logic(name, *expr.args)
        if name == "ne" and expr.args[0].dtype == BOOL:
            left, right = expr.args
            if isinstance(left, Const) and isinstance(right, Const):
                return self._bool(bool(left.value) is not bool(right.value))
        if name == "not" and expr.dtype == BOOL and isinstance(expr.args[0], Const):
            return self._bool(not expr.args[0].value)
        if name == "select_n" and expr.args[0].dtype == BOOL:
            return self._select(expr, *expr.args)
        if name in ("max", "min"):
            return self._extreme(name, *expr.args)
        if name == "convert_element_type":
            return self._convert(expr.args[0], expr.dtype)
        if name == "add":
            return self._sum(expr)
        return None

    def values_of(self, expr: Expr) -> Interval | None:
        """(smallest, largest) value of an integer expression that cannot have wrapped; None where it is not known."""
        if expr not in self._intervals:
            bounds = self._found_interval(expr) if expr.dtype.kind in "iu" else None
            self._intervals[expr] = (
                bounds if bounds is not None and _holds(expr.dtype, bounds) else None
            )
        return self._intervals[expr]

    def _found_interval(self, expr: Expr) -> Interval | None:
        if isinstance(expr, Const):
            return int(expr.value), int(expr.value)
        if isinstance(expr, IndexValue):
            return interval(expr.affine, self.bounds)
        rule = (
            INTERVALS.get(expr.info.primitive)
            if isinstance(expr, Op) and len(expr.args) <= 2
            else None
        )
        if rule is None:
            return int(np.iinfo(expr.dtype).min), int(np.iinfo(expr.dtype).max)
        parts = [self.values_of(arg) for arg in expr.args]
        return None if None in parts else rule(*parts)

    def _extreme(self, name: str, expr: Expr, y: Expr) -> Expr | None:
        x_range, y_range = self.values_of(expr), self.values_of(y)
        if x_range is None or y_range is None:
            return None
        larger, smaller = (expr, y) if name == "max" else (y, expr)
        if x_range[0] >= y_range[1]:
            return larger
        return smaller if y_range[0] >= x_range[1] else None

    def _convert(self, expr: Expr, dtype: np.dtype) -> Expr | None:
        if not isinstance(expr, IndexValue) or dtype.kind not in "iu":
            return None
        bounds = self.values_of(expr)
        if bounds is None or not _holds(dtype, bounds):
            return None
        return self.pool.index(dtype, expr.affine)

    def _sum(self, expr: Expr) -> Expr | None:
        """An index plus what can only be one number."""
        if self.values_of(expr) is None:
            return None
        for x, y in (expr.args, expr.args[::-1]):
            values = self.values_of(y)
            if isinstance(x, IndexValue) and values is not None and values[0] == values[1]:
                return self.pool.index(expr.dtype, x.affine + values[0])
        return None

    def _gather(self, expr: Gather) -> Expr | None:
        """Axes along which the index is affine and certainly inside are addressed by it; a load where all are."""
        buf, axes = expr.access
        args, left = iter(expr.args), list[Expr]()
        located: list[Affine | None] = []
        known: list[Affine] = []
        for axis, extent in zip(axes, buf.shape):
            if axis is None:
                arg = next(args)
                place = as_affine(arg)
                bounds = None if place is None else self.values_of(arg)
                if bounds is not None and bounds[0] >= 0 and bounds[1] < extent:
                    axis = place
                else:
                    left.append(arg)
            located.append(axis)
            known += () if axis is None else (axis,)
        if len(left) == len(expr.args):
            return None
        if left:
            return self.pool.gather(expr.dtype, buf, tuple(located), tuple(left))
        return self.pool.load(expr.dtype, buf, tuple(known), False)

    def _select(self, expr: Expr, test: Expr, *cases: Expr) -> Expr | None:
        if isinstance(test, Const):
            return cases[int(test.value)]
        return test if expr.dtype == BOOL and _is(cases[0], False) and _is(cases[1], True) else None

    def _range(self, affine: Affine, low: int, high: int) -> Expr:
        bounds = interval(affine, self.bounds) or (-UNBOUNDED, UNBOUNDED)
        start, end = self._assumed.get(affine.linear(), (-UNBOUNDED, UNBOUNDED))
        smallest, largest = (
            max(bounds[0], _moved(start, affine.const)),
            min(bounds[1], _moved(end, affine.const) - 1),
        )
        if low <= smallest and largest < high:
            return self._bool(True)
        if largest < low or smallest >= high:
            return self._bool(False)
        return self.pool.in_range(affine, low, high)

    def _comparison(self, name: str, expr: Expr, y: Expr) -> Expr | None:
        if expr.dtype.kind not in "iu":
            return None
        low, high = COMPARISONS[name]
        of_x, of_y = self.values_of(expr), self.values_of(y)
        if of_x is not None and of_y is not None:
            smallest, largest = of_x[0] - of_y[1], of_x[1] - of_y[0]
            if (low == -UNBOUNDED or low <= smallest) and (high == UNBOUNDED or largest < high):
                return self._bool(True)
            if (low != -UNBOUNDED and largest < low) or (high != UNBOUNDED and smallest >= high):
                return self._bool(False)
        lhs, rhs = as_affine(expr), as_affine(y)
        if lhs is None or rhs is None or expr.dtype.kind != "i" or expr.dtype.itemsize < 4:
            return None
        difference = lhs - rhs
        low = low if low == -UNBOUNDED else low - difference.const
        high = high if high == UNBOUNDED else high - difference.const
        return self._range(difference.linear(), max(low, -UNBOUNDED), min(high, UNBOUNDED))

    def _logic(self, name: str, expr: Expr, y: Expr) -> Expr | None:
        absorbing = name == "or"
        for decider, other in ((expr, y), (y, expr)):
            if _is(decider, absorbing):
                return self._bool(absorbing)
            if _is(decider, not absorbing):
                return other
        if (
            isinstance(expr, InRange)
            and isinstance(y, InRange)
            and name == "and"
            and expr.affine.linear() == y.affine.linear()
        ):
            # One interval from two, both measured from the same expression.
            base = expr.affine.linear()
            ends = [
                (
                    max(part.low - part.affine.const, -UNBOUNDED),
                    min(part.high - part.affine.const, UNBOUNDED),
                )
                for part in (expr, y)
            ]
            return self._range(base, max(end[0] for end in ends), min(end[1] for end in ends))
        return None
