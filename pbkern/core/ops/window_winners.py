"""Windows' winners: numbers, one per window, added to the element that won it.

Every element asks the windows that contain it whether it won. For windows s elements apart,
elements s q + r are in the same windows, counted from q: they are computed together, phase by
phase, and the phases are interleaved.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from jax import lax


def scatter_to_winners(winner, source, shape, window, strides, padding):
    """An array of this shape: sums of `source`, one number per window, each added to the element that won its window.

    winner: i32, row-major offsets in windows.
    """
    if window == strides and not any(map(any, padding)):
        return _apart(winner, source, shape, window)
    sizes = [-(-(size + lo) // stride) for size, (lo, _), stride in zip(shape, padding, strides)]
    phases = itertools.product(*map(range, strides))
    parts = {phase: _phase(winner, source, phase, sizes, window, strides) for phase in phases}
    spread = interleave(parts, strides, range(len(shape)))
    starts = [lo for lo, _ in padding]
    return lax.slice(spread, starts, [lo + size for lo, size in zip(starts, shape)])


def _apart(winner, source, shape, window):
    """Windows that touch but do not overlap: a dimension of offsets follows every dimension of windows."""
    apart = tuple(extent for pair in zip(source.shape, window) for extent in pair)
    spread = [
        lax.broadcast_in_dim(array, apart, tuple(range(0, len(apart), 2)))
        for array in (winner, source)
    ]
    won = lax.eq(spread[0], _places(apart, window))
    placed = lax.select_n(won, lax.full(apart, 0, source.dtype), spread[1])
    placed = lax.reshape(placed, tuple(size * extent for size, extent in zip(source.shape, window)))
    rest = [(0, size - covered, 0) for size, covered in zip(shape, placed.shape)]
    return (
        lax.pad(placed, np.zeros((), placed.dtype), rest) if any(pad[1] for pad in rest) else placed
    )


def _places(apart, window):
    """i32 array: each element's row-major offset in its window."""
    total, stride = lax.full(apart, 0, np.int32), math.prod(window)
    for axis, extent in enumerate(window):
        stride //= extent
        if extent > 1:
            total = total + lax.broadcasted_iota(np.int32, apart, 2 * axis + 1) * np.int32(stride)
    return total


def _phase(winner, source, phase, sizes, window, strides):
    """Gradients of elements s q + r of the padded array, q below `sizes`: element r + s j of window q - j."""
    total = lax.full(sizes, 0, source.dtype)
    earlier = [
        range(-(-(extent - r) // stride)) for extent, r, stride in zip(window, phase, strides)
    ]
    for back in itertools.product(*earlier):
        offset = [r + stride * j for r, stride, j in zip(phase, strides, back)]
        place = sum(shift * math.prod(window[axis + 1 :]) for axis, shift in enumerate(offset))
        moved = [(j, size - count - j, 0) for j, size, count in zip(back, sizes, source.shape)]
        at = lax.pad(winner, np.asarray(-1, np.int32), moved)
        won = lax.eq(at, lax.full(sizes, place, np.int32))
        total = total + lax.select_n(
            won,
            lax.full(sizes, 0, source.dtype),
            lax.pad(source, np.zeros((), source.dtype), moved),
        )
    return total


def interleave(parts: dict, steps, axes):
    """Joins parts by phase (one number per axis of `axes`) to one array.

    Along an axis of step s, its element s q + r is element q of phase r.
    """
    for position in reversed(
        range(len(steps))
    ):  # the last dimension's phases become neighbours first
        parts = {
            rest: _interleave(
                [parts[*rest, phase] for phase in range(steps[position])], axes[position]
            )
            for rest in itertools.product(*map(range, steps[:position]))
        }
    return parts[()]


def _interleave(parts: list, axis: int):
    """Element q of part r -> element len(parts) q + r."""
    if len(parts) == 1:
        return parts[0]
    shape = parts[0].shape
    wide = [lax.expand_dims(part, (axis + 1,)) for part in parts]
    return lax.reshape(
        lax.concatenate(wide, axis + 1),
        (*shape[:axis], shape[axis] * len(parts), *shape[axis + 1 :]),
    )
