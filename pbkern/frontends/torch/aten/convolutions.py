"""Convolutions, transposed ones and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .table import as_list, op


def convolve(x, w, stride, padding, dilation, transposed, output_padding, groups):
    """Torch's convolution of x: [batch, channels, *space] without a bias."""
    n = x.ndim - 2
    stride, padding, dilation = as_list(stride, n), as_list(padding, n), as_list(dilation, n)
    space = "DHW"[-n:]
    layout = (f"NC{space}", f"OI{space}", f"NC{space}")
    if not transposed:
        return lax.conv_general_dilated(
            x,
            w,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            dimension_numbers=layout,
            feature_group_count=groups,
        )
    extra = as_list(output_padding, n)
    ins, outs, *window = w.shape
    w = (
        w.reshape(groups, ins // groups, outs, *window)
        .swapaxes(1, 2)
        .reshape(groups * outs, ins // groups, *window)
    )
    reach = [dim * (k - 1) - p for dim, k, p in zip(dilation, window, padding)]
    pads = [(r, r + o) for r, o in zip(reach, extra)]
    return lax.conv_general_dilated(
        x,
        jnp.flip(w, range(2, n + 2)),
        (1,) * n,
        pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
    )


@op("aten::convolution", "aten::_convolution")
def convolution(call, x, w, bias, *config, **_):
    y = convolve(x, w, *config[:6])
    n = w.ndim - 2
    return y if bias is None else y + bias.reshape((-1,) + (1,) * n)


@op("aten::convolution_backward")
def convolution_backward(call, g, x, w, bias_sizes, *rest):
    *config, mask = rest
    _, vjp = jax.vjp(lambda x, w: convolve(x, w, *config), x, w)
    to_x, to_w = vjp(g)
    others = tuple(axis for axis in range(g.ndim) if axis != g.ndim - w.ndim + 1)
    return to_x if mask[0] else None, to_w if mask[1] else None, g.sum(others) if mask[2] else None
