"""Loop over small values -> dsl.Kernel: one program, whose body is the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.trace import trace_kernel
from pbkern.fuse.access.blocks import BodyContext, request, run_steps
from pbkern.fuse.access.rules import whole
from pbkern.fuse.graph import Inner, Node
from pbkern.fuse.partition.loops_in_kernels import KernelLoop
from pbkern.fuse.tiling.schedule import Schedule

from .group_kernel import array_type


def emit_loop(name: str, schedule: Schedule, loop: KernelLoop, compiler_params: dict) -> Kernel:
    """The kernel that runs a loop, whose bodies are groups."""
    operands = [var for var, _ in schedule.requests.inputs]
    results = [var for var, _ in schedule.outputs]
    (eqn,) = loop.node.eqns

    def body(*refs) -> None:
        values: dict[Any, Any] = {var: ref[...] for var, ref in zip(operands, refs)}
        for node in loop.constants:
            values |= _computed(node, values)
        values_of = _run(eqn, loop.node.inner, [values[var] for var in eqn.invars])
        for ref, value in zip(refs[len(operands) :], values_of, strict=True):
            ref[...] = value

    return trace_kernel(
        body,
        in_types=[array_type(array_aval(var)) for var in operands],
        out_types=[array_type(array_aval(var)) for var in results],
        compiler_params=compiler_params,
        name=name,
        x64=True,
        source="",
    )


def _run(eqn: jex.JaxprEqn, inner: Mapping[str, Inner], args: Sequence) -> list:
    """Control flow on values, with the bodies as their groups compute them."""
    bodies = {name: _traced(part) for name, part in inner.items()}
    params = dict(eqn.params)
    if eqn.primitive.name == "cond":
        params["branches"] = tuple(bodies.values())
    else:
        params |= bodies
    return eqn.primitive.bind(*args, **params)


def _traced(inner: Inner) -> jex.ClosedJaxpr:
    """A body, as equations of the kernel."""
    types = [
        jax.ShapeDtypeStruct(array_aval(var).shape, array_aval(var).dtype)
        for var in inner.jaxpr.invars
    ]

    def body(*args) -> list:
        values: dict[Any, Any] = dict(zip(inner.jaxpr.invars, args))
        for node in inner.ordered:
            (first, *_) = node.eqns
            if node.kind == "group":
                values |= _computed(node, values)
            elif node.kind == "control":
                values_of = _run(first, node.inner, [values[var] for var in first.invars])
                values |= dict(zip(first.outvars, values_of))
            else:
                source, *_ = first.invars
                values[first.outvars[0]] = first.primitive.bind(values[source], **first.params)
        return [values[var] for var in inner.jaxpr.outvars]

    return jax.make_jaxpr(body)(*types)


def _computed(node: Node, values: Mapping) -> dict:
    """Results of a group, from whole values."""
    wanted = [(var, tuple(map(whole, array_aval(var).shape))) for var in node.outputs]
    requests = request(node.eqns, wanted)
    blocks = {}
    for var, hull in requests.inputs:
        starts = [span.start.const for span in hull]
        ends = [start + span.size for start, span in zip(starts, hull)]
        full = ends == list(array_aval(var).shape) and not any(starts)
        blocks[var, hull] = values[var] if full else lax.slice(values[var], starts, ends)
    is_number = not requests.inputs and all(not access for _, access in wanted)
    with jax.ensure_compile_time_eval() if is_number else contextlib.nullcontext():
        get = run_steps(requests, blocks, BodyContext())
        return {var: get(var, access) for var, access in wanted}
