"""Moves equations into the branch of a conditional that alone reads their results.

    t = dot(a, b)                                        def last(): t = dot(a, b); ...
    cond(is_last, lambda: tanh(t), lambda: 0)    ->      cond(is_last, last, lambda: 0)

A derivative computes values in all steps of a loop that a conditional of the body reads in one step alone.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.evaluation import evaluate
from pbkern.core.jaxprs.walks import atoms, literal_value, selector

# Place of use, in the form (id of a cond equation, number of its branch), for all uses outside of branches.
OTHER_USES = (0, 0)


def sunk(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A function without effects, with equations in the branches that alone use their results."""
    moved = _moved(closed.jaxpr)
    if not moved:
        return closed
    return jax.make_jaxpr(_SunkFunction(closed, moved))(*closed.in_avals)


class _SunkFunction:
    """Evaluates a jaxpr with some equations inside of branches.

    Attributes:
      closed: the jaxpr.
      moved: (id of a cond equation, number of its branch) -> the equations that go there, the last one first.
      producers: value -> the equation that computes it.
    """

    def __init__(
        self, closed: jex.ClosedJaxpr, moved: Mapping[tuple[int, int], list[jex.JaxprEqn]]
    ) -> None:
        self.closed, self.moved = closed, moved
        self.producers = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}

    def __call__(self, *args) -> list:
        jaxpr = self.closed.jaxpr
        inside = {id(eqn) for eqns in self.moved.values() for eqn in eqns}
        env = dict(zip(jaxpr.constvars, self.closed.consts)) | dict(zip(jaxpr.invars, args))
        self.evaluate([eqn for eqn in jaxpr.eqns if id(eqn) not in inside], env)
        return [
            literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]
            for atom in jaxpr.outvars
        ]

    def evaluate(self, eqns: Iterable, env: dict) -> None:
        """Adds the results of equations to `env`."""
        for eqn in eqns:
            if eqn.primitive.name == "cond":
                results = self.conditional(eqn, env)
            else:
                results = _jax.bind_again(eqn, [_read(atom, env) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results))

    def conditional(self, eqn, env: Mapping) -> list:
        """Results of a cond equation; of one branch alone where an outer branch decides which."""
        kind, choice = selector(eqn, self.producers)
        chosen = _read(choice, env)
        branches = [
            functools.partial(self.branch, eqn, number, env)
            for number in range(len(eqn.params["branches"]))
        ]
        if isinstance(chosen, np.bool_):
            return list(branches[int(chosen)]())
        if kind == "pred":
            return list(lax.cond(chosen, branches[1], branches[0]))
        return list(lax.switch(chosen, branches))

    def branch(self, eqn, number: int, outer: Mapping) -> tuple:
        """Results of one branch, with the equations that moved there before it."""
        env, of_branch = dict(outer), eqn.params["branches"][number]
        kind, choice = selector(eqn, self.producers)
        if kind == "pred":
            env[choice] = np.bool_(number)  # for conditionals inside that test the same value
        self.evaluate(self.moved.get((id(eqn), number), ())[::-1], env)
        # Operands that this branch does not read may be missing.
        operands = [_read(atom, env) for atom in eqn.invars[1:]]
        return tuple(evaluate(of_branch.jaxpr, of_branch.consts, operands, inline_calls=False))


def _read(atom, env: Mapping) -> Any:
    """The value of an atom; None where it is missing."""
    return literal_value(atom) if isinstance(atom, jex.Literal) else env.get(atom)


def _moved(jaxpr: jex.Jaxpr) -> dict[tuple[int, int], list]:
    """(id of a cond equation, number of its branch) -> the equations that go there, the last one first."""
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    places = collections.defaultdict(set)
    for atom in jaxpr.outvars:
        if isinstance(atom, jex.Var):
            places[atom].add(OTHER_USES)
    moved = collections.defaultdict(list)
    for eqn in reversed(jaxpr.eqns):
        used = set().union(*(places[var] for var in eqn.outvars))
        (place,) = used if len(used) == 1 and not eqn.effects else (OTHER_USES,)
        if place != OTHER_USES:
            moved[place].append(eqn)
        for atom in [selector(eqn, producers)[1]] if eqn.primitive.name == "cond" else atoms(eqn):
            if isinstance(atom, jex.Var):
                places[atom].add(place)
        if eqn.primitive.name == "cond":
            for number, branch in enumerate(eqn.params["branches"]):
                for atom in _operands_read(eqn, branch.jaxpr):
                    places[atom].add((id(eqn), number))
    return moved


def _operands_read(eqn, branch: jex.Jaxpr) -> list[jex.Var]:
    """Operands of a cond equation that one of its branches reads."""
    read = {atom for inner in branch.eqns for atom in atoms(inner)} | {
        atom for atom in branch.outvars if isinstance(atom, jex.Var)
    }
    return [
        atom
        for atom, var in zip(eqn.invars[1:], branch.invars)
        if var in read and isinstance(atom, jex.Var)
    ]
