"""in_range: integers that must lie in a range, such as indices and divisors, as an elementwise equation.

    y = in_range(x, low, high)       y is x; where an element is out of its range, the process's count of reports grows

Where low < high, elements must lie in [low, high). Where low > high, they must not lie in [high,
low): divisors have in_range(x, 1, 0). Who calls what holds such equations compares the count before
and after, and then asks which element it was (`Ranges`). Machine code counts in a word of its
runtime (targets/host/runtime/xla.py), what XLA runs counts here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core as jex
from jax.interpreters import mlir

from pbkern import _jax
from pbkern.core.errors import DivisionByZero, IndexOutOfRange
from pbkern.core.jaxprs.evaluation import evaluate

in_range_p = jex.Primitive("in_range")  # x: integers -> x; params: low, high


@in_range_p.def_abstract_eval
def _type(x, *, low, high):
    return jax.core.ShapedArray(x.shape, x.dtype)


_jax.set_eager_rule(in_range_p)


def in_range(x, low: int, high: int):
    """x, of whose elements those that are out of their range are reported.

    A range that holds all of x's type asks nothing.
    """
    info = np.iinfo(x.dtype)
    if low < high:
        low, high = max(low, info.min), min(high, info.max + 1)
        if (low, high) == (info.min, info.max + 1):
            return x
    return in_range_p.bind(x, low=low, high=high)


def outside(x, low: int, high: int):
    """Booleans: which elements are out of their range."""
    if low < high:
        # Neither the lower limit nor the highest element of the range is out of the type.
        return (x < low) | (x > high - 1)
    return (x >= high) & (x < low)


_reports = itertools.count(1)
_reported = [0]


def reported_by_xla() -> int:
    """Counts the reports of XLA's part of programs."""
    return _reported[0]


def _report(x):
    _reported[0] = next(_reports)
    return x


@jax.jit
def _noted(bad, x):
    return jax.lax.cond(bad, lambda x: jax.pure_callback(_report, jax.typeof(x), x), lambda x: x, x)


def _by_xla(x, *, low, high):
    return _noted(outside(x, low, high).any(), x)


mlir.register_lowering(in_range_p, mlir.lower_fun(_by_xla, multiple_results=False))


class Check(NamedTuple):
    """One check of a program, for messages.

    Attributes:
      where: the operator, and behind " at " the line that calls it, if it is known.
      number: word for the integers that are checked.
    """

    where: str
    number: str = "index"


class Ranges:
    """The checks of a jaxpr, asked of operands after something was reported. described: each of them, in order."""

    def __init__(self, closed: jex.ClosedJaxpr, described: Sequence[Check]):
        self._checks = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive is in_range_p]
        self._described = described
        assert len(self._checks) == len(described), (len(self._checks), described)
        self._all_in_range = jax.jit(lambda *operands: self._all(closed, operands))

    def _all(self, closed: jex.ClosedJaxpr, operands: Sequence) -> list:
        """Per check: whether an element is out of its range, and the first such element."""
        results = []

        def bind(eqn, *values):
            if eqn.primitive is not in_range_p:
                return _jax.bind_again(eqn, values)
            x = jax.numpy.ravel(values[0])
            wrong = outside(x, **eqn.params)
            results.append((wrong.any(), x[jax.numpy.argmax(wrong)]))
            return values

        evaluate(closed.jaxpr, closed.consts, operands, bind=bind)
        return results

    def check(self, operands: Sequence) -> None:
        """Raises IndexOutOfRange or DivisionByZero for the first number of these operands' that is out of its range."""
        for eqn, check, (is_wrong, value) in zip(
            self._checks, self._described, jax.device_get(self._all_in_range(*operands))
        ):
            if not is_wrong:
                continue
            low, high = eqn.params["low"], eqn.params["high"]
            operator, _, line = check.where.partition(" at ")
            if low > high:
                raise DivisionByZero(f"integer division by zero in {operator}", at=line or None)
            raise IndexOutOfRange(
                f"{check.number} {value} is out of range in {operator}",
                at=line or None,
                why=f"a dimension of {high} elements has indices from {low} to {high - 1}"
                if check.number == "index"
                else f"it must be {low}"
                if high == low + 1
                else f"it must be from {low} to {high - 1}",
            )
