"""ClosedJaxpr -> the same without dead carries of scans, which only they themselves read, and without unread operands.

The counter of most fori_loops is a dead carry: each step would launch a kernel just to count.
Indices of updates at known places are unread operands.
"""

from __future__ import annotations

import jax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of
from pbkern.core.jaxprs import atoms, inner_jaxprs
from pbkern.fuse.simplify.driver import drop_dead, retrace


def _live_carries(body: jex.Jaxpr, n_consts: int, n_carry: int, wanted: set[int]) -> set[int]:
    """Carries that reach a wanted one or a ys result, directly or over several steps."""
    live = set(wanted)
    while True:
        read = _needed(body, n_carry, live)
        more = live | {k for k in range(n_carry) if body.invars[n_consts + k] in read}
        if more == live:
            return live
        live = more


def _needed(body: jex.Jaxpr, n_carry: int, live: set[int]) -> set:
    """Values that live carries and ys need."""
    read = {
        a
        for k, a in enumerate(body.outvars)
        if (k >= n_carry or k in live) and not isinstance(a, jex.Literal)
    }
    for eqn in reversed(body.eqns):
        if eqn.effects or any(v in read for v in eqn.outvars):
            read.update(atoms(eqn))
    return read


def _read(jaxpr: jex.Jaxpr) -> set:
    """Values that equations or results read, also inside control flow."""
    atoms = [*jaxpr.outvars, *(a for e in jaxpr.eqns for a in e.invars)]
    own = {a for a in atoms if not isinstance(a, jex.Literal)}
    return own.union(*(_read(inner.jaxpr) for e in jaxpr.eqns for inner in inner_jaxprs(e)))


def drop_dead_carries(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Removes dead carries of scans, then operands that no step reads."""
    used = _read(closed.jaxpr)

    def rewrite(eqn, operands):
        p, body = params_of(eqn), eqn.params["jaxpr"]
        n_consts, n_carry = p["num_consts"], p["num_carry"]
        wanted = {k for k in range(n_carry) if eqn.outvars[k] in used}
        kept = sorted(_live_carries(body.jaxpr, n_consts, n_carry, wanted))
        needed = _needed(body.jaxpr, n_carry, set(kept))
        consts = [k for k in range(n_consts) if body.jaxpr.invars[k] in needed]
        if len(kept) == n_carry and len(consts) == n_consts:
            return None
        types = [v.aval for v in body.jaxpr.invars]
        read = [*consts, *(n_consts + k for k in kept), *range(n_consts + n_carry, len(types))]

        def slim(*args):
            given = dict(zip(read, args))  # the values of the others do not matter
            others = {
                k: jax.numpy.zeros(t.shape, t.dtype) for k, t in enumerate(types) if k not in given
            }
            results = jex.jaxpr_as_fun(body)(*((given | others)[k] for k in range(len(types))))
            return [results[k] for k in kept] + list(results[n_carry:])

        made = drop_dead(jax.make_jaxpr(slim)(*(types[k] for k in read)))
        changed = {"jaxpr": made, "num_consts": len(consts), "num_carry": len(kept)}
        rebound = bind_again(eqn, [operands[k] for k in read], {**p, **changed})
        # Nobody reads the results that are None.
        results: list = [None] * n_carry + list(rebound[len(kept) :])
        for k, x in zip(kept, rebound):
            results[k] = x
        return results

    has_scan = any(
        e.primitive.name == "scan" and "linear" not in e.params for e in closed.jaxpr.eqns
    )
    return drop_dead(retrace(closed, {"scan": rewrite})) if has_scan else closed
