"""Window reductions, and depthwise convolutions -> arithmetic on slices, which time tiling can take."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from jax import lax

WINDOWS = {"reduce_window_sum": lax.add, "reduce_window_max": lax.max, "reduce_window_min": lax.min}
# Windows with more elements (sum over dimensions), and convolutions with more in all, stay as they
# are.
MAX_SLICES = 16


def is_window(eqn) -> bool:
    """Does each result depend on elements of one operand around it, with or without weights?"""
    return eqn.primitive.name in WINDOWS or (
        eqn.primitive.name == "conv_general_dilated" and _keeps_channels_apart(eqn)
    )


def _keeps_channels_apart(eqn) -> bool:
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
    few = math.prod(weights.shape[dim] for dim in numbers.rhs_spec[2:]) <= MAX_SLICES
    return (
        one_each and steps and unpadded and exact and few and numbers.lhs_spec == numbers.out_spec
    )


def window_as_slices(eqn, operands):
    """Reduces windows one dimension after the other: fewer operations, and halos along each alone."""
    (x,), params = operands, eqn.params
    if (
        any(stride != 1 for stride in params["window_strides"])
        or sum(params["window_dimensions"]) > MAX_SLICES
    ):
        return None
    for axis, (size, apart) in enumerate(
        zip(params["window_dimensions"], params["window_dilation"])
    ):
        extent = x.shape[axis] - (size - 1) * apart
        parts = [lax.slice_in_dim(x, k * apart, k * apart + extent, axis=axis) for k in range(size)]
        x = functools.reduce(WINDOWS[eqn.primitive.name], parts)
    return [x]


def convolution_as_slices(eqn, operands):
    """The sum of slices, each times its weight."""
    if not _keeps_channels_apart(eqn):
        return None
    (x, kernel), params = operands, eqn.params
    numbers, shape = params["dimension_numbers"], eqn.outvars[0].aval.shape
    taps, spatial = numbers.rhs_spec[2:], numbers.lhs_spec[2:]
    terms = []
    for at in itertools.product(*(range(kernel.shape[axis]) for axis in taps)):
        starts, tap = [0] * x.ndim, [slice(None)] * kernel.ndim
        for k, dim, dilation, along in zip(at, spatial, params["rhs_dilation"], taps):
            starts[dim], tap[along] = k * dilation, slice(k, k + 1)
        weights = lax.reshape(kernel[tuple(tap)], (params["feature_group_count"],))
        part = lax.slice(x, starts, [start + size for start, size in zip(starts, shape)])
        terms.append(part * lax.broadcast_in_dim(weights, shape, (numbers.lhs_spec[1],)))
    return [functools.reduce(lax.add, terms)]


AS_SLICES = dict.fromkeys(WINDOWS, window_as_slices) | {
    "conv_general_dilated": convolution_as_slices
}
