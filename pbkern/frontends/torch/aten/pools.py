"""Pooling over windows, and resizing.

A window that `ceil_mode` adds may end behind the padding; it never starts there.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.ops.window_winners import scatter_to_winners

from .table import as_list, op


def _windows(x, rank, kernel, stride, padding, dilation, ceil):
    """(window, strides, dilation, pads) of reduce_window over the last n dimensions."""
    kernel, padding, dilation = (
        as_list(kernel, rank),
        as_list(padding, rank),
        as_list(dilation, rank),
    )
    stride = as_list(stride, rank) if stride else kernel
    pads = []
    for size, width, step, pad, dim in zip(x.shape[-rank:], kernel, stride, padding, dilation):
        reach = dim * (width - 1) + 1
        count = (size + 2 * pad - reach) // step + 1
        if ceil:
            count = -(-(size + 2 * pad - reach) // step) + 1
            count -= (count - 1) * step >= size + pad
        pads.append((pad, max((count - 1) * step + reach - size - pad, 0)))
    lead = (1,) * (x.ndim - rank)
    return (
        lead + tuple(kernel),
        lead + tuple(stride),
        lead + tuple(dilation),
        [(0, 0)] * len(lead) + pads,
    )


def _lowest(dtype):
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min, dtype)


def _max_pool(x, rank, kernel, stride, padding, dilation, ceil):
    window, strides, spread, pads = _windows(x, rank, kernel, stride, padding, dilation, ceil)
    return lax.reduce_window(
        x, _lowest(x.dtype), lax.max, window, strides, pads, window_dilation=spread
    )


def _max_places(x, rank, kernel, stride, padding, dilation, ceil):
    """Places in the flat plane of each window's greatest element: the first of equal ones, the last NaN."""
    window, strides, spread, pads = _windows(x, rank, kernel, stride, padding, dilation, ceil)
    plane = int(np.prod(x.shape[-rank:]))
    places = jnp.broadcast_to(jnp.arange(plane).reshape(x.shape[-rank:]), x.shape)

    def greater(lhs, rhs):
        is_nan, other_is = lhs[0] != lhs[0], rhs[0] != rhs[0]
        before = (lhs[0] > rhs[0]) | ((lhs[0] == rhs[0]) & (lhs[1] < rhs[1]))
        better = jnp.where(is_nan | other_is, is_nan & (~other_is | (lhs[1] > rhs[1])), before)
        return jnp.where(better, lhs[0], rhs[0]), jnp.where(better, lhs[1], rhs[1])

    start = (jnp.asarray(_lowest(x.dtype)), jnp.asarray(plane, places.dtype))
    return lax.reduce_window(
        (x, places), start, greater, window, strides, pads, window_dilation=spread
    )[1]


def _max_pool_rule(rank):
    def rule(call, x, kernel, stride, padding, dilation, ceil):
        config = (rank, kernel, stride, padding, dilation, ceil)
        places = _max_places(x, *config) if 1 in call.used else jnp.zeros(call.shapes[1], np.int64)
        return _max_pool(x, *config), places

    return rule


# Most elements of a window that are compared one by one; larger windows find places in a loop.
MOST_COMPARED = 64


def _max_pool_gradient(rank):
    def rule(call, g, x, kernel, stride, padding, dilation, ceil, *places):
        """The greatest element of a window gets its gradient: the first of equal ones, the last NaN."""
        config = (rank, kernel, stride, padding, dilation, ceil)
        window, strides, spread, pads = _windows(x, *config)
        if math.prod(window) > MOST_COMPARED:
            return _added_at(_max_places(x, *config), g, x.shape, rank)
        winner = _winners(x, rank, g.shape, window, strides, spread, pads)
        if max(spread) == 1:
            return scatter_to_winners(winner, g, x.shape, window, strides, pads)
        return _scattered(winner, g, x.shape, window, strides, spread, pads)

    return rule


def _added_at(places, g, shape, rank):
    """Zeros of this shape, and gradients at places in flat planes."""
    planes, size = math.prod(shape[:-rank]), math.prod(shape[-rank:])
    flat = jnp.zeros((planes, size), g.dtype)
    rows = jnp.arange(planes)[:, None]
    return flat.at[rows, places.reshape(planes, -1)].add(g.reshape(planes, -1)).reshape(shape)


def _offsets(window, spread):
    return list(
        itertools.product(*[range(0, extent * dim, dim) for extent, dim in zip(window, spread)])
    )


def _winners(x, rank, counts, window, strides, spread, pads):
    """i32 array: the row-major number in its window of each window's greatest element.

    Padding wins nothing.
    """
    padded = (
        lax.pad(x, _lowest(x.dtype), [(low, high, 0) for low, high in pads])
        if any(map(any, pads))
        else x
    )
    winner, best, seen = jnp.zeros(counts, np.int32), None, np.zeros(counts[-rank:], bool)
    for k, offset in enumerate(_offsets(window, spread)):
        ends = [
            begin + (size - 1) * stride + 1 for begin, size, stride in zip(offset, counts, strides)
        ]
        here = lax.slice(padded, offset, ends, strides)
        inside = _inside(*(dims[-rank:] for dims in (x.shape, counts, offset, strides, pads)))
        wins = (here != here) | (here > best) if best is not None else None
        if (
            best is not None and (inside & ~seen).any()
        ):  # whatever it is, it is the first that is no padding
            wins = wins | (inside & ~seen)
        best = here if wins is None else jnp.where(wins, here, best)
        winner = winner if wins is None else jnp.where(wins, np.int32(k), winner)
        seen = seen | inside
    return winner


def _inside(sizes, counts, offset, strides, pads) -> np.ndarray:
    """Per window, whether its element at this offset lies in the array."""
    inside = np.ones(counts, bool)
    for axis, (size, count, begin, stride, (low, _)) in enumerate(
        zip(sizes, counts, offset, strides, pads)
    ):
        at = np.arange(count) * stride + begin - low
        inside &= ((at >= 0) & (at < size)).reshape(
            [-1 if dim == axis else 1 for dim in range(len(counts))]
        )
    return inside


def _scattered(winner, g, shape, window, strides, spread, pads):
    """Gradients at the winners of windows with holes, place by place of a window."""
    sizes = [low + size + high for size, (low, high) in zip(shape, pads)]
    total = jnp.zeros(sizes, g.dtype)
    for k, offset in enumerate(_offsets(window, spread)):
        ends = [
            begin + (size - 1) * stride + 1 for begin, size, stride in zip(offset, g.shape, strides)
        ]
        config = [
            (begin, size - end, stride - 1)
            for begin, end, stride, size in zip(offset, ends, strides, sizes)
        ]
        total = total + lax.pad(jnp.where(winner == k, g, 0), np.zeros((), g.dtype), config)
    return lax.slice(
        total, [low for low, _ in pads], [low + size for (low, _), size in zip(pads, shape)]
    )


def _mean_pool(x, rank, kernel, stride=(), padding=0, ceil=False, with_padding=True, divisor=None):
    window, strides, _, pads = _windows(x, rank, kernel, stride, padding, 1, ceil)

    def summed(array, pads):
        return lax.reduce_window(
            array,
            np.zeros((), array.dtype),
            lax.add,
            window[-array.ndim :],
            strides[-array.ndim :],
            pads[-array.ndim :],
        )

    sums = summed(x, pads)
    if divisor:
        return sums / divisor
    if not with_padding:
        return sums / summed(jnp.ones(x.shape[-rank:], x.dtype), pads)
    if not ceil:
        return sums / int(np.prod(window))
    given_padding = as_list(padding, rank)  # what ceil_mode adds behind the padding does not count
    padded = jnp.ones(
        [size + 2 * pad for size, pad in zip(x.shape[-rank:], given_padding)], x.dtype
    )
    return sums / summed(
        padded, [(0, max(high - pad, 0)) for (_, high), pad in zip(pads[-rank:], given_padding)]
    )


for _n in (1, 2, 3):
    op(f"aten::avg_pool{_n}d")(lambda call, x, *config, _n=_n: _mean_pool(x, _n, *config))
    op(f"aten::avg_pool{_n}d_backward")(
        lambda call, g, x, *config, _n=_n: jax.vjp(lambda x: _mean_pool(x, _n, *config), x)[1](g)[0]
    )
for _n in (2, 3):
    op(f"aten::max_pool{_n}d_with_indices")(_max_pool_rule(_n))
    op(f"aten::max_pool{_n}d_with_indices_backward", f"pbkern::max_pool{_n}d_backward")(
        _max_pool_gradient(_n)
    )


def _adaptive_mean(x, sizes):
    """Means of parts of each dimension, which may share elements at their ends."""
    for axis, parts in zip(range(-len(sizes), 0), sizes):
        extent = x.shape[axis]
        if parts == 1:
            x = x.mean(axis, keepdims=True)
        elif extent % parts == 0:
            axis %= x.ndim
            x = x.reshape(*x.shape[:axis], parts, extent // parts, *x.shape[axis + 1 :]).mean(
                axis + 1
            )
        else:
            lows = np.arange(parts) * extent // parts
            highs = -(-np.arange(1, parts + 1) * extent // parts)
            places = np.arange(extent)[:, None]
            inside = (places >= lows) & (
                places < highs
            )  # [n, parts]; products with zeros would spread NaN
            chosen = jnp.where(inside, jnp.moveaxis(x, axis, -1)[..., None], 0)
            x = jnp.moveaxis(chosen.sum(-2) / jnp.asarray(highs - lows, x.dtype), -1, axis)
    return x


for _n in (2, 3):
    op(f"aten::_adaptive_avg_pool{_n}d")(lambda call, x, sizes: _adaptive_mean(x, sizes))
    op(f"aten::_adaptive_avg_pool{_n}d_backward")(
        lambda call, g, x, _n=_n: jax.vjp(lambda x: _adaptive_mean(x, g.shape[-_n:]), x)[1](g)[0]
    )


def _nearest(rank: int):
    def rule(call, x, size, *scales):
        """Torch rounds places down, in float32.

        Scales are those that a caller named, one by one or in a list.
        """
        if len(scales) == 1 and isinstance(scales[0], list | tuple):
            (scales,) = scales
        for axis, scale in itertools.zip_longest(range(-rank, 0), scales):
            outs, ins = call.shape[axis], x.shape[axis]
            step = np.float32(1 / scale if scale else ins / outs)
            places = np.minimum(
                (np.arange(outs, dtype=np.float32) * step).astype(np.int64), ins - 1
            )
            x = jnp.take(x, places, axis=axis)
        return x

    return rule


for _n in (1, 2, 3):
    op(f"aten::upsample_nearest{_n}d")(_nearest(_n))
