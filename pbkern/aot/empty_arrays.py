"""A jaxpr whose arrays without elements are constants: libraries have nobody to compute with them, and need not.

What makes none but empty arrays becomes constants, what reads none but empty arrays is computed
now, and empty parts of a concatenation go. Jaxprs without empty arrays stay as they are, so that
their plans are those of the JIT.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.retracing import retrace
from pbkern.core.jaxprs.walks import equations


def computed_now(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The jaxpr without equations on empty arrays, as far as they need no other values."""
    atoms = [var for eqn in equations(closed.jaxpr) for var in (*eqn.invars, *eqn.outvars)]
    if not any(_is_empty(getattr(atom, "aval", None)) for atom in atoms):
        return closed
    with _jax.types_kept(closed):
        return retrace(closed, _rewritten)


def _is_empty(aval) -> bool:
    if not isinstance(getattr(aval, "dtype", None), np.dtype) or not all(
        isinstance(size, int) for size in aval.shape
    ):
        return False
    return math.prod(aval.shape) == 0


def _empty(atom) -> np.ndarray:
    return np.zeros(array_aval(atom).shape, array_aval(atom).dtype)


def _rewritten(eqn, *operands) -> list | None:
    if eqn.effects:
        return None
    if all(_is_empty(var.aval) for var in eqn.outvars):
        return [_empty(var) for var in eqn.outvars]
    if eqn.primitive.name == "concatenate":
        nonempty = [
            operand for operand, var in zip(operands, eqn.invars) if not _is_empty(var.aval)
        ]
        return None if len(nonempty) == len(operands) else _jax.bind_again(eqn, nonempty)
    if not any(_is_empty(var.aval) for var in eqn.invars):
        return None
    given = [
        _empty(var) if _is_empty(var.aval) else operand
        for operand, var in zip(operands, eqn.invars)
    ]
    if any(isinstance(x, jax.core.Tracer) for x in given):
        return None
    with jax.ensure_compile_time_eval():
        return [np.asarray(x) for x in _jax.bind_again(eqn, given)]
