"""Convolutions with padding -> convolutions of a padded image, which fuses like any producer."""

from __future__ import annotations

import numpy as np
from jax import lax

from .dilated import undilated
from .exchanged import exchanged


def convolved(eqn, operands, *, fewest_taps_per_element: float):
    """Results of a convolution as cheaper ones; None where it stays as it is.

    A filter that is larger than the image, by that many taps per element, becomes the image. Padding becomes `pad`. A dilated
    input is convolved without its zeros, or they become part of the padding.
    """
    (x, weights), shape = operands, eqn.outvars[0].aval.shape
    x, weights, params = exchanged(
        x, weights, eqn.params, shape, fewest_taps_per_element=fewest_taps_per_element
    )
    result = undilated(x, weights, params, shape)
    if result is not None:
        return [result]
    spatial = params["dimension_numbers"].lhs_spec[2:]
    is_plain = all(lo == hi == 0 for lo, hi in params["padding"]) and all(
        step == 1 for step in params["lhs_dilation"]
    )
    if (is_plain and params is eqn.params) or 0 in x.shape:
        return None
    config = [(0, 0, 0)] * x.ndim
    for dim, (lo, hi), dilation in zip(spatial, params["padding"], params["lhs_dilation"]):
        config[dim] = (lo, hi, dilation - 1)
    x = lax.pad(x, np.zeros((), x.dtype), config)
    plain = {**params, "padding": ((0, 0),) * len(spatial), "lhs_dilation": (1,) * len(spatial)}
    return [eqn.primitive.bind(x, weights, **plain)]
