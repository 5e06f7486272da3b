"""Walking and re-tracing jaxprs: the only jaxpr surgery in pbkern.

Jaxprs are never built by hand: `inline` re-traces through calls with `primitive.bind`, which renames variables
(JAX shares inner jaxprs between call sites) and type-checks the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.extend import core as jex

from .affine import Affine

# Equations that only call another jaxpr, by the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "jaxpr",
}


def called_jaxpr(eqn) -> jex.ClosedJaxpr | None:
    """The jaxpr that a call equation inlines to, or None for any other equation."""
    key = CALLS.get(eqn.primitive.name)
    inner = eqn.params.get(key) if key else None
    if inner is None and key:
        inner = eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")
    if inner is None:
        return None
    return inner if isinstance(inner, jex.ClosedJaxpr) else jex.ClosedJaxpr(inner, ())


def inner_jaxprs(eqn) -> Iterator[jex.ClosedJaxpr]:
    """Every jaxpr among an equation's parameters."""
    for value in eqn.params.values():
        for v in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(v, jex.ClosedJaxpr):
                yield v
            elif isinstance(v, jex.Jaxpr):
                yield jex.ClosedJaxpr(v, ())


def evaluate(jaxpr: jex.Jaxpr, consts: Sequence, args: Sequence, inline_calls: bool = True,
             bind: Callable | None = None) -> list:
    """Binds each equation in order on `args`, going through calls. `bind(eqn, *operands) -> results` may intercept."""
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        inner = called_jaxpr(eqn) if inline_calls else None
        if inner is not None:
            results = evaluate(inner.jaxpr, inner.consts, operands, inline_calls, bind)
        elif bind is not None:
            results = bind(eqn, *operands)
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results))
    return [read(a) for a in jaxpr.outvars]


def inline(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same function without call equations at its top level."""
    avals = [v.aval for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args))(*avals)


def affine_outputs(jaxpr: jex.Jaxpr) -> list[Affine | None]:
    """Each result as an affine expression of the inputs (symbols 0, 1, ...), None where it is not one."""
    env: dict = {v: Affine.symbol(n) for n, v in enumerate(jaxpr.invars)}

    def read(atom) -> Affine | None:
        if isinstance(atom, jex.Literal):
            return Affine((), int(atom.val)) if np.ndim(atom.val) == 0 else None
        return env.get(atom)

    def step(eqn) -> Affine | None:
        xs = [read(a) for a in eqn.invars]
        if not xs or any(x is None for x in xs):
            return None
        name = eqn.primitive.name
        if name == "add":
            return xs[0] + xs[1]
        if name == "sub":
            return xs[0] - xs[1]
        if name == "neg":
            return xs[0] * -1
        if name == "mul" and (xs[0].is_const or xs[1].is_const):
            return xs[0] * xs[1].const if xs[1].is_const else xs[1] * xs[0].const
        if name in ("convert_element_type", "stop_gradient", "copy"):
            return xs[0]
        return None

    def run(jx: jex.Jaxpr) -> None:
        for eqn in jx.eqns:
            inner = called_jaxpr(eqn)
            if inner is not None:
                for v, a in zip(inner.jaxpr.invars, eqn.invars):
                    env[v] = read(a)
                run(inner.jaxpr)
                for v, a in zip(eqn.outvars, inner.jaxpr.outvars):
                    env[v] = read(a)
            elif len(eqn.outvars) == 1:
                env[eqn.outvars[0]] = step(eqn)

    run(jaxpr)
    return [read(a) for a in jaxpr.outvars]
