"""Operations that make arrays, or move elements and compute none."""

from __future__ import annotations

import numpy as np
from jax import lax
from jaxlib.mlir import ir

from pbkern.frontends.stablehlo.constants import constant
from pbkern.frontends.stablehlo.table import check, rule


@rule("stablehlo.constant", "chlo.constant")
def constant_(op):
    return constant(op.mlir, op.dtype)


@check("stablehlo.constant", "chlo.constant")
def _constant_is_dense(op):
    """Large constants may lie in a section of their own.

    The bindings have no attribute of complex numbers, which are read as text.
    """
    try:
        value = op.attributes["value"]
    except TypeError:
        return None
    return (
        None
        if isinstance(value, ir.DenseElementsAttr)
        else f"its value is a {type(value).__name__}"
    )


@rule("stablehlo.iota", "stablehlo.dynamic_iota")
def iota(op, *shape):
    return lax.broadcasted_iota(op.dtype, op.shape, op.integer("iota_dimension"))


@rule("stablehlo.reshape", "stablehlo.dynamic_reshape")
def reshape(op, x, *shape):
    return lax.reshape(x, op.shape)


@rule("stablehlo.transpose")
def transpose(op, x):
    return lax.transpose(x, op.integers("permutation"))


@rule("stablehlo.reverse")
def reverse(op, x):
    return lax.rev(x, op.integers("dimensions"))


@rule("stablehlo.broadcast_in_dim", "stablehlo.dynamic_broadcast_in_dim")
def broadcast_in_dim(op, x, *shape):
    return lax.broadcast_in_dim(x, op.shape, op.integers("broadcast_dimensions"))


@rule("stablehlo.broadcast")
def broadcast(op, x):
    return lax.broadcast(x, op.integers("broadcast_sizes"))


@rule("stablehlo.concatenate")
def concatenate(op, *xs):
    return lax.concatenate(xs, op.integer("dimension"))


@rule("stablehlo.slice")
def slice_(op, x):
    return lax.slice(
        x, op.integers("start_indices"), op.integers("limit_indices"), op.integers("strides")
    )


@rule("stablehlo.pad")
def pad(op, x, value):
    widths = zip(
        op.integers("edge_padding_low"),
        op.integers("edge_padding_high"),
        op.integers("interior_padding"),
    )
    return lax.pad(x, value, list(widths))


@rule("stablehlo.get_dimension_size")
def get_dimension_size(op, x):
    return np.int32(x.shape[op.integer("dimension")])


@rule("stablehlo.set_dimension_size")
def set_dimension_size(op, x, size):
    """Accepts types of known size: the size that the dimension has."""
    return x
