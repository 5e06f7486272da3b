"""Control flow -> a node with the partitions of its bodies, if all that they hold is fused; else a node left to XLA.

Loops over stencils take several steps at once (fuse/time_tiling/overlapped.py).
fuse/emit/control_flow.py emits the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.core.ops.scatter import SCATTERS
from pbkern.core.passes import passed_over, run_passes
from pbkern.fuse.graph import Inner, Node, order
from pbkern.fuse.options import FuseOptions
from pbkern.fuse.simplify.literal_operands import operands_as_equations, outputs_as_equations
from pbkern.fuse.split.two_stage import SPLIT_REDUCTIONS
from pbkern.fuse.tiling.block_search import schedule_at
from pbkern.fuse.time_tiling.overlapped import tile_time

from . import leave_layouts_to_xla
from .donation import scatter_into_carries

# They stand before and after a complex operation that is left to XLA, and become views where there
# is none.
MOVES_OF_COMPLEX = frozenset({"real", "imag", "complex", "convert_element_type"})


def named_jaxprs(eqn) -> Iterable[tuple[str, jex.ClosedJaxpr]]:
    """(parameter name, jaxpr) of a control-flow equation; jaxprs of a tuple are numbered."""
    for name, value in eqn.params.items():
        if isinstance(value, jex.ClosedJaxpr):
            yield name, value
        elif isinstance(value, tuple) and value and isinstance(value[0], jex.ClosedJaxpr):
            yield from ((f"{name}{n}", closed) for n, closed in enumerate(value))


def control_node(parts, eqn, partition: Callable) -> Node:
    """The node of control flow, fused only if all of its body is."""
    bodies = {}
    options = FuseOptions.of(parts.options, parts.machine)
    for name, closed in named_jaxprs(eqn):
        of = f"{name} of {eqn.primitive.name}"
        split = run_passes(
            "partition", (SPLIT_REDUCTIONS,), closed, options, of=of, failed=passed_over(of)
        )
        closed = operands_as_equations(outputs_as_equations(split))
        if closed.consts:
            return Node("xla", [eqn], list(eqn.outvars), reason="its body holds array constants")
        inside = partition(closed, parts.machine, parts.supports, parts.options)
        bad = _cause([node for node in inside.nodes if node.kind == "xla"])
        if bad is not None:
            reason = f"{bad.eqns[0].primitive.name} in its body: {bad.reason}"
            return Node("xla", [eqn], list(eqn.outvars), reason=reason)
        bodies[name] = Inner(closed.jaxpr, inside, order(inside.nodes, closed.jaxpr.invars))
    if not all(_scatters_in_place(parts, eqn, name, inner) for name, inner in bodies.items()):
        return Node(
            "xla", [eqn], list(eqn.outvars), reason="a scatter in its body would copy its operand"
        )
    if any(isinstance(var, jex.Literal) for var in eqn.invars):
        return Node("xla", [eqn], list(eqn.outvars), reason="an operand is a literal")
    return Node(
        "control", [eqn], list(eqn.outvars), inner=bodies | _time_blocks(parts, eqn, bodies)
    )


def _cause(left: list[Node]) -> Node | None:
    """The node that is left to XLA on its own account, rather than for an operation beside it."""

    def is_own(node: Node) -> bool:
        moves = all(eqn.primitive.name in MOVES_OF_COMPLEX for eqn in node.eqns)
        return not moves and node.reason != leave_layouts_to_xla.REASON

    return next(filter(is_own, left), left[0] if left else None)


def _scatters_in_place(parts, eqn, name: str, inner: Inner) -> bool:
    """Do scatters into operands of a body update in place, as XLA's do, instead of copying once per step?"""
    nodes = inner.partition.nodes
    nested = [
        subgroup for node in nodes for i in node.inner.values() for subgroup in i.partition.groups()
    ]
    if any(subgroup.scatters() and subgroup.own_schedule.aliases for subgroup in nested):
        return False  # that loop starts with a copy
    given = set(inner.jaxpr.invars)
    groups = [
        node
        for node in nodes
        if node.kind == "group"
        and any(
            member.primitive.name in SCATTERS and member.invars[0] in given for member in node.eqns
        )
    ]
    scatter_into_carries(eqn, name, inner)
    for group in groups:
        few = all(
            member.invars[2].aval.size <= parts.limits.few_updates
            for member in group.eqns
            if member.primitive.name in SCATTERS
        )
        if few and group.own_schedule.aliases:  # nothing is copied: one program is enough
            outputs = [var for var, _ in group.own_schedule.outputs]
            shape = array_aval(outputs[0]).shape
            whole = schedule_at(group.eqns, outputs, shape, parts.machine)
            group.schedule = group.schedule if whole is None else whole
    scatter_into_carries(eqn, name, inner)
    return all(member.own_schedule.aliases for member in groups)


def _time_blocks(parts, eqn, bodies: dict[str, Inner]) -> dict[str, Inner]:
    """{"jaxpr": several steps of the loop's body in one kernel, "rest": the remaining steps}, if that pays."""
    params = params_of(eqn)
    if eqn.primitive.name != "scan" or parts.options_disable_fusion():
        return {}
    inner = bodies["jaxpr"]
    walks = len(eqn.invars) > params["num_consts"] + params["num_carry"]
    if len(inner.jaxpr.outvars) != params["num_carry"] or (walks and params["reverse"]):
        return {}
    body = jex.ClosedJaxpr(inner.jaxpr, ())
    blocks = tile_time(
        body,
        inner.partition,
        (params["num_consts"], params["num_carry"]),
        params["length"],
        parts.machine,
        parts.limits,
    )
    if blocks is None:
        return {}
    return {"jaxpr": blocks.main} | ({"rest": blocks.rest} if blocks.rest else {})
