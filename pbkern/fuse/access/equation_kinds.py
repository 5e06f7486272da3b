"""Kinds of equations: equations of one kind differ in the names of their values alone.

Equal layers consist of equations of the same kinds. What depends on an equation's operation, parameters and types is worked
out for one of each kind.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Any, TypeVar

import numpy as np
from jax.extend import core as jex

from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.process.context_values import during

T = TypeVar("T")


@dataclass
class EquationKinds:
    """Memo of one plan.

    Attributes:
      numbers: content of an equation -> number of its kind.
      known: id of an equation -> (equation, number of its kind, its operands that are no literals, and results). It keeps
        the equation, so that no other gets its id.
      answers: (question, number of a kind or key of a group) -> answer.
    """

    numbers: dict[tuple, int] = field(default_factory=dict)
    known: dict[int, tuple[Any, int, tuple]] = field(default_factory=dict)
    answers: dict[tuple[str, Any], Any] = field(default_factory=dict)

    def number(self, eqn) -> int:
        """Equal for equations of one kind."""
        return (self.known.get(id(eqn)) or self._new(eqn))[1]

    def group(self, eqns: Sequence, outputs: Sequence) -> tuple:
        """Equal for groups that differ only in the names of values."""
        known = self.known
        entries = [known.get(id(eqn)) or self._new(eqn) for eqn in eqns]
        values = [value for entry in entries for value in entry[2]]
        number_of = dict(zip(dict.fromkeys(values), itertools.count())).__getitem__
        kinds = tuple([entry[1] for entry in entries])
        return kinds, *map(number_of, values), *map(number_of, outputs)

    def _new(self, eqn) -> tuple:
        number = self.numbers.setdefault(description(eqn), len(self.numbers))
        known = self.known[id(eqn)] = eqn, number, (*atoms(eqn), *eqn.outvars)
        return known


def description(eqn) -> tuple:
    """Operation, parameters, types and literals; the equation itself if parameters cannot be compared."""
    params = tuple((name, type(value), value) for name, value in sorted(eqn.params.items()))
    types = tuple(var.aval for var in (*eqn.invars, *eqn.outvars))
    literals = tuple(
        (k, np.asarray(atom.val).tobytes())
        for k, atom in enumerate(eqn.invars)
        if isinstance(atom, jex.Literal)
    )
    described = (eqn.primitive, params, types, literals)
    try:
        hash(described)
    except TypeError:
        return (id(eqn),)
    return described


_current: contextvars.ContextVar[EquationKinds | None] = contextvars.ContextVar(
    "kinds of equations in one plan", default=None
)


def kinds_memoised() -> AbstractContextManager:
    """In a `with` block, equations have kinds. The machine must stay the same in it."""
    return during(_current, EquationKinds())


def current_kinds() -> EquationKinds | None:
    """The kinds of the plan that is being made."""
    return _current.get()


def once_per_kind(question: str, eqn, answer: Callable[[], T]) -> T:
    """answer(), or what it was for an equation of the same kind."""
    kinds = _current.get()
    if kinds is None:
        return answer()
    key = question, kinds.number(eqn)
    if key not in kinds.answers:
        kinds.answers[key] = answer()
    return kinds.answers[key]
