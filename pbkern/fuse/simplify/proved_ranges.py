"""Checks of ranges that are known to hold are dropped: in_range(iota + 1, 0, n) -> iota + 1.

Bounds of integers follow from iotas and constants through arithmetic, and through whatever moves elements. Places that a
program computes for itself, such as those of windows or of diagonals, thereby stay as plain as they were.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.extend import core as jex

from pbkern.core.jaxprs import equations

from .driver import retrace
from .facts import Notes

Bounds = tuple[int, int]  # the least and the greatest number that may occur
# Equations whose result holds elements of the first operand.
MOVES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev", "copy", "stop_gradient",
         "dynamic_slice", "in_range", "reduce_max", "reduce_min", "cummax", "cummin")  # fmt: skip


def drop_proved_ranges(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    if not any(e.primitive.name == "in_range" for e in equations(closed.jaxpr)):
        return closed
    ranges = _Ranges()
    rules = {name: ranges.noted(rule) for name, rule in RULES.items()}
    return retrace(closed, rules | {"in_range": ranges.checked})


class _Ranges:
    """Bounds of values while equations are bound again."""

    def __init__(self) -> None:
        self.notes = Notes()

    def of(self, x) -> Bounds | None:
        if isinstance(x, np.ndarray | np.generic | int) and not isinstance(x, jax.core.Tracer):
            x = np.asarray(x)
            return (int(x.min()), int(x.max())) if x.dtype.kind in "iub" and x.size else None
        found = self.notes.find("bounds", x)
        return found[0] if found else None

    def noted(self, rule: Callable) -> Callable:
        def rewrite(eqn, operands):
            out = eqn.outvars[0].aval
            if getattr(out, "dtype", None) is None or not jax.numpy.issubdtype(out.dtype, np.integer):
                return None
            bounds = rule(eqn, [self.of(x) for x in operands])
            info = np.iinfo(out.dtype)
            if bounds is None or bounds[0] < info.min or bounds[1] > info.max:  # it may wrap
                return None
            return self.notes.bound("bounds", eqn, operands, bounds)

        return rewrite

    def checked(self, eqn, operands):
        bounds, (low, high) = self.of(operands[0]), (eqn.params["low"], eqn.params["high"])
        if bounds is None:
            return None
        inside = low <= bounds[0] and bounds[1] < high if low < high else bounds[1] < high or bounds[0] >= low
        return [operands[0]] if inside else None


def _iota(eqn, of) -> Bounds:
    return 0, max(eqn.params["shape"][eqn.params["dimension"]] - 1, 0)


def _hull(eqn, of) -> Bounds | None:
    return None if None in of or not of else (min(low for low, _ in of), max(high for _, high in of))


def _corners(f: Callable[[int, int], int]) -> Callable:
    """Bounds of a function that is monotonic in each of its two operands."""

    def rule(eqn, of) -> Bounds | None:
        if None in of:
            return None
        found = [f(x, y) for x in of[0] for y in of[1]]
        return min(found), max(found)

    return rule


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
    "select_n": lambda eqn, of: _hull(eqn, of[1:]),
    "dynamic_update_slice": lambda eqn, of: _hull(eqn, of[:2]),
    "add": _corners(lambda x, y: x + y),
    "sub": _corners(lambda x, y: x - y),
    "mul": _corners(lambda x, y: x * y),
    "max": _corners(max),
    "min": _corners(min),
    "neg": lambda eqn, of: of[0] and (-of[0][1], -of[0][0]),
    "rem": _remainder,
    "div": _quotient,
    "clamp": _clamp,
    "argmax": lambda eqn, of: (0, max(eqn.invars[0].aval.shape[eqn.params["axes"][0]] - 1, 0)),
    "argmin": lambda eqn, of: (0, max(eqn.invars[0].aval.shape[eqn.params["axes"][0]] - 1, 0)),
}
