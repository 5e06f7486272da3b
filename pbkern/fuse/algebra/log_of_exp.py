"""ClosedJaxpr -> the same without logarithms of exponentials: log(exp(x)) -> x, log(exp2(x)) -> log(2) x.

Neither function is computed. Where the exponential overflows the result is infinity, and where it is zero, minus
infinity, as the two functions have it: comparisons of x decide. Exponentials that are subnormal count as numbers.
Also through views of the exponential, such as one repeated along rows. A bfloat16 exponential is rounded, so its
logarithm is computed.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.core.ops.views import SHAPE_VIEWS
from pbkern.fuse.simplify.driver import retrace

EXPONENTIALS = {"exp": 1.0, "exp2": float(np.log(2.0))}
TYPES = ("float16", "float32", "float64")


def cancel_log_of_exp(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites jaxprs that hold exponentials and logarithms. Changes rounding."""
    names = primitive_names(closed)
    if "log" not in names or names.isdisjoint(EXPONENTIALS):
        return closed
    seen = _Exponents()
    rules = (
        dict.fromkeys(EXPONENTIALS, seen.note)
        | dict.fromkeys((*SHAPE_VIEWS, "transpose"), seen.moved)
        | {"log": seen.log}
    )
    return retrace(closed, rules)


class _Exponents:
    """Remembers, by value, exponent and base of exponentials.

    A view of an exponential is the exponential of the view.
    """

    def __init__(self) -> None:
        self.notes = Notes()

    def note(self, eqn, operands):
        value = eqn.primitive.bind(*operands, **eqn.params)
        return self.notes.note("exponential", value, operands[0], EXPONENTIALS[eqn.primitive.name])

    def moved(self, eqn, operands):
        exponential = self.notes.find("exponential", operands[0])
        if exponential is None:
            return None
        x, factor = exponential
        value, view = (
            eqn.primitive.bind(operand, *operands[1:], **eqn.params) for operand in (operands[0], x)
        )
        return self.notes.note("exponential", value, view, factor)

    def log(self, eqn, operands):
        exponential = self.notes.find("exponential", operands[0])
        if exponential is None or eqn.outvars[0].aval.dtype.name not in TYPES:
            return None
        x, factor = exponential
        value = x if factor == 1 else lax.mul(x, np.asarray(factor, x.dtype))
        low, high = _finite_range(x.dtype, factor)
        value = lax.select(lax.gt(x, high), lax.full_like(x, np.inf), value)
        return [lax.select(lax.lt(x, low), lax.full_like(x, -np.inf), value)]


def _finite_range(dtype: np.dtype, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """(least x, largest x) of a type for which exp(factor x) is neither zero nor infinite.

    Kernels compute exponentials of float16 numbers with the range of float32.
    """
    info = jnp.finfo(np.result_type(dtype, np.float32))
    # Half of the least number rounds to zero, half a unit beyond the largest one to infinity.
    low = (math.log(float(info.smallest_subnormal)) - math.log(2.0)) / factor
    high = (math.log(float(info.max)) + math.log1p(float(info.epsneg) / 2)) / factor
    least, largest = np.asarray(low, dtype), np.asarray(high, dtype)
    if float(least) < low:
        least = np.nextafter(least, np.asarray(np.inf, dtype))
    if float(largest) > high:
        largest = np.nextafter(largest, np.asarray(-np.inf, dtype))
    return least, largest
