"""The vector math library's contents: primitive -> function, with its error bound in ULP.

Functions are grouped in math_exp (exponentials, logarithms, powers, remainder), math_trig, math_special and
math_gamma. All work on f32 and f64 at any lanes. ERROR_ULP holds the default versions' bounds over the whole
range, away from the caller's flushing of subnormals; APPROX_RELATIVE the relative error of what `approx=True`
makes cheaper. Below zero, where they cancel, lgamma and digamma have their bounds in ULP of the largest of
their value, their value at |x| and 1.
"""

from __future__ import annotations

from collections.abc import Callable

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
    "fmod": exp_log.fmod,
}

# name -> (f32, f64)
_BOUNDS = {
    "exp": (1.1, 1.1),
    "exp2": (1.1, 1.1),
    "expm1": (1.6, 2),
    "log": (1, 1),
    "log1p": (1.5, 1.5),
    "logistic": (2.75, 2.75),
    "tanh": (2.75, 2.75),
    "sinh": (1.75, 1.75),
    "cosh": (1.5, 1.5),
    "asinh": (2, 2),
    "acosh": (2.5, 2.5),
    "atanh": (2.25, 2.25),
    "rsqrt": (1.5, 1.5),
    "cbrt": (0.8, 0.8),
    "sin": (1.75, 3),
    "cos": (1.75, 3),
    "tan": (1.25, 1.25),
    "asin": (2.5, 2.5),
    "acos": (1.25, 1.25),
    "atan": (2, 2),
    "atan2": (2.5, 2.5),
    "erf": (1.25, 2.5),
    "erfc": (4.5, 5),
    "erf_inv": (3.25, 5),
    "pow": (0.6, 1.5),
    "fmod": (0, 0),
    "lgamma": (4.5, 4.5),
    "digamma": (6, 6.5),
}
ERROR_ULP = {
    (name, el): float(ulp)
    for name, pair in _BOUNDS.items()
    for el, ulp in zip(("f32", "f64"), pair)
}
_RELATIVE = {
    "exp": (6e-6, 1e-10),
    "expm1": (3e-5, 5e-10),
    "logistic": (6e-6, 1e-10),
    "tanh": (3e-5, 4e-10),
}
_RELATIVE |= {"sinh": (8e-6, 1e-10), "cosh": (6e-6, 1e-10), "erfc": (8e-6, 1e-10)}
APPROX_RELATIVE = {
    (name, el): relative
    for name, pair in _RELATIVE.items()
    for el, relative in zip(("f32", "f64"), pair)
}
