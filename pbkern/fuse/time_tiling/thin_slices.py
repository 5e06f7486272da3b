"""Body of a stencil's loop -> the same, with thin slices of computed values computed from the body's operands.

    v = average(u); v.at[:, 0].set(v[:, 1])    ->    v.at[:, 0].set(average(u[:, 0:3]))

A border that is set from its neighbours reads a column, or a row, of what the step makes. Otherwise
all of it would be stored for that.
"""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern._jax import bind_again, source_context
from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import literal_value
from pbkern.fuse.access.blocks import BlockRequests, BodyContext, Unfusable, request, run_steps
from pbkern.fuse.access.rules import Access, NeedsWhole, Span
from pbkern.fuse.simplify.driver import Rewrite
from pbkern.fuse.tiling.decided_cases import DecidedCases

from .limits import TimeTilingLimits


def with_thin_slices(closed: jex.ClosedJaxpr, limits: TimeTilingLimits) -> jex.ClosedJaxpr:
    """The body with its thin slices computed again; itself where it has none."""
    jaxpr, decided = closed.jaxpr, DecidedCases(closed.jaxpr.eqns)
    plans = {
        id(eqn): plan
        for n, eqn in enumerate(jaxpr.eqns)
        if (plan := _plan(jaxpr.eqns[:n], eqn, decided, limits)) is not None
    }
    if not plans:
        return closed

    def body(*args) -> list:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args)))

        def value(atom):
            return literal_value(atom) if isinstance(atom, jex.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            with source_context(eqn):
                if id(eqn) in plans:
                    access, requests = plans[id(eqn)]
                    results = [_computed(values, eqn, access, requests)]
                else:
                    results = bind_again(eqn, [value(atom) for atom in eqn.invars])
            values |= dict(zip(eqn.outvars, results))
        return [value(atom) for atom in jaxpr.outvars]

    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(body)(*types)


def _plan(
    before: list[jex.JaxprEqn], eqn: jex.JaxprEqn, decided: DecidedCases, limits: TimeTilingLimits
) -> tuple[Access, BlockRequests] | None:
    """(block of the slice's operand, how it follows from the body's operands), for a slice that is thin."""
    if eqn.primitive.name != "slice" or eqn.invars[0] not in decided.makers:
        return None
    operand, result = (array_aval(var) for var in (eqn.invars[0], eqn.outvars[0]))
    if math.prod(result.shape) * limits.thinnest > math.prod(operand.shape):
        return None
    bounds = zip(eqn.params["start_indices"], eqn.params["limit_indices"])
    access = tuple(Span(Affine((), start), end - start) for start, end in bounds)
    try:
        requests = request(before, [(eqn.invars[0], access)], decided.step)
    except (NeedsWhole, Unfusable, UnsupportedOp, NotImplementedError):
        return None
    return (access, requests) if len(requests.steps) <= limits.most_thin_equations else None


def _computed(values: dict, eqn: jex.JaxprEqn, access: Access, requests: BlockRequests):
    blocks = {}
    for var, hull in requests.inputs:
        starts = [span.start.const for span in hull]
        ends = [start + span.size for start, span in zip(starts, hull)]
        blocks[var, hull] = lax.slice(values[var], starts, ends)
    block = run_steps(requests, blocks, BodyContext())(eqn.invars[0], access)
    strides = eqn.params["strides"]
    return block if strides is None else lax.slice(block, (0,) * block.ndim, block.shape, strides)


def thin_ends_as_selects(limits: TimeTilingLimits) -> dict[str, Rewrite]:
    """Rewrites of concatenations of thin ends to a large part: selects by index, which need no memory."""

    def rewrite(eqn, operands):
        axis, (result,) = eqn.params["dimension"], eqn.outvars
        extent = array_aval(result).shape[axis]
        large = max(range(len(operands)), key=lambda n: operands[n].shape[axis])
        if (extent - operands[large].shape[axis]) * limits.thinnest > extent:
            return None
        index = lax.broadcasted_iota(np.int32, array_aval(result).shape, axis)
        parts, start = [], 0
        for operand in operands:
            end = start + operand.shape[axis]
            padding = [(0, 0, 0)] * operand.ndim
            padding[axis] = (start, extent - end, 0)
            parts.append(lax.pad(operand, np.zeros((), operand.dtype), padding))
            start = end
        joined, start = parts[large], 0
        for operand, part in zip(operands, parts):
            end = start + operand.shape[axis]
            tests = [lax.ge(index, np.int32(start))] if start else []
            tests += [lax.lt(index, np.int32(end))] if end < extent else []
            if part is not parts[large] and tests:
                joined = lax.select(functools.reduce(lax.bitwise_and, tests), part, joined)
            start = end
        return [joined]

    return {"concatenate": rewrite}
