"""Powers whose exponents are small multiples of a half -> products and square roots: x ** 2.5 is |x| ** 2 * sqrt(x).

Zeros, infinities and NaN keep what pow makes of them: pow(-0, 1/2) is 0 where sqrt(-0) is -0,
pow(-inf, 1/2) is inf.
"""

from __future__ import annotations

import numpy as np
from jax import lax


def write_out(eqn, operands, largest_exponent: float) -> list | None:
    """Rewrite of pow with exponents up to a size, see rewrites.py."""
    x, y = operands
    known = isinstance(y, (np.ndarray, np.generic)) and y.ndim == 0
    if (
        not known
        or not np.issubdtype(eqn.outvars[0].aval.dtype, np.floating)
        or x.dtype != eqn.outvars[0].aval.dtype
    ):
        return None
    exponent = float(y)
    if exponent == 0 or not abs(exponent) <= largest_exponent or 2 * exponent != int(2 * exponent):
        return None
    if exponent == int(exponent):
        return [x] if exponent == 1 else [lax.integer_pow(x, int(exponent))]
    return [_half(x, exponent)]


def _half(x, exponent: float):
    below = lax.eq(x, np.asarray(-np.inf, x.dtype))
    positive = lax.add(x, np.zeros((), x.dtype))  # zeros lose their sign
    if exponent < 0:
        root = lax.select_n(below, lax.rsqrt(positive), lax.full_like(x, 0))
    else:
        root = lax.select_n(below, lax.sqrt(positive), lax.full_like(x, np.inf))
    whole = int(exponent)
    return lax.mul(lax.integer_pow(lax.abs(x), whole), root) if whole else root
