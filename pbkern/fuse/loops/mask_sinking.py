"""Masks of indices that are operands of a loop -> sunk into its body.

    m = rows >= columns                                  scan(lambda x, w: layer(x, w, where(rows >= columns, ...)), ...)
    scan(lambda x, w: layer(x, w, where(m, ...)), ...)

An operand is a matrix of numbers. A test inside the body lets lowering skip what it masks
(fuse/partition/duplicate_producers.py), or cut code where it changes. This is the opposite of
invariant hoisting, on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of, source_of
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.access.blocks import literal
from pbkern.fuse.cost.kinds import is_of_index_tests
from pbkern.fuse.simplify.driver import retrace

COMPARISONS = {"ge", "gt", "le", "lt"}


@dataclass(frozen=True)
class SinkMasks:
    """Sinks masks into bodies of scans, nested ones too."""

    most_index_equations: int = threshold(
        16, "equations of a mask that is sunk. Source: not recorded"
    )
    fewest_elements: int = threshold(
        1024, "elements of a mask that is sunk: smaller ones cost nothing to read"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        if not any(eqn.primitive.name == "scan" for eqn in closed.jaxpr.eqns):
            return closed
        masks = self._masks(closed.jaxpr)

        def rewrite(eqn, operands):
            body, n_consts = eqn.params["jaxpr"], params_of(eqn)["num_consts"]
            sunk = {
                k: masks[var]
                for k, var in enumerate(eqn.invars[:n_consts])
                if not isinstance(var, jex.Literal) and var in masks
            }
            sunk = {k: eqns for k, eqns in sunk.items() if self._is_mask(eqn.invars[k].aval, eqns)}
            inner = self(_with_masks(body, sunk, eqn.invars) if sunk else body, options)
            if inner is body:
                return None
            remaining = [k for k in range(len(operands)) if k not in sunk]
            params = params_of(eqn) | {"jaxpr": inner, "num_consts": n_consts - len(sunk)}
            return bind_again(eqn, [operands[place] for place in remaining], params)

        return retrace(closed, {"scan": rewrite})

    def _masks(self, jaxpr: jex.Jaxpr) -> dict:
        """Value -> the few equations, in order, that compute it from indices only."""
        masks: dict = {}
        for eqn in jaxpr.eqns:
            if is_of_index_tests(eqn.primitive.name) and all(
                isinstance(var, jex.Literal) or var in masks for var in eqn.invars
            ):
                before = [
                    x for var in eqn.invars if not isinstance(var, jex.Literal) for x in masks[var]
                ]
                eqns = tuple({id(x): x for x in (*before, eqn)}.values())
                if len(eqns) <= self.most_index_equations:
                    masks[eqn.outvars[0]] = eqns
        return masks

    def _is_mask(self, aval, eqns) -> bool:
        compared = any(eqn.primitive.name in COMPARISONS for eqn in eqns)
        return (
            compared
            and sum(size > 1 for size in aval.shape) > 1
            and aval.size >= self.fewest_elements
        )


def _with_masks(body: jex.ClosedJaxpr, sunk: dict, atoms) -> jex.ClosedJaxpr:
    """The body of a scan that computes the operands at positions `sunk` by the equations given there."""

    def slim(*args):
        rest = iter(args)
        masks = {k: _evaluate(eqns, atoms[k]) for k, eqns in sunk.items()}
        operands = [masks[k] if k in masks else next(rest) for k in range(len(body.jaxpr.invars))]
        return jex.jaxpr_as_fun(body)(*operands)

    return jax.make_jaxpr(slim)(
        *(var.aval for k, var in enumerate(body.jaxpr.invars) if k not in sunk)
    )


def _evaluate(eqns: Sequence[jex.JaxprEqn], result: jex.Var):
    env: dict = {}
    for eqn in eqns:
        operands = [
            literal(var) if isinstance(var, jex.Literal) else env[var] for var in eqn.invars
        ]
        with source_of(eqn):
            env[eqn.outvars[0]] = eqn.primitive.bind(*operands, **eqn.params)
    return env[result]
