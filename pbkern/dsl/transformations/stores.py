"""Stores of a function's results, inside of the branches of conditionals that compute them.

    x = cond(p, lambda: dot(a, b), lambda: zeros)             @when(p)
    ref[...] = ref[...] + x                           ->      def _(): ref[...] = ref[...] + dot(a, b)

A product is then added up where it is computed, and a branch without one touches no memory.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.walks import atoms, literal_value, selector
from pbkern.core.lazy_dataclass import dataclass


@dataclass(frozen=True)
class StoreTarget:
    """The Ref that a result goes to.

    Attributes:
      ref: is stored to, or added to.
      adds: whether the result is added to what is there.
      contents: what the function was given as the contents of `ref`, if it was.
    """

    ref: jax.Array
    adds: bool = False
    contents: jax.Array | None = None

    def store(self, value) -> None:
        value = lax.convert_element_type(value, self.ref.dtype)
        self.ref[...] = self.ref[...] + value if self.adds else value


def run_and_store(
    closed: jex.ClosedJaxpr, operands: Sequence, targets: Sequence[StoreTarget]
) -> None:
    """Stores the first results of a function without effects, in the order of `targets`."""
    with jax.enable_x64(True):  # every type is explicit by now
        _Stores(closed, targets).run(operands)


class _Stores:
    """A function whose results are stored.

    Attributes:
      targets: variable -> where it goes, of results that conditionals compute and nothing else reads.
      values: of the function's variables.
    """

    def __init__(self, closed: jex.ClosedJaxpr, targets: Sequence[StoreTarget]) -> None:
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self.results = list(zip(closed.jaxpr.outvars, targets))
        self.producers = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}
        outvars = collections.Counter(
            atom for atom in closed.jaxpr.outvars if isinstance(atom, jex.Var)
        )
        read = {atom for eqn in closed.jaxpr.eqns for atom in atoms(eqn)}
        self.targets = {
            atom: target
            for atom, target in self.results
            if outvars.get(atom) == 1 and atom not in read and self.is_conditional(atom)
        }
        self.values: dict = {}

    def is_conditional(self, var: jex.Var) -> bool:
        eqn = self.producers.get(var)
        return eqn is not None and eqn.primitive.name == "cond"

    def read(self, atom):
        return literal_value(atom) if isinstance(atom, jex.Literal) else self.values[atom]

    def run(self, operands: Sequence) -> None:
        self.values |= dict(zip(self.jaxpr.constvars, self.consts))
        self.values |= dict(zip(self.jaxpr.invars, operands))
        stored: list[tuple] = []
        for eqn in self.jaxpr.eqns:
            numbers = [n for n, var in enumerate(eqn.outvars) if var in self.targets]
            if len(numbers) < len(eqn.outvars):
                # Values beside those that are stored: both are computed, unless the latter take no computation.
                numbers = [n for n in numbers if self.is_moved(eqn, n)]
                self.compute(eqn, [n for n, _ in enumerate(eqn.outvars) if n not in numbers])
            stored.append((eqn, numbers))
        inside: set[jex.Var] = set()
        for eqn, numbers in stored:
            if numbers:
                self.conditional(eqn, numbers)
                inside.update(eqn.outvars[n] for n in numbers)
        for atom, target in self.results:
            if not isinstance(atom, jex.Var) or atom not in inside:
                target.store(self.read(atom))

    def is_moved(self, eqn, number: int) -> bool:
        """Whether a result of a conditional is zero, or an operand, in each branch."""
        return all(
            branch.jaxpr.outvars[number] in branch.jaxpr.invars
            or _is_zero(branch.jaxpr.outvars[number], _producers(branch.jaxpr))
            for branch in eqn.params["branches"]
        )

    def compute(self, eqn, numbers: Sequence[int]) -> None:
        """Computes these results of an equation."""
        if len(numbers) == len(eqn.outvars):
            results: Sequence = _jax.bind_again(eqn, list(map(self.read, eqn.invars)))
        else:
            parts = [
                functools.partial(self.part, branch, eqn.invars[1:], numbers)
                for branch in eqn.params["branches"]
            ]
            results = self.choose(eqn, parts)
        self.values.update(zip((eqn.outvars[n] for n in numbers), results))

    def part(self, branch: jex.ClosedJaxpr, given: Sequence, numbers: Sequence[int]) -> tuple:
        """Results of a branch with these numbers."""
        wanted = [n in numbers for n, _ in enumerate(branch.jaxpr.outvars)]
        needed, _ = _jax.needed_operands(branch, wanted)
        # Operands that these results do not need may be missing.
        operands = [
            self.values.get(atom) if isinstance(atom, jex.Var) else self.read(atom)
            for atom in given
        ]
        return tuple(jex.jaxpr_as_fun(needed)(*operands))

    def conditional(self, eqn, numbers: Sequence[int]) -> None:
        """Stores these results of a conditional in its branches."""
        goals = [(n, self.targets[eqn.outvars[n]]) for n in numbers]
        self.choose(
            eqn,
            [
                functools.partial(self.branch, branch, eqn.invars[1:], goals)
                for branch in eqn.params["branches"]
            ],
        )

    def choose(self, eqn, branches: Sequence[Callable]) -> tuple:
        kind, choice = selector(eqn, self.producers)
        chosen = self.read(choice)
        if isinstance(chosen, (np.generic, bool, int)):
            return branches[min(max(int(chosen), 0), len(branches) - 1)]()
        if kind == "pred":
            return lax.cond(chosen, branches[1], branches[0])
        return lax.switch(chosen, branches)

    def branch(self, branch: jex.ClosedJaxpr, given: Sequence, goals: Sequence) -> tuple:
        """Stores a branch's results. No zero is added, and a result that is the old value is not stored."""
        jaxpr = branch.jaxpr
        outer = dict(zip(jaxpr.invars, given))
        changed = [
            (n, target)
            for n, target in goals
            if not self.changes_nothing(jaxpr.outvars[n], outer, _producers(jaxpr), target)
        ]
        if changed:
            results = self.part(branch, given, [n for n, _ in changed])
            for (_, target), value in zip(changed, results):
                target.store(value)
        return ()

    def changes_nothing(self, atom, outer, producers, target: StoreTarget) -> bool:
        if target.adds:
            is_outer_zero = atom in outer and _is_zero(outer[atom], self.producers)
            return is_outer_zero or _is_zero(atom, producers)
        is_operand = isinstance(atom, jex.Var) and atom in outer
        return (
            is_operand
            and target.contents is not None
            and isinstance(outer[atom], jex.Var)
            and self.read(outer[atom]) is target.contents
        )


def _producers(jaxpr: jex.Jaxpr) -> dict:
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def _is_zero(atom, producers) -> bool:
    """Whether a value is zero everywhere, as its equations show it."""
    if isinstance(atom, jex.Literal):
        return not np.any(literal_value(atom))
    eqn = producers.get(atom)
    return (
        eqn is not None
        and eqn.primitive.name in ("broadcast_in_dim", "reshape", "convert_element_type")
        and _is_zero(eqn.invars[0], producers)
    )
