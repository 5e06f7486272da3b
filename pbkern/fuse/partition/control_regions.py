"""Control flow -> a node with the partitions of its bodies, if all that they hold is fused; else a node left to XLA.

Loops over stencils take several steps at once (fuse/time_tiling/overlapped.py), where no kernel holds the loop.
fuse/emit/control_flow.py emits the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.ops.scatter import SCATTERS
from pbkern.core.passes import passed_over, run_passes
from pbkern.fuse.cost.kinds import nbytes
from pbkern.fuse.graph import Edge, Inner, Node, Partition, order, overwritten
from pbkern.fuse.options import FuseOptions
from pbkern.fuse.simplify.literal_operands import operands_as_equations, outputs_as_equations
from pbkern.fuse.split.two_stage import SPLIT_REDUCTIONS
from pbkern.fuse.time_tiling.obstacles import obstacle
from pbkern.fuse.time_tiling.overlapped import tile_time

from . import leave_layouts_to_xla
from .donation import carried, in_place, scatter_into_carries

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
    bodies, unsplit = {}, {}
    options = FuseOptions.of(parts.options, parts.machine)
    for name, closed in named_jaxprs(eqn):
        of = f"{name} of {eqn.primitive.name}"
        split = run_passes(
            "partition", (SPLIT_REDUCTIONS,), closed, options, of=of, failed=passed_over(of)
        )
        unsplit[name] = closed
        closed = operands_as_equations(outputs_as_equations(split))
        if closed.consts:
            return Node("xla", [eqn], list(eqn.outvars), reason="its body holds array constants")
        pairs = _pairs(parts, eqn, name, closed.jaxpr)
        inside = partition(closed, parts.machine, parts.supports, parts.options, pairs=pairs)
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

    def search_steps(node: Node) -> None:
        node.inner = bodies | _time_blocks(parts, eqn, bodies, unsplit, partition)
        node.shares = _shared_operands(parts, eqn, node.inner)

    return Node(
        "control",
        [eqn],
        list(eqn.outvars),
        inner=bodies,
        search_steps=search_steps,
        shares=_shared_operands(parts, eqn, bodies),
    )


def take_several_steps(parts: Partition, *context: object) -> Partition:
    """Lets loops that the host runs take several steps at a time, where that pays."""
    waiting = list(parts.nodes)
    while waiting:
        node = waiting.pop()
        if node.kind == "control":
            node.takes_several_steps()
            waiting += (each for body in node.inner.values() for each in body.partition.nodes)
    return parts


def _pairs(parts, eqn, name: str, body: jex.Jaxpr) -> dict:
    """Result of a body -> the operand of the body that it may overwrite."""
    if eqn.primitive.name != "cond":
        return carried(eqn, name, body)
    return {
        result: body.invars[eqn.invars.index(parts.updates[var].operand) - 1]
        for var, result in zip(eqn.outvars, body.outvars)
        if var in parts.updates
    }


def _shared_operands(parts, eqn, inner: dict[str, Inner]) -> dict:
    """Result of control flow -> the operand that all bodies hand on or update in place."""
    bodies = [(body, in_place(body)) for name, body in inner.items() if name != "cond_jaxpr"]
    return {
        var: parts.updates[var].operand
        for number, var in enumerate(eqn.outvars)
        if var in parts.updates
        and "rest" not in inner
        and all(
            (result := body.jaxpr.outvars[number]) in updated or result in body.jaxpr.invars
            for body, updated in bodies
        )
    }


def _cause(left: list[Node]) -> Node | None:
    """The node that is left to XLA on its own account, rather than for an operation beside it."""

    def is_own(node: Node) -> bool:
        moves = all(eqn.primitive.name in MOVES_OF_COMPLEX for eqn in node.eqns)
        return not moves and node.reason != leave_layouts_to_xla.REASON

    return next(filter(is_own, left), left[0] if left else None)


def _scatters_in_place(parts, eqn, name: str, inner: Inner) -> bool:
    """Whether scatters into large operands of a body update in place, as XLA's do, without a copy per step."""
    nodes, most_bytes = inner.partition.nodes, parts.limits.most_copied_bytes
    if any(_copies(node, most_bytes) for node in nodes):
        return False
    given = set(inner.jaxpr.invars)
    groups = [
        node
        for node in nodes
        if node.kind == "group"
        and any(
            member.primitive.name in SCATTERS
            and member.invars[0] in given
            and nbytes(member.invars[0].aval) > most_bytes
            for member in node.eqns
        )
    ]
    scatter_into_carries(eqn, name, inner)
    shared = overwritten(inner.ordered)
    return all(not shared.keys().isdisjoint(member.overwrites) for member in groups)


def _copies(node: Node, most_bytes: float) -> bool:
    """Whether an inner loop copies more than a few bytes that it scatters into, each time that it begins."""
    for body in node.inner.values():
        groups, updated = body.partition.groups(), in_place(body)
        if any(group.scatters() and group.own_schedule.aliases for group in groups):
            results = zip(node.outputs, body.jaxpr.outvars)
            if any(
                inside in updated and var not in node.shares and nbytes(var.aval) > most_bytes
                for var, inside in results
            ):
                return True
    return False


def _time_blocks(
    parts, eqn, bodies: dict[str, Inner], unsplit: dict[str, jex.ClosedJaxpr], partition: Callable
) -> dict[str, Inner]:
    """{"jaxpr": several steps of the loop's body in one kernel, "rest": the remaining steps}, if that pays.

    `unsplit`: the bodies before their reductions were split.
    """
    params = params_of(eqn)
    if eqn.primitive.name != "scan" or parts.options_disable_fusion():
        return {}
    inner = bodies["jaxpr"]
    walks = len(eqn.invars) > params["num_consts"] + params["num_carry"]
    has_values = len(eqn.outvars) > params["num_carry"]
    if (walks or has_values) and params["reverse"]:
        return {}
    body = operands_as_equations(outputs_as_equations(unsplit["jaxpr"]))
    counts = params["num_consts"], params["num_carry"]
    blocks = tile_time(
        body,
        inner.partition,
        counts,
        params["length"],
        parts.machine,
        parts.limits,
        lambda closed: partition(closed, parts.machine, parts.supports, parts.options),
    )
    steps = 1 if blocks is None else blocks.main.steps
    if blocks is None or blocks.main.partition.nodes[0].own_schedule.wave is None:
        why = obstacle(body, counts, parts.limits)
        if why:
            carried_bytes = sum(nbytes(var.aval) for var in eqn.outvars[: params["num_carry"]])
            moved = 2 * carried_bytes * max(params["length"] // steps - 1, 0)
            parts.edges.append(
                Edge(eqn, False, f"a kernel takes {steps} of its steps: {why}", moved)
            )
    if blocks is None:
        return {}
    return {"jaxpr": blocks.main} | ({"rest": blocks.rest} if blocks.rest else {})
