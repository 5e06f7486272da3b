"""Loop over small values -> dsl.Kernel: programs whose body is the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.dsl.kernel import Kernel
from pbkern.dsl.specs import BlockSpec
from pbkern.dsl.trace import trace_kernel
from pbkern.fuse.access.blocks import BodyContext, request, run_steps
from pbkern.fuse.graph import Inner, Node
from pbkern.fuse.partition.loop_kernels.loops_in_kernels import KernelLoop
from pbkern.fuse.partition.loop_kernels.program_blocks import ProgramBlocks
from pbkern.fuse.partition.loop_kernels.step_groups import StepGroup
from pbkern.fuse.tiling.schedule import Schedule

from .group_kernel import array_type

# (value, its dimension along which each step has one element)
Element = tuple[jex.Var, int]


def emit_loop(name: str, schedule: Schedule, loop: KernelLoop, compiler_params: dict) -> Kernel:
    """The kernel that runs a loop, whose bodies are groups."""
    operands = [var for var, _ in schedule.requests.inputs]
    results = [var for var, _ in schedule.outputs]
    (eqn,) = loop.node.eqns
    blocks = loop.blocks

    def body(*refs) -> None:
        values: dict[Any, Any] = {var: ref[...] for var, ref in zip(operands, refs)}
        for node in loop.before:
            values |= _computed(node, values, blocks)
        if loop.beside:
            values |= _run_with_groups(loop, values, results)
        else:
            stepped = _run(eqn, loop.node.inner, [values[var] for var in eqn.invars], blocks)
            values |= dict(zip(eqn.outvars, stepped, strict=True))
        for node in loop.after:
            values |= _computed(node, values, blocks)
        for ref, var in zip(refs[len(operands) :], results, strict=True):
            ref[...] = values[var]

    return trace_kernel(
        body,
        in_types=[array_type(array_aval(var)) for var in operands],
        out_types=[array_type(array_aval(var)) for var in results],
        grid=blocks.grid,
        in_specs=[_block_spec(var, blocks) for var in operands] if blocks.grid else None,
        out_specs=[_block_spec(var, blocks) for var in results] if blocks.grid else None,
        compiler_params=compiler_params,
        name=name,
        x64=True,
        source="",
    )


def _block_spec(var: jex.Var, blocks: ProgramBlocks) -> BlockSpec:
    starts = [next(iter(span.start.symbols), None) for span in blocks.access(var)]

    def index(*grid) -> tuple:
        return tuple(0 if axis is None else grid[axis] for axis in starts)

    return BlockSpec(blocks.shape(var), index)


def _run(
    eqn: jex.JaxprEqn, inner: Mapping[str, Inner], args: Sequence, blocks: ProgramBlocks
) -> list:
    """Control flow on blocks of values, with the bodies as their groups compute them."""
    bodies = {name: _traced(part, blocks) for name, part in inner.items()}
    params = dict(eqn.params)
    if eqn.primitive.name == "cond":
        params["branches"] = tuple(bodies.values())
    else:
        params |= bodies
    return eqn.primitive.bind(*args, **params)


def _run_with_groups(
    loop: KernelLoop, values: Mapping[Any, Any], results: Sequence[jex.Var]
) -> dict[Any, Any]:
    """Results of a scan whose steps compute groups beside it, and what these make of values of the steps.

    `results`: of the kernel.
    """
    (eqn,) = loop.node.eqns
    params = params_of(eqn)
    (inner,) = loop.node.inner.values()
    body = jex.jaxpr_as_fun(_traced(inner, loop.blocks))
    first, carried = params["num_consts"], params["num_carry"]
    consts, init, xs = (
        eqn.invars[:first],
        eqn.invars[first : first + carried],
        eqn.invars[first + carried :],
    )
    ys = eqn.outvars[carried:]
    before = [group for group in loop.beside if set(group.node.outputs) <= set(xs)]
    behind = [group for group in loop.beside if group not in before]
    computed = {var for group in before for var in group.node.outputs}
    read = {*results, *(var for node in loop.after for var in node.reads())}
    stacked: list[Element] = [(var, 0) for var in ys if var in read] + [
        (var, group.step_dims[var]) for group in behind for var in group.node.outputs
    ]
    walked: dict[Element, Any] = {(var, 0): values[var] for var in xs if var not in computed}
    for group in loop.beside:
        for var in group.operands:
            dim = group.step_dims.get(var)
            if dim is not None and var not in ys:
                walked[var, dim] = jnp.moveaxis(values[var], dim, 0)

    def step(carry: list, elements: list) -> tuple[list, list]:
        known = dict(zip(walked, elements))
        for group in before:
            known |= _computed_in_step(group, known, values)
        args = [*(values[var] for var in consts), *carry, *(known[var, 0] for var in xs)]
        stepped = body(*args)
        known |= {(var, 0): y for var, y in zip(ys, stepped[carried:])}
        for group in behind:
            known |= _computed_in_step(group, known, values)
        return stepped[:carried], [known[key] for key in stacked]

    last, elements = lax.scan(
        step,
        [values[var] for var in init],
        list(walked.values()),
        length=params["length"],
        reverse=params["reverse"],
    )
    of_all_steps = {var: jnp.moveaxis(y, 0, dim) for (var, dim), y in zip(stacked, elements)}
    return dict(zip(eqn.outvars, last)) | of_all_steps


def _computed_in_step(
    group: StepGroup, known: Mapping[Element, Any], values: Mapping[Any, Any]
) -> dict[Element, Any]:
    """Results of a group for one step. `known`: elements of the step; `values`: what each step reads all of."""
    wanted = [(var, group.blocks.access(var)) for var in group.node.outputs]
    requests = request(group.node.eqns, wanted)
    operands = {}
    for var, hull in requests.inputs:
        dim = group.step_dims.get(var)
        operands[var, hull] = (
            values[var] if dim is None else lax.expand_dims(known[var, dim], (dim,))
        )
    get = run_steps(requests, operands, BodyContext())
    dims = group.step_dims
    return {(var, dims[var]): lax.squeeze(get(var, access), (dims[var],)) for var, access in wanted}


def _traced(inner: Inner, blocks: ProgramBlocks) -> jex.ClosedJaxpr:
    """A body, as equations of the kernel."""
    types = [
        jax.ShapeDtypeStruct(blocks.shape(var), array_aval(var).dtype) for var in inner.jaxpr.invars
    ]

    def body(*args) -> list:
        values: dict[Any, Any] = dict(zip(inner.jaxpr.invars, args))
        for node in inner.ordered:
            if node.kind == "control":
                (eqn,) = node.eqns
                stepped = _run(eqn, node.inner, [values[var] for var in eqn.invars], blocks)
                values |= dict(zip(eqn.outvars, stepped))
            else:
                values |= _computed(node, values, blocks)
        return [values[var] for var in inner.jaxpr.outvars]

    return jax.make_jaxpr(body)(*types)


def _computed(node: Node, values: Mapping, blocks: ProgramBlocks) -> dict:
    """Results of a group or of a view, from a program's blocks of values."""
    wanted = [(var, blocks.access(var)) for var in node.outputs]
    requests = request(node.eqns, wanted)
    operands = {}
    for var, hull in requests.inputs:
        starts = [
            span.start.const - all_of.start.const for span, all_of in zip(hull, blocks.access(var))
        ]
        ends = [start + span.size for start, span in zip(starts, hull)]
        full = tuple(ends) == blocks.shape(var) and not any(starts)
        operands[var, hull] = values[var] if full else lax.slice(values[var], starts, ends)
    is_number = not requests.inputs and all(not access for _, access in wanted)
    with jax.ensure_compile_time_eval() if is_number else contextlib.nullcontext():
        get = run_steps(requests, operands, BodyContext())
        return {var: get(var, access) for var, access in wanted}
