"""Rows of an operand that are a multiple of a large power of two apart: they fall into few sets of the first cache."""

from __future__ import annotations

import math

from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Nest

# Lines this many apart are in the same set, and how many of one set stay there beside those of other operands.
LINE, SETS, WAYS = 64, 64, 8


def fit(rows: int, apart: int) -> bool:
    """Whether lines of so many rows, `apart` bytes from one another, stay in the cache; 0 bytes: that is not known."""
    if not apart:
        return True
    sets = SETS * LINE // math.gcd(apart, SETS * LINE)
    return rows <= WAYS * min(sets, SETS)


def rows_apart(nest: Nest, dim: str, vector: str) -> int:
    """Bytes between neighbours along `dim` of the operand that the lanes of a vector share; 0 where they are not known."""
    steps = [flat_coefficient(e.info[0], e.info[1], dim) * e.info[0].dtype.itemsize
             for r in nest.reductions for e in r.args if e.kind == "load" and vector not in e.symbols]
    return next(iter(steps), 0)
