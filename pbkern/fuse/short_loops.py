"""ClosedJaxpr -> the same with short scans of element-wise bodies written out.

    for c in (3, 2, 1):  y = y * x + c        ->    ((0 * x + 3) * x + 2) * x + 1

Such steps fuse with one another and with what comes before and after: memory is passed over once. Steps that look at
their neighbours stay loops, whose tiles time_blocks.py chooses.
"""

from __future__ import annotations

from jax import lax
from jax.extend import core as jex

from ..jaxprs import equations
from .access import ELEMENTWISE
from .rewrites import REWRITES
from .simplify import retrace

# Equations after writing out. They bound the time of compilation, as MAX_EQUATIONS of time_blocks.py does.
MAX_EQUATIONS = 200


def write_out_loops(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Writes out scans, at any depth, that stack nothing, whose steps are element-wise, and that are no longer than
    MAX_EQUATIONS."""
    short = any(e.primitive.name == "scan" and _is_short(e) for e in equations(closed.jaxpr))
    return retrace(closed, REWRITES | {"scan": _written_out}) if short else closed


def _is_short(eqn) -> bool:
    p = eqn.params
    body = p["jaxpr"].jaxpr
    return (
        len(body.outvars) == p["num_carry"]
        and p["length"] * max(len(body.eqns), 1) <= MAX_EQUATIONS
        and all(_is_pointwise(e) for e in body.eqns)
    )


def _is_pointwise(eqn) -> bool:
    """Is each element made of the same element of the operands, or of scalars?"""
    repeats = eqn.primitive.name == "broadcast_in_dim" and not getattr(eqn.invars[0].aval, "shape", ())
    return eqn.primitive.name in ELEMENTWISE or repeats


def _written_out(eqn, operands):
    if not _is_short(eqn):
        return None
    p = eqn.params
    end = p["num_consts"] + p["num_carry"]
    consts, carries, xs = operands[: p["num_consts"]], operands[p["num_consts"] : end], operands[end:]
    step = jex.jaxpr_as_fun(p["jaxpr"])
    turns = range(p["length"])
    for k in reversed(turns) if p["reverse"] else turns:
        carries = step(*consts, *carries, *(lax.index_in_dim(x, k, keepdims=False) for x in xs))
    return list(carries)
