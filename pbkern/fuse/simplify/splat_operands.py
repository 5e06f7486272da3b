"""Splat operands: arrays that hold one known scalar everywhere, while equations are bound again (driver.py).

a = broadcast_in_dim 500 (1, 1)    b = sub a 0    rem x b    ->    rem x 500
"""

from __future__ import annotations

from typing import cast

import numpy as np
from jax import lax
from jax.typing import ArrayLike

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.ops.views import VIEWS

from .rewrites import FOLDED

# Operations whose result holds the operand's scalar everywhere.
SPREADING = VIEWS.keys()
# Operations that rewrites compute on scalars, if all operands are splats.
FOLDING = {*FOLDED, "convert_element_type", "select_n"}
# Operations on booleans -> the operand that is the result, whatever the other operand is.
ABSORBING = {"and": False, "or": True}
# Comparisons of an unsigned number with 0 -> their result. Remainders of unsigned numbers have them.
OF_UNSIGNED = {"lt": False, "ge": True}
# Arithmetic that one operand does not decide.
PLAIN_ARITHMETIC = FOLDED - ABSORBING.keys() - OF_UNSIGNED.keys()


def _decided_by_one(eqn, operands, scalars) -> np.bool_ | None:
    """The result where one operand decides it; None elsewhere."""
    name = eqn.primitive.name
    if name in ABSORBING and eqn.outvars[0].aval.dtype == bool:
        decided = any(scalar is not None and bool(scalar) == ABSORBING[name] for scalar in scalars)
        return np.bool_(ABSORBING[name]) if decided else None
    if (
        name in OF_UNSIGNED
        and operands[0].dtype.kind == "u"
        and scalars[1] is not None
        and scalars[1] == 0
    ):
        return np.bool_(OF_UNSIGNED[name])
    return None


class Splat:
    """Remembers values that are known to be splats."""

    def __init__(self, rewrites: dict):
        self.rewrites = rewrites
        self._folding = FOLDING & rewrites.keys()
        self._notes = Notes()

    def changes(self, eqn, operands) -> bool:
        """Whether the equation's result may be a splat, or its operands scalars; False is sure and quick."""
        if self._notes.know_any(operands):
            return True
        literals = sum(isinstance(x, (np.ndarray, np.generic)) for x in operands)
        return literals > 0 and (
            literals == len(operands) or eqn.primitive.name not in PLAIN_ARITHMETIC
        )

    def scalar(self, x) -> np.ndarray | np.generic | None:
        """The scalar that x holds everywhere, if known."""
        if isinstance(x, (np.ndarray, np.generic)):
            return x if x.ndim == 0 else None
        scalar = self._notes.find("splat", x)
        return scalar[0] if scalar else None

    def note(self, eqn, operands, results) -> None:
        """Notes results that hold an operand's scalar."""
        if eqn.primitive.name in SPREADING and len(operands) == 1:
            scalar = self.scalar(operands[0])
            if scalar is not None and np.ndim(results[0]):
                self._notes.note("splat", results[0], scalar)

    def folded(self, eqn, operands) -> list | None:
        """The result of an operation on splats."""
        if eqn.primitive.name not in self._folding:
            return None
        out, scalars = eqn.outvars[0].aval, [self.scalar(operand) for operand in operands]
        if not out.shape:
            return None
        scalar: np.ndarray | np.generic | None = _decided_by_one(eqn, operands, scalars)
        if scalar is None and not any(splat is None for splat in scalars):
            results = self.rewrites[eqn.primitive.name](eqn, scalars)
            scalar = self.scalar(results[0]) if results is not None else None
        if scalar is None:
            return None
        # JAX takes scalars of ml_dtypes too, which its hint leaves out.
        value = lax.full(out.shape, cast(ArrayLike, scalar), out.dtype)
        return self._notes.note("splat", value, scalar)

    def as_scalars(self, eqn, operands) -> list:
        """Operands of an elementwise operation, splats as scalars if another operand has the result's shape."""
        name = eqn.primitive.name
        if name == "select_n" and self.scalar(operands[0]) is not None:
            return [self.scalar(operands[0]), *operands[1:]]
        if name not in FOLDED:
            return operands
        scalars = [self.scalar(operand) for operand in operands]
        if all(splat is None for splat in scalars):
            return operands
        if any(
            splat is None and operand.shape == eqn.outvars[0].aval.shape
            for splat, operand in zip(scalars, operands)
        ):
            return [
                operand if splat is None else splat for splat, operand in zip(scalars, operands)
            ]
        return operands
