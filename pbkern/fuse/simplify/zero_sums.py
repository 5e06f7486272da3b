"""Rewrite of sums that start with zero, as those of Python's `sum` do: (0 + x) + y -> x + y, and (0 + x) - y -> x - y.

0 + x alone stays: it makes -0 a 0. In a sum with y that matters only where both are -0, and the result then is -0, as it
is of XLA.
"""

from __future__ import annotations

import jax
import numpy as np

from pbkern._jax import bind_again
from pbkern.core.jaxprs.evaluation import Notes

TYPES = ("float32", "float64")


class ZeroSums:
    """Remembers, by value, sums of a value and zero. Replaces the rewrites of `add` and `sub` that it is given."""

    def __init__(self, add, sub) -> None:
        self.notes = Notes()
        self.simpler = {"add": add, "sub": sub}

    def add(self, eqn, operands):
        simpler = self.simpler["add"](eqn, operands)
        if simpler is not None or eqn.outvars[0].aval.dtype.name not in TYPES:
            return simpler
        for zero, value in (operands, operands[::-1]):
            if _is_zero(zero) and _has_type(value, eqn):
                return self.notes.bound("zero sum", eqn, operands, value)
        return self._bound(eqn, operands, [self._value(operand) for operand in operands])

    def sub(self, eqn, operands):
        simpler = self.simpler["sub"](eqn, operands)
        if simpler is not None or eqn.outvars[0].aval.dtype.name not in TYPES:
            return simpler
        return self._bound(eqn, operands, [self._value(operands[0]), operands[1]])

    def _bound(self, eqn, operands, values):
        """The equation on values in place of their sums with zero; None where no operand is such a sum."""
        if all(value is operand for value, operand in zip(values, operands)):
            return None
        return bind_again(eqn, values)

    def _value(self, operand):
        (value,) = self.notes.find("zero sum", operand) or (operand,)
        return value


def _is_zero(x) -> bool:
    return isinstance(x, (np.ndarray, np.generic)) and np.ndim(x) == 0 and bool(x == 0)


def _has_type(value, eqn) -> bool:
    """Whether a value is like the result, so that it can stand in its place."""
    out = eqn.outvars[0].aval
    return np.ndim(value) > 0 and value.shape == out.shape and jax.typeof(value).dtype == out.dtype
