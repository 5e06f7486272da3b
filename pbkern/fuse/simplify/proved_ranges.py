"""Checks of ranges that are known to hold are dropped, and those of indices that may be negative become simpler.

    in_range(iota + 1, 0, n)                                     ->  iota + 1
    j = in_range(i, -n, n); select_n(j < 0, j, j + n)            ->  in_range(select_n(i < 0, i, i + n), 0, n)

Bounds of integers follow from iotas, constants and checks through arithmetic, comparisons, and
whatever moves elements. Places that a program computes for itself, such as those of windows or of
diagonals, thereby stay as plain as they were. Where no index is negative, the addition of n is
dropped. A check of [0, n) takes one operation less than one of [-n, n), and code generation knows
that what passed it is an index (lower/nest/context.py).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.core.ops.views import VIEWS
from pbkern.dsl.primitives.in_range import in_range

from .driver import retrace

Bounds = tuple[int, int]  # the least and the greatest number that may occur
# Equations whose result holds elements of the first operand.
MOVES = (
    *VIEWS,
    "stop_gradient",
    "dynamic_slice",
    "reduce_max",
    "reduce_min",
    "cummax",
    "cummin",
)


def drop_proved_ranges(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    if "in_range" not in primitive_names(closed):
        return closed
    ranges = _Ranges()
    rules = {name: ranges.noted(rule) for name, rule in RULES.items()}
    rules |= {
        "in_range": ranges.checked,
        "select_n": ranges.selected,
        "lt": ranges.compared,
        "add": ranges.added,
    }
    return retrace(closed, rules)


class _Ranges:
    """Bounds of values while equations are bound again."""

    def __init__(self) -> None:
        self.notes = Notes()

    def of(self, x) -> Bounds | None:
        if isinstance(x, np.ndarray | np.generic | int) and not isinstance(x, jax.core.Tracer):
            x = np.asarray(x)
            return (int(x.min()), int(x.max())) if x.dtype.kind in "iub" and x.size else None
        bounds = self.notes.find("bounds", x)
        return bounds[0] if bounds else bounds_of_type(x.dtype)

    def noted(self, rule: Callable) -> Callable:
        def rewrite(eqn, operands):
            out = eqn.outvars[0].aval
            possible = bounds_of_type(getattr(out, "dtype", None))
            if possible is None:
                return None
            bounds, (low, high) = rule(eqn, [self.of(operand) for operand in operands]), possible
            if (
                bounds is None or bounds == possible or bounds[0] < low or bounds[1] > high
            ):  # it may wrap
                return None
            return self.notes.bound("bounds", eqn, operands, bounds)

        return rewrite

    def checked(self, eqn, operands):
        bounds, (low, high) = self.of(operands[0]), (eqn.params["low"], eqn.params["high"])
        within = bounds is not None and low <= bounds[0] and bounds[1] < high
        apart = bounds is not None and (bounds[1] < high or bounds[0] >= low)
        if within if low < high else apart:
            return [operands[0]]
        if low >= high:
            return None
        [checked] = self.notes.bound("bounds", eqn, operands, (low, high - 1))
        return (
            self.notes.note("signed index", checked, operands[0], high)
            if low == -high
            else [checked]
        )

    def compared(self, eqn, operands):
        """x < 0 is noted where x is an index that may be negative."""
        if self.notes.find("signed index", operands[0]) and self.of(operands[1]) == (0, 0):
            return self.notes.bound("negative", eqn, operands, operands[0])
        return self.noted(RULES["lt"])(eqn, operands)

    def added(self, eqn, operands):
        """x + n is noted where x is an index in [-n, n)."""
        index = self.notes.find("signed index", operands[0])
        if index and self.of(operands[1]) == (index[1], index[1]):
            return self.notes.bound("from the end", eqn, operands, operands[0])
        return self.noted(RULES["add"])(eqn, operands)

    def wrapped(self, which, cases) -> list | None:
        """The index of [0, n) that an index of [-n, n) stands for, checked as such.

        None where the choice is none between an index and index + n.
        """
        negative, from_end = (
            self.notes.find("negative", which),
            self.notes.find("from the end", cases[-1]),
        )
        if (
            not negative
            or not from_end
            or len(cases) != 2
            or not negative[0] is from_end[0] is cases[0]
            or (signed := self.notes.find("signed index", cases[0])) is None
        ):
            return None
        index, n = signed
        index_in_range = lax.select(
            lax.lt(index, lax.full_like(index, 0)), lax.add(index, lax.full_like(index, n)), index
        )
        return self.notes.note("bounds", in_range(index_in_range, 0, n), (0, n - 1))

    def selected(self, eqn, operands):
        """The case that is always chosen."""
        if wrapped := self.wrapped(operands[0], operands[1:]):
            return wrapped
        which = self.of(operands[0])
        if which is None or which[0] != which[1] or operands[1].shape != eqn.outvars[0].aval.shape:
            return self.noted(lambda eqn, of: _hull(eqn, of[1:]))(eqn, operands)
        return [operands[1 + which[0]]]


def bounds_of_type(dtype) -> Bounds | None:
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iub":
        return None
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def _iota(eqn, of) -> Bounds:
    return 0, max(eqn.params["shape"][eqn.params["dimension"]] - 1, 0)


def _hull(eqn, of) -> Bounds | None:
    return (
        None if None in of or not of else (min(low for low, _ in of), max(high for _, high in of))
    )


def _corners(function: Callable[[int, int], int]) -> Callable:
    """Bounds of a function that is monotonic in each of its two operands."""

    def rule(eqn, of) -> Bounds | None:
        if None in of:
            return None
        corners = [function(x, y) for x in of[0] for y in of[1]]
        return min(corners), max(corners)

    return rule


def _compared(function: Callable[[int, int], bool]) -> Callable:
    """0 or 1 where all elements compare alike: at the corners, and neither can be the other."""

    def rule(eqn, of) -> Bounds | None:
        if None in of:
            return None
        (x_low, x_high), (y_low, y_high) = of
        outcomes = {function(x, y) for x in (x_low, x_high) for y in (y_low, y_high)}
        apart = (
            x_high < y_low
            or y_high < x_low
            or x_low == x_high == y_low == y_high
            or function(0, 1) != function(1, 0)
        )
        return (int(min(outcomes)),) * 2 if len(outcomes) == 1 and apart else None

    return rule


def _both(eqn, of) -> Bounds | None:
    if eqn.outvars[0].aval.dtype != np.bool_:
        return None
    return (0, 0) if (0, 0) in of else (1, 1) if of == [(1, 1), (1, 1)] else None


def _either(eqn, of) -> Bounds | None:
    if eqn.outvars[0].aval.dtype != np.bool_:
        return None
    return (1, 1) if (1, 1) in of else (0, 0) if of == [(0, 0), (0, 0)] else None


def _opposite(eqn, of) -> Bounds | None:
    if eqn.outvars[0].aval.dtype != np.bool_ or of[0] is None:
        return None
    return 1 - of[0][1], 1 - of[0][0]


def _remainder(eqn, of) -> Bounds | None:
    """Has the sign of the first operand."""
    x, y = of
    if y is None or y[0] <= 0:
        return None
    low = 0 if x is not None and x[0] >= 0 else 1 - y[1]
    return low, y[1] - 1


def _quotient(eqn, of) -> Bounds | None:
    x, y = of
    if x is None or y is None or y[0] <= 0 or x[0] < 0:
        return None
    return x[0] // y[1], x[1] // y[0]


def _clamp(eqn, of) -> Bounds | None:
    low, _, high = of
    return None if low is None or high is None else (min(low[0], high[0]), max(low[1], high[1]))


RULES: dict[str, Callable] = {
    "iota": _iota,
    "convert_element_type": lambda eqn, of: of[0],
    **dict.fromkeys(MOVES, lambda eqn, of: of[0]),
    "concatenate": _hull,
    "pad": _hull,
    "dynamic_update_slice": lambda eqn, of: _hull(eqn, of[:2]),
    "add": _corners(lambda x, y: x + y),
    "sub": _corners(lambda x, y: x - y),
    "mul": _corners(lambda x, y: x * y),
    "max": _corners(max),
    "min": _corners(min),
    "neg": lambda eqn, of: of[0] and (-of[0][1], -of[0][0]),
    "lt": _compared(lambda x, y: x < y),
    "le": _compared(lambda x, y: x <= y),
    "gt": _compared(lambda x, y: x > y),
    "ge": _compared(lambda x, y: x >= y),
    "eq": _compared(lambda x, y: x == y),
    "ne": _compared(lambda x, y: x != y),
    "and": _both,
    "or": _either,
    "not": _opposite,
    "rem": _remainder,
    "div": _quotient,
    "clamp": _clamp,
    "argmax": lambda eqn, of: (0, max(eqn.invars[0].aval.shape[eqn.params["axes"][0]] - 1, 0)),
    "argmin": lambda eqn, of: (0, max(eqn.invars[0].aval.shape[eqn.params["axes"][0]] - 1, 0)),
}
