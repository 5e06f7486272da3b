"""Argmax scatter of max pooling: select_and_scatter_add -> comparisons of strided slices and selects.

Each window's gradient goes to the element that won. The primitive's own chain of comparisons finds
the winner's place, so ties and NaN go where JAX sends them (core/ops/window_winners.py takes them
there). Padding is the smallest number, and wins where a window is all padding, as in JAX on CPUs.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from jax import lax

from pbkern.core.ops.window_winners import scatter_to_winners
from pbkern.fuse.access.windows_contractions import greatest, least


def scatter_to_argmax(eqn, operands, most_offsets: float):
    """Rewrite of select_and_scatter_add whose windows have at most so many offsets, see rewrites.py."""
    (source, x), params = operands, eqn.params
    window, strides = tuple(params["window_dimensions"]), tuple(params["window_strides"])
    if (
        math.prod(window) > most_offsets
        or 0 in source.shape
        or min(min(pair) for pair in params["padding"]) < 0
    ):
        return None
    winner = _winners(x, source.shape, params)
    return [scatter_to_winners(winner, source, x.shape, window, strides, params["padding"])]


def _winners(x, counts, params):
    """i32 array: the row-major offset of each window's winner; a later element wins if `select_prim` is false."""
    window, strides = params["window_dimensions"], params["window_strides"]
    if any(map(any, params["padding"])):
        loses = least if params["select_prim"] is lax.ge_p else greatest
        x = lax.pad(x, loses(x.dtype), [(lo, hi, 0) for lo, hi in params["padding"]])
    best = place = None
    for k, offset in enumerate(itertools.product(*map(range, window))):
        limits = [
            start + (count - 1) * stride + 1
            for start, count, stride in zip(offset, counts, strides)
        ]
        here = lax.slice(x, offset, limits, strides)
        if best is None:
            best, place = here, lax.full(counts, 0, np.int32)
            continue
        stays = params["select_prim"].bind(best, here)
        best = lax.select_n(stays, here, best)
        place = lax.select_n(stays, lax.full(counts, k, np.int32), place)
    return place
