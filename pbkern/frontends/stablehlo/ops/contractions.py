"""Matrix products and convolutions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pbkern.frontends.stablehlo.table import rule


def _precision(op):
    words = op.precision
    return words and tuple(getattr(lax.Precision, word.upper()) for word in words)


@rule("stablehlo.dot")
def dot(op, x, y):
    """Multiplies vectors and matrices."""
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=_precision(op), preferred_element_type=op.dtype)


@rule("stablehlo.dot_general")
def dot_general(op, x, y):
    dot_dimension_numbers = stablehlo.DotDimensionNumbers(op.attribute("dot_dimension_numbers"))
    contracted = (
        list(dot_dimension_numbers.lhs_contracting_dimensions),
        list(dot_dimension_numbers.rhs_contracting_dimensions),
    )
    batch = (
        list(dot_dimension_numbers.lhs_batching_dimensions),
        list(dot_dimension_numbers.rhs_batching_dimensions),
    )
    return lax.dot_general(
        x, y, (contracted, batch), precision=_precision(op), preferred_element_type=op.dtype
    )


@rule("stablehlo.convolution")
def convolution(op, x, weight):
    conv_dimension_numbers = stablehlo.ConvDimensionNumbers(op.attribute("dimension_numbers"))
    space = list(conv_dimension_numbers.kernel_spatial_dimensions)
    numbers = lax.ConvDimensionNumbers(
        (
            conv_dimension_numbers.input_batch_dimension,
            conv_dimension_numbers.input_feature_dimension,
            *conv_dimension_numbers.input_spatial_dimensions,
        ),
        (
            conv_dimension_numbers.kernel_output_feature_dimension,
            conv_dimension_numbers.kernel_input_feature_dimension,
            *space,
        ),
        (
            conv_dimension_numbers.output_batch_dimension,
            conv_dimension_numbers.output_feature_dimension,
            *conv_dimension_numbers.output_spatial_dimensions,
        ),
    )
    ones = [1] * len(space)
    reversed_ = [
        dim
        for dim, flipped in zip(space, op.integers("window_reversal", [0] * len(space)))
        if flipped
    ]
    return lax.conv_general_dilated(
        x,
        lax.rev(weight, reversed_) if reversed_ else weight,
        op.integers("window_strides", ones),
        op.pairs("padding", len(space)),
        op.integers("lhs_dilation", ones),
        op.integers("rhs_dilation", ones),
        numbers,
        op.integer("feature_group_count"),
        op.integer("batch_group_count"),
        _precision(op),
        op.dtype,
    )


@rule("stablehlo.einsum")
def einsum(op, x, y):
    return jnp.einsum(ir.StringAttr(op.attribute("einsum_config")).value, x, y)


@rule("stablehlo.unary_einsum")
def unary_einsum(op, x):
    return jnp.einsum(ir.StringAttr(op.attribute("einsum_config")).value, x)
