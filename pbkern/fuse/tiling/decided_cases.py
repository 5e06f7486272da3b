"""Selects and concatenations of which a block needs one case, as follows from where the block may start.

    select_n(row == 0, v, broadcast(v[1]))[row : row + 4], row in [2, 90]   ->   v[row : row + 4]
    concatenate(u[1:2], u)[row : row + 4], row in [2, 90]                   ->   u[row - 1 : row + 3]

An access rule asks for all cases of a block that moves. Here bounds of indices are followed through
the equations that make a predicate, with the rules of fuse/simplify/proved_ranges.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.fuse.access.blocks import Step, step_of
from pbkern.fuse.access.rules import Access, NeedsWhole, Pull, Span, pull
from pbkern.fuse.simplify.proved_ranges import MOVES, RULES, Bounds, bounds_of_type

# Rules of these take their operands' bounds at the block's own place; others know whole arrays.
OF_PLACES = frozenset(
    {
        "add",
        "sub",
        "mul",
        "max",
        "min",
        "neg",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
        "and",
        "or",
        "not",
    }
    | {"rem", "div", "clamp", "convert_element_type", *MOVES}
)


class DecidedCases:
    """Steps of equations whose blocks start where symbol 0 is in `rows` (first, last)."""

    def __init__(self, eqns: Iterable[jex.JaxprEqn], rows: tuple[int, int] = (0, 0)) -> None:
        self.rows = rows
        self.makers = {var: eqn for eqn in eqns for var in eqn.outvars}
        self.known: dict[tuple[jex.Var, Access], Bounds | None] = {}

    def step(self, eqn, out: Access) -> Step:
        """In place of `step_of`: asks for the one case that the block needs, where there is one."""
        case, operand = self.case(eqn, out)
        if case is None:
            return step_of(eqn, out)
        inputs = tuple(operand if k == case else None for k in range(len(eqn.invars)))
        return Step(eqn, out, Pull(inputs, {}, lambda ctx, *operands: [operands[case]]))

    def case(self, eqn, out: Access) -> tuple[int, Access] | tuple[None, None]:
        """(number of the operand that holds a block of a select or of a concatenation, its block)."""
        if eqn.primitive.name == "select_n" and eqn.invars[0].aval.shape:
            chosen = self.bounds(eqn.invars[0], out)
            if chosen is not None and chosen[0] == chosen[1]:
                return 1 + chosen[0], out
        elif eqn.primitive.name == "concatenate":
            return self.part(eqn, out)
        return None, None

    def part(self, eqn, out: Access) -> tuple[int, Access] | tuple[None, None]:
        """(operand that holds the whole block, its block)."""
        axis = eqn.params["dimension"]
        first, last = self.reached(out[axis])
        ends = np.cumsum([0, *(var.aval.shape[axis] for var in eqn.invars)]).tolist()
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            if start <= first and last < end:
                moved = (span.shifted(-start) if k == axis else span for k, span in enumerate(out))
                return number, tuple(moved)
        return None, None

    def bounds(self, atom, access: Access) -> Bounds | None:
        """The least and the greatest of a block's integers, or of its truth values as 0 and 1."""
        if isinstance(atom, jex.Literal):
            value = np.asarray(atom.val)
            return (int(value.min()), int(value.max())) if value.dtype.kind in "iub" else None
        place = atom, access
        if place not in self.known:
            self.known[place] = self._followed(atom, access)
        return self.known[place]

    def _followed(self, var: jex.Var, access: Access) -> Bounds | None:
        possible = bounds_of_type(getattr(var.aval, "dtype", None))
        eqn = self.makers.get(var)
        if possible is None or eqn is None:
            return possible
        if eqn.primitive.name == "iota":
            bounds: Bounds | None = self.reached(access[eqn.params["dimension"]])
        elif eqn.primitive.name in OF_PLACES:
            try:
                inputs = pull(eqn, access).inputs
            except (NeedsWhole, UnsupportedOp, NotImplementedError):
                return possible
            operands = [
                None if block is None else self.bounds(atom, block)
                for atom, block in zip(eqn.invars, inputs)
            ]
            bounds = RULES[eqn.primitive.name](eqn, operands)
        else:
            return possible
        wraps = bounds is None or bounds[0] < possible[0] or bounds[1] > possible[1]
        return possible if wraps else bounds

    def reached(self, span: Span) -> tuple[int, int]:
        """(first, last) index that a span reaches."""
        starts = [_at(span.start, row) for row in self.rows]
        return min(starts), max(starts) + span.size - 1


def _at(start: Affine, row: int) -> int:
    return start.const + sum(coeff * row for _, coeff in start.terms)
