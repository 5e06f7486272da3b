"""The vector math library's contents: primitive -> function. Error bounds are in the rows of ELEMENTWISE.

Functions are grouped in math_exp (exponentials, logarithms, powers, remainder), math_trig, math_special and
math_gamma. All work on f32 and f64 at any lanes. ERROR_ULP holds the default versions' bounds over the whole
range, away from the caller's flushing of subnormals; APPROX_RELATIVE the relative error of what `approx=True`
makes cheaper. Below zero, where they cancel, lgamma and digamma have their bounds in ULP of the largest of
their value, their value at |x| and 1.
"""

from __future__ import annotations

from collections.abc import Callable

from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.lower.mlir.ops import Ssa

from . import erf, exp_log, gamma, trig

UNARY: dict[str, Callable[..., Ssa]] = {
    **{
        name: getattr(exp_log, name)
        for name in (
            "exp",
            "exp2",
            "expm1",
            "log",
            "log1p",
            "logistic",
            "tanh",
            "sinh",
            "cosh",
            "asinh",
            "acosh",
            "atanh",
            "rsqrt",
            "cbrt",
        )
    },
    **{name: getattr(trig, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: getattr(erf, name) for name in ("erf", "erfc", "erf_inv")},
    **{name: getattr(gamma, name) for name in ("lgamma", "digamma")},
}
BINARY: dict[str, Callable[..., Ssa]] = {
    "pow": exp_log.pow,
    "atan2": trig.atan2,
    "rem": exp_log.fmod,
}


def _by_type(bounds: dict[str, tuple[float, float]]) -> dict[tuple[str, str], float]:
    """(primitive, element type) -> bound."""
    return {
        (name, el): float(bound)
        for name, pair in bounds.items()
        for el, bound in zip(("f32", "f64"), pair)
    }


ERROR_ULP = _by_type({name: row.error_ulp or (0.0, 0.0) for name, row in ELEMENTWISE.items()})
APPROX_RELATIVE = _by_type(
    {
        name: row.approx_relative
        for name, row in ELEMENTWISE.items()
        if row.approx_relative is not None
    }
)
