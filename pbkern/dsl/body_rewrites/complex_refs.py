"""Kernels on complex arrays -> the same on real ones, re and im side by side along a last dimension of 2.

    x: Ref[complex64[8, 16]]                x: Ref[float32[8, 16, 2]]
    o[...] = abs(x[...])          ->        p = x[...];  o[...] = sqrt(p[:, :, 0]^2 + p[:, :, 1]^2)

Targets get such kernels. What a body computes with complex numbers are equations on both parts (core/ops/complex).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.errors import UnsupportedKernel
from pbkern.core.jaxprs.retracing import retrace, retrace_into
from pbkern.core.jaxprs.walks import equations, inner_jaxprs
from pbkern.core.ops.complex.arithmetic import Complex
from pbkern.core.ops.complex.interleaved import deinterleave, interleave, part_type
from pbkern.core.ops.complex.pairs import constant, has_rule, is_complex, results_of, touches
from pbkern.dsl.kernel import ArrayType, Blocked, BlockMapping, Kernel, Scratch
from pbkern.dsl.primitives.ref_access import (
    Range,
    add_index,
    bind_access,
    compose,
    is_ref_access,
    mul_index,
)

# Equations that ask a Ref, and not its elements.
ABOUT_REFS = ("in_bounds",)


def has_complex_numbers(kernel: Kernel) -> bool:
    """Whether an operand, a result, scratch or a value of a kernel's body is complex."""
    types = [*kernel.in_types, *kernel.out_types, *kernel.scratch]
    return any(map(is_complex, types)) or _computes_complex(kernel.body)


@_jax.cached_by_jaxpr_alone
def _computes_complex(body: jex.ClosedJaxpr) -> bool:
    return any(map(touches, equations(body.jaxpr)))


@functools.lru_cache(maxsize=256)
def over_pairs(kernel: Kernel) -> Kernel:
    """The kernel, without a last stage, over Refs of pairs.

    Raises UnsupportedKernel, at the user's line, for what has no rule.
    """
    for eqn in equations(kernel.body.jaxpr):
        _refuse(kernel, eqn)
    types = [_jax.ref_contents(var.aval) for var in kernel.body.jaxpr.invars]

    def run(*refs):
        retrace_into(kernel.body.jaxpr, kernel.body.consts, refs, _rewrite, constant)

    with jax.enable_x64(True):  # every type is explicit by now
        body = jax.make_jaxpr(run)(*[_jax.ref_aval(*_in_pairs(type_)) for type_ in types])
        body = retrace(body)
    return dataclasses.replace(
        kernel,
        inputs=tuple(map(_mapping, kernel.inputs)),
        outputs=tuple(map(_mapping, kernel.outputs)),
        scratch=tuple(map(_scratch, kernel.scratch)),
        body=body,
        with_rules=None,
        sizes=None,
    )


def type_in_pairs(type_: ArrayType) -> ArrayType:
    """The type of the parts of an array; that of the array if it is not complex."""
    return ArrayType(*_in_pairs(type_))


def _in_pairs(type_) -> tuple[tuple[int, ...], np.dtype]:
    if not is_complex(type_):
        return tuple(type_.shape), np.dtype(type_.dtype)
    return (*type_.shape, 2), part_type(type_.dtype)


def _scratch(scratch: Scratch) -> Scratch:
    shape, dtype = _in_pairs(scratch)
    return dataclasses.replace(scratch, shape=shape, dtype=dtype)


def _mapping(mapping: BlockMapping) -> BlockMapping:
    """A block mapping with all of the last dimension."""
    if not is_complex(mapping.array):
        return mapping

    def index_map(*args):
        return [*jex.jaxpr_as_fun(mapping.index_map)(*args), np.int32(0)]

    avals = [_jax.fresh_aval(var.aval) for var in mapping.index_map.jaxpr.invars]
    with jax.enable_x64(False):
        wider = retrace(jax.make_jaxpr(index_map)(*avals))
    return dataclasses.replace(
        mapping,
        array=type_in_pairs(mapping.array),
        dims=(*mapping.dims, Blocked(2)),
        index_map=wider,
    )


def _refuse(kernel: Kernel, eqn) -> None:
    """Raises UnsupportedKernel for an equation on complex numbers that has no rule."""
    refs = [var.aval for var in eqn.invars if _jax.is_ref(var.aval)]
    is_on_refs = any(is_complex(_jax.ref_contents(ref)) for ref in refs)
    is_known = (is_ref_access(eqn) or eqn.primitive.name in ABOUT_REFS) if refs else has_rule(eqn)
    is_concerned = is_on_refs or touches(eqn)
    if is_concerned and not is_known and not _contains_others(eqn):
        raise UnsupportedKernel(
            f"complex numbers in kernel `{kernel.name}`",
            at=_jax.user_line(eqn) or kernel.defined_at or None,
            why=f"`{eqn.primitive.name}` has no rule for pairs of real numbers",
            hint="compute it outside of the kernel, or from lax.real and lax.imag",
        )


def _rewrite(eqn, *operands) -> list | None:
    if is_ref_access(eqn) and is_complex(_jax.ref_contents(eqn.invars[0].aval)):
        return _accessed(eqn, operands)
    if _contains_others(eqn) or not touches(eqn) or not has_rule(eqn):
        return None
    return results_of(eqn, operands)


def _contains_others(eqn) -> bool:
    """Whether an equation contains others."""
    return any(True for _ in inner_jaxprs(eqn))


def _accessed(eqn, operands: Sequence) -> list:
    """An access to both parts of the elements."""
    number, name = _jax.REF_OPERANDS[eqn.primitive.name], eqn.primitive.name
    shape, _ = _jax.ref_type(eqn.invars[0].aval)
    indexers = _jax.unflatten_indexers(eqn.params["tree"], operands[number:])
    indices = (*compose(shape, indexers, add_index, mul_index), Range(0, 2))
    ref, *values = operands[:number]
    pairs = [
        _wide_mask(value) if var.aval.dtype == bool else _stored(value, var.aval)
        for value, var in zip(values, eqn.invars[1:number])
    ]
    results = bind_access(eqn.primitive, (*shape, 2), [ref, *pairs], indices)
    return results if name == "addupdate" else [deinterleave(result) for result in results]


def _wide_mask(mask):
    return lax.broadcast_in_dim(mask, (*mask.shape, 2), range(mask.ndim))


def _stored(value, aval):
    """Both parts, in the shape of the value."""
    pair = value if isinstance(value, Complex) else Complex(value, None)
    if pair.interleaved is not None:
        return pair.interleaved
    parts = [
        lax.broadcast_in_dim(
            part, aval.shape, range(len(aval.shape) - np.ndim(part), len(aval.shape))
        )
        if np.shape(part) != aval.shape
        else part
        for part in pair.parts
    ]
    return interleave(Complex(*parts))
