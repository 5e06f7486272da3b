"""Refs of floats and integers of less than a byte, and of 8-bit floats: in memory, each element is a byte.

Before: `x: Ref[float8_e4m3fn]`, `v = x[...]`. After: `x: Ref[uint8]`, `v = decode(x[...])`, float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedKernel
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.dsl.primitives import ref_access

from .bitcasts import width
from .narrow_floats import body_dtype, decode, encode, in_body, is_narrow_float, quantise
from .value_primitives import rewrite as rewrite_values

HELD_AS = {"int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8}


def held_as(dtype: np.dtype) -> np.dtype:
    """Type of a Ref's elements in memory."""
    if is_narrow_float(dtype):
        return np.dtype(np.uint8)
    return np.dtype(HELD_AS.get(np.dtype(dtype).name, dtype))


def held(x, dtype):
    """x as the other side of a call holds it: `dtype` is its type there."""
    if x.dtype == dtype:
        return x
    if is_narrow_float(x.dtype):
        return _bytes_of(x, dtype)
    if is_narrow_float(dtype):
        return lax.bitcast_convert_type(x.astype(_bits_of(dtype)), dtype)
    return x.astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _bytes_of(x, dtype):
    return lax.bitcast_convert_type(x, _bits_of(x.dtype)).astype(dtype)


@_bytes_of.defjvp
def _refuse_tangents(dtype, primals, _):
    raise UnsupportedKernel(
        "derivative of a kernel with respect to narrow floats",
        why=f"{primals[0].dtype} has too few digits: the kernel holds it as {np.dtype(dtype)}",
        hint="operands and results of 16 or more bits",
    )


def _bits_of(dtype) -> np.dtype:
    """The unsigned integer of as many bits as a narrow float."""
    return np.dtype(jnp.uint4 if width(dtype) == 4 else np.uint8)


def over_bytes(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A body over Refs of any elements -> the same over Refs of bytes where elements are narrow."""
    types = [_jax.ref_contents(var.aval) for var in closed.jaxpr.invars]
    if all(held_as(type_.dtype) == type_.dtype for type_ in types):
        return closed

    def run(*refs):
        retrace_into(closed.jaxpr, closed.consts, refs, _rewrite, in_body)

    with jax.enable_x64(True):  # every type is explicit by now
        return jax.make_jaxpr(run)(
            *[_jax.ref_aval(type_.shape, held_as(type_.dtype)) for type_ in types]
        )


def _rewrite(eqn, *operands) -> list | None:
    if not ref_access.is_ref_access(eqn):
        return rewrite_values(eqn, *operands)
    dtype = np.dtype(_jax.ref_contents(eqn.invars[0].aval).dtype)
    if held_as(dtype) == dtype:
        return ref_access.rewrite(eqn, *operands)
    if eqn.primitive.name == "addupdate":
        return _add(eqn, dtype, operands)
    number = _jax.REF_OPERANDS[eqn.primitive.name]
    values = [
        _stored(operand, dtype) if operand.dtype != bool else operand
        for operand in operands[1:number]
    ]
    results = ref_access.canonical_access(eqn, [operands[0], *values, *operands[number:]])
    return [_loaded(result, dtype) for result in results]


def _add(eqn, dtype: np.dtype, operands: Sequence) -> list:
    """Reads, adds, rounds and stores."""
    ref, value, *index = operands
    indexers = _jax.unflatten_indexers(eqn.params["tree"], index)
    indices = ref_access.compose(ref.shape, indexers, ref_access.add_index, ref_access.mul_index)
    (before,) = ref_access.bind_access(_jax.REF_PRIMITIVES["get"], ref.shape, [ref], indices)
    total = _loaded(before, dtype) + value
    total = quantise(total, dtype) if is_narrow_float(dtype) else total
    ref_access.bind_access(
        _jax.REF_PRIMITIVES["swap"], ref.shape, [ref, _stored(total, dtype)], indices
    )
    return []


def _loaded(raw, dtype: np.dtype):
    return decode(raw, dtype) if is_narrow_float(dtype) else raw.astype(dtype)


def _stored(value, dtype: np.dtype):
    """The bytes of a value, which is float32 for a narrow float."""
    if is_narrow_float(dtype):
        return encode(lax.convert_element_type(value, body_dtype(dtype)), dtype)
    return lax.convert_element_type(value, held_as(dtype))
