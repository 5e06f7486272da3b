"""Masks of indices that are operands of a loop -> sunk into its body.

    m = rows >= columns                                  scan(lambda x, w: layer(x, w, where(rows >= columns, ...)), ...)
    scan(lambda x, w: layer(x, w, where(m, ...)), ...)

An operand is a matrix of numbers. A test inside the body lets lowering skip what it masks
(fuse/partition/duplicate_producers.py), or cut code where it changes. This is the opposite of
invariant hoisting, on purpose.
"""

from __future__ import annotations

import jax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of, source_of
from pbkern.fuse.access.blocks import literal
from pbkern.fuse.cost.kinds import OF_TESTS
from pbkern.fuse.partition.duplicate_producers import MOST_OF_INDICES
from pbkern.fuse.simplify.driver import retrace

COMPARISONS = {"ge", "gt", "le", "lt"}
# Smaller ones cost nothing to read.
LEAST_ELEMENTS = 1024


def sink_masks(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Sinks masks into bodies of scans, nested ones too."""
    if not any(e.primitive.name == "scan" for e in closed.jaxpr.eqns):
        return closed
    made = _masks(closed.jaxpr)

    def rewrite(eqn, operands):
        body, n = eqn.params["jaxpr"], params_of(eqn)["num_consts"]
        sunk = {
            k: made[v]
            for k, v in enumerate(eqn.invars[:n])
            if not isinstance(v, jex.Literal) and v in made
        }
        sunk = {k: eqns for k, eqns in sunk.items() if _is_mask(eqn.invars[k].aval, eqns)}
        inner = sink_masks(_with_masks(body, sunk, eqn.invars) if sunk else body)
        if inner is body:
            return None
        kept = [k for k in range(len(operands)) if k not in sunk]
        params = params_of(eqn) | {"jaxpr": inner, "num_consts": n - len(sunk)}
        return bind_again(eqn, [operands[k] for k in kept], params)

    return retrace(closed, {"scan": rewrite})


def _masks(jaxpr: jex.Jaxpr) -> dict:
    """Value -> the few equations, in order, that compute it from indices only."""
    made: dict = {}
    for e in jaxpr.eqns:
        if e.primitive.name in OF_TESTS and all(
            isinstance(a, jex.Literal) or a in made for a in e.invars
        ):
            before = [x for a in e.invars if not isinstance(a, jex.Literal) for x in made[a]]
            eqns = tuple({id(x): x for x in (*before, e)}.values())
            if len(eqns) <= MOST_OF_INDICES:
                made[e.outvars[0]] = eqns
    return made


def _is_mask(aval, eqns) -> bool:
    compared = any(e.primitive.name in COMPARISONS for e in eqns)
    return compared and sum(n > 1 for n in aval.shape) > 1 and aval.size >= LEAST_ELEMENTS


def _with_masks(body: jex.ClosedJaxpr, sunk: dict, atoms) -> jex.ClosedJaxpr:
    """The body of a scan that computes the operands at positions `sunk` by the equations given there."""

    def slim(*args):
        rest = iter(args)
        masks = {k: _evaluate(eqns, atoms[k]) for k, eqns in sunk.items()}
        operands = [masks[k] if k in masks else next(rest) for k in range(len(body.jaxpr.invars))]
        return jex.jaxpr_as_fun(body)(*operands)

    return jax.make_jaxpr(slim)(*(v.aval for k, v in enumerate(body.jaxpr.invars) if k not in sunk))


def _evaluate(eqns, result):
    env: dict = {}
    for e in eqns:
        operands = [literal(a) if isinstance(a, jex.Literal) else env[a] for a in e.invars]
        with source_of(e):
            env[e.outvars[0]] = e.primitive.bind(*operands, **e.params)
    return env[result]
