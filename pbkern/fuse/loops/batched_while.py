"""While loops with a batched predicate, as vmap makes them -> one loop that runs while any of them does."""

from __future__ import annotations

from jax.extend import core as jex

from pbkern.core.jaxprs.retracing import while_any
from pbkern.core.jaxprs.walks import equations
from pbkern.fuse.simplify.driver import retrace


def loops_as_one(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites a function so that its while loops have scalar predicates."""
    return (
        retrace(closed, {"while": _as_one})
        if any(map(_is_batched, equations(closed.jaxpr)))
        else closed
    )


def _is_batched(eqn) -> bool:
    return eqn.primitive.name == "while" and bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def _as_one(eqn, operands):
    if not _is_batched(eqn):
        return None
    params, first = eqn.params, eqn.params["cond_nconsts"]
    last = first + params["body_nconsts"]
    goes_on, step = (
        jex.jaxpr_as_fun(loops_as_one(params[name])) for name in ("cond_jaxpr", "body_jaxpr")
    )
    return while_any(
        lambda carry: goes_on(*operands[:first], *carry)[0],
        lambda carry: step(*operands[first:last], *carry),
        operands[last:],
    )
