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
    return (
        eqn.primitive.name in WINDOWS
        or eqn.primitive.name == "conv_general_dilated"
        and _keeps_channels_apart(eqn)
    )


def _keeps_channels_apart(eqn) -> bool:
    (x, w), p = (a.aval for a in eqn.invars), eqn.params
    numbers, channels = p["dimension_numbers"], p["feature_group_count"]
    one_each = channels == w.shape[numbers.rhs_spec[0]] and w.shape[numbers.rhs_spec[1]] == 1
    steps = (
        all(n == 1 for n in (*p["window_strides"], *p["lhs_dilation"]))
        and p["batch_group_count"] == 1
    )
    unpadded = all(pair == (0, 0) for pair in map(tuple, p["padding"]))
    exact = x.dtype == w.dtype == eqn.outvars[0].aval.dtype and np.dtype(x.dtype).name in (
        "float32",
        "float64",
    )
    few = math.prod(w.shape[d] for d in numbers.rhs_spec[2:]) <= MAX_SLICES
    return (
        one_each and steps and unpadded and exact and few and numbers.lhs_spec == numbers.out_spec
    )


def window_as_slices(eqn, operands):
    """Reduces windows one dimension after the other: fewer operations, and halos along each alone."""
    (x,), p = operands, eqn.params
    if any(n != 1 for n in p["window_strides"]) or sum(p["window_dimensions"]) > MAX_SLICES:
        return None
    for d, (size, apart) in enumerate(zip(p["window_dimensions"], p["window_dilation"])):
        n = x.shape[d] - (size - 1) * apart
        parts = [lax.slice_in_dim(x, k * apart, k * apart + n, axis=d) for k in range(size)]
        x = functools.reduce(WINDOWS[eqn.primitive.name], parts)
    return [x]


def convolution_as_slices(eqn, operands):
    """The sum of slices, each times its weight."""
    if not _keeps_channels_apart(eqn):
        return None
    (x, w), p = operands, eqn.params
    numbers, shape = p["dimension_numbers"], eqn.outvars[0].aval.shape
    taps, spatial = numbers.rhs_spec[2:], numbers.lhs_spec[2:]
    terms = []
    for at in itertools.product(*(range(w.shape[d]) for d in taps)):
        starts, tap = [0] * x.ndim, [slice(None)] * w.ndim
        for k, d, dilation, along in zip(at, spatial, p["rhs_dilation"], taps):
            starts[d], tap[along] = k * dilation, slice(k, k + 1)
        weights = lax.reshape(w[tuple(tap)], (p["feature_group_count"],))
        part = lax.slice(x, starts, [s + n for s, n in zip(starts, shape)])
        terms.append(part * lax.broadcast_in_dim(weights, shape, (numbers.lhs_spec[1],)))
    return [functools.reduce(lax.add, terms)]


AS_SLICES = dict.fromkeys(WINDOWS, window_as_slices) | {
    "conv_general_dilated": convolution_as_slices
}
