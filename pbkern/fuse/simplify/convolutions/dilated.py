"""Convolutions of a dilated input (transposed, or gradients of strided ones) -> convolutions of the input itself.

Convolving with the zeros between its elements would cost the dilation s times as much, per
dimension.

- No more than s taps along a dimension: no two input elements meet in a result. The taps become output channels of a kernel
  with one tap, whose results are laid side by side: one convolution for all pixels of a patch.
- More taps (polyphase decomposition): result s q + r meets only the taps k with (s q + r + k - low) divisible by s, every s-th
  one. That is a convolution of the input with a part of the kernel. The s phases of each dimension are interleaved.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from jax import lax

from pbkern.core.ops.window_winners import interleave


def undilated(x, weights, params: dict, shape):
    """A convolution with a dilated input; None if the input is not dilated, or if there are strides as well.

    `shape` is the result's.
    """
    plain = (
        all(step == 1 for step in (*params["window_strides"], *params["rhs_dilation"]))
        and params["batch_group_count"] == 1
    )
    steps = params["lhs_dilation"]
    if (
        not plain
        or all(step == 1 for step in steps)
        or 0 in x.shape
        or 0 in weights.shape
        or 0 in shape
    ):
        return None
    apart = [
        k
        for k, (step, axis) in enumerate(zip(steps, params["dimension_numbers"].rhs_spec[2:]))
        if 1 < step >= weights.shape[axis]
    ]
    if apart:
        return _disjoint_windows(x, weights, params, shape, apart)
    return _polyphase(x, weights, params, shape)


# --- no result meets two elements
# -----------------------------------------------------------------------------------


def _disjoint_windows(x, weights, params: dict, shape, apart: list[int]):
    """A convolution whose windows do not meet along the spatial dimensions `apart`; `shape` is the result's."""
    numbers, steps = params["dimension_numbers"], params["lhs_dilation"]
    at, axes = (
        [numbers.rhs_spec[2 + dim] for dim in apart],
        [numbers.out_spec[2 + dim] for dim in apart],
    )
    taps = [weights.shape[dim] for dim in at]
    sizes = dict(zip(axes, (x.shape[numbers.lhs_spec[2 + dim]] for dim in apart)))
    inner = {
        **params,
        "padding": tuple(
            (0, 0) if k in apart else pads for k, pads in enumerate(params["padding"])
        ),
        "lhs_dilation": tuple(1 if k in apart else step for k, step in enumerate(steps)),
    }
    channel = numbers.out_spec[1]
    counted = [
        sizes.get(dim, size) * (math.prod(taps) if dim == channel else 1)
        for dim, size in enumerate(shape)
    ]
    y = _polyphase(x, _taps_as_channels(weights, numbers.rhs_spec[0], at), inner, counted)
    y = _channels_as_taps(y, channel, taps, axes, [steps[dim] for dim in apart])
    config = [(0, 0, 0)] * y.ndim
    for k, axis, tap in zip(
        apart, axes, taps
    ):  # of the reversed taps, j of element i is result i s + j + first
        first = params["padding"][k][0] - (tap - 1)
        config[axis] = (first, shape[axis] - first - y.shape[axis], 0)
    return lax.pad_p.bind(y, np.zeros((), y.dtype), padding_config=tuple(config))


def _taps_as_channels(weights, channel: int, at: list[int]):
    """The kernel with one tap along the dimensions `at`, and an output channel for each that it had, the last one first."""
    shape = [1 if axis in at else size for axis, size in enumerate(weights.shape)]
    shape[channel] *= math.prod(weights.shape[dim] for dim in at)
    order = [axis for axis in range(weights.ndim) if axis not in at]
    after = order.index(channel) + 1
    return lax.reshape(
        lax.transpose(lax.rev(weights, at), (*order[:after], *at, *order[after:])), shape
    )


def _channels_as_taps(y, channel: int, taps: list[int], axes: list[int], steps: list[int]):
    """[..., channels taps, ..., n, ...] -> [..., channels, ..., n steps, ...]: the taps of an element, and zeros, follow it."""
    shape, count = y.shape, len(taps)
    y = lax.reshape(
        y, (*shape[:channel], shape[channel] // math.prod(taps), *taps, *shape[channel + 1 :])
    )
    place = {
        axis: axis + count * (axis > channel) for axis in range(len(shape))
    }  # where a dimension of the result is now
    tap = {axis: channel + 1 + k for k, axis in enumerate(axes)}
    order = [
        part for dim in place for part in ((place[dim], tap[dim]) if dim in tap else (place[dim],))
    ]
    y = lax.transpose(y, order)
    pads = dict(
        zip(
            (tap[axis] for axis in axes), (step - tap_count for step, tap_count in zip(steps, taps))
        )
    )
    y = lax.pad_p.bind(
        y, np.zeros((), y.dtype), padding_config=tuple((0, pads.get(dim, 0), 0) for dim in order)
    )
    wide = dict(zip(axes, steps))
    return lax.reshape(
        y,
        [
            (shape[dim] // (math.prod(taps) if dim == channel else 1)) * wide.get(dim, 1)
            for dim in place
        ],
    )


# --- phases
# ---------------------------------------------------------------------------------------------------------


def _polyphase(x, weights, params: dict, shape):
    """A convolution of this shape as one per phase; where nothing is dilated, there is one."""
    steps, spatial = params["lhs_dilation"], params["dimension_numbers"].out_spec[2:]
    sizes = [-(-shape[dim] // step) for dim, step in zip(spatial, steps)]
    parts = {
        phase: _phase(x, weights, params, phase, sizes)
        for phase in itertools.product(*map(range, steps))
    }
    return lax.slice(interleave(parts, steps, spatial), (0,) * len(shape), shape)


def _phase(x, weights, params: dict, phase, sizes):
    """Results at places `dilation * q + remainder`, for q below `sizes`."""
    numbers, starts, limits, strides = (
        params["dimension_numbers"],
        [0] * weights.ndim,
        list(weights.shape),
        [1] * weights.ndim,
    )
    pads = [(0, 0, 0)] * x.ndim
    for k, (remainder, dilation, (low, _)) in enumerate(
        zip(phase, params["lhs_dilation"], params["padding"])
    ):
        tap, first = numbers.rhs_spec[2 + k], (low - remainder) % dilation
        starts[tap], strides[tap] = first, dilation  # more taps than that: each phase has some
        taps = -(-(weights.shape[tap] - starts[tap]) // dilation)
        before = -((remainder + first - low) // dilation)
        at = numbers.lhs_spec[2 + k]
        pads[at] = (before, sizes[k] - x.shape[at] - before + taps - 1, 0)
    kernel = lax.slice(weights, starts, limits, strides)
    x = lax.pad_p.bind(x, np.zeros((), x.dtype), padding_config=tuple(pads))
    count = len(phase)
    changed = {"padding": ((0, 0),) * count, "lhs_dilation": (1,) * count}
    return lax.conv_general_dilated_p.bind(x, kernel, **{**params, **changed})
