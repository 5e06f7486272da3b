"""Slices of selects and concatenations -> slices of the one case that they hold.

    y = select_n(column < 1, x, v); y[:, 7]    ->    x[:, 7]

Updates at known places that follow each other, such as the sides of an array, then all read the
array as it was before them where none of them reaches: none has to be stored for the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax
from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import equations, primitive_names
from pbkern.fuse.access.rules import Access, Span
from pbkern.fuse.simplify.driver import retrace
from pbkern.fuse.tiling.decided_cases import DecidedCases

CHOICES = ("select_n", "concatenate")


def read_cases(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    if "slice" not in (names := primitive_names(closed)) or names.isdisjoint(CHOICES):
        return closed
    reads = _Reads(DecidedCases(equations(closed.jaxpr)))
    return retrace(closed, dict.fromkeys(CHOICES, reads.noted) | {"slice": reads.slice})


class _Reads:
    """Rewrites that know which equation made a value of several cases."""

    def __init__(self, decided: DecidedCases) -> None:
        self.decided, self.notes = decided, Notes()

    def noted(self, eqn, operands: Sequence):
        return self.notes.bound("choice", eqn, operands, eqn, tuple(operands))

    def slice(self, eqn, operands: Sequence):
        (x,), params = operands, eqn.params
        bounds = zip(params["start_indices"], params["limit_indices"])
        access: Access = tuple(Span(Affine((), start), end - start) for start, end in bounds)
        while choice := self.notes.find("choice", x):
            source, cases = choice
            case, part = self.decided.case(source, access)
            if case is None or part is None:
                break
            x, access = cases[case], part
        if x is operands[0]:
            return None
        starts = [span.start.const for span in access]
        ends = [start + span.size for start, span in zip(starts, access)]
        return [lax.slice(x, starts, ends, params["strides"])]
