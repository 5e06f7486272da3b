"""Primitives of values that users write and bodies do not have -> equivalent lax equations.

Hand-written kernels and imported Pallas kernels share this table. Nothing here depends on the
kernel around the equation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.calls import has_rules
from pbkern.core.jaxprs.walks import equations, inner_jaxprs
from pbkern.core.ops import linear_algebra
from pbkern.core.ops.top_k import by_sorting

from . import bitcasts as bits
from .narrow_floats import (
    FORMATS,
    body_dtype,
    calculate,
    has_narrow_floats,
    is_narrow_float,
    quantise,
    round_at_random,
    rounded_value,
    to_float32,
)
from .numpy_primitives import EQUIVALENTS


def _reciprocal(eqn, x) -> list:
    """1 / x, exactly: `approx` allows an error, but a division costs little here."""
    return [lax.div(lax.full_like(x, 1), x)]


def _bitcast(eqn, x) -> list:
    return [bits.rows(x, eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)]


def _bitcast_convert_type(eqn, x) -> list | None:
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return None if bits.is_plain(old, new) else [bits.convert(x, old, new)]


def _convert_element_type(eqn, x) -> list | None:
    """A conversion from or to a narrow float type, whose values are float32 in the body."""
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if not is_narrow_float(new):
        return calculate(eqn, [x])
    x = to_float32(x)
    return [x if old == new else rounded_value(x, quantise(x, new))]


def _lax_empty(eqn) -> list:
    """lax.empty, whose elements are not specified: zeros."""
    aval = eqn.outvars[0].aval
    return [jnp.zeros(aval.shape, body_dtype(aval.dtype))]


def _top_k(eqn, x) -> list | None:
    results = by_sorting(eqn, [x])
    if results is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return results
    values, places = results
    return [_values_at(eqn.params["axis"], x, values, places), places]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values_at(axis: int, x, values, places):
    """`values`, which are those of x at places along an axis: the integers that were sorted have no derivative."""
    return values


@_values_at.defjvp
def _(axis, primals, tangents):
    places = primals[2]
    moved = jnp.take_along_axis(tangents[0], places, axis, mode="promise_in_bounds")
    return _values_at(axis, *primals), moved


def _linear_algebra(eqn, *operands) -> list | None:
    return linear_algebra.as_equations(eqn, operands)


def _roll(eqn, x, shift) -> list:
    """x rolled by `shift`; with `stride`, by shift + stride * position along `stride_axis`."""
    axis, stride, stride_axis = (
        eqn.params["axis"],
        eqn.params.get("stride"),
        eqn.params.get("stride_axis"),
    )
    if stride is None:
        return [_roll_by(x, shift, axis)]
    rows = [
        _roll_by(lax.slice_in_dim(x, k, k + 1, axis=stride_axis), shift + k * stride, axis)
        for k in range(x.shape[stride_axis])
    ]
    return [lax.concatenate(rows, stride_axis)]


def _roll_by(x, shift, axis: int):
    """x rolled by `shift` along one axis."""
    extent = x.shape[axis]
    start = lax.rem(
        extent - lax.rem(jnp.asarray(shift, np.int32), np.int32(extent)), np.int32(extent)
    )
    return lax.dynamic_slice_in_dim(lax.concatenate([x, x], axis), start, extent, axis)


def _platform_index(eqn) -> list:
    """The branch for the CPU, else the default one."""
    platforms = eqn.params["platforms"]
    number = next((n for n, names in enumerate(platforms) if names is None or "cpu" in names), None)
    if number is None:
        raise UnsupportedOp(
            "no branch for the CPU", at=_jax.user_line(eqn), why=f"platforms {platforms}"
        )
    return [np.int32(number)]


def _inline_asm(eqn, *operands) -> list:
    """The operation that Pallas's own assembly stands for. Raises UnsupportedOp for other assembly."""
    if "tanh.approx" in eqn.params["asm"]:
        return [lax.tanh(operands[0])]
    raise UnsupportedOp(
        "inline assembly in a Pallas kernel", at=_jax.user_line(eqn), why=eqn.params["asm"]
    )


# --- random numbers
# ------------------------------------------------------------------------------------------------


def _stochastic_round(eqn, x, random) -> list:
    to = np.dtype(eqn.params["target_dtype"])
    if to.name not in ("bfloat16", *FORMATS) or x.dtype != np.float32:
        raise UnsupportedOp(
            "`stochastic_round` in a Pallas kernel",
            at=_jax.user_line(eqn),
            why=f"from {x.dtype} to {to}",
            hint=f"from float32 to bfloat16, {', '.join(FORMATS)}",
        )
    return [round_at_random(x, random, to)]


# --- packed elements
# -----------------------------------------------------------------------------------------------


def _pack(eqn, *xs: jax.Array) -> list:
    """Operands side by side in one word, the first lowest."""
    packed, word = np.dtype(eqn.params["packed_dtype"]), np.dtype(eqn.outvars[0].aval.dtype)
    bits = word.itemsize * 8 // len(xs)
    total = None
    for k, x in enumerate(xs):
        if jnp.issubdtype(packed, jnp.floating):
            x = lax.bitcast_convert_type(x.astype(packed), f"uint{bits}").astype(word)
        else:
            x = lax.bitcast_convert_type(x, word) & word.type((1 << bits) - 1)
        x = x << word.type(k * bits)
        total = x if total is None else total | x
    return [total]


def _unpack(eqn, x) -> list:
    packed, out = np.dtype(eqn.params["packed_dtype"]), np.dtype(eqn.params["unpacked_dtype"])
    word = np.dtype(f"uint{x.dtype.itemsize * 8}")
    bits = (
        jax.dtypes.itemsize_bits(packed)
        if hasattr(jax.dtypes, "itemsize_bits")
        else packed.itemsize * 8
    )
    part = lax.bitcast_convert_type(x, word) >> word.type(eqn.params["index"] * bits)
    if jnp.issubdtype(packed, jnp.floating):
        return [lax.bitcast_convert_type(part.astype(f"uint{bits}"), packed).astype(out)]
    signed = np.dtype(f"int{word.itemsize * 8}")
    top = word.itemsize * 8 - bits
    part = part << word.type(top)
    if jnp.issubdtype(packed, jnp.unsignedinteger):
        return [(part >> word.type(top)).astype(out)]
    return [(lax.bitcast_convert_type(part, signed) >> signed.type(top)).astype(out)]


VALUE_RULES: dict[str, Callable[..., list | None]] = EQUIVALENTS | {
    "convert_element_type": _convert_element_type,
    "empty": _lax_empty,
    "top_k": _top_k,
    **dict.fromkeys(linear_algebra.RULES, _linear_algebra),
    "reciprocal": _reciprocal,
    "bitcast": _bitcast,
    "bitcast_convert_type": _bitcast_convert_type,
    "roll": _roll,
    "platform_index": _platform_index,
    "elementwise_inline_asm_p": _inline_asm,
    "stochastic_round": _stochastic_round,
    "pack_elementwise": _pack,
    "unpack_elementwise": _unpack,
}
# Hints and placements: the value itself.
IDENTITIES = (
    "multiple_of",
    "max_contiguous",
    "add_dependency",
    "layout_cast",
    "reshard",
    "optimization_barrier",
    "pvary",
)
# Nothing to do on one core that runs its programs in order.
NOTHING = (
    "delay",
    "debug_barrier_p",
    "set_max_registers_p",
    "commit_smem",
    "trace_value",
    "print_layout",
)


def rewrite(eqn, *operands) -> list | None:
    """retrace's rewrite rule: results of an equation of values that bodies do not have, None for any other."""
    name = eqn.primitive.name
    if name in IDENTITIES:
        return list(operands[: len(eqn.outvars)])
    if name in NOTHING:
        return []
    results = VALUE_RULES[name](eqn, *operands) if name in VALUE_RULES else None
    if results is not None or any(inner_jaxprs(eqn)):
        return results
    return calculate(eqn, operands)


def needs_rules(jaxpr: jex.Jaxpr) -> bool:
    """Whether an equation, at any depth, has another derivative than what stands for it in Kernel.body."""
    return has_rules(jaxpr) or any(
        eqn.primitive.name == "top_k" or has_narrow_floats(eqn) for eqn in equations(jaxpr)
    )
