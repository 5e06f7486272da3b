"""ClosedJaxpr -> the same with one comparison for several that ask for the signs of an integer and of its remainder.

    sign(x) != 1 & rem(x, 7) != 0     ->     rem(x, 7) < 0

These come from floor_divide, remainder and their relatives. A test against zero is the set of signs, of {-1, 0, 1}, for which
it holds: `and`, `or` and `not` of tests of one value are the intersection, the union and the complement. A remainder that is
not zero has the dividend's sign.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.fuse.simplify.driver import retrace

SIGNS = (-1, 0, 1)
Signs = frozenset[int]
COMPARISONS: dict[str, tuple[Callable, Callable]] = {
    "lt": (int.__lt__, lax.lt),
    "le": (int.__le__, lax.le),
    "eq": (int.__eq__, lax.eq),
    "ne": (int.__ne__, lax.ne),
    "ge": (int.__ge__, lax.ge),
    "gt": (int.__gt__, lax.gt),
}
# Set of signs -> the comparison with zero that holds for them.
TESTS = {
    frozenset(sign for sign in SIGNS if holds(sign, 0)): compare
    for holds, compare in COMPARISONS.values()
}


def join_sign_tests(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites jaxprs in which signs or remainders of integers are compared."""
    names = primitive_names(closed)
    if names.isdisjoint(("sign", "rem")) or names.isdisjoint(COMPARISONS):
        return closed
    seen = _SignTests()
    rules = dict.fromkeys(COMPARISONS, seen.compared) | {
        "sign": seen.noted,
        "rem": seen.noted,
        "and": seen.both,
        "or": seen.either,
        "not": seen.opposite,
    }
    return retrace(closed, rules)


class _SignTests:
    """Remembers signs and remainders by their operand, and tests by value and set of signs."""

    def __init__(self) -> None:
        self.notes = Notes()

    def noted(self, eqn, operands):
        if operands[0].dtype.kind != "i":
            return None
        return self.notes.bound(eqn.primitive.name, eqn, operands, operands[0])

    def compared(self, eqn, operands):
        x, y = operands
        if x.dtype == np.bool_ and eqn.primitive.name in ("eq", "ne"):
            return self._is(eqn, x, y)
        number = _number(y) if x.dtype.kind == "i" else None
        if number is None:
            return None
        holds, _ = COMPARISONS[eqn.primitive.name]
        signs = frozenset(sign for sign in SIGNS if holds(sign, number))
        sign = self.notes.find("sign", x)
        if sign is not None:
            return self._test(sign[0], signs)
        return self.notes.bound("test", eqn, operands, x, signs) if number == 0 else None

    def _is(self, eqn, x, y):
        """A test that is compared with True or False."""
        number, test = _number(y), self.notes.find("test", x)
        if number is None or test is None:
            return None
        value, signs = test
        stays = bool(number) == (eqn.primitive.name == "eq")
        return self._test(value, signs if stays else frozenset(SIGNS) - signs)

    def both(self, eqn, operands):
        tests = [self.notes.find("test", operand) for operand in operands]
        if None in tests:
            return None
        for (x, of_x), (y, of_y) in (tests, reversed(tests)):
            remainder = self.notes.find("rem", y)
            is_dividend = remainder is not None and remainder[0] is x and 0 not in of_y
            if x is y or is_dividend:
                return self._test(y, of_x & of_y)
        return None

    def either(self, eqn, operands):
        tests = [self.notes.find("test", operand) for operand in operands]
        if None in tests or tests[0][0] is not tests[1][0]:
            return None
        (x, of_x), (_, of_y) = tests
        return self._test(x, of_x | of_y)

    def opposite(self, eqn, operands):
        test = self.notes.find("test", operands[0])
        return None if test is None else self._test(test[0], frozenset(SIGNS) - test[1])

    def _test(self, x, signs: Signs) -> list:
        compare = TESTS.get(signs)
        if compare is None:  # all signs or none
            return [lax.full_like(x, bool(signs), np.bool_)]
        return self.notes.note("test", compare(x, np.zeros((), x.dtype)), x, signs)


def _number(x) -> int | None:
    """The integer or truth value that a scalar constant is."""
    if isinstance(x, jax.core.Tracer) or np.ndim(x):
        return None
    return int(x)
