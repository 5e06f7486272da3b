"""Filters of convolutions among the constants of a traced function: they stay constants, whose numbers the fuser looks at.

Other constants become operands (call.py): functions that differ in their numbers alone share a plan.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.extend import core as jex

from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.core.ops.views import MOST_ELEMENTS, VIEWS

CONVOLUTION = "conv_general_dilated"


def constant_filters(closed: jex.ClosedJaxpr) -> list[int]:
    """Places, among the constants, of small arrays that are a convolution's filter as they are or through views."""
    if not closed.consts or CONVOLUTION not in primitive_names(closed):
        return []
    known = {
        var: place
        for place, (var, const) in enumerate(zip(closed.jaxpr.constvars, closed.consts))
        if not isinstance(const, jax.core.Tracer) and 0 < np.size(const) <= MOST_ELEMENTS
    }
    return sorted(_filters(closed.jaxpr, known)) if known else []


def _filters(jaxpr: jex.Jaxpr, known: dict[jex.Var, int]) -> set[int]:
    """Places that the filters of convolutions come from, in calls too; known: values -> the place that each is a view of."""
    known, places = dict(known), set[int]()
    for eqn in jaxpr.eqns:
        sources = {
            n: known[var]
            for n, var in enumerate(eqn.invars)
            if not isinstance(var, jex.Literal) and var in known
        }
        if not sources:
            continue
        inner = called_jaxpr(eqn)
        if inner is not None:
            places |= _filters(inner.jaxpr, {inner.jaxpr.invars[n]: p for n, p in sources.items()})
        elif eqn.primitive.name == CONVOLUTION and 1 in sources:
            places.add(sources[1])
        elif eqn.primitive.name in VIEWS and len(eqn.invars) == 1:
            known[eqn.outvars[0]] = sources[0]
    return places
