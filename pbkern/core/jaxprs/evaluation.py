"""Binds a jaxpr's equations on values, in order, and what can be said of results without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax.extend import core as jex

from pbkern._jax import bind_again, cached_by_jaxpr_alone, fresh_aval, source_context
from pbkern.core.affine import Affine

from .calls import called_jaxpr
from .walks import literal_value


def evaluate(
    jaxpr: jex.Jaxpr,
    consts: Sequence,
    args: Sequence,
    inline_calls: bool = True,
    bind: Callable | None = None,
) -> list:
    """Binds each equation in order on `args`.

    Args:
      jaxpr: the function.
      consts: values of its constvars.
      args: its operands.
      inline_calls: whether the equations of called jaxprs are bound in place of a call.
      bind: (eqn, *operands) -> results, in place of `bind_again`.

    Returns:
      The function's results.
    """
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        inner = called_jaxpr(eqn) if inline_calls else None
        if inner is not None:
            with source_context(eqn):  # for equations of library functions, which have no line
                results = evaluate(inner.jaxpr, inner.consts, operands, inline_calls, bind)
        elif bind is not None:
            results = bind(eqn, *operands)
        else:
            results = bind_again(eqn, operands)
        env.update(zip(eqn.outvars, results))
    return [read(var) for var in jaxpr.outvars]


def inline(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Removes call equations at a function's top level."""
    avals = [var.aval for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args))(*avals)


class Notes:
    """Facts of several kinds that a rewrite remembers about values, by their identity, while equations are bound again."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, int], tuple] = {}
        self._ids: set[int] = set()

    def note(self, kind: str, value, *what) -> list:
        """Notes facts about a value under `kind`, and returns [value]."""
        # The value stays alive, so that no other one gets its id.
        self._noted[kind, id(value)] = value, *what
        self._ids.add(id(value))
        return [value]

    def bound(self, kind: str, eqn, operands, *what) -> list:
        """The result of an equation on these operands, noted."""
        return self.note(kind, *bind_again(eqn, operands), *what)

    def know_any(self, values: Iterable) -> bool:
        """Whether there is a fact about one of these values."""
        return not self._ids.isdisjoint(map(id, values))

    def find(self, kind: str, x) -> tuple | None:
        """The noted facts, or None."""
        entry = self._noted.get((kind, id(x)))
        return entry and entry[1:]


def in_demand_order(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A pure jaxpr's equations in the order in which a nested expression of its results would evaluate them."""
    producers = {var: (eqn, n) for eqn in closed.jaxpr.eqns for n, var in enumerate(eqn.outvars)}

    def run(*args):
        env = dict(zip(closed.jaxpr.invars, args)) | dict(
            zip(closed.jaxpr.constvars, closed.consts)
        )

        def value(atom):
            if isinstance(atom, jex.Literal):
                return literal_value(atom)
            if atom not in env:
                eqn, _ = producers[atom]
                operands = [value(var) for var in eqn.invars]
                with source_context(eqn):
                    results = bind_again(eqn, operands)
                env.update(zip(eqn.outvars, results))
            return env[atom]

        return [value(var) for var in closed.jaxpr.outvars]

    return jax.make_jaxpr(run)(*[fresh_aval(var.aval) for var in closed.jaxpr.invars])


@cached_by_jaxpr_alone
def affine_outputs(jaxpr: jex.Jaxpr) -> tuple[Affine | None, ...]:
    """Each result as an affine expression of the inputs (symbols 0, 1, ...), None where it is not one."""
    env: dict = {var: Affine.symbol(n) for n, var in enumerate(jaxpr.invars)}

    def read(atom) -> Affine | None:
        if isinstance(atom, jex.Literal):
            return Affine((), int(atom.val)) if np.ndim(atom.val) == 0 else None
        return env.get(atom)

    def step(eqn) -> Affine | None:
        xs = [x for var in eqn.invars if (x := read(var)) is not None]
        if not xs or len(xs) < len(eqn.invars):
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
                for var, atom in zip(inner.jaxpr.invars, eqn.invars):
                    env[var] = read(atom)
                run(inner.jaxpr)
                for var, atom in zip(eqn.outvars, inner.jaxpr.outvars):
                    env[var] = read(atom)
            elif len(eqn.outvars) == 1:
                env[eqn.outvars[0]] = step(eqn)

    run(jaxpr)
    return tuple(read(var) for var in jaxpr.outvars)
