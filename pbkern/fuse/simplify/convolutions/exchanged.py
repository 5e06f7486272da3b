"""Convolutions whose filter is larger than their image -> the image is the filter.

A convolution costs a multiplication per tap of its filter and result. With much padding, most taps meet zeros: the gradient
of a convolution's gradient takes a small filter for the image and the result's gradient for the filter. Of 28 x 28 taps and
an image of 3 x 3, 784 multiplications a result become 9.
"""

from __future__ import annotations

import math

from jax import lax


def exchanged(x, weights, params: dict, shape, *, fewest_taps_per_element: float) -> tuple:
    """(image, filter, parameters) of the cheaper convolution; the given ones where the filter is not so much larger.

    `shape` is the result's.

    With image x of size X and dilation a, filter w of size K and dilation b, stride s and padding p in front, result o is the
    sum of x[i] w[k] over a i = s o + b k - p. Counted from the ends, i = X - 1 - i' and k = K - 1 - k', that is the convolution
    of the reversed w with the reversed x: b k' = s o + a i' - p', p' = p + a (X - 1) - b (K - 1).
    """
    numbers = params["dimension_numbers"]
    sizes = [x.shape[axis] for axis in numbers.lhs_spec[2:]]
    taps = [weights.shape[axis] for axis in numbers.rhs_spec[2:]]
    is_grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    is_empty = 0 in x.shape or 0 in shape
    if is_grouped or is_empty or math.prod(taps) < fewest_taps_per_element * math.prod(sizes):
        return x, weights, params
    longer = [
        (size - 1) * of_image - (tap - 1) * of_filter
        for size, tap, of_image, of_filter in zip(
            sizes, taps, params["lhs_dilation"], params["rhs_dilation"]
        )
    ]
    batch, channel, *spatial = numbers.out_spec
    changed = {
        "dimension_numbers": lax.ConvDimensionNumbers(
            numbers.rhs_spec, numbers.lhs_spec, (channel, batch, *spatial)
        ),
        "padding": tuple(
            (low + more, high + more) for (low, high), more in zip(params["padding"], longer)
        ),
        "lhs_dilation": params["rhs_dilation"],
        "rhs_dilation": params["lhs_dilation"],
    }
    image, kernel = lax.rev(weights, numbers.rhs_spec[2:]), lax.rev(x, numbers.lhs_spec[2:])
    return image, kernel, {**params, **changed}
