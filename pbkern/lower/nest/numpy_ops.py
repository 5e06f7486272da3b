"""Elementwise operations of expressions on NumPy arrays, for the interpreter of nests.

float16 and bfloat16 are carried as float32 between the operations of one expression, as
lower/math/elementwise.py has it: only convert_element_type and reduce_precision round. What NumPy
defines otherwise than XLA runs as the JAX operation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from pbkern.core.errors import InternalError
from pbkern.lower.math.elementwise import EqnInfo

HALF = ("float16", "bfloat16")
# Largest float32 that rounds to a finite one.
FINITE = {"float16": 65520.0, "bfloat16": float.fromhex("0x1.FFp127")}


def register_dtype(dtype: np.dtype) -> np.dtype:
    """In which values of a dtype are carried."""
    return np.dtype(np.float32) if dtype.name in HALF else dtype


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Register values as they are in memory.

    NaNs keep their bits, which may be anything where bytes are moved as floats.
    """
    x = np.asarray(x)
    found = x.astype(dtype)
    if dtype.name == "bfloat16" and x.dtype == np.float32 and (nan := np.isnan(x)).any():
        upper = (x.view(np.uint32) >> 16).astype(np.uint16)
        upper |= np.where(upper & 0x7F, 0, 0x40).astype(np.uint16)
        found = np.where(nan, upper, found.view(np.uint16)).view(dtype)
    return found


def apply(info: EqnInfo, args: Sequence[np.ndarray]) -> np.ndarray:
    """Register values of operands, which broadcast -> that of the result. Raises InternalError for an unknown operation."""
    name = info.primitive
    with np.errstate(all="ignore"):
        if name in ON_MEMORY:  # what depends on the format of a number
            args = [rounded(arg, dtype) for arg, dtype in zip(args, info.in_dtypes)]
            found = ON_MEMORY[name](info, *args)
        elif name in NUMPY and not _is_narrow(info):
            found = NUMPY[name](info, *args)
        elif name in JAX:
            found = _by_jax(JAX[name], info, args)
        else:
            raise InternalError(f"nest: the interpreter has no operation `{name}`")
    return np.asarray(found).astype(register_dtype(info.out_dtype))


def _is_narrow(info: EqnInfo) -> bool:
    """Whether an operand has elements of less than a byte."""
    return any(
        dtype.kind not in "biuf" and dtype.name not in HALF
        for dtype in (*info.in_dtypes, info.out_dtype)
    )


def _by_jax(function: Callable, info: EqnInfo, args: Sequence[np.ndarray]) -> np.ndarray:
    """function(info, *operands) as JAX has it, on the CPU.

    Operands are padded to few lengths: JAX compiles for each.
    """
    wide = np.broadcast_arrays(*args)
    size = wide[0].size
    flat = [
        np.resize(array.reshape(-1), 1 << max(size - 1, 0).bit_length())
        if size
        else array.reshape(-1)
        for array in wide
    ]
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        found = np.asarray(function(info, *map(jax.numpy.asarray, flat)))
    return found[:size].reshape(wide[0].shape)


# ---------------------------------------------------------------- NumPy's


def _convert(info: EqnInfo, x: np.ndarray) -> np.ndarray:
    source, target = info.in_dtypes[0], info.out_dtype
    if target.kind == "b":
        return x != 0
    if source == target:
        return x
    if (
        x.dtype.kind == "f" and target.kind in "iu"
    ):  # NaN and what is too large have no meaning in NumPy
        return _by_jax(lambda info, operand: operand.astype(target), info, [x])
    if target.name in HALF:
        return x.astype(np.float32).astype(target)
    return x.astype(target)


def _select(info: EqnInfo, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if which.dtype.kind == "b":
        return np.where(which, cases[-1], cases[0])
    found = cases[-1]
    for position in reversed(range(len(cases) - 1)):
        found = np.where(which == position, cases[position], found)
    return found


def _is_finite(info: EqnInfo, x: np.ndarray) -> np.ndarray:
    return np.abs(x) < FINITE.get(info.in_dtypes[0].name, np.inf)


def _extreme(x: np.ndarray, y: np.ndarray, sign: int) -> np.ndarray:
    """The larger (`sign` 1) or smaller; 0 is larger than -0."""
    if x.dtype.kind == "b":
        return x | y if sign > 0 else x & y
    found = np.maximum(x, y) if sign > 0 else np.minimum(x, y)
    zeros = (x == 0) & (y == 0)
    return found if x.dtype.kind != "f" else np.where(zeros, sign * (sign * x + sign * y), found)


_PLAIN = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "square": np.square,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
NUMPY: dict[str, Callable[..., np.ndarray]] = {
    **{
        name: (lambda info, *args, function=ufunc: function(*args))
        for name, ufunc in _PLAIN.items()
    },
    "not": lambda info, x: np.logical_not(x) if x.dtype.kind == "b" else np.invert(x),
    "max": lambda info, x, y: _extreme(x, y, 1),
    "min": lambda info, x, y: _extreme(x, y, -1),
    "select_n": _select,
    "is_finite": _is_finite,
    "convert_element_type": _convert,
    "copy": lambda info, x: x,
    "copy_p": lambda info, x: x,
    "stop_gradient": lambda info, x: x,
    "in_range": lambda info, x: x,
}


# ---------------------------------------------------------------- JAX's


def _total_order(function: Callable) -> Callable:
    """Floats by sign, then magnitude: -NaN < -inf < ... < -0 < +0 < ... < NaN."""

    def ordered(info: EqnInfo, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if x.dtype.kind != "f":
            return function(x, y)
        bits = np.dtype(f"i{x.dtype.itemsize}")
        x, y = (
            np.where(
                operand.view(bits) < 0, operand.view(bits) ^ np.iinfo(bits).max, operand.view(bits)
            )
            for operand in (x, y)
        )
        return function(x, y)

    return ordered


def _bitcast(info: EqnInfo, x: np.ndarray) -> np.ndarray:
    return (
        np.ascontiguousarray(x).view(info.out_dtype)
        if x.ndim
        else np.asarray(x[()]).view(info.out_dtype)
    )


def _nextafter(info: EqnInfo, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _by_jax(lambda info, x, y: jax.lax.nextafter(x, y), info, [x, y])


def _reduce_precision(info: EqnInfo, x: np.ndarray) -> np.ndarray:
    params = info.params
    return _by_jax(
        lambda info, x: jax.lax.reduce_precision(
            x, params["exponent_bits"], params["mantissa_bits"]
        ),
        info,
        [x],
    )


ON_MEMORY: dict[str, Callable[..., np.ndarray]] = {
    "bitcast_convert_type": _bitcast,
    "nextafter": _nextafter,
    "reduce_precision": _reduce_precision,
}
NUMPY |= {
    f"{name}_to": _total_order(ufunc)
    for name, ufunc in (("eq", np.equal), ("le", np.less_equal), ("lt", np.less))
}
JAX: dict[str, Callable] = {
    **{
        name: (lambda info, *args, name=name: getattr(jax.lax, name)(*args))
        for name in (
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atan2",
            "atanh",
            "cbrt",
            "clz",
            "cos",
            "cosh",
            "digamma",
            "div",
            "erf",
            "erf_inv",
            "erfc",
            "exp",
            "exp2",
            "expm1",
            "lgamma",
            "log",
            "log1p",
            "logistic",
            "mulhi",
            "population_count",
            "pow",
            "rem",
            "rsqrt",
            "shift_left",
            "shift_right_arithmetic",
            "shift_right_logical",
            "sign",
            "sin",
            "sinh",
            "tan",
            "tanh",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "max",
            "min",
        )
    },
    "clamp": lambda info, low, x, high: jax.lax.clamp(low, x, high),
    "integer_pow": lambda info, x: jax.lax.integer_pow(x, info.params["y"]),
    "round": lambda info, x: jax.lax.round(
        x, jax.lax.RoundingMethod(int(info.params["rounding_method"]))
    ),
    "convert_element_type": lambda info, x: x.astype(info.out_dtype),
    "select_n": lambda info, which, *cases: jax.lax.select_n(which, *cases),
    "and": lambda info, x, y: x & y,
    "or": lambda info, x, y: x | y,
    "xor": lambda info, x, y: x ^ y,
    "copy": lambda info, x: x,
    "copy_p": lambda info, x: x,
}
