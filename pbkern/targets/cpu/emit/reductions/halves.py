"""Sums of bfloat16 along vectors: which may take the elements of two vectors by turns.

A loaded vector of words holds two bfloat16 each. The high half of a word is a float32 with one operation (a mask), and
so is the low half (a shift). Whole vectors of bfloat16 that are widened in their order cost two operations each, of
which the one that spreads elements has one unit on most cores.

    wide(a[0..15]), wide(a[16..31])     ->     a[0, 2, .. 30], a[1, 3, .. 31]

Lanes of a reduction along vectors are combined at the end: which lane an element is in changes nothing but rounding.
"""

from __future__ import annotations

import numpy as np

from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, Gather, Load, Nest


def takes_halves(nest: Nest, vector: str) -> bool:
    """Whether all that moves along the reduced dimension `vector` is bfloat16 side by side, and nothing is stored there."""
    if nest.ordered or nest.moves() or any(store.inner for store in nest.stores):
        return False
    moving = [
        expr
        for expr in nest.nodes()
        if vector in expr.symbols and (isinstance(expr, Gather) or not expr.args)
    ]
    return bool(moving) and all(_is_row(expr, vector) for expr in moving)


def _is_row(expr: Expr, vector: str) -> bool:
    if not isinstance(expr, Load) or expr.guard or storage_el(expr.buf.dtype) != "bf16":
        return False
    same = np.dtype(expr.buf.root.dtype) == np.dtype(expr.buf.dtype)
    return same and flat_coefficient(expr.buf, expr.index, vector) == 1
