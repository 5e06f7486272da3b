"""ClosedJaxpr -> the same with counted while loops as scans, and with induction variables as xs of the scans.

    while i < n: i = i + c, ...    ->  scan of known length, where n and the first i are constants
    carry i' = i + c               ->  xs = i, i + c, i + 2 c, ...

A scan of known length may take several steps at once, and no step waits for the previous counter.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again, params_of
from pbkern.core.jax_types import array_aval
from pbkern.fuse.simplify.driver import drop_dead, retrace

# Comparison of a counter with a bound -> (sign of the counter's step, distance from the bound to the first value that ends
# the loop).
CONDITIONS = {"lt": (1, 0), "le": (1, 1), "gt": (-1, 0), "ge": (-1, -1)}
# Comparison -> the same with its operands exchanged.
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def count_loops(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Turns while loops of known length into scans, also inside control flow."""
    return retrace(closed, {"while": _as_scan})


def walk_counters(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Moves induction variables from carries to xs of scans.

    Scans inside of control flow stay: the values would be constants of inner jaxprs, which these do not hold.
    """
    top_level = {id(eqn) for eqn in closed.jaxpr.eqns}
    walk = lambda eqn, operands: _over_counters(eqn, operands) if id(eqn) in top_level else None
    counts = any(eqn.primitive.name == "scan" and _steps(eqn) for eqn in closed.jaxpr.eqns)
    return retrace(closed, {"scan": walk}) if counts else closed


def _steps(eqn) -> dict[int, int]:
    """Carry of a scan that counts -> the number that each step adds to it."""
    params, body = params_of(eqn), eqn.params["jaxpr"].jaxpr
    olds = body.invars[params["num_consts"] :][: params["num_carry"]]
    steps = {k: _increment(body, old, new) for k, (old, new) in enumerate(zip(olds, body.outvars))}
    return {k: step for k, step in steps.items() if step is not None}


def _constant(x) -> int | None:
    """The value of a known integer scalar; None for other values."""
    known = isinstance(x, (np.ndarray, np.generic)) and x.ndim == 0 and x.dtype.kind in "iu"
    return int(x) if known else None


def _maker(jaxpr: jex.Jaxpr, var):
    """The equation that makes `var`, behind conversions that only change whether its type is weak."""
    makers = {output: eqn for eqn in jaxpr.eqns for output in eqn.outvars}
    while var in makers and makers[var].primitive.name == "convert_element_type":
        source = makers[var].invars[0]
        if isinstance(source, jex.Literal) or array_aval(source).dtype != var.aval.dtype:
            return None
        var = source
    return makers.get(var)


def _increment(jaxpr: jex.Jaxpr, old, new) -> int | None:
    """c if `new` is old + c, else None."""
    eqn = None if isinstance(new, jex.Literal) else _maker(jaxpr, new)
    if eqn is None or eqn.primitive.name not in ("add", "sub"):
        return None
    x, y = eqn.invars
    if y is old and eqn.primitive.name == "add":
        x, y = y, x
    step = (
        _constant(np.asarray(y.val, array_aval(y).dtype))
        if x is old and isinstance(y, jex.Literal)
        else None
    )
    return -step if step is not None and eqn.primitive.name == "sub" else step


def _trips(eqn, operands) -> int | None:
    """Trip count of a while loop, if it counts from one constant to another."""
    params = eqn.params
    cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    test = None if isinstance(cond.outvars[0], jex.Literal) else _maker(cond, cond.outvars[0])
    if test is None or test.primitive.name not in CONDITIONS:
        return None
    compared, name = list(test.invars), test.primitive.name
    carries = cond.invars[params["cond_nconsts"] :]
    if isinstance(compared[0], jex.Literal) or compared[0] not in carries:
        compared, name = compared[::-1], MIRRORED[name]
    counter, bound = compared
    if isinstance(counter, jex.Literal) or counter not in carries:
        return None
    index = carries.index(counter)
    if isinstance(bound, jex.Literal):
        last = _constant(np.asarray(bound.val, array_aval(bound).dtype))
    else:
        is_given = bound in cond.invars[: params["cond_nconsts"]]
        last = _constant(operands[cond.invars.index(bound)]) if is_given else None
    first = _constant(operands[params["cond_nconsts"] + params["body_nconsts"] + index])
    step = _increment(body, body.invars[params["body_nconsts"] + index], body.outvars[index])
    sign, behind = CONDITIONS[name]
    if first is None or last is None or not step or step * sign < 0:
        return None
    trips = max(0, -(-(last + behind - first) // step))
    limits = np.iinfo(counter.aval.dtype)
    wraps = not limits.min <= first + trips * step <= limits.max
    return None if wraps else trips


def _as_scan(eqn, operands: Sequence) -> list | None:
    """Results of a while loop as a scan; None where its length is unknown."""
    trips = None if eqn.effects else _trips(eqn, operands)
    if trips is None:
        return None
    params = eqn.params
    body = retrace(params["body_jaxpr"], {"while": _as_scan})
    consts = operands[params["cond_nconsts"] : params["cond_nconsts"] + params["body_nconsts"]]
    firsts = tuple(operands[params["cond_nconsts"] + params["body_nconsts"] :])
    if trips == 0:
        return list(firsts)

    def step(carry, _):
        results = jex.jaxpr_as_fun(body)(*consts, *carry)
        return tuple(
            lax.convert_element_type(result, var.aval.dtype)
            for result, var in zip(results, eqn.outvars)
        ), None

    return list(lax.scan(step, firsts, None, length=trips)[0])


def _over_counters(eqn, operands: Sequence) -> list | None:
    """Results of a scan with its induction variables as xs; None where it has none with a known first value."""
    params, body = params_of(eqn), eqn.params["jaxpr"]
    n_consts, n_carry, length = params["num_consts"], params["num_carry"], params["length"]
    olds = body.jaxpr.invars[n_consts : n_consts + n_carry]
    counters: dict[int, tuple[int, int]] = {}  # carry -> (first value, step)
    for k, step in _steps(eqn).items():
        first = _constant(operands[n_consts + k])
        if first is not None:
            counters[k] = first, step
    if not counters or params["reverse"] or eqn.effects:
        return None
    carried = [k for k in range(n_carry) if k not in counters]

    def values(k: int, low: int, high: int) -> np.ndarray:
        """Values of a counter before the steps from `low` to `high`."""
        first, step = counters[k]
        return (first + step * np.arange(low, high, dtype=np.int64)).astype(olds[k].aval.dtype)

    def step_over_counters(*args):
        consts, carry, xs = (
            args[:n_consts],
            args[n_consts : n_consts + len(carried)],
            args[n_consts + len(carried) :],
        )
        given = dict(zip(carried, carry)) | dict(zip(counters, xs))
        results = jex.jaxpr_as_fun(body)(
            *consts, *(given[k] for k in range(n_carry)), *xs[len(counters) :]
        )
        return [results[place] for place in carried] + list(results[n_carry:])

    ins = [var.aval for var in body.jaxpr.invars]
    types = (
        ins[:n_consts]
        + [ins[n_consts + place] for place in (*carried, *counters)]
        + ins[n_consts + n_carry :]
    )
    smaller = drop_dead(jax.make_jaxpr(step_over_counters)(*types))
    given = [
        *operands[:n_consts],
        *(operands[n_consts + place] for place in carried),
        *(values(k, 0, length) for k in counters),
        *operands[n_consts + n_carry :],
    ]
    rebound = bind_again(eqn, given, {**params, "jaxpr": smaller, "num_carry": len(carried)})
    results = dict(zip(carried, rebound))
    results |= {k: values(k, length, length + 1)[0] for k in counters}
    return [*(results[k] for k in range(n_carry)), *rebound[len(carried) :]]
