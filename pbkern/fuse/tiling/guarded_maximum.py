"""Guard: a function of the maximum that exponentials subtract in place of it, as where(m == -inf, 0, m) does in softmax.

Its values at the last maximum scale the sums behind the last chunk. No chunk needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.access.dimension_map import MOVING


@dataclass(frozen=True)
class Guard:
    """An elementwise function of a maximum.

    Attributes:
      maximum: its argument.
      result: its value.
      eqns: what makes the result of the maximum and of literals, in program order: elementwise equations, and those that
        move or repeat elements.
    """

    maximum: jex.Var
    result: jex.Var
    eqns: tuple

    def __call__(self, maximum: jax.Array) -> jax.Array:
        """Traces the function, elementwise on an array of any shape."""
        return self._evaluated(
            maximum,
            lambda atom: lax.full(maximum.shape, atom.val, atom.aval.dtype),
            lambda eqn, operands: eqn.primitive.bind(*operands, **eqn.params),
        )

    def is_finite_without_scores(self) -> bool:
        """Whether the function is finite at -inf, the maximum of a row that a mask hides; False where NumPy cannot tell."""
        names = {eqn.primitive.name for eqn in self.eqns}.difference(MOVING)
        if any(ELEMENTWISE[name].meaning is None for name in names):
            return False
        result = self._evaluated(
            np.asarray(-np.inf, array_aval(self.maximum).dtype),
            lambda atom: np.asarray(atom.val, array_aval(atom).dtype),
            lambda eqn, operands: ELEMENTWISE[eqn.primitive.name].evaluated(
                operands, eqn.params, array_aval(eqn.outvars[0]).dtype
            ),
        )
        return bool(np.isfinite(np.asarray(result, np.float64)))

    def _evaluated(self, maximum, of_literal: Callable, of_equation: Callable) -> Any:
        """The result at a maximum; `of_literal`: Literal -> value; `of_equation`: (equation, operands) -> value."""
        values: dict = {self.maximum: maximum}
        for eqn in self.eqns:
            operands = [
                of_literal(atom) if isinstance(atom, jex.Literal) else values[atom]
                for atom in eqn.invars
            ]
            moves = eqn.primitive.name in MOVING
            values[eqn.outvars[0]] = operands[0] if moves else of_equation(eqn, operands)
        return values[self.result]


def as_maximum(eqn, maximum: jex.Var):
    """The last equation of a guard -> one of the same result that is the maximum itself, of the same shape."""
    dtype = eqn.outvars[0].aval.dtype
    return eqn.replace(
        primitive=lax.convert_element_type_p,
        invars=[maximum],
        params={"new_dtype": dtype, "weak_type": False, "sharding": None},
    )
