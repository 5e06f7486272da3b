"""Kernel -> the kernel of its tangents: forward mode.

Its body is the author's with tangents beside the values, equation by equation. Scratch and results
that the body reads back have values and tangents; other results have tangents alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import ad

from pbkern import _jax
from pbkern.core.jaxprs.calls import rules_kept
from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.jaxprs.walks import equations
from pbkern.dsl.body_rewrites.pure_program import REPORTS
from pbkern.dsl.kernel import BlockMapping, Kernel, input_fusion, with_input_fusion
from pbkern.dsl.primitives import grid
from pbkern.dsl.trace import canonical_body, with_both_bodies


def is_differentiable(type_) -> bool:
    return jnp.issubdtype(type_.dtype, jnp.inexact)


@functools.lru_cache(maxsize=256)
def tangent_kernel(kernel: Kernel, active: tuple[bool, ...]) -> Kernel:
    """The kernel (operands, tangents of the active ones) -> (results that are read back, tangents of differentiable results).

    `active`: per operand of a kernel without a last stage, of which those that share memory with a
    differentiable result are. `values_kept` says which results come first.
    """
    num_in = len(kernel.inputs)
    dtypes = [m.array for m in kernel.outputs] + list(kernel.scratch)
    with_tangent = [*active, *map(is_differentiable, dtypes)]
    stored = values_kept(kernel)
    both, _ = _jax.jvp_jaxpr(kernel.differentiable, with_tangent)
    places = _places(kernel, with_tangent, stored)

    def run(*refs):
        operands = [refs[places[n]] if n in places else Absent() for n in range(len(both.in_avals))]
        with rules_kept():
            retrace_into(both.jaxpr, both.consts, operands, without_stores)

    order = sorted(places, key=lambda n: places[n])
    with jax.enable_x64(True):  # every type is explicit by now
        body = jax.make_jaxpr(run)(*[_jax.fresh_aval(both.in_avals[n]) for n in order])
    mappings = (*kernel.inputs, *kernel.outputs)
    tangents_in = [_tangent(m) for m, has in zip(kernel.inputs, active) if has]
    tangents_out = [_tangent(m) for m, has in zip(kernel.outputs, with_tangent[num_in:]) if has]
    scratch_tangents = [
        buf for buf, has in zip(kernel.scratch, with_tangent[len(mappings) :]) if has
    ]
    allowed = input_fusion(kernel)
    tangent = dataclasses.replace(
        kernel,
        name=f"{kernel.name}_tangent",
        inputs=(*kernel.inputs, *tangents_in),
        outputs=(*(kernel.outputs[n] for n in stored), *tangents_out),
        scratch=(*kernel.scratch, *scratch_tangents),
        aliases=_aliases(kernel, active, stored),
        compiler_params=with_input_fusion(
            kernel.compiler_params,
            [*allowed, *(flag for flag, has in zip(allowed, active) if has)],
        ),
        with_rules=None,
    )

    def complete(closed: jex.ClosedJaxpr) -> Kernel:
        return dataclasses.replace(tangent, body=canonical_body(closed, kernel.name))

    return with_both_bodies(complete, body)


def values_kept(kernel: Kernel) -> tuple[int, ...]:
    """Numbers of results that the body reads back or whose bounds it asks for, or that share memory with an operand."""
    read = _jax.read_inputs(kernel.body.jaxpr)
    if any(eqn.primitive is grid.in_bounds_p for eqn in equations(kernel.body.jaxpr)):
        return tuple(range(len(kernel.outputs)))
    shared = {output for _, output in kernel.aliases}
    return tuple(
        n for n in range(len(kernel.outputs)) if len(kernel.inputs) + n in read or n in shared
    )


def _tangent(mapping: BlockMapping) -> BlockMapping:
    return dataclasses.replace(mapping, origin=f"tangent of {mapping.origin}")


def _places(kernel: Kernel, with_tangent: Sequence[bool], stored: Sequence[int]) -> dict[int, int]:
    """Operand of the differentiated body, values first, then tangents -> its number among the Refs of the tangent kernel."""
    num_in, num_out, num_all = len(kernel.inputs), len(kernel.outputs), len(with_tangent)
    tangents = [n for n, has in enumerate(with_tangent) if has]
    number = {n: num_all + k for k, n in enumerate(tangents)}
    results = range(num_in, num_in + num_out)
    order = [
        *range(num_in),
        *(number[n] for n in tangents if n < num_in),
        *(num_in + n for n in stored),
        *(number[n] for n in tangents if n in results),
        *range(num_in + num_out, num_all),
        *(number[n] for n in tangents if n >= num_in + num_out),
    ]
    return {operand: place for place, operand in enumerate(order)}


def _aliases(
    kernel: Kernel, active: Sequence[bool], stored: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    inputs = [n for n, has in enumerate(active) if has]
    outputs = [n for n, m in enumerate(kernel.outputs) if is_differentiable(m.array)]
    values = [(i, stored.index(output)) for i, output in kernel.aliases]
    tangents = [
        (len(kernel.inputs) + inputs.index(i), len(stored) + outputs.index(output))
        for i, output in kernel.aliases
        if output in outputs
    ]
    return tuple(sorted(values + tangents))


class Absent:
    """Stands for the Ref of a result that the body only stores to, and whose value nobody asks for."""


def without_stores(eqn, *operands) -> list | None:
    """retrace's rewrite rule that drops stores to absent Refs, and reports."""
    if eqn.primitive.name in REPORTS:
        return [None] * len(eqn.outvars)
    is_absent = bool(operands) and isinstance(operands[0], Absent)
    return [None] * len(eqn.outvars) if is_absent else None


# --- tangents of accesses that JAX does not know
# ------------------------------------------------------------------------------------------------


def _masked_load(primals, tangents, *, tree):
    (_, mask, _, *indices), (ref_tangent, _, other_tangent, *_) = primals, tangents
    value = grid.masked_load_p.bind(*primals, tree=tree)
    if isinstance(ref_tangent, ad.Zero):
        if isinstance(other_tangent, ad.Zero):
            return value, ad.Zero(_jax.tangent_type(value))
        return value, jax.lax.select(mask, jnp.zeros_like(other_tangent), other_tangent)
    other_tangent = ad.instantiate_zeros(other_tangent)
    return value, grid.masked_load_p.bind(ref_tangent, mask, other_tangent, *indices, tree=tree)


def _masked_store(primals, tangents, *, tree):
    (_, _, mask, *indices), (ref_tangent, value_tangent, *_) = primals, tangents
    grid.masked_store_p.bind(*primals, tree=tree)
    if not isinstance(ref_tangent, ad.Zero):
        value_tangent = ad.instantiate_zeros(value_tangent)
        grid.masked_store_p.bind(ref_tangent, value_tangent, mask, *indices, tree=tree)
    return [], []


def _in_bounds(primals, _, *, axis):
    value = grid.in_bounds_p.bind(*primals, axis=axis)
    return value, ad.Zero(_jax.tangent_type(value))


ad.primitive_jvps[grid.masked_load_p] = _masked_load
ad.primitive_jvps[grid.masked_store_p] = _masked_store
ad.primitive_jvps[grid.in_bounds_p] = _in_bounds
