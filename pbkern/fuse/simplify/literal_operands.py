"""Literals that need a buffer (operands and results of control flow, operands of hand-written kernels) -> equations.

A HostProgram moves buffers. A literal that enters a loop, or leaves a branch, must be written to
one first.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from .driver import CONTROL, retrace

TAKE_BUFFERS = (*CONTROL, "pbkern_kernel")


def _written(x):
    """A rank-0 constant of any dtype as the result of an equation that JAX does not fold."""
    return lax.select_n_p.bind(np.bool_(False), x, x)


def outputs_as_equations(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Adds equations for results that are literals."""
    if not any(isinstance(var, jex.Literal) for var in closed.jaxpr.outvars):
        return closed

    def run(*args):
        results = jex.jaxpr_as_fun(closed)(*args)
        return [
            _written(result) if isinstance(var, jex.Literal) else result
            for var, result in zip(closed.jaxpr.outvars, results)
        ]

    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(run)(*avals)


def operands_as_equations(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Adds equations for literals that enter control flow or hand-written kernels."""
    if not any(
        eqn.primitive.name in TAKE_BUFFERS
        and any(isinstance(var, jex.Literal) for var in eqn.invars)
        for eqn in closed.jaxpr.eqns
    ):
        return closed

    def rewrite(eqn, operands):
        written = [
            _written(operand)
            if isinstance(operand, (np.ndarray, np.generic)) and operand.ndim == 0
            else operand
            for operand in operands
        ]
        return list(eqn.primitive.bind(*written, **eqn.params))

    return retrace(closed, dict.fromkeys(TAKE_BUFFERS, rewrite))
