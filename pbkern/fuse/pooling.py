"""select_and_scatter_add over windows that do not overlap -> comparisons of strided slices and one select.

It is the gradient of max pooling: each window's gradient goes to the element that won. The winner's place is found by
the same chain of comparisons that the primitive defines, so ties and NaN go where JAX sends them; then every element
asks whether it won. Overlapping or padded windows stay.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from jax import lax

# Offsets in a window: each is a slice, a comparison and two selects.
MAX_WINDOW = 16


def scatter_to_winners(eqn, operands):
    """Rewrite of select_and_scatter_add, see rewrites.py."""
    (source, x), p = operands, eqn.params
    window, strides = tuple(p["window_dimensions"]), tuple(p["window_strides"])
    padded = any(lo or hi for lo, hi in p["padding"])
    if window != strides or padded or math.prod(window) > MAX_WINDOW or 0 in source.shape:
        return None
    winner = _winners(x, source.shape, window, p["select_prim"])
    # Between every dimension of windows and the next goes the dimension of offsets inside one.
    apart = tuple(n for pair in zip(source.shape, window) for n in pair)
    spread = [lax.broadcast_in_dim(v, apart, tuple(range(0, len(apart), 2))) for v in (winner, source)]
    won = lax.eq(spread[0], _places(apart, window))
    made = lax.select_n(won, lax.full(apart, 0, source.dtype), spread[1])
    made = lax.reshape(made, tuple(n * w for n, w in zip(source.shape, window)))
    rest = [(0, n - m, 0) for n, m in zip(x.shape, made.shape)]
    return [lax.pad(made, np.zeros((), made.dtype), rest) if any(r[1] for r in rest) else made]


def _winners(x, counts, window, select):
    """i32 array: the row-major offset of each window's winner; a later element wins where `select` is false."""
    best = place = None
    for k, offset in enumerate(itertools.product(*map(range, window))):
        limits = [o + (n - 1) * w + 1 for o, n, w in zip(offset, counts, window)]
        here = lax.slice(x, offset, limits, window)
        if best is None:
            best, place = here, lax.full(counts, 0, np.int32)
            continue
        stays = select.bind(best, here)
        best = lax.select_n(stays, here, best)
        place = lax.select_n(stays, lax.full(counts, k, np.int32), place)
    return place


def _places(apart, window):
    """i32 array: each element's row-major offset in its window."""
    total, stride = lax.full(apart, 0, np.int32), math.prod(window)
    for d, w in enumerate(window):
        stride //= w
        if w > 1:
            total = total + lax.broadcasted_iota(np.int32, apart, 2 * d + 1) * np.int32(stride)
    return total
