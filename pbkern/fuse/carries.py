"""ClosedJaxpr -> the same without carries of scans that nothing reads but themselves.

The counter of most fori_loops is one: each step would launch a kernel just to count.
"""

from __future__ import annotations

import jax
from jax.extend import core as jex

from ..jaxprs import inner_jaxprs
from .simplify import drop_dead, retrace


def _live_carries(body: jex.Jaxpr, n_consts: int, n_carry: int, wanted: set[int]) -> set[int]:
    """Carries that reach a wanted one or a ys result, directly or over several steps."""
    live = set(wanted)
    while True:
        read = {a for k, a in enumerate(body.outvars) if (k >= n_carry or k in live) and not isinstance(a, jex.Literal)}
        for eqn in reversed(body.eqns):
            if eqn.effects or any(v in read for v in eqn.outvars):
                read.update(a for a in eqn.invars if not isinstance(a, jex.Literal))
        more = live | {k for k in range(n_carry) if body.invars[n_consts + k] in read}
        if more == live:
            return live
        live = more


def _read(jaxpr: jex.Jaxpr) -> set:
    """Values that equations or results read, in the jaxprs of control flow too."""
    atoms = [*jaxpr.outvars, *(a for e in jaxpr.eqns for a in e.invars)]
    own = {a for a in atoms if not isinstance(a, jex.Literal)}
    return own.union(*(_read(inner.jaxpr) for e in jaxpr.eqns for inner in inner_jaxprs(e)))


def drop_dead_carries(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Takes carries out of scans that nothing reads but themselves."""
    used = _read(closed.jaxpr)

    def rewrite(eqn, operands):
        p, body = eqn.params, eqn.params["jaxpr"]
        n_consts, n_carry = p["num_consts"], p["num_carry"]
        wanted = {k for k in range(n_carry) if eqn.outvars[k] in used}
        kept = sorted(_live_carries(body.jaxpr, n_consts, n_carry, wanted))
        if len(kept) == n_carry:
            return None
        inner_types = [body.jaxpr.invars[n_consts + k].aval for k in range(n_carry)]

        def slim(*args):
            # A dead carry's value is of no consequence.
            carry = [jax.numpy.zeros(t.shape, t.dtype) for t in inner_types]
            for k, x in zip(kept, args[n_consts:]):
                carry[k] = x
            results = jex.jaxpr_as_fun(body)(*args[:n_consts], *carry, *args[n_consts + len(kept) :])
            return [results[k] for k in kept] + list(results[n_carry:])

        ins = [v.aval for v in body.jaxpr.invars]
        ins = ins[:n_consts] + [ins[n_consts + k] for k in kept] + ins[n_consts + n_carry :]
        made = drop_dead(jax.make_jaxpr(slim)(*ins))
        operands = (
            operands[:n_consts] + [operands[n_consts + k] for k in kept] + operands[n_consts + n_carry :]
        )
        rebound = eqn.primitive.bind(*operands, **{**p, "jaxpr": made, "num_carry": len(kept)})
        # Nobody reads the results that are None.
        results: list = [None] * n_carry + list(rebound[len(kept) :])
        for k, x in zip(kept, rebound):
            results[k] = x
        return results

    has_scan = any(e.primitive.name == "scan" and "linear" not in e.params for e in closed.jaxpr.eqns)
    return drop_dead(retrace(closed, {"scan": rewrite})) if has_scan else closed
