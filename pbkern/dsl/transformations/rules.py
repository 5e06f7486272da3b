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
from pbkern.core.errors import UnsupportedKernel
from pbkern.core.jaxprs.calls import EXPANSIONS
from pbkern.dsl.call import interpret_p, kernel_p
from pbkern.dsl.kernel import Kernel

from .backward import backward_plan, cotangents, final_states
from .batched import (
    aliased_operands,
    batch,
    batched_kernel,
    launch_each,
    needs_launches,
    stacked,
)
from .last_maxima import with_final_states
from .tangent import is_differentiable, tangent_kernel, values_kept

# Operands of a kernel, the results in `known` (final states of the scratch in `finals` are further ones), tangents of active
# operands -> tangents of differentiable results.
# The results are there for the transpose.
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
    finals = finals_of(kernel, tangents)
    launched = with_final_states(kernel, finals) if finals else kernel
    known = primitive.bind(*primals, kernel=launched)
    moved = kernel_tangents(primitive, kernel, primals, known, tangents, finals)
    return known[: len(kernel.outputs)], moved


def finals_of(kernel: Kernel, tangents: Sequence) -> tuple[int, ...]:
    """Numbers of scratch whose final states the derivative reads, from the tangents of a kernel without a last stage."""
    return final_states(kernel, _active(kernel, tangents))


def _active(kernel: Kernel, tangents: Sequence) -> tuple[bool, ...]:
    """Which operands have tangents, from the tangents: those that share memory with a differentiable result do."""
    shared = {i for i, output in kernel.aliases if is_differentiable(kernel.outputs[output].array)}
    return tuple(
        n in shared or not isinstance(tangent, ad.Zero) for n, tangent in enumerate(tangents)
    )


def kernel_tangents(
    primitive,
    kernel: Kernel,
    primals: Sequence,
    results: Sequence,
    tangents: Sequence,
    finals: tuple[int, ...] = (),
) -> list:
    """Tangents of the results of a kernel without a last stage.

    `finals`: numbers of scratch whose final states are behind the results.
    """
    active = _active(kernel, tangents)
    given = [ad.instantiate_zeros(tangents[n]) for n, has in enumerate(active) if has]
    moved = iter(
        tangent_p.bind(
            *primals,
            *results,
            *given,
            kernel=kernel,
            active=active,
            known=tuple(range(len(results))),
            finals=finals,
            launch=primitive,
        )
        if any(active)
        else ()
    )
    zeros = [ad.Zero(_jax.tangent_type(type_)) for type_ in kernel.out_types]
    return [
        next(moved, zero) if is_differentiable(type_) else zero
        for type_, zero in zip(kernel.out_types, zeros)
    ]


def _tangents(*operands, kernel: Kernel, active: tuple[bool, ...], known, finals, launch) -> list:
    primals, _, tangents = _parts(operands, active, known)
    tangent = tangent_kernel(kernel, active)
    return launch.bind(*primals, *tangents, kernel=tangent)[len(values_kept(kernel)) :]


def _parts(operands: Sequence, active: Sequence, known: Sequence) -> tuple:
    """(operands of the kernel, its results, tangents)."""
    first, end = len(active), len(active) + len(known)
    return operands[:first], operands[first:end], operands[end:]


def _types(*_, kernel: Kernel, **params) -> list:
    return [
        jax.core.ShapedArray(type_.shape, type_.dtype)
        for type_ in kernel.out_types
        if is_differentiable(type_)
    ]


def _tangents_of_tangents(primals, tangents, **params):
    call = functools.partial(_tangents, **params)
    return jax.jvp(call, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _transposed(given: Sequence, *operands, kernel: Kernel, active, known, finals, launch) -> list:
    primals, results, tangents = _parts(operands, active, known)
    if any(map(ad.is_undefined_primal, (*primals, *results))):
        raise NotImplementedError("transpose of a kernel's tangents by what they are taken at")
    given = list(map(ad.instantiate_zeros, given))
    back = cotangents(launch, kernel, active, primals, dict(zip(known, results)), given, finals)
    return [None] * (len(primals) + len(results)) + [
        ct if ad.is_undefined_primal(tangent) else None for ct, tangent in zip(back, tangents)
    ]


def _for_transpose(trace, *tracers, kernel: Kernel, active, known, finals, launch) -> list:
    """Stages the tangents with those results alone that the transpose reads: others need not stay in memory."""
    primals, results, tangents = _parts(tracers, active, known)
    try:
        read = backward_plan(kernel, active, known, finals).read
    except UnsupportedKernel:  # the transpose says so, where there is one
        read = ()
    stay = [result for n, result in zip(known, results) if n in read]
    read = tuple(n for n in known if n in read)
    params = {"kernel": kernel, "active": active, "known": read, "finals": finals, "launch": launch}
    return _jax.partly_evaluated(trace, tangent_p, [*primals, *stay, *tangents], params)


def _batched_tangents(args, dims, *, kernel: Kernel, active, known, **params):
    """The call for stacked operands stays linear: an operand is stacked where it, or its tangent, is."""
    size = next(arg.shape[dim] for arg, dim in zip(args, dims) if dim is not None)
    numbers = [n for n, has in enumerate(active) if has]
    of_primals, _, of_tangents = _parts(dims, active, known)
    batched = [dim is not None for dim in of_primals]
    for n, dim in zip(numbers, of_tangents):
        batched[n] |= dim is not None
    if needs_launches(kernel, batched):
        call = functools.partial(
            tangent_p.bind, kernel=kernel, active=active, known=known, **params
        )
        results = launch_each(call, args, dims)
        return results, [0] * len(results)
    for n in aliased_operands(kernel):
        batched[n] = True
    flags = [*batched, *(True for _ in known), *(batched[n] for n in numbers)]
    args = [stacked(arg, dim, size) if flag else arg for arg, dim, flag in zip(args, dims, flags)]
    both = batched_kernel(kernel, tuple(batched), size)
    results = tangent_p.bind(*args, kernel=both, active=active, known=known, **params)
    return results, [0] * len(results)


tangent_p.def_abstract_eval(_types)
tangent_p.def_impl(_tangents)
ad.primitive_jvps[tangent_p] = _tangents_of_tangents
ad.primitive_transposes[tangent_p] = _transposed
batching.primitive_batchers[tangent_p] = _batched_tangents
_jax.set_partial_rule(tangent_p, _for_transpose)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangents, multiple_results=True))
EXPANSIONS[tangent_p.name] = _tangents
for _primitive in (kernel_p, interpret_p):
    ad.primitive_jvps[_primitive] = lambda primals, tangents, *, kernel, primitive=_primitive: (
        differentiated(primitive, kernel, primals, tangents)
    )
    batching.primitive_batchers[_primitive] = lambda args, dims, *, kernel, primitive=_primitive: (
        batch(primitive, args, dims, kernel)
    )
