"""ClosedJaxpr -> the same with full unrolling of scans of one step, and of short ones with elementwise bodies.

    for c in (3, 2, 1):  y = y * x + c        ->    ((0 * x + 3) * x + 2) * x + 1

Such steps fuse with one another and with their surroundings: one pass over memory. Steps that read
neighbours stay a loop, which fuse/time_tiling/overlapped.py tiles.
"""

from __future__ import annotations

from jax import lax
from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace
from pbkern.fuse.simplify.rewrites import REWRITES


@dataclass(frozen=True)
class UnrollLoops:
    """Unrolls, at any depth, scans of one step, and short elementwise ones that stack nothing."""

    most_equations: int = threshold(
        200, "equations of a loop after unrolling: bounds compile time. Source: not recorded"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        scans = (eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "scan")
        if not any(map(self._is_short, scans)):
            return closed

        def rewrite(eqn, operands):
            return _written_out(eqn, operands) if self._is_short(eqn) else None

        return retrace(closed, REWRITES | {"scan": rewrite})

    def _is_short(self, eqn) -> bool:
        params = params_of(eqn)
        body = params["jaxpr"].jaxpr
        return (params["length"] == 1 and not body.effects) or (
            len(body.outvars) == params["num_carry"]
            and params["length"] * max(len(body.eqns), 1) <= self.most_equations
            and all(_is_pointwise(body_eqn) for body_eqn in body.eqns)
        )


def _is_pointwise(eqn) -> bool:
    """Whether each element depends only on the same element of the operands, or on scalars."""
    repeats = eqn.primitive.name == "broadcast_in_dim" and not getattr(
        eqn.invars[0].aval, "shape", ()
    )
    return eqn.primitive.name in ELEMENTWISE or repeats


def _written_out(eqn, operands) -> list:
    params = params_of(eqn)
    end = params["num_consts"] + params["num_carry"]
    consts, carries, xs = (
        operands[: params["num_consts"]],
        operands[params["num_consts"] : end],
        operands[end:],
    )
    step = jex.jaxpr_as_fun(params["jaxpr"])
    turns, stacked = range(params["length"]), []
    for turn in reversed(turns) if params["reverse"] else turns:
        results = step(*consts, *carries, *(lax.index_in_dim(x, turn, keepdims=False) for x in xs))
        carries, stacked = results[: params["num_carry"]], results[params["num_carry"] :]
    return [
        *carries,
        *(lax.expand_dims(y, (0,)) for y in stacked),
    ]  # only scans of one step stack any
