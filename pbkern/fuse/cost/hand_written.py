"""Kernel -> predicted seconds, for kernels that fusion did not make: an order in which to try candidates.

Traffic is that of blocks over the grid, as for fused kernels; arithmetic is the price of the body's
equations, each at the shape that it has there. What stays in which cache between equations is not
known of a body, so that absolute times mean little.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import inner_jaxprs
from pbkern.dsl.kernel import BlockMapping, Kernel
from pbkern.dsl.primitives.ref_access import is_ref_access
from pbkern.fuse.access.blocks import BlockRequests, Step
from pbkern.fuse.access.rules import Access, NeedsWhole, Span, pull, whole

from .model import CostModel, price_of
from .roofline import overlapped


def predicted_seconds(kernel: Kernel, costs: CostModel) -> float:
    """Seconds of all programs, without a last stage; infinite where the model cannot tell."""
    arrays = [operand.array for operand in (*kernel.inputs, *kernel.outputs)]
    types = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    with jax.enable_x64(True):
        variables = jax.make_jaxpr(lambda *values: values)(*types).jaxpr.invars
    blocks = [
        (var, _access(operand))
        for var, operand in zip(variables, (*kernel.inputs, *kernel.outputs))
    ]
    inputs, outputs = blocks[: len(kernel.inputs)], blocks[len(kernel.inputs) :]
    traffic = costs.kernel_cost(BlockRequests({}, [], inputs), outputs, kernel.grid)
    if traffic is None:
        return math.inf
    arithmetic = sum(_seconds(kernel.body.jaxpr, costs))
    in_order = math.prod(
        size for size, word in zip(kernel.grid, _semantics(kernel)) if word != "parallel"
    )
    side_by_side = math.ceil(kernel.num_programs / max(in_order, 1) / costs.cores)
    compute = arithmetic * in_order * side_by_side
    return traffic.seconds - traffic.memory + overlapped(compute, traffic.memory)


def _access(operand: BlockMapping) -> Access:
    """The block of a program; an index that is not affine in the grid counts as fixed."""
    return tuple(
        Span(Affine() if start is None else start, dim.size)
        for start, dim in zip(operand.starts, operand.dims)
    )


def _semantics(kernel: Kernel) -> tuple[str, ...]:
    """Words for the grid's dimensions; those that nothing is said of count as parallel."""
    for params in kernel.compiler_params.values():
        words = getattr(params, "dimension_semantics", None)
        if words is not None:
            return tuple(words)
    return ("parallel",) * len(kernel.grid)


def _seconds(jaxpr: jex.Jaxpr, costs: CostModel) -> Iterator[float]:
    """Seconds of a body's equations on one core; loops of unknown length count as one turn."""
    for eqn in jaxpr.eqns:
        bodies = [sum(_seconds(inner.jaxpr, costs)) for inner in inner_jaxprs(eqn)]
        if bodies:
            turns = _jax.params_of(eqn)["length"] if eqn.primitive.name == "scan" else 1
            yield turns * max(bodies)
        elif not is_ref_access(eqn) and eqn.outvars:
            try:
                out = tuple(map(whole, array_aval(eqn.outvars[0]).shape))
                price = price_of(Step(eqn, out, pull(eqn, out)), costs)
            except (UnsupportedOp, NeedsWhole):
                continue  # of no weight for the order, such as program_id
            yield price.seconds + price.packing
