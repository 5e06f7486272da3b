"""ClosedJaxpr -> the same without logarithms of exponentials: log(exp(x)) -> x, log(exp2(x)) -> log(2) x.

As XLA did until jax 0.10: nothing overflows in between, and neither function is computed. Also
through views of the exponential, such as one repeated along rows. Storage-only types stay as they
are: a bfloat16 exponential is rounded, as with XLA.
"""

from __future__ import annotations

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs import Notes, primitive_names
from pbkern.core.ops.views import SHAPE_VIEWS
from pbkern.fuse.simplify.driver import retrace

EXPONENTIALS = {"exp": 1.0, "exp2": float(np.log(2.0))}
TYPES = ("float16", "float32", "float64")


def cancel_log_of_exp(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites jaxprs that hold exponentials and logarithms.

    Changes rounding, and keeps what would overflow.
    """
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
        return [x if factor == 1 else lax.mul(x, np.asarray(factor, x.dtype))]
