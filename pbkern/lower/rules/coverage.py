"""Which equations a body may contain: answered before anything is built, so that fusion can leave the rest to XLA."""

from __future__ import annotations

import functools

import numpy as np

from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.core.ops.scatter import SCATTERS
from pbkern.lower.math import elementwise
from pbkern.lower.mlir.element_types import ELEMENTS, SUB_BYTE

from . import control_flow, views
from .contractions import CONTRACTIONS
from .scatter import supports as scatter_supports

OTHERS = (
    "sort",
    "get",
    "swap",
    "addupdate",
    "masked_load",
    "masked_store",
    "program_id",
    "num_programs",
    "in_bounds",
)


def supports(eqn) -> str | None:
    """None if bodies can contain the equation, else why not."""
    name = eqn.primitive.name
    called = called_jaxpr(eqn)
    if called is not None:
        return next((reason for inner in called.jaxpr.eqns if (reason := supports(inner))), None)
    for var in (*eqn.invars, *eqn.outvars):
        dtype = getattr(var.aval, "dtype", None)
        if dtype is not None and not _fits_registers(dtype):
            return f"dtype {dtype} has no register type on this target"
    if name in elementwise.RULES and name not in views.RULES:
        ins = [np.dtype(var.aval.dtype) for var in eqn.invars]
        if elementwise.supports(name, ins, np.dtype(eqn.outvars[0].aval.dtype)):
            return None
        return f"`{name}` is not covered for {', '.join(input_.name for input_ in ins)}"
    if name in SCATTERS:
        return scatter_supports(eqn)
    if name in views.RULES or name in CONTRACTIONS or name in OTHERS:
        return None
    if name in control_flow.RULES:
        return next(
            (
                reason
                for jaxpr in inner_jaxprs(eqn)
                for inner in jaxpr.jaxpr.eqns
                if (reason := supports(inner))
            ),
            None,
        )
    return f"no lowering rule for `{name}`"


@functools.cache
def _fits_registers(dtype) -> bool:
    return isinstance(dtype, np.dtype) and dtype.name in ELEMENTS and dtype.name not in SUB_BYTE


def coverage() -> dict[str, list[str]]:
    """Covered primitives by family."""
    return {
        "elementwise": sorted(set(elementwise.RULES) - set(views.RULES)),
        "shape": list(views.RULES),
        "reduction and contraction": list(CONTRACTIONS),
        "control flow": list(control_flow.RULES),
        "other": sorted((*OTHERS, *SCATTERS)),
    }
