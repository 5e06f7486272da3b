"""Argmax scatter of max pooling: select_and_scatter_add -> comparisons of strided slices and selects.

Each window's gradient goes to the element that won. The primitive's own chain of comparisons finds the winner's place, so ties
and NaN go where JAX sends them. Then every element asks the windows that contain it whether it won. For windows s elements
apart, elements s q + r are in the same windows, counted from q: they are computed together, phase by phase, and the phases are
interleaved. Padding is the smallest number, and wins where a window is all padding, as in JAX on CPUs.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from jax import lax

from pbkern.fuse.access.windows_contractions import greatest, least

from .dilated_convolution import interleave

# Most offsets in a window: each is a slice, a comparison and two selects.
MAX_WINDOW = 16


def scatter_to_argmax(eqn, operands):
    """Rewrite of select_and_scatter_add, see rewrites.py."""
    (source, x), p = operands, eqn.params
    window, strides = tuple(p["window_dimensions"]), tuple(p["window_strides"])
    if math.prod(window) > MAX_WINDOW or 0 in source.shape or min(min(pair) for pair in p["padding"]) < 0:
        return None
    winner = _winners(x, source.shape, p)
    return [scatter_to_winners(winner, source, x.shape, window, strides, p["padding"])]


def scatter_to_winners(winner, source, shape, window, strides, padding):
    """An array of this shape: sums of `source`, one number per window, each added to the element that won its window.

    winner: i32, row-major offsets in windows.
    """
    if window == strides and not any(map(any, padding)):
        return _apart(winner, source, shape, window)
    sizes = [-(-(n + lo) // s) for n, (lo, _), s in zip(shape, padding, strides)]
    phases = itertools.product(*map(range, strides))
    parts = {r: _phase(winner, source, r, sizes, window, strides) for r in phases}
    made = interleave(parts, strides, range(len(shape)))
    starts = [lo for lo, _ in padding]
    return lax.slice(made, starts, [lo + n for lo, n in zip(starts, shape)])


def _winners(x, counts, p):
    """i32 array: the row-major offset of each window's winner; a later element wins if `select_prim` is false."""
    window, strides = p["window_dimensions"], p["window_strides"]
    if any(map(any, p["padding"])):
        loses = least if p["select_prim"] is lax.ge_p else greatest
        x = lax.pad(x, loses(x.dtype), [(lo, hi, 0) for lo, hi in p["padding"]])
    best = place = None
    for k, offset in enumerate(itertools.product(*map(range, window))):
        limits = [o + (n - 1) * s + 1 for o, n, s in zip(offset, counts, strides)]
        here = lax.slice(x, offset, limits, strides)
        if best is None:
            best, place = here, lax.full(counts, 0, np.int32)
            continue
        stays = p["select_prim"].bind(best, here)
        best = lax.select_n(stays, here, best)
        place = lax.select_n(stays, lax.full(counts, k, np.int32), place)
    return place


def _apart(winner, source, shape, window):
    """Windows that touch but do not overlap: a dimension of offsets follows every dimension of windows."""
    apart = tuple(n for pair in zip(source.shape, window) for n in pair)
    spread = [lax.broadcast_in_dim(v, apart, tuple(range(0, len(apart), 2))) for v in (winner, source)]
    won = lax.eq(spread[0], _places(apart, window))
    made = lax.select_n(won, lax.full(apart, 0, source.dtype), spread[1])
    made = lax.reshape(made, tuple(n * w for n, w in zip(source.shape, window)))
    rest = [(0, n - m, 0) for n, m in zip(shape, made.shape)]
    return lax.pad(made, np.zeros((), made.dtype), rest) if any(r[1] for r in rest) else made


def _places(apart, window):
    """i32 array: each element's row-major offset in its window."""
    total, stride = lax.full(apart, 0, np.int32), math.prod(window)
    for d, w in enumerate(window):
        stride //= w
        if w > 1:
            total = total + lax.broadcasted_iota(np.int32, apart, 2 * d + 1) * np.int32(stride)
    return total


def _phase(winner, source, phase, sizes, window, strides):
    """Gradients of elements s q + r of the padded array, q below `sizes`: element r + s j of window q - j."""
    total = lax.full(sizes, 0, source.dtype)
    earlier = [range(-(-(w - r) // s)) for w, r, s in zip(window, phase, strides)]
    for back in itertools.product(*earlier):
        offset = [r + s * j for r, s, j in zip(phase, strides, back)]
        place = sum(o * math.prod(window[d + 1 :]) for d, o in enumerate(offset))
        moved = [(j, n - m - j, 0) for j, n, m in zip(back, sizes, source.shape)]
        at = lax.pad(winner, np.asarray(-1, np.int32), moved)
        won = lax.eq(at, lax.full(sizes, place, np.int32))
        total = total + lax.select_n(won, lax.full(sizes, 0, source.dtype), lax.pad(source, np.zeros((), source.dtype), moved))
    return total
