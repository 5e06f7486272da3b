"""ClosedJaxpr -> the same without dead carries of scans, which no other value needs, and without unread operands.

The counter of most fori_loops is a dead carry: each step would launch a kernel just to count.
Indices of updates at known places are unread operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of
from pbkern.core.jaxprs.walks import atoms, equations, inner_of
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
        var
        for k, var in enumerate(body.outvars)
        if (k >= n_carry or k in live) and not isinstance(var, jex.Literal)
    }
    for eqn in reversed(body.eqns):
        if eqn.effects or any(var in read for var in eqn.outvars):
            read.update(atoms(eqn))
    return read


def _read(jaxpr: jex.Jaxpr) -> set:
    """Values that equations or results read, also inside control flow."""
    atoms = [*jaxpr.outvars, *(var for eqn in jaxpr.eqns for var in eqn.invars)]
    read = {atom for atom in atoms if not isinstance(atom, jex.Literal)}
    return read.union(*(_read(inner.jaxpr) for inner in inner_of(jaxpr)))


def drop_dead_carries(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Removes dead carries of scans, then operands that no step reads."""
    used = _read(closed.jaxpr)

    def rewrite(eqn, operands: Sequence) -> list | None:
        needed = _needed_operands(eqn, used)
        return None if needed is None else _without_others(eqn, operands, *needed)

    has_dead = any(
        eqn.primitive.name == "scan" and _needed_operands(eqn, used) is not None
        for eqn in equations(closed.jaxpr)
    )
    return retrace(closed, {"scan": rewrite}) if has_dead else closed


def _without_others(eqn, operands: Sequence, consts: Sequence[int], carries: Sequence[int]) -> list:
    """Binds a scan with some of its operands alone.

    Args:
      eqn: the scan.
      operands: all of them.
      consts: numbers of the operands that never change, among those that stay.
      carries: numbers of the carries that stay.

    Returns:
      The scan's results; None for those of dropped carries, which nothing reads.
    """
    params, body = params_of(eqn), eqn.params["jaxpr"]
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    types = [var.aval for var in body.jaxpr.invars]
    stay = [*consts, *(n_consts + k for k in carries), *range(n_consts + n_carry, len(types))]

    def step(*args):
        given = dict(zip(stay, args))
        # No result that stays depends on these.
        dropped = {
            k: jax.numpy.zeros(type_.shape, type_.dtype)
            for k, type_ in enumerate(types)
            if k not in given
        }
        results = jex.jaxpr_as_fun(body)(*((given | dropped)[k] for k in range(len(types))))
        return [results[k] for k in carries] + list(results[n_carry:])

    smaller = drop_dead(jax.make_jaxpr(step)(*(types[k] for k in stay)))
    changed = {"jaxpr": smaller, "num_consts": len(consts), "num_carry": len(carries)}
    rebound = bind_again(eqn, [operands[k] for k in stay], {**params, **changed})
    results: list = [None] * n_carry + list(rebound[len(carries) :])
    for k, result in zip(carries, rebound):
        results[k] = result
    return results


def _needed_operands(eqn, used: set) -> tuple[list[int], list[int]] | None:
    """Numbers of the operands that never change and of the carries that a scan needs; None where it needs all."""
    params, body = params_of(eqn), eqn.params["jaxpr"].jaxpr
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    wanted = {k for k in range(n_carry) if eqn.outvars[k] in used}
    live = sorted(_live_carries(body, n_consts, n_carry, wanted))
    needed = _needed(body, n_carry, set(live))
    consts = [k for k in range(n_consts) if body.invars[k] in needed]
    return None if len(live) == n_carry and len(consts) == n_consts else (consts, live)
