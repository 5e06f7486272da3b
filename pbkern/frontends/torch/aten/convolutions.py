"""Convolutions, transposed ones and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .table import as_list, op


def convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups):
    """Torch's convolution of x: [batch, channels, *space] without a bias."""
    num_spatial = x.ndim - 2
    stride, padding, dilation = (
        as_list(stride, num_spatial),
        as_list(padding, num_spatial),
        as_list(dilation, num_spatial),
    )
    space = "DHW"[-num_spatial:]
    layout = (f"NC{space}", f"OI{space}", f"NC{space}")
    if not transposed:
        return lax.conv_general_dilated(
            x,
            weight,
            stride,
            [(pad, pad) for pad in padding],
            rhs_dilation=dilation,
            dimension_numbers=layout,
            feature_group_count=groups,
        )
    extra = as_list(output_padding, num_spatial)
    ins, outs, *window = weight.shape
    weight = (
        weight.reshape(groups, ins // groups, outs, *window)
        .swapaxes(1, 2)
        .reshape(groups * outs, ins // groups, *window)
    )
    reach = [dim * (extent - 1) - pad for dim, extent, pad in zip(dilation, window, padding)]
    pads = [(low, low + extra_size) for low, extra_size in zip(reach, extra)]
    return lax.conv_general_dilated(
        x,
        jnp.flip(weight, range(2, num_spatial + 2)),
        (1,) * num_spatial,
        pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
    )


@op("aten::convolution", "aten::_convolution")
def convolution(call, x, weight, bias, *config, **_):
    y = convolve(x, weight, *config[:6])
    num_spatial = weight.ndim - 2
    return y if bias is None else y + bias.reshape((-1,) + (1,) * num_spatial)


@op("aten::convolution_backward")
def convolution_backward(call, g, x, weight, bias_sizes, *rest):
    *config, mask = rest
    _, vjp = jax.vjp(lambda x, w: convolve(x, w, *config), x, weight)
    to_x, to_w = vjp(g)
    other_axes = tuple(axis for axis in range(g.ndim) if axis != g.ndim - weight.ndim + 1)
    return (
        to_x if mask[0] else None,
        to_w if mask[1] else None,
        g.sum(other_axes) if mask[2] else None,
    )
