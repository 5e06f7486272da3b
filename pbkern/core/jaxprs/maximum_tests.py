"""Tests whether an operand equals the larger or smaller of itself and another -> comparisons of the two operands.

    eq(x, max(x, y))   ->   ge(x, y)

Derivatives of max and min ask so. The maximum may be an array, and the operand be computed again beside it with another
rounding, so that neither operand would equal it; the comparison cannot go wrong, and does not wait for the maximum. NaN equals
nothing, and neither is it at least anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms, primitive_names, variables

ORDERS = {"max": lax.ge_p, "min": lax.le_p}


def compare_operands(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites the tests of a jaxpr, not those of jaxprs inside its equations. Drops extremes that nothing reads then."""
    names = primitive_names(closed)
    if "eq" not in names or names.isdisjoint(ORDERS):
        return closed
    jaxpr = closed.jaxpr
    makers = {
        eqn.outvars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name in ORDERS and array_aval(eqn.outvars[0]).dtype.kind != "c"
    }
    eqns = [_compared(eqn, makers) if eqn.primitive.name == "eq" else eqn for eqn in jaxpr.eqns]
    read = {*variables(jaxpr.outvars), *(atom for eqn in eqns for atom in atoms(eqn))}
    unread = makers.keys() - read
    eqns = [eqn for eqn in eqns if unread.isdisjoint(eqn.outvars)]
    return jex.ClosedJaxpr(jaxpr.replace(eqns=eqns), closed.consts)


def _compared(eqn, makers: dict):
    for operand, other in (eqn.invars, eqn.invars[::-1]):
        maker = makers.get(other) if isinstance(other, jex.Var) else None
        if maker is None:
            continue
        for second in _seconds(operand, *maker.invars):
            shapes = {array_aval(atom).shape for atom in (operand, second)}
            if array_aval(other).shape in shapes:
                order = ORDERS[maker.primitive.name]
                return eqn.replace(primitive=order, invars=[operand, second], params={})
    return eqn


def _seconds(operand, x, y) -> Iterator:
    """The one of x and y that `operand` is not, if it is one of the two."""
    if _is_same(operand, x):
        yield y
    elif _is_same(operand, y):
        yield x


def _is_same(one, other) -> bool:
    if isinstance(one, jex.Literal) and isinstance(other, jex.Literal):
        return array_aval(one) == array_aval(other) and bool(np.all(one.val == other.val))
    return one is other
