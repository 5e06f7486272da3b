"""Operations that compute each element by itself."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir

from pbkern.frontends.stablehlo.operation import refused
from pbkern.frontends.stablehlo.table import rule


def _boolean(of_numbers, of_booleans):
    return lambda x, y: of_booleans(x, y) if x.dtype == bool else of_numbers(x, y)


def power(x, y):
    """x^y. Of integers modulo 2^bits, by squares; to negative exponents the integer part, and zero for x = 0, as XLA does."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return lax.pow(x, y)
    one, limits = lax.full_like(y, 1), jnp.iinfo(x.dtype)
    result, square, rest = lax.full_like(x, 1), x, lax.abs(y) if limits.min else y
    for bit in range(limits.bits - (limits.min < 0)):
        result = lax.select(lax.eq(rest & one, one), result * square, result)
        rest = lax.shift_right_logical(rest, one)
        square = square * square if bit < limits.bits - 2 else square
    if not limits.min:
        return result
    is_unit = lax.eq(lax.abs(x), lax.full_like(x, 1))
    return lax.select((y >= 0) | is_unit, result, lax.full_like(x, 0))


UNARY = {
    "abs": lax.abs,
    "cbrt": lax.cbrt,
    "ceil": lax.ceil,
    "count_leading_zeros": lax.clz,
    "cosine": lax.cos,
    "exponential": lax.exp,
    "exponential_minus_one": lax.expm1,
    "floor": lax.floor,
    "imag": jnp.imag,
    "is_finite": lax.is_finite,
    "log": lax.log,
    "log_plus_one": lax.log1p,
    "logistic": lax.logistic,
    "negate": lax.neg,
    "not": lax.bitwise_not,
    "popcnt": lax.population_count,
    "real": jnp.real,
    "round_nearest_afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_nearest_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "rsqrt": lax.rsqrt,
    "sign": lax.sign,
    "sine": lax.sin,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
}
BINARY = {
    "add": _boolean(lax.add, lax.bitwise_or),
    "and": lax.bitwise_and,
    "atan2": lax.atan2,
    "complex": lax.complex,
    "divide": lax.div,
    "maximum": lax.max,
    "minimum": lax.min,
    "multiply": _boolean(lax.mul, lax.bitwise_and),
    "or": lax.bitwise_or,
    "power": power,
    "remainder": lax.rem,
    "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
    "subtract": lax.sub,
    "xor": lax.bitwise_xor,
}
CHLO = {
    "acos": lax.acos,
    "acosh": lax.acosh,
    "asin": lax.asin,
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atanh": lax.atanh,
    "bessel_i1e": lax.bessel_i1e,
    "conj": lax.conj,
    "cosh": lax.cosh,
    "digamma": lax.digamma,
    "erf": lax.erf,
    "erf_inv": lax.erf_inv,
    "erfc": lax.erfc,
    "is_inf": jnp.isinf,
    "is_neg_inf": jnp.isneginf,
    "is_pos_inf": jnp.isposinf,
    "lgamma": lax.lgamma,
    "next_after": lax.nextafter,
    "polygamma": lax.polygamma,
    "sinh": lax.sinh,
    "square": lax.square,
    "tan": lax.tan,
    "zeta": lax.zeta,
}
# Broadcasting forms of CHLO that are named otherwise than the operation.
BROADCASTING = BINARY | {"next_after": lax.nextafter, "polygamma": lax.polygamma, "zeta": lax.zeta}


def broadcast(op, *operands):
    """Operands of CHLO's broadcasting operations at one shape; `broadcast_dimensions` places those of a lower rank."""
    rank = max(operand.ndim for operand in operands)
    places = op.integers("broadcast_dimensions", ()) or None
    if places is not None:
        operands = [
            operand
            if operand.ndim == rank
            else lax.expand_dims(operand, [axis for axis in range(rank) if axis not in places])
            for operand in operands
        ]
    return jnp.broadcast_arrays(*operands)


for _name, _f in (UNARY | BINARY).items():
    rule(f"stablehlo.{_name}")(lambda op, *operands, _f=_f: _f(*operands))
for _name, _f in CHLO.items():  # TensorFlow writes those of MHLO
    rule(f"chlo.{_name}", f"mhlo.{_name}")(lambda op, *operands, _f=_f: _f(*operands))
for _name, _f in BROADCASTING.items():
    rule(f"chlo.broadcast_{_name}")(lambda op, *operands, _f=_f: _f(*broadcast(op, *operands)))


def in_total_order(x):
    """Floats as integers in the order -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{x.dtype.itemsize * 8}"))
    return lax.select(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


@rule("stablehlo.compare")
def compare(op, x, y):
    if op.choice("compare_type") == "TOTALORDER" and jnp.issubdtype(x.dtype, jnp.floating):
        x, y = in_total_order(x), in_total_order(y)
    return getattr(lax, op.choice("comparison_direction").lower())(x, y)


@rule("chlo.broadcast_compare")
def broadcast_compare(op, x, y):
    return compare(op, *broadcast(op, x, y))


@rule("stablehlo.select")
def select(op, test, x, y):
    return lax.select(jnp.broadcast_to(test, x.shape), x, y)


@rule("chlo.broadcast_select")
def broadcast_select(op, test, x, y):
    return lax.select(*jnp.broadcast_arrays(test, x, y))


@rule("stablehlo.clamp")
def clamp(op, low, x, high):
    return lax.clamp(low, x, high)


@rule("stablehlo.convert")
def convert(op, x):
    if op.dtype == bool and x.dtype != bool:
        return lax.ne(x, np.zeros((), x.dtype))
    if x.dtype.kind == "c" and op.dtype.kind != "c":
        x = lax.real(x)
    return lax.convert_element_type(x, op.dtype)


@rule("stablehlo.bitcast_convert")
def bitcast_convert(op, x):
    return lax.bitcast_convert_type(x, op.dtype)


@rule("stablehlo.reduce_precision")
def reduce_precision(op, x):
    return lax.reduce_precision(x, op.integer("exponent_bits"), op.integer("mantissa_bits"))


@rule("chlo.constant_like")
def constant_like(op, x):
    value = op.attribute("value")
    if not isinstance(value, ir.FloatAttr | ir.IntegerAttr):
        raise refused(op, f"a constant {value}")
    return jnp.full(x.shape, value.value, op.dtype)


@rule("stablehlo.optimization_barrier")
def optimization_barrier(op, *xs):
    return lax.optimization_barrier(tuple(xs))
