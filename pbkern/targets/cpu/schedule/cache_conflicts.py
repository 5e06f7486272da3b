"""Rows of an operand that are a multiple of a large power of two apart: they fall into few sets of the first cache."""

from __future__ import annotations

import math

from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Load, Nest
from pbkern.targets.cpu.machine import CONFLICT_BYTES, LINE_BYTES

# Lines this many apart are in the same set. Source: 32 KB of L1 in 8 ways.
CACHE_SETS = 64
# Lines of one set that stay there beside those of other operands.
CACHE_WAYS = 8
# Pages that the nearest tables do not hold (64 entries on Zen 3 and Golden Cove), rows of two in
# each.
MANY_PAGES = 128


def fit(rows: int, apart: int) -> bool:
    """Whether lines of so many rows, `apart` bytes from one another, stay in the cache; 0 bytes: that is not known."""
    if not apart:
        return True
    sets = CACHE_SETS * LINE_BYTES // math.gcd(apart, CACHE_SETS * LINE_BYTES)
    return rows <= CACHE_WAYS * min(sets, CACHE_SETS)


def are_apart(rows: int, step: int, span: int, l2_bytes: int) -> bool:
    """Whether a few columns of so many rows, `step` bytes from one another, `span` in all, are better read from a copy.

    Rows far apart need an entry of the page tables each, and may evict one another from the first
    cache; near ones are worth a copy only where all of them leave the second cache.
    """
    if step >= CONFLICT_BYTES:
        return rows >= MANY_PAGES or not fit(rows, step)
    return span > l2_bytes // 2


def rows_apart(nest: Nest, dim: str, vector: str) -> int:
    """Bytes between neighbours along `dim` of the operand that the lanes of a vector share; 0 where they are not known."""
    steps = [
        flat_coefficient(arg.buf, arg.index, dim) * arg.buf.dtype.itemsize
        for reduction in nest.reductions
        for arg in reduction.args
        if isinstance(arg, Load) and vector not in arg.symbols
    ]
    return next(iter(steps), 0)
