"""Operations that lax has as a whole: transforms, decompositions, random bits, normalisation, calls of known names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from pbkern.frontends.stablehlo.operation import HloOperation
from pbkern.frontends.stablehlo.table import check, rule


@rule("stablehlo.fft")
def fft(op: HloOperation, x):
    return lax.fft(x, lax.FftType[op.choice("fft_type") or ""], tuple(op.integers("fft_length")))


@rule("stablehlo.cholesky")
def cholesky(op: HloOperation, x):
    lower = op.flag("lower")
    factor = lax.linalg.cholesky(
        x if lower else jnp.swapaxes(x, -1, -2).conj(), symmetrize_input=False
    )
    return factor if lower else jnp.swapaxes(factor, -1, -2).conj()


@rule("stablehlo.triangular_solve")
def triangular_solve(op: HloOperation, matrix, rhs):
    turned = op.choice("transpose_a")
    return lax.linalg.triangular_solve(
        matrix,
        rhs,
        left_side=op.flag("left_side"),
        lower=op.flag("lower"),
        unit_diagonal=op.flag("unit_diagonal"),
        transpose_a=turned in ("TRANSPOSE", "ADJOINT"),
        conjugate_a=turned == "ADJOINT",
    )


@rule("stablehlo.rng")
def rng(op: HloOperation, low, high, shape):
    return lax.rng_uniform(low, high, op.shape)


@check("stablehlo.rng")
def _is_uniform(op):
    kind = HloOperation(op).choice("rng_distribution")
    return None if kind == "UNIFORM" else f"{kind} numbers; lax has uniform ones"


def _normalised(op: HloOperation, x, scale, offset, mean, variance):
    axis = op.integer("feature_index")
    across = lambda vector: lax.broadcast_in_dim(vector, x.shape, (axis,))
    return (x - across(mean)) * across(
        lax.rsqrt(variance + x.dtype.type(op.number("epsilon")))
    ) * across(scale) + across(offset)


@rule("stablehlo.batch_norm_inference")
def batch_norm_inference(op: HloOperation, x, scale, offset, mean, variance):
    return _normalised(op, x, scale, offset, mean, variance)


def _moments(op: HloOperation, x):
    other_axes = tuple(axis for axis in range(x.ndim) if axis != op.integer("feature_index"))
    return jnp.mean(x, other_axes), jnp.var(x, other_axes), other_axes


@rule("stablehlo.batch_norm_training")
def batch_norm_training(op: HloOperation, x, scale, offset):
    mean, variance, _ = _moments(op, x)
    return _normalised(op, x, scale, offset, mean, variance), mean, variance


@rule("stablehlo.batch_norm_grad")
def batch_norm_grad(op: HloOperation, x, scale, mean, variance, g):
    """Gradients of batch_norm_training; formula of StableHLO's specification."""
    axis = op.integer("feature_index")
    other_axes = tuple(k for k in range(x.ndim) if k != axis)
    across = lambda vector: lax.broadcast_in_dim(vector, x.shape, (axis,))
    count = x.dtype.type(x.size // x.shape[axis])
    centred, spread = x - across(mean), lax.rsqrt(variance + x.dtype.type(op.number("epsilon")))
    total, weighted = g.sum(other_axes), (g * centred).sum(other_axes)
    to_x = across(scale * spread / count) * (
        count * g - across(total) - centred * across(weighted * spread * spread)
    )
    return to_x, weighted * spread, total


# Calls that mean what they are given, or a function that lax has.
UNCHANGED = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "xla.sdy.FuncResultSharding",
    "LayoutConstraint",
    "annotate_device_placement",
    "mhlo.copy",
)
FUNCTIONS = {
    "mhlo.erf": lax.erf,
    "mhlo.tan": lax.tan,
    "mhlo.asin": lax.asin,
    "mhlo.acos": lax.acos,
    "mhlo.atan": lax.atan,
    "mhlo.sinh": lax.sinh,
    "mhlo.cosh": lax.cosh,
    "mhlo.asinh": lax.asinh,
    "mhlo.acosh": lax.acosh,
    "mhlo.atanh": lax.atanh,
}


def _reflectors(op: HloOperation, x):
    """R over the vectors of reflectors, and their factors."""
    transposed, factors = jnp.linalg.qr(x, mode="raw")
    return jnp.swapaxes(transposed, -1, -2), factors


def _eigenvectors(op: HloOperation, x):
    """Eigenvectors, and eigenvalues in ascending order, which is one of those that the call leaves open."""
    lower = op.text("backend_config").split(",")[0] == "1"
    return lax.linalg.eigh(x, lower=lower, symmetrize_input=False)


def _top_k(op: HloOperation, x):
    return lax.top_k(x, op.shape[-1])


# Calls that read the operation besides its operands. XLA's compiler for TensorFlow makes those of decompositions.
CALLS_WITH_OPTIONS: dict[str, Callable[..., Any]] = {
    "Qr": _reflectors,
    "ProductOfElementaryHouseholderReflectors": lambda op, x, factors: (
        lax.linalg.householder_product(x, factors)
    ),
    "Eigh": _eigenvectors,
    "mhlo.topk": _top_k,
}


@rule("stablehlo.custom_call")
def custom_call(op: HloOperation, *xs):
    name = op.text("call_target_name")
    if name in UNCHANGED:
        return xs[0]
    if name in FUNCTIONS:
        return FUNCTIONS[name](*xs)
    results = CALLS_WITH_OPTIONS[name](op, *xs)
    is_tuple = isinstance(op.mlir.results[0].type, ir.TupleType)
    return (tuple(results),) if is_tuple else results


@check("stablehlo.custom_call")
def _is_known(op):
    name = ir.StringAttr(op.attributes["call_target_name"]).value
    return (
        None if name in UNCHANGED or name in FUNCTIONS or name in CALLS_WITH_OPTIONS else "unknown"
    )


@rule("sdy.sharding_constraint", "mhlo.copy")
def unchanged(op: HloOperation, x):
    return x
