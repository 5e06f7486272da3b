"""Array constants of loops' and branches' bodies -> constants of the whole function, which the bodies are passed.

    for: x % jit{ constant c in x + c }      ->      c constant; for: x + c

A jitted function that closes over an array, called in a body, is such a constant. Kernels read
operands, no constants.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern._jax import fresh_aval, nesting
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.jaxprs.walks import inner_jaxprs


def hoist_constants_of_bodies(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites a function to canonical form, without constants in bodies; returns it as it was, if no body holds an array."""
    arrays = {id(array): array for array in _held(closed.jaxpr, in_body=False)}
    if not arrays:
        return closed

    def run(given, *args):
        passed = dict(zip(arrays, given))
        return retrace_into(
            closed.jaxpr, closed.consts, args, None, lambda value: passed.get(id(value), value)
        )

    avals = [fresh_aval(var.aval) for var in closed.jaxpr.invars]
    hoisted = jax.make_jaxpr(run)(list(arrays.values()), *avals)
    return _jax.with_constants(_jax.hoist_constants(hoisted), [*hoisted.consts, *arrays.values()])


def _held(jaxpr: jex.Jaxpr, in_body: bool) -> Iterator:
    """Array constants at any depth below control flow; those of calls outside of it become constants when they are inlined."""
    for eqn in nesting(jaxpr):
        below = in_body or called_jaxpr(eqn) is None
        for inner in inner_jaxprs(eqn):
            yield from (const for const in inner.consts if below and np.ndim(const))
            yield from _held(inner.jaxpr, below)
