"""A body, followed for one program: which Refs it may have stored to, and which it reads before any store.

Numbers that follow from the program's place in the grid are known, and so are conditions on them.
Everything that is loaded is not. A branch on an unknown condition may store, and its reads get the
benefit of the doubt; a loop is followed for its first turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jaxprs.calls import called_jaxpr
from pbkern.core.jaxprs.walks import inner_jaxprs, literal_value, variables_read
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.interpret import numpy_result
from pbkern.dsl.primitives.ref_access import is_ref_access, ref_access


@dataclass(frozen=True)
class _RefNumber:
    """A Ref: its number among those of the body."""

    number: int


UNKNOWN = object()


@dataclass
class PlaceWalk:
    """Follows one program through its accesses to Refs.

    Attributes:
      place: the program's number along each grid dimension, None where it is not known.
      grid: sizes of the grid, None where they are not known.
      stored: numbers of Refs that the program may have stored to; at first, those that are defined.
      first_read: called with (number of a Ref, equation) at each read before any store.
      is_certain: whether the equations that are followed run whatever values are loaded.
    """

    place: Sequence[int | None]
    grid: Sequence[int | None]
    stored: set[int]
    first_read: Callable[[int, Any], None] = field(default=lambda number, eqn: None)
    is_certain: bool = True

    def run(self, jaxpr: jex.Jaxpr) -> set[int]:
        """Follows a body; returns the numbers of Refs that it may have stored to."""
        self._run(jaxpr, (), [_RefNumber(n) for n in range(len(jaxpr.invars))])
        return self.stored

    def _run(self, jaxpr: jex.Jaxpr, consts: Sequence, args: Sequence) -> list:
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

        def read(atom):
            return literal_value(atom) if isinstance(atom, jex.Literal) else env[atom]

        used = variables_read(jaxpr)
        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            if is_ref_access(eqn):
                self._access(eqn, operands[0].number, not used.isdisjoint(eqn.outvars))
                results: Sequence = [UNKNOWN] * len(eqn.outvars)
            else:
                results = self._equation(eqn, operands)
            env.update(zip(eqn.outvars, results))
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn, operands: list) -> Sequence:
        name, unknown = eqn.primitive.name, [UNKNOWN] * len(eqn.outvars)
        if name in ("program_id", "num_programs"):
            number = (self.place if name == "program_id" else self.grid)[eqn.params["axis"]]
            return unknown if number is None else [np.int32(number)]
        if name == "cond":
            return self._cond(eqn, operands)
        if name == "scan":
            return self._scan(eqn, operands)
        inner = called_jaxpr(eqn)
        if inner is not None:
            return self._run(inner.jaxpr, inner.consts, operands)
        if any(inner_jaxprs(eqn)):
            self._perhaps(eqn, operands)
            return unknown
        is_number = all(isinstance(operand, np.generic) for operand in operands)
        if not is_number or len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape:
            return unknown
        result = numpy_result(eqn, operands)
        return unknown if result is None else [result[()]]

    def _access(self, eqn, number: int, gives_elements: bool) -> None:
        access = ref_access(eqn)
        reads = access.kind == "add" or gives_elements
        if reads and access.mask is None and number not in self.stored and self.is_certain:
            self.first_read(number, eqn)
        if access.kind != "load":
            self.stored.add(number)

    def _cond(self, eqn, operands: list) -> Sequence:
        selector, *rest = operands
        branches = eqn.params["branches"]
        if selector is not UNKNOWN:
            branch = branches[min(max(int(selector), 0), len(branches) - 1)]
            return self._run(branch.jaxpr, branch.consts, rest)
        self._perhaps(eqn, rest)
        return [UNKNOWN] * len(eqn.outvars)

    def _scan(self, eqn, operands: list) -> Sequence:
        params = _jax.params_of(eqn)
        body, first = params["jaxpr"], params["num_consts"] + params["num_carry"]
        if params["length"]:
            of_slices = [
                operand if isinstance(operand, _RefNumber) else UNKNOWN
                for operand in operands[first:]
            ]
            self._run(body.jaxpr, body.consts, [*operands[:first], *of_slices])
            self._perhaps(eqn, operands)  # later turns
        return [UNKNOWN] * len(eqn.outvars)

    def _perhaps(self, eqn, operands: list) -> None:
        """Notes stores of all branches and turns of an equation, as values may choose any of them."""
        refs = [operand for operand in operands if isinstance(operand, _RefNumber)]
        if not refs:
            return
        before, self.is_certain = self.is_certain, False
        for inner in inner_jaxprs(eqn):
            inner_refs = [var for var in inner.jaxpr.invars if _jax.is_ref(var.aval)]
            if len(inner_refs) != len(refs):  # a while's condition, which reads some of them
                self.stored.update(ref.number for ref in refs)
                continue
            numbers = iter(refs)
            args = [next(numbers) if _jax.is_ref(v.aval) else UNKNOWN for v in inner.jaxpr.invars]
            self._run(inner.jaxpr, [UNKNOWN] * len(inner.consts), args)
        self.is_certain = before
