"""Operators that compute each element by itself.

Arithmetic is done in the type that Torch gives the result.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.errors import UnsupportedOp

from .table import as_type, check_real, op, operands

# Functions of one array whose result has the type of what they compute with.
UNARY: dict[str, Callable] = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "neg": jnp.negative,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "trunc": jnp.trunc,
    "reciprocal": lambda x: 1 / x,
    "square": jnp.square,
    "lgamma": lax.lgamma,
    "log_sigmoid": jax.nn.log_sigmoid,
}
# Whose result may have another type than what they look at.
TESTS: dict[str, Callable] = {
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isfinite": jnp.isfinite,
    "logical_not": jnp.logical_not,
    "signbit": jnp.signbit,
    "abs": jnp.abs,
    "real": jnp.real,
    "imag": jnp.imag,
    "bitwise_not": jnp.invert,
}
BINARY: dict[str, Callable] = {
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "atan2": jnp.arctan2,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "hypot": jnp.hypot,
    "nextafter": jnp.nextafter,
    "copysign": jnp.copysign,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
}
COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
LOGICAL = {
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}

for _name, _f in UNARY.items():
    op(f"aten::{_name}", f"prims::{_name}")(lambda call, x, _f=_f: _f(as_type(x, call.dtype)))
for _name, _f in TESTS.items():
    op(f"aten::{_name}", f"prims::{_name}")(lambda call, x, _f=_f: _f(x))
for _name, _f in BINARY.items():
    op(f"aten::{_name}", f"prims::{_name}")(lambda call, x, y, _f=_f: _f(*operands(call, x, y)))
for _name, _f in COMPARISONS.items():
    op(f"aten::{_name}", f"prims::{_name}")(
        lambda call, x, y, _f=_f: _f(as_type(x, call.arguments), as_type(y, call.arguments))
    )
for _name, _f in LOGICAL.items():
    op(f"aten::{_name}")(lambda call, x, y, _f=_f: _f(x, y))
op(
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh_copy",
    "aten::lift_fresh",
    "aten::resolve_conj",
    "aten::resolve_neg",
)(lambda call, x: x)
op("aten::_neg_view")(lambda call, x: -x)
op("aten::clone", "aten::contiguous")(lambda call, x: x)
op("aten::conj", "aten::_conj", "aten::conj_physical", "aten::_conj_physical", "prims::conj")(
    lambda call, x: jnp.conj(x)
)
op("aten::relu")(lambda call, x: jnp.maximum(x, jnp.zeros((), x.dtype)))


@op("aten::mul", "prims::mul")
def mul(call, x, y):
    return jnp.multiply(*operands(call, x, y, exact_numbers=True))


@op("aten::sign", "aten::sgn", "prims::sign")
def sign(call, x):
    """Returns 0 for NaN, and the direction of a complex number."""
    if jnp.iscomplexobj(x):
        size = jnp.abs(x)
        return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))
    return jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0))


@op("aten::digamma", "prims::digamma")
def digamma(call, x):
    """At zero: the infinity of the other sign."""
    x = as_type(x, call.dtype)
    return jnp.where(x == 0, jnp.copysign(jnp.full((), np.inf, x.dtype), -x), lax.digamma(x))


@op("aten::logaddexp")
def logaddexp(call, x, y):
    x, y = operands(call, x, y)
    check_real(x)
    return jnp.logaddexp(x, y)


@op("aten::angle")
def angle(call, x):
    """Returns the angle; of the real numbers -0.0 and NaN it is 0 and NaN."""
    return (
        jnp.angle(x)
        if jnp.iscomplexobj(x)
        else jnp.where(jnp.isnan(x), x, jnp.where(x < 0, np.pi, 0))
    )


def _scaled(call, x, alpha):
    """A product with a number that Torch rounds to the type of the result."""
    if isinstance(alpha, int | float) and alpha == 1:
        return x
    return _wide(x) * as_type(as_type(alpha, call.dtype), _wide(x).dtype)


@op("aten::add", "prims::add")
def add(call, x, y, alpha=1):
    x, y = operands(call, x, y)
    return jnp.logical_or(x, y) if call.dtype.kind == "b" else x + _scaled(call, y, alpha)


@op("aten::sub", "prims::sub")
def sub(call, x, y, alpha=1):
    x, y = operands(call, x, y)
    return x - _scaled(call, y, alpha)


@op("aten::rsub")
def rsub(call, x, y, alpha):
    x, y = operands(call, x, y)
    return y - _scaled(call, x, alpha)


@op("aten::div", "aten::true_divide")
def div(call, x, y, rounding_mode=None):
    if rounding_mode is None:
        x, y = operands(call, x, y, exact_numbers=True)
        return x / y
    x, y = _divided(call, x, y, exact_numbers=True)
    if rounding_mode == "floor":
        return _floor_divided(x, y)
    x, y = jnp.broadcast_arrays(x, y)
    if call.dtype.kind in "iu":
        return lax.div(x, y)
    return jnp.where(
        lax.rem(x, y) == 0, jnp.round(x / y), jnp.trunc(x / y)
    )  # 3 / 3 may be just below 1


def _divided(call, x, y, exact_numbers=False):
    """Both operands, a divisor of integers checked not to be zero."""
    if call.dtype.kind not in "iu":
        return operands(call, x, y, exact_numbers=exact_numbers)
    if isinstance(y, int | float):  # known now
        call.in_range(np.asarray(y).astype(call.dtype), 1, 0)
        return operands(call, x, y)
    x, y = operands(call, x, y)
    return x, call.in_range(y, 1, 0)


def _floor_divided(x, y):
    """Divides floats: exact where x is a multiple of y, and infinities and zeros as Torch has them."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.floor_divide(x, y)
    x, y = jnp.broadcast_arrays(x, y)
    rest = lax.rem(x, y)
    quotient = (x - rest) / y
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    whole = jnp.floor(quotient)
    whole = jnp.where(quotient - whole > 0.5, whole + 1, whole)
    whole = jnp.where(quotient != 0, whole, jnp.copysign(jnp.zeros((), x.dtype), x / y))
    return jnp.where(y == 0, x / y, whole)


@op("prims::div")
def prims_div(call, x, y):
    """Divides; integers are rounded towards zero."""
    return div(call, x, y, "trunc" if call.dtype.kind in "iu" else None)


@op("aten::floor_divide")
def floor_divide(call, x, y):
    return _floor_divided(*_divided(call, x, y, exact_numbers=True))


@op("aten::fmod")
def fmod(call, x, y):
    return jnp.fmod(*_divided(call, x, y))


@op("aten::remainder")
def remainder(call, x, y):
    return jnp.remainder(*_divided(call, x, y))


@op("aten::pow")
def power(call, x, y):
    """A number as an exponent stays one: squares are products, and half a power is a root."""
    if call.dtype.kind in "iu" and isinstance(y, int) and y < 0:
        raise UnsupportedOp("Torch has no negative powers of integers", why=f"the exponent is {y}")
    if (
        isinstance(y, float)
        and abs(y) == 0.5
        and not isinstance(x, int | float)
        and call.dtype != np.float16
    ):
        return jnp.sqrt(as_type(x, call.dtype)) if y > 0 else lax.rsqrt(as_type(x, call.dtype))
    if (
        isinstance(y, int | float)
        and float(y).is_integer()
        and abs(y) <= 64
        and not isinstance(x, int | float)
    ):
        return lax.integer_pow(as_type(x, call.dtype), int(y))
    x, y = operands(call, x, y)
    return _integer_power(x, y) if call.dtype.kind in "iu" else jnp.power(x, y)


def _integer_power(x, y):
    """Products that wrap, by the bits of the exponent; of negative exponents, those of 1 and -1 alone are not zero."""
    x, y = jnp.broadcast_arrays(x, y)
    total, square, left = jnp.ones_like(x), x, y
    for _ in range(y.dtype.itemsize * 8 - (y.dtype.kind == "i")):
        total = jnp.where(left & 1 == 1, total * square, total)
        square, left = square * square, left >> 1
    if y.dtype.kind == "u":
        return total
    odd = jnp.where(y & 1 == 1, x, jnp.ones_like(x))
    return jnp.where(y < 0, jnp.where(jnp.abs(x) == 1, odd, jnp.zeros_like(x)), total)


def _wide(x):
    """16-bit floats in the type in which Torch computes with them and with numbers, which are not rounded to 16 bits."""
    return (
        x.astype(np.float32)
        if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating)
        else x
    )


@op("aten::gelu")
def gelu(call, x, approximate):
    return jax.nn.gelu(_wide(x), approximate=approximate != "none")


@op("aten::silu")
def silu(call, x):
    return jax.nn.silu(x)


@op("aten::leaky_relu")
def leaky_relu(call, x, negative_slope):
    x = _wide(x)
    return jnp.where(x > 0, x, x * as_type(negative_slope, x.dtype))


@op("aten::elu")
def elu(call, x, alpha, scale, input_scale):
    x = _wide(x)
    low = jnp.expm1(jnp.minimum(x, 0) * as_type(input_scale, x.dtype)) * as_type(alpha, x.dtype)
    return jnp.where(x > 0, x, low) * as_type(scale, x.dtype)


@op("aten::softplus")
def softplus(call, x, beta, threshold):
    x = _wide(x)
    scaled = x * as_type(beta, x.dtype)
    return jnp.where(
        scaled > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta
    )


@op("aten::threshold_backward")
def threshold_backward(call, g, x, threshold):
    return jnp.where(x <= threshold, jnp.zeros((), g.dtype), g)


@op("aten::clamp", "aten::clip", "aten::clamp_min", "aten::hardtanh")
def clamp(call, x, low, high=None):
    """Each bound may be None."""
    x = as_type(x, call.dtype)
    x = x if low is None else jnp.maximum(x, as_type(low, call.dtype))
    return x if high is None else jnp.minimum(x, as_type(high, call.dtype))


@op("aten::where", "prims::where")
def where(call, test, x, y):
    return jnp.where(test, as_type(x, call.dtype), as_type(y, call.dtype))


@op("aten::masked_fill")
def masked_fill(call, x, mask, value):
    return jnp.where(mask, as_type(value, x.dtype), x)


@op("aten::lerp")
def lerp(call, x, y, weight):
    x, y, weight = operands(call, x, y, weight, exact_numbers=True)
    return jnp.where(jnp.abs(weight) < 0.5, x + weight * (y - x), y - (y - x) * (1 - weight))


@op("aten::addcmul")
def addcmul(call, x, y, z, value):
    x, y, z, value = operands(call, x, y, z, value, exact_numbers=True)
    return x + value * (y * z)


@op("aten::addcdiv")
def addcdiv(call, x, y, z, value):
    x, y, z, value = operands(call, x, y, z, value, exact_numbers=True)
    return x + value * y / z  # in the order of Torch


@op("prims::fma")
def fma(call, x, y, z):
    return x * y + z


@op("aten::round")
def round_half_to_even(call, x, decimals=0):
    return x if call.dtype.kind in "iu" else jnp.round(x, decimals)


@op("aten::_to_copy", "aten::to")
def to_copy(call, x, *_, **__):
    return as_type(x, call.dtype)


@op("prims::convert_element_type")
def convert_element_type(call, x, dtype):
    return as_type(x, call.dtype)


@op("aten::view_as_real")
def view_as_real(call, x):
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


@op("aten::view_as_complex")
def view_as_complex(call, x):
    return lax.complex(x[..., 0], x[..., 1])


@op("aten::complex")
def complex_of(call, x, y):
    return lax.complex(*jnp.broadcast_arrays(x, y))


@op("aten::polar")
def polar(call, size, angle):
    size, angle = jnp.broadcast_arrays(size, angle)
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


@op("aten::nan_to_num")
def nan_to_num(call, x, nan, posinf, neginf):
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


# Gradients of complex numbers are multiplied by conjugates of derivatives (PyTorch's manual, "Autograd mechanics").
@op("aten::sigmoid_backward")
def sigmoid_backward(call, g, y):
    return g * jnp.conj(y * (1 - y))


@op("aten::tanh_backward")
def tanh_backward(call, g, y):
    return g * jnp.conj(1 - y * y)


@op("aten::isin")
def isin(call, x, tests, assume_unique, invert):
    return jnp.isin(x, tests, invert=invert)


@op("aten::copy")
def copy(call, x, y, non_blocking):
    return as_type(jnp.broadcast_to(y, x.shape), x.dtype)


@op("aten::clamp_max")
def clamp_max(call, x, high):
    return clamp(call, x, None, high)
