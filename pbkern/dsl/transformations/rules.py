"""Rules that tell JAX how calls of kernels are transformed.

A call's tangents are a call of their own, of a primitive that is linear in the operands' tangents:
`pbkern_tangent` runs the kernel of tangents, and its transpose the backward kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from pbkern import _jax
from pbkern.core.jaxprs import EXPANSIONS
from pbkern.dsl.call import interpret_p, kernel_p
from pbkern.dsl.kernel import Kernel

from .backward import cotangents
from .batched import (
    aliased_operands,
    batch,
    batched_kernel,
    launch_each,
    needs_launches,
    stacked,
)
from .tangent import is_differentiable, tangent_kernel, values_kept

# Operands of a kernel, tangents of the active ones -> tangents of its differentiable results.
tangent_p = jex.Primitive("pbkern_tangent")
tangent_p.multiple_results = True


def differentiated(
    primitive, kernel: Kernel, primals: Sequence, tangents: Sequence
) -> tuple[list, list]:
    """(results, their tangents) of a call of a kernel: the rule of forward mode."""
    if kernel.finish is not None:
        first, last = kernel.stages
        split = len(first.inputs)
        results, moved = differentiated(primitive, first, primals[:split], tangents[:split])
        return differentiated(
            primitive, last, [*results, *primals[split:]], [*moved, *tangents[split:]]
        )
    results = primitive.bind(*primals, kernel=kernel)
    moved = kernel_tangents(primitive, kernel, primals, tangents)
    return results, moved


def kernel_tangents(primitive, kernel: Kernel, primals: Sequence, tangents: Sequence) -> list:
    """Tangents of the results of a kernel without a last stage."""
    shared = {i for i, output in kernel.aliases if is_differentiable(kernel.outputs[output].array)}
    active = tuple(
        n in shared or not isinstance(tangent, ad.Zero) for n, tangent in enumerate(tangents)
    )
    given = [ad.instantiate_zeros(tangents[n]) for n, has in enumerate(active) if has]
    moved = iter(
        tangent_p.bind(*primals, *given, kernel=kernel, active=active, launch=primitive)
        if any(active)
        else ()
    )
    zeros = [ad.Zero(_jax.tangent_type(type_)) for type_ in kernel.out_types]
    return [
        next(moved, zero) if is_differentiable(type_) else zero
        for type_, zero in zip(kernel.out_types, zeros)
    ]


def _tangents(*operands, kernel: Kernel, active: tuple[bool, ...], launch) -> list:
    tangent = tangent_kernel(kernel, active)
    return launch.bind(*operands, kernel=tangent)[len(values_kept(kernel)) :]


def _types(*_, kernel: Kernel, **params) -> list:
    return [
        jax.core.ShapedArray(type_.shape, type_.dtype)
        for type_ in kernel.out_types
        if is_differentiable(type_)
    ]


def _tangents_of_tangents(primals, tangents, **params):
    call = functools.partial(_tangents, **params)
    return jax.jvp(call, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _transposed(given: Sequence, *operands, kernel: Kernel, active, launch) -> list:
    primals, tangents = operands[: len(active)], operands[len(active) :]
    if any(map(ad.is_undefined_primal, primals)):
        raise NotImplementedError("transpose of a kernel's tangents by what they are taken at")
    back = cotangents(launch, kernel, active, primals, list(map(ad.instantiate_zeros, given)))
    return [None] * len(primals) + [
        ct if ad.is_undefined_primal(tangent) else None for ct, tangent in zip(back, tangents)
    ]


def _batched_tangents(args, dims, *, kernel: Kernel, active, **params):
    """The call for stacked operands stays linear: an operand is stacked where it, or its tangent, is."""
    size = next(arg.shape[dim] for arg, dim in zip(args, dims) if dim is not None)
    numbers = [n for n, has in enumerate(active) if has]
    batched = [dim is not None for dim in dims[: len(active)]]
    for n, dim in zip(numbers, dims[len(active) :]):
        batched[n] |= dim is not None
    if needs_launches(kernel, batched):
        call = functools.partial(tangent_p.bind, kernel=kernel, active=active, **params)
        results = launch_each(call, args, dims)
        return results, [0] * len(results)
    for n in aliased_operands(kernel):
        batched[n] = True
    args = [
        stacked(arg, dim, size) if batched[n] else arg
        for arg, dim, n in zip(args, dims, [*range(len(active)), *numbers])
    ]
    both = batched_kernel(kernel, tuple(batched), size)
    results = tangent_p.bind(*args, kernel=both, active=active, **params)
    return results, [0] * len(results)


tangent_p.def_abstract_eval(_types)
tangent_p.def_impl(_tangents)
ad.primitive_jvps[tangent_p] = _tangents_of_tangents
ad.primitive_transposes[tangent_p] = _transposed
batching.primitive_batchers[tangent_p] = _batched_tangents
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangents, multiple_results=True))
EXPANSIONS[tangent_p.name] = _tangents
for _primitive in (kernel_p, interpret_p):
    ad.primitive_jvps[_primitive] = lambda primals, tangents, *, kernel, primitive=_primitive: (
        differentiated(primitive, kernel, primals, tangents)
    )
    batching.primitive_batchers[_primitive] = lambda args, dims, *, kernel, primitive=_primitive: (
        batch(primitive, args, dims, kernel)
    )
