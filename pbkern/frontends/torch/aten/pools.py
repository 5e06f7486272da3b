"""Pooling over windows, and resizing.

A window that `ceil_mode` adds may end behind the padding; it never starts there.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .table import as_list, op


def _windows(x, n, kernel, stride, padding, dilation, ceil):
    """(window, strides, dilation, pads) of reduce_window over the last n dimensions."""
    kernel, padding, dilation = as_list(kernel, n), as_list(padding, n), as_list(dilation, n)
    stride = as_list(stride, n) if stride else kernel
    pads = []
    for size, k, s, p, d in zip(x.shape[-n:], kernel, stride, padding, dilation):
        reach = d * (k - 1) + 1
        count = (size + 2 * p - reach) // s + 1
        if ceil:
            count = -(-(size + 2 * p - reach) // s) + 1
            count -= (count - 1) * s >= size + p
        pads.append((p, max((count - 1) * s + reach - size - p, 0)))
    lead = (1,) * (x.ndim - n)
    return lead + tuple(kernel), lead + tuple(stride), lead + tuple(dilation), [(0, 0)] * len(lead) + pads


def _lowest(dtype):
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min, dtype)


def _max_pool(x, n, kernel, stride, padding, dilation, ceil):
    window, strides, spread, pads = _windows(x, n, kernel, stride, padding, dilation, ceil)
    return lax.reduce_window(x, _lowest(x.dtype), lax.max, window, strides, pads, window_dilation=spread)


def _max_places(x, n, kernel, stride, padding, dilation, ceil):
    """Where in the flat plane the first greatest element of each window is."""
    window, strides, spread, pads = _windows(x, n, kernel, stride, padding, dilation, ceil)
    plane = int(np.prod(x.shape[-n:]))
    places = jnp.broadcast_to(jnp.arange(plane).reshape(x.shape[-n:]), x.shape)

    def first(a, b):
        better = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(better, a[0], b[0]), jnp.where(better, a[1], b[1])

    start = (jnp.asarray(_lowest(x.dtype)), jnp.asarray(plane, places.dtype))
    return lax.reduce_window((x, places), start, first, window, strides, pads, window_dilation=spread)[1]


def _max_pool_rule(n):
    def rule(call, x, kernel, stride, padding, dilation, ceil):
        config = (n, kernel, stride, padding, dilation, ceil)
        places = _max_places(x, *config) if 1 in call.used else jnp.zeros(call.shapes[1], np.int64)
        return _max_pool(x, *config), places

    return rule


def _max_pool_gradient(n):
    def rule(call, g, x, kernel, stride, padding, dilation, ceil, *places):
        """The first greatest element of a window gets its gradient; NaN is the greatest."""
        x = jnp.where(jnp.isnan(x), np.inf, x)
        if max(as_list(dilation, n)) > 1:
            return _scattered(g, x, n, kernel, stride, padding, dilation, ceil)
        _, vjp = jax.vjp(lambda x: _max_pool(x, n, kernel, stride, padding, dilation, ceil), x)
        return vjp(g)[0]

    return rule


def _scattered(g, x, n, kernel, stride, padding, dilation, ceil):
    """Gradients at the first greatest elements of windows, place by place of a window."""
    window, strides, spread, pads = _windows(x, n, kernel, stride, padding, dilation, ceil)
    padded = lax.pad(x, _lowest(x.dtype), [(low, high, 0) for low, high in pads])
    offsets = list(itertools.product(*[range(0, w * d, d) for w, d in zip(window, spread)]))
    ends = [[o + (size - 1) * s + 1 for o, size, s in zip(offset, g.shape, strides)] for offset in offsets]
    seen = [lax.slice(padded, offset, end, strides) for offset, end in zip(offsets, ends)]
    winner, best = jnp.zeros(g.shape, np.int32), seen[0]
    for k, value in enumerate(seen[1:], 1):
        winner, best = jnp.where(value > best, k, winner), jnp.maximum(value, best)
    total = jnp.zeros(padded.shape, g.dtype)
    for k, (offset, end) in enumerate(zip(offsets, ends)):
        config = [(o, size - e, s - 1) for o, e, s, size in zip(offset, end, strides, padded.shape)]
        total = total + lax.pad(jnp.where(winner == k, g, 0), np.zeros((), g.dtype), config)
    return lax.slice(total, [low for low, _ in pads], [low + size for (low, _), size in zip(pads, x.shape)])


def _mean_pool(x, n, kernel, stride=(), padding=0, ceil=False, with_padding=True, divisor=None):
    window, strides, _, pads = _windows(x, n, kernel, stride, padding, 1, ceil)

    def summed(a, pads):
        return lax.reduce_window(a, np.zeros((), a.dtype), lax.add, window[-a.ndim :], strides[-a.ndim :], pads[-a.ndim :])

    sums = summed(x, pads)
    if divisor:
        return sums / divisor
    if not with_padding:
        return sums / summed(jnp.ones(x.shape[-n:], x.dtype), pads)
    if not ceil:
        return sums / int(np.prod(window))
    own = as_list(padding, n)  # what ceil_mode adds behind the padding does not count
    padded = jnp.ones([size + 2 * p for size, p in zip(x.shape[-n:], own)], x.dtype)
    return sums / summed(padded, [(0, max(high - p, 0)) for (_, high), p in zip(pads[-n:], own)])


for _n in (1, 2, 3):
    op(f"aten::avg_pool{_n}d")(lambda call, x, *config, _n=_n: _mean_pool(x, _n, *config))
    op(f"aten::avg_pool{_n}d_backward")(
        lambda call, g, x, *config, _n=_n: jax.vjp(lambda x: _mean_pool(x, _n, *config), x)[1](g)[0])
for _n in (2, 3):
    op(f"aten::max_pool{_n}d_with_indices")(_max_pool_rule(_n))
    op(f"aten::max_pool{_n}d_with_indices_backward", f"pbkern::max_pool{_n}d_backward")(_max_pool_gradient(_n))


def _adaptive_mean(x, sizes):
    """Means of parts of each dimension, which may share elements at their ends."""
    for axis, parts in zip(range(-len(sizes), 0), sizes):
        n = x.shape[axis]
        if parts == 1:
            x = x.mean(axis, keepdims=True)
        elif n % parts == 0:
            axis %= x.ndim
            x = x.reshape(*x.shape[:axis], parts, n // parts, *x.shape[axis + 1 :]).mean(axis + 1)
        else:
            shares = np.zeros((n, parts))
            for k in range(parts):
                low, high = k * n // parts, -(-(k + 1) * n // parts)
                shares[low:high, k] = 1 / (high - low)
            x = jnp.moveaxis(jnp.tensordot(x, shares.astype(x.dtype), (axis, 0)), -1, axis)
    return x


for _n in (2, 3):
    op(f"aten::_adaptive_avg_pool{_n}d")(lambda call, x, sizes: _adaptive_mean(x, sizes))
    op(f"aten::_adaptive_avg_pool{_n}d_backward")(
        lambda call, g, x, _n=_n: jax.vjp(lambda x: _adaptive_mean(x, g.shape[-_n:]), x)[1](g)[0])


def _nearest(n: int):
    def rule(call, x, size, *scales):
        """Torch rounds places down, in float32. Scales are those that a caller named, one by one or in a list."""
        if len(scales) == 1 and isinstance(scales[0], list | tuple):
            (scales,) = scales
        for axis, scale in itertools.zip_longest(range(-n, 0), scales):
            outs, ins = call.shape[axis], x.shape[axis]
            step = np.float32(1 / scale if scale else ins / outs)
            places = np.minimum((np.arange(outs, dtype=np.float32) * step).astype(np.int64), ins - 1)
            x = jnp.take(x, places, axis=axis)
        return x

    return rule


for _n in (1, 2, 3):
    op(f"aten::upsample_nearest{_n}d")(_nearest(_n))
