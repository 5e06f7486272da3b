"""Rows of an operand or a result a multiple of a large power of two apart, which fall into few sets of the first cache."""

from __future__ import annotations

from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Load, Nest


def rows_apart(nest: Nest, dim: str, vector: str) -> int:
    """Bytes between neighbours along `dim` of the operand that the lanes of a vector share; 0 where they are not known."""
    steps = [
        flat_coefficient(arg.buf, arg.index, dim) * arg.buf.dtype.itemsize
        for reduction in nest.reductions
        for arg in reduction.args
        if isinstance(arg, Load) and vector not in arg.symbols
    ]
    return next(iter(steps), 0)


def stored_rows_apart(nest: Nest, dim: str) -> int:
    """Bytes between neighbours along `dim` of the results; 0 where they are not known."""
    steps = [
        flat_coefficient(store.buf, store.index, dim) * store.buf.dtype.itemsize
        for store in nest.stores
    ]
    return max(map(abs, steps), default=0)
