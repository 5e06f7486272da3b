"""MathTable: a target's own versions of functions, which take the place of the shared polynomials.

    shared:  exp(b, x) is a polynomial                    a target:  lookup("exp", "f32") is a function (b, x) -> exp(x)

The names are those of functions in lower/math/exp_log.py and lower/math/erf.py that ask: exp, exp2,
rsqrt, tanh, log, log1p, erf, erfc, and erfcx, which is exp(x**2) erfc(x) for x >= 0. bf16 rounds to nearest even, keeps
subnormals and NaN. loaded_f16 takes one float16 that was loaded, and gives it back as the target wants it in a register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class MathTable(Protocol):
    """A target's functions.

    asymmetric_minima: whether the instruction for the smaller of two floats returns its second operand where one is NaN or
    both are zeros.
    predicts_branches: whether a branch around a part of a function of one scalar is cheaper than that part.
    """

    asymmetric_minima: bool
    predicts_branches: bool

    def lookup(self, function: str, el: str) -> Callable[[Any, Any], Any] | None:
        """The target's (builder, value) -> value for an element type in registers, f32 or f64; None: the shared one.

        The builder does not contract; the value may have any number of lanes.
        """


class SharedMath:
    """A target without versions of its own."""

    asymmetric_minima = False
    predicts_branches = False

    def lookup(self, function: str, el: str) -> None:
        return None


SHARED = SharedMath()
