"""Which plans can be called with addresses of the arrays of the call itself."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex

from pbkern.dsl.checks import can_fail
from pbkern.fuse.emit.plan import Plan, Segment


def is_direct(jaxpr: jex.ClosedJaxpr, plan: Plan) -> bool:
    """Whether the plan's values are the arrays of the call: complex numbers, for one, are pairs in it; checks need JAX."""
    inner: list[Any] = [v.aval for v in (*plan.jaxpr.invars, *plan.jaxpr.outvars)]
    outer: list[Any] = [*jaxpr.in_avals, *jaxpr.out_avals]
    same = [(a.shape, a.dtype) for a in inner] == [(a.shape, a.dtype) for a in outer]
    return same and plan.whole is None and not any(can_fail(k) for k in plan.kernels())


def only_program(jaxpr: jex.ClosedJaxpr, plan: Plan) -> tuple[Segment, list[int]] | None:
    """The one program of a plan whose results are the call's, in their order, and the operands of the call that it reads; None
    for other plans."""
    if not is_direct(jaxpr, plan) or len(plan.segments) != 1 or not plan.segments[0].is_ours:
        return None
    (segment,), operands = plan.segments, list(plan.jaxpr.invars)
    if list(segment.makes) != list(plan.jaxpr.outvars) or not set(segment.reads) <= set(operands):
        return None
    return segment, [operands.index(v) for v in segment.reads]
