"""ClosedJaxpr -> the same with equations that compute constants such as np.arange(n).

A mask that compares such indices is known without reading an array, so that parts which it leaves out altogether are not
computed (docs/decisions/006-masked-keys-are-skipped.md).
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex


def count_progressions(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Computes those constants that are vectors of integers start, start + step, start + 2 step and so on."""
    progressions = [_progression(const) for const in closed.consts]
    if not any(progressions):
        return closed

    def counted(*args):
        consts = [
            const
            if progression is None
            else _count(len(const), *progression, np.dtype(const.dtype))
            for const, progression in zip(closed.consts, progressions)
        ]
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(closed.jaxpr, consts))(*args)

    return jax.make_jaxpr(counted)(*closed.in_avals)


def _progression(x) -> tuple[int, int] | None:
    """(start, step) of an array that is such a vector; None for others, and for tracers."""
    if (
        isinstance(x, jax.core.Tracer)
        or getattr(x, "ndim", 0) != 1
        or x.shape[0] < 2
        or not np.issubdtype(x.dtype, np.integer)
    ):
        return None
    values = np.asarray(x).astype(object if np.dtype(x.dtype).itemsize == 8 else np.int64)
    step = int(values[1]) - int(values[0])
    return (int(values[0]), step) if step and (np.diff(values) == step).all() else None


def _count(length: int, start: int, step: int, dtype: np.dtype) -> jax.Array:
    """start, start + step, ... as an iota and arithmetic."""
    counted = lax.iota(dtype, length)
    counted = counted if step == 1 else counted * np.asarray(step, np.int64).astype(dtype)
    return counted + np.asarray(start).astype(dtype) if start else counted
