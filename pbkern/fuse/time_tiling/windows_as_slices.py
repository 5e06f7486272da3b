"""Window reductions, and depthwise convolutions -> arithmetic on slices, which time tiling can take."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from jax import lax

from pbkern.fuse.simplify.convolutions.known_filters import slice_of_tap
from pbkern.fuse.simplify.driver import Rewrite

from .limits import TimeTilingLimits

WINDOWS = {"reduce_window_sum": lax.add, "reduce_window_max": lax.max, "reduce_window_min": lax.min}


def is_window(eqn, limits: TimeTilingLimits) -> bool:
    """Whether each element of the result depends on the elements of one operand around it, with or without weights."""
    return eqn.primitive.name in WINDOWS or (
        eqn.primitive.name == "conv_general_dilated" and _keeps_channels_apart(eqn, limits)
    )


def _keeps_channels_apart(eqn, limits: TimeTilingLimits) -> bool:
    (x, weights), params = (var.aval for var in eqn.invars), eqn.params
    numbers, channels = params["dimension_numbers"], params["feature_group_count"]
    one_each = (
        channels == weights.shape[numbers.rhs_spec[0]] and weights.shape[numbers.rhs_spec[1]] == 1
    )
    steps = (
        all(step == 1 for step in (*params["window_strides"], *params["lhs_dilation"]))
        and params["batch_group_count"] == 1
    )
    unpadded = all(pair == (0, 0) for pair in map(tuple, params["padding"]))
    exact = x.dtype == weights.dtype == eqn.outvars[0].aval.dtype and np.dtype(x.dtype).name in (
        "float32",
        "float64",
    )
    few = math.prod(weights.shape[dim] for dim in numbers.rhs_spec[2:]) <= limits.most_slices
    return (
        one_each and steps and unpadded and exact and few and numbers.lhs_spec == numbers.out_spec
    )


def _window_as_slices(eqn, operands, limits: TimeTilingLimits):
    """Reduces windows one dimension after the other: fewer operations, and halos along each alone."""
    (x,), params = operands, eqn.params
    if (
        any(stride != 1 for stride in params["window_strides"])
        or sum(params["window_dimensions"]) > limits.most_slices
    ):
        return None
    for axis, (size, apart) in enumerate(
        zip(params["window_dimensions"], params["window_dilation"])
    ):
        extent = x.shape[axis] - (size - 1) * apart
        parts = [lax.slice_in_dim(x, k * apart, k * apart + extent, axis=axis) for k in range(size)]
        x = functools.reduce(WINDOWS[eqn.primitive.name], parts)
    return [x]


def _convolution_as_slices(eqn, operands, limits: TimeTilingLimits):
    """The sum of slices, each times its weight."""
    if not _keeps_channels_apart(eqn, limits):
        return None
    (x, kernel), params = operands, eqn.params
    numbers, shape = params["dimension_numbers"], eqn.outvars[0].aval.shape
    taps, spatial = numbers.rhs_spec[2:], numbers.lhs_spec[2:]
    terms = []
    for at in itertools.product(*(range(kernel.shape[axis]) for axis in taps)):
        tap = [slice(None)] * kernel.ndim
        for k, along in zip(at, taps):
            tap[along] = slice(k, k + 1)
        weights = lax.reshape(kernel[tuple(tap)], (params["feature_group_count"],))
        part = slice_of_tap(x, at, spatial, params["rhs_dilation"], shape)
        terms.append(part * lax.broadcast_in_dim(weights, shape, (numbers.lhs_spec[1],)))
    return [functools.reduce(lax.add, terms)]


def as_slices(limits: TimeTilingLimits) -> dict[str, Rewrite]:
    """The rewrites, by primitive."""
    windows = functools.partial(_window_as_slices, limits=limits)
    convolutions = functools.partial(_convolution_as_slices, limits=limits)
    return dict.fromkeys(WINDOWS, windows) | {"conv_general_dilated": convolutions}
