"""ClosedJaxpr -> the same with full unrolling of scans of one step, and of short ones with elementwise bodies.

Those that stack values or reduce are unrolled where the user asks for it, by `unroll=True` or as many steps as there are.

    for c in (3, 2, 1):  y = y * x + c        ->    ((0 * x + 3) * x + 2) * x + 1

Such steps fuse with one another and with their surroundings: one pass over memory. Steps that read
neighbours stay a loop, which fuse/time_tiling/overlapped.py tiles.
"""

from __future__ import annotations

from jax import lax
from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace
from pbkern.fuse.simplify.rewrites import REWRITES

REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"}


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

        stacks = Notes()

        def rewrite(eqn, operands):
            return _written_out(eqn, operands, stacks) if self._is_short(eqn) else None

        return retrace(closed, REWRITES | {"scan": rewrite})

    def _is_short(self, eqn) -> bool:
        params = params_of(eqn)
        body, length = params["jaxpr"].jaxpr, params["length"]
        if length == 1:
            return not body.effects
        is_asked_for = params["unroll"] >= length > 1
        return (
            (len(body.outvars) == params["num_carry"] or is_asked_for)
            and length * max(len(body.eqns), 1) <= self.most_equations
            and all(
                _is_pointwise(body_eqn) or (is_asked_for and body_eqn.primitive.name in REDUCTIONS)
                for body_eqn in body.eqns
            )
        )


def _is_pointwise(eqn) -> bool:
    """Whether each element depends only on the same element of the operands, or on scalars."""
    repeats = eqn.primitive.name == "broadcast_in_dim" and not getattr(
        eqn.invars[0].aval, "shape", ()
    )
    return eqn.primitive.name in ELEMENTWISE or repeats


def _written_out(eqn, operands, stacks: Notes) -> list:
    """The results of a scan's steps one after the other; `stacks` has the steps' values of those stacked before."""
    params = params_of(eqn)
    end = params["num_consts"] + params["num_carry"]
    consts, carries, xs = (
        operands[: params["num_consts"]],
        operands[params["num_consts"] : end],
        operands[end:],
    )
    step = jex.jaxpr_as_fun(params["jaxpr"])
    turns = range(params["length"])
    pieces = [stacks.find("pieces", x) for x in xs]
    values: dict[int, list] = {}
    for turn in reversed(turns) if params["reverse"] else turns:
        elements = [
            lax.index_in_dim(x, turn, keepdims=False) if of_x is None else of_x[turn]
            for x, of_x in zip(xs, pieces)
        ]
        results = step(*consts, *carries, *elements)
        carries, values[turn] = results[: params["num_carry"]], results[params["num_carry"] :]
    stacked = []
    for of_turns in zip(*(values[turn] for turn in turns)):
        stack = lax.concatenate([lax.expand_dims(value, (0,)) for value in of_turns], 0)
        stacked += stacks.note("pieces", stack, *of_turns)
    return [*carries, *stacked]
