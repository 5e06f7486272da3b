"""Rewrites of products with numbers: (x * c) * d -> x * (c d), also where x * c was written x / (1 / c).

As XLA does it: one operation and one rounding less, and steps of a linspace, i / n * n, are whole
numbers where 1 / n * n is 1. Not for storage-only types: there the product of c and d would be
rounded, but x * c is not.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.jaxprs.evaluation import Notes

TYPES = ("float32", "float64")


class Factors:
    """Remembers, by value, products with a number.

    Replaces the rewrites of `mul` and `div` that it is given.
    """

    def __init__(self, mul, div) -> None:
        self.notes = Notes()
        self.products: dict[tuple, object] = {}  # equal products share one value
        self.simpler = {"mul": mul, "div": div}

    def mul(self, eqn, operands):
        simpler = self.simpler["mul"](eqn, operands)
        number = next((side for side in (0, 1) if _is_number(operands[side])), None)
        if simpler is not None or number is None or eqn.outvars[0].aval.dtype.name not in TYPES:
            return simpler
        x = operands[1 - number]
        return [self._product(x, operands[number], number)] if jnp.ndim(x) else None

    def div(self, eqn, operands):
        """A quotient that another rewrite turned into a product counts as a product."""
        quotient = self.simpler["div"](eqn, operands)
        x, y = operands
        if (
            quotient is None
            or not _is_number(y)
            or y == 1
            or not jnp.ndim(x)
            or eqn.outvars[0].aval.dtype.name not in TYPES
        ):
            return quotient
        return [self._product(x, np.asarray(1.0 / np.float64(y)).astype(y.dtype))]

    def _product(self, x, factor, side: int = 1):
        """x * factor, or factor * x for side 0."""
        y, earlier = self.notes.find("product", x) or (x, None)
        joint = _joint(earlier, factor)
        x, factor = (x, factor) if joint is None else (y, joint)
        key = id(x), factor.tobytes(), factor.dtype
        if key not in self.products:
            self.products[key] = (
                x
                if factor == 1
                else self.notes.note(
                    "product", lax.mul(*((x, factor) if side else (factor, x))), x, factor
                )[0]
            )
        return self.products[key]


def _is_number(x) -> bool:
    return isinstance(x, (np.ndarray, np.generic)) and np.ndim(x) == 0


def _joint(b, c) -> np.ndarray | None:
    """b c, if x * b overflows only where x * (b c) does too, and neither underflows to zero."""
    if b is None or not (0 < abs(b) <= 1 or abs(c) >= 1):
        return None
    with np.errstate(all="ignore"):
        joint = np.asarray(b * c)
    limits = np.finfo(joint.dtype)
    return joint if limits.tiny <= abs(joint) <= limits.max else None
