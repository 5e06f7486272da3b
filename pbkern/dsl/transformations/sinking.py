"""Moves equations into the branch of a conditional that alone reads what they compute.

    t = dot(a, b)                                        def last(): t = dot(a, b); ...
    cond(is_last, lambda: tanh(t), lambda: 0)    ->      cond(is_last, last, lambda: 0)

Derivatives compute what all steps of a loop may need; a conditional of the body says that one step does.
"""

from __future__ import annotations

import collections

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs import atoms, evaluate, literal_value, selector

# A place of use: (a cond equation's id, the number of its branch); of all other uses together.
OTHER_USES = (0, 0)


def sunk(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A function without effects, with equations in the branches that alone use their results."""
    moved = _moved(closed.jaxpr)
    if not moved:
        return closed
    inside = {id(eqn) for eqns in moved.values() for eqn in eqns}
    producers = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}

    def run(eqns, env: dict) -> None:
        def read(atom):
            return literal_value(atom) if isinstance(atom, jex.Literal) else env.get(atom)

        for eqn in eqns:
            if eqn.primitive.name == "cond":
                kind, choice = selector(eqn, producers)
                branches = [
                    lambda eqn=eqn, n=n: branch(eqn, n, env)
                    for n in range(len(eqn.params["branches"]))
                ]
                chosen = read(choice)
                if isinstance(chosen, np.bool_):
                    results = list(branches[int(chosen)]())
                elif kind == "pred":
                    results = list(lax.cond(chosen, branches[1], branches[0]))
                else:
                    results = list(lax.switch(chosen, branches))
            else:
                results = _jax.bind_again(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results))

    def branch(eqn, number: int, outer: dict) -> tuple:
        env, of_branch = dict(outer), eqn.params["branches"][number]
        kind, choice = selector(eqn, producers)
        if kind == "pred":
            env[choice] = np.bool_(number)  # for conditionals of the same, inside
        run(moved.get((id(eqn), number), ())[::-1], env)
        # Operands that this branch does not read may be missing.
        operands = [
            literal_value(atom) if isinstance(atom, jex.Literal) else env.get(atom)
            for atom in eqn.invars[1:]
        ]
        return tuple(evaluate(of_branch.jaxpr, of_branch.consts, operands, inline_calls=False))

    def function(*args):
        env = dict(zip(closed.jaxpr.constvars, closed.consts))
        env |= dict(zip(closed.jaxpr.invars, args))
        run([eqn for eqn in closed.jaxpr.eqns if id(eqn) not in inside], env)
        return [
            literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]
            for atom in closed.jaxpr.outvars
        ]

    return jax.make_jaxpr(function)(*closed.in_avals)


def _moved(jaxpr: jex.Jaxpr) -> dict[tuple[int, int], list]:
    """Branch -> the equations that go there, the last one first."""
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
                for atom in _read(eqn, branch.jaxpr):
                    places[atom].add((id(eqn), number))
    return moved


def _read(eqn, branch: jex.Jaxpr) -> list[jex.Var]:
    """Operands of a cond equation that one of its branches reads."""
    read = {atom for inner in branch.eqns for atom in atoms(inner)} | {
        atom for atom in branch.outvars if isinstance(atom, jex.Var)
    }
    return [
        atom
        for atom, var in zip(eqn.invars[1:], branch.invars)
        if var in read and isinstance(atom, jex.Var)
    ]
