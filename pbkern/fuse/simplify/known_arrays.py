"""Known arrays: small constants and views of them, while equations are bound again (driver.py).

c = constant f32[3,3]    w = broadcast_in_dim c    conv x w    ->    the rewrite of conv sees the numbers of w
"""

from __future__ import annotations

import jax
import numpy as np

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.ops.views import MOST_ELEMENTS, VIEWS

from .splat_operands import Splat

# Operand whose numbers a rewrite looks at, by primitive.
LOOKED_AT = {"conv_general_dilated": 1}


class KnownArrays:
    """Which values are known to hold which numbers."""

    def __init__(self, splat: Splat) -> None:
        self._splat = splat
        self._notes = Notes()

    def numbers(self, x) -> np.ndarray | None:
        """The elements of x, if they are known and few."""
        if np.size(x) > MOST_ELEMENTS:
            return None
        if not isinstance(x, jax.core.Tracer):
            return np.asarray(x)
        noted = self._notes.find("array", x)
        if noted:
            return noted[0]
        scalar = self._splat.scalar(x)
        return None if scalar is None else np.full(x.shape, scalar, x.dtype)

    def note_constant(self, value, constant) -> None:
        """Notes that `value` stands for a constant of the function."""
        if np.size(constant) <= MOST_ELEMENTS and not isinstance(constant, jax.core.Tracer):
            self._notes.note("array", value, np.asarray(constant))

    def changes(self, operands) -> bool:
        """Whether numbers of an operand, an array, are known."""
        return self._notes.know_any(operands)

    def note(self, eqn, operands, results) -> None:
        """Notes results that are views of a known array."""
        view = VIEWS.get(eqn.primitive.name)
        if view is None or len(operands) != 1 or np.size(results[0]) > MOST_ELEMENTS:
            return
        numbers = self.numbers(operands[0])
        if numbers is not None:
            self._notes.note("array", results[0], view(eqn.params, numbers))

    def as_arrays(self, eqn, operands) -> list:
        """The operands; the one that a rewrite looks at as its numbers, if they are known."""
        at = LOOKED_AT.get(eqn.primitive.name)
        if at is None or (numbers := self.numbers(operands[at])) is None:
            return operands
        return [*operands[:at], numbers, *operands[at + 1 :]]
