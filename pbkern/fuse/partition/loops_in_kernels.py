"""Loops whose bodies compute little -> one kernel each, with the loop inside.

    for each of 1000 steps: launch kernel (2 operations on a scalar)    ->    launch kernel (1000 steps)

A step of the host's loop calls a function for each kernel, and carries go through memory. Inside a
kernel, code generation holds them in registers. fuse/emit/loop_kernel.py emits the kernel; the
groups of the body say what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.access.blocks import BlockRequests
from pbkern.fuse.access.rules import Access, whole
from pbkern.fuse.cost.kinds import nbytes
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.graph import Inner, Node, Partition
from pbkern.fuse.options import FuseOptions
from pbkern.fuse.tiling.schedule import Schedule

LOOPS = frozenset(("scan", "while"))


@dataclass(frozen=True)
class LoopsInKernels:
    """Puts loops over small values into kernels, the outermost that fit."""

    most_equations: int = threshold(
        400,
        "equations of a loop's body, with those of loops in it: they are one function, which takes long to compile. Source: "
        "not recorded",
    )

    def __call__(
        self, parts: Partition, options: FuseOptions, results: Collection[jex.Var]
    ) -> Partition:
        """`results`: the function's, among values of the partition."""
        if options.machine.sizes.loop_elements:
            self._visit(parts.nodes, options.machine, results)
        return parts

    def _visit(
        self, nodes: list[Node], machine: CostModel, results: Collection[jex.Var]
    ) -> list[Node]:
        """Changes nodes in place; returns those that are no longer needed, which are removed."""
        loops = []
        for node in (each for each in nodes if each.kind == "control"):
            if node.eqns[0].primitive.name in LOOPS and self._fits(node, machine):
                loops.append(node)
                continue
            for inner in node.inner.values():
                results_here = {
                    var for var in inner.jaxpr.outvars if not isinstance(var, jex.Literal)
                }
                for gone in self._visit(inner.partition.nodes, machine, results_here):
                    inner.ordered.remove(gone)
        constants = {
            var: node for node in nodes if _is_constant(node, machine) for var in node.outputs
        }
        for node in loops:
            _put_in_kernel(node, machine, constants)
        read = set(results).union(*(node.reads() for node in nodes))
        unread = [
            node for node in dict.fromkeys(constants.values()) if read.isdisjoint(node.outputs)
        ]
        for node in unread:
            nodes.remove(node)
        return unread

    def _fits(self, node: Node, machine: CostModel) -> bool:
        nodes = list(nodes_inside(node))
        equations = [eqn for each in nodes for eqn in each.eqns]
        most = machine.sizes.loop_elements
        return (
            all(map(_is_plain, nodes))
            and not node.shares
            and all(inner.steps == 1 for inner in _bodies(node))
            and len(equations) <= self.most_equations
            and all(math.prod(aval.shape) <= most for aval in _avals(node, equations))
        )


def nodes_inside(node: Node) -> Iterator[Node]:
    """Nodes of the bodies of control flow, also of that inside them."""
    for inner in node.inner.values():
        for each in inner.ordered:
            yield each
            yield from nodes_inside(each)


def _bodies(node: Node) -> Iterator[Inner]:
    for inner in node.inner.values():
        yield inner
        for each in inner.ordered:
            yield from _bodies(each)


def _is_plain(node: Node) -> bool:
    """Whether a body's node is arithmetic on whole values, a view of them, or control flow."""
    if node.kind == "group":
        return node.finish is None and node.own_schedule.wave is None
    return node.kind == "control" or (node.kind == "alias" and "start" not in node.eqns[0].params)


def _avals(node: Node, equations: Sequence[jex.JaxprEqn]) -> Iterator:
    """Types of the values that a step computes, reads and hands on."""
    for eqn in equations:
        if eqn.primitive.name not in LOOPS:  # whose xs are read element by element
            yield from (var.aval for var in (*atoms(eqn), *eqn.outvars))
    for inner in _bodies(node):
        yield from (var.aval for var in (*inner.jaxpr.invars, *inner.jaxpr.outvars))


@dataclass(frozen=True)
class KernelLoop:
    """Control flow inside a kernel: `node`, and `constants`, groups without operands whose results it reads."""

    node: Node
    constants: tuple[Node, ...]

    @property
    def steps(self) -> int:
        """Steps of a scan; 1 where values decide how many there are."""
        (eqn,) = self.node.eqns
        return params_of(eqn)["length"] if eqn.primitive.name == "scan" else 1

    def reads(self) -> list[jex.Var]:
        """Values that the loop reads and others make."""
        constants = {var for node in self.constants for var in node.outputs}
        return [var for var in dict.fromkeys(atoms(self.node.eqns[0])) if var not in constants]

    def equations(self) -> list[jex.JaxprEqn]:
        nodes = (*self.constants, *nodes_inside(self.node))
        return [eqn for node in nodes if node.kind != "control" for eqn in node.eqns]


def _is_constant(node: Node, machine: CostModel) -> bool:
    """Whether a node makes small values of nothing."""
    return (
        node.kind == "group"
        and _is_plain(node)
        and not node.reads()
        and all(math.prod(var.aval.shape) <= machine.sizes.loop_elements for var in node.outputs)
    )


def _put_in_kernel(node: Node, machine: CostModel, constants: Mapping[jex.Var, Node]) -> None:
    """Makes a group of control flow, in place. `constants`: values that are made of nothing, with their nodes."""
    (eqn,) = node.eqns

    def all_of(var) -> tuple[jex.Var, Access]:
        return var, tuple(map(whole, array_aval(var).shape))

    makers = dict.fromkeys(constants[var] for var in atoms(eqn) if var in constants)
    loop = KernelLoop(Node(node.kind, node.eqns, node.outputs, inner=node.inner), tuple(makers))
    reads = list(map(all_of, loop.reads()))
    results = tuple(map(all_of, eqn.outvars))
    node.schedule = Schedule(
        (), (), results, BlockRequests({}, [], reads), _price(loop, machine), loop=loop
    )
    node.kind, node.inner = "group", {}


def _price(loop: KernelLoop, machine: CostModel) -> Cost:
    """Arithmetic of all steps one after the other, on one core."""
    costs = [each.own_schedule.cost for each in nodes_inside(loop.node) if each.kind == "group"]
    steps = loop.steps
    compute = steps * sum(cost.compute for cost in costs)
    moved = sum(nbytes(var.aval) for var in (*loop.reads(), *loop.node.outputs))
    memory = moved / machine.far_bandwidth(moved) if moved else 0.0
    flops = steps * sum(cost.flops for cost in costs)
    held = sum(cost.scratch for cost in costs)
    limit = max(steps * sum(cost.limit for cost in costs), moved / machine.memory_bandwidth)
    seconds = compute + memory + machine.launch_seconds
    return Cost(seconds, compute, memory, moved, flops, 1.0, moved + held, held, 1, limit)
