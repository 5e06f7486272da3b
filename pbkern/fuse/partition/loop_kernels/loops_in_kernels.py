"""Loops whose bodies compute little -> one kernel each, with the loop inside.

    for each of 1000 steps: launch kernel (2 operations on a scalar)    ->    launch kernel (1000 steps)

A step of the host's loop calls a function for each kernel, and carries go through memory. Inside a
kernel, code generation holds them in registers. Where elements need nothing of each other, programs
share them (program_blocks.py). fuse/emit/loop_kernel.py emits the kernel; the groups of the body say
what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.access.blocks import BlockRequests
from pbkern.fuse.cost.kinds import itemsize, nbytes
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.graph import Inner, Node, Partition, order
from pbkern.fuse.options import FuseOptions
from pbkern.fuse.tiling.schedule import Schedule

from .program_blocks import WHOLE, ProgramBlocks, cut_loop, independent_parts
from .program_widths import ProgramSize, program_widths
from .step_groups import StepGroup, groups_of_steps, with_step_groups

LOOPS = frozenset(("scan", "while"))


@dataclass(frozen=True)
class LoopsInKernels:
    """Puts loops over small values into kernels, the outermost that fit."""

    most_equations: int = threshold(
        400,
        "equations of a loop's body, with those of loops in it: they are one function, which takes long to compile. Source: "
        "not recorded",
    )
    held_vectors: int = threshold(
        8,
        "vectors of each carry that a program has where its elements depend on one element of every value, so that registers "
        "hold them. Linear recurrence 1000 x 4096 in programs of 4 vectors: 1.58 ms, 8 1.22, 16 1.26, 64 1.47. Zen 4, "
        "29 November 2026",
    )
    light_operations: float = threshold(
        8.0,
        "operations of a step, per element, beyond which registers hold half as many. Lorenz's equations, 1000 x 10001: 4 "
        "vectors 0.65 ms, 8 0.78, 16 0.96; a gated unit, 200 x 10000: 0.68, 2.2, 1.2. Zen 4, 29 November 2026",
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
        read = set(results).union(*(node.reads() for node in nodes))
        loops = []
        for node in (each for each in nodes if each.kind == "control"):
            if node.eqns[0].primitive.name in LOOPS:
                results_read = [var for var in node.outputs if var in read]
                blocks = self._blocks(node, machine, results_read)
                if blocks is not None:
                    loops.append((node, results_read, blocks))
                    continue
            for inner in node.inner.values():
                results_here = {
                    var for var in inner.jaxpr.outvars if not isinstance(var, jex.Literal)
                }
                if self._visit(inner.partition.nodes, machine, results_here):
                    inner.ordered[:] = order(inner.partition.nodes, inner.jaxpr.invars)
        makers = {
            var: node
            for node in nodes
            if node.kind == "group" and _is_plain(node) and (not node.reads() or _moves_rows(node))
            for var in node.outputs
        }
        removed = []
        for node, results_read, blocks in loops:
            beside, blocks = self._beside(node, nodes, results, results_read, blocks, machine)
            for group in beside:
                nodes.remove(group.node)
                removed.append(group.node)
                for var in group.node.outputs:
                    makers.pop(var, None)
            if beside:
                read = set(results).union(*(each.reads() for each in nodes if each is not node))
                results_read = [var for var in results_read if var in read]
            after = [
                turned
                for var in results_read
                if (turned := _turned(var, nodes, results)) is not None
            ]
            node.search_steps = None
            node.schedule = _in_kernel(
                replace(node), machine, makers, results_read, after, beside, blocks
            )
            node.outputs = [var for var, _ in node.schedule.outputs]
            node.kind, node.inner = "group", {}
            for turned in after:
                nodes.remove(turned)
                makers.pop(turned.outputs[0], None)
            removed += after
        read = set(results).union(*(node.reads() for node in nodes))
        for node in dict.fromkeys(makers.values()):
            if read.isdisjoint(node.outputs):
                nodes.remove(node)
                removed.append(node)
        return removed

    def _beside(
        self,
        node: Node,
        nodes: Sequence[Node],
        results: Collection[jex.Var],
        results_read: Sequence[jex.Var],
        blocks: ProgramBlocks,
        machine: CostModel,
    ) -> tuple[list[StepGroup], ProgramBlocks]:
        """(groups that the loop's steps compute, blocks of programs that do so)."""
        groups = groups_of_steps(node, nodes, results, blocks, machine)
        if groups:
            again = self._blocks(node, machine, results_read, groups)
            if again is not None and again.widths != blocks.widths:
                blocks = again
                groups = groups_of_steps(node, nodes, results, blocks, machine)
        return groups, with_step_groups(blocks, groups)

    def _blocks(
        self,
        node: Node,
        machine: CostModel,
        results: Sequence[jex.Var],
        beside: Sequence[StepGroup] = (),
    ) -> ProgramBlocks | None:
        """The blocks of a loop's programs in one kernel, with groups beside it; None if it is to stay outside."""
        nodes = list(nodes_inside(node))
        equations = [eqn for each in nodes for eqn in each.eqns]
        if (
            not all(map(_is_plain, nodes))
            or node.shares
            or len(equations) > self.most_equations
            or not results
        ):
            return None
        sizes = [math.prod(aval.shape) for aval in _avals(node, equations)]
        fits = max(sizes, default=0) <= machine.sizes.loop_elements
        parts = independent_parts(node, results)
        # Tiles of several steps stay where elements of a step need each other.
        is_elementwise = parts is not None and parts.largest_part == 1
        if not is_elementwise and node.takes_several_steps():
            return None
        pays = parts is not None and (
            not fits or self._pays(node, machine, max(sizes, default=0), beside)
        )
        cut = (
            self._cut(node, machine, results, parts, beside) if parts is not None and pays else None
        )
        return cut or (WHOLE if fits else None)

    def _pays(
        self, node: Node, machine: CostModel, largest: int, beside: Sequence[StepGroup]
    ) -> bool:
        """Whether a loop that one program could hold is worth several. `largest`: elements of its largest value."""
        compute = _price(KernelLoop(node, (), (), tuple(beside), WHOLE), machine).compute
        saved = compute - compute / machine.cores
        fills_several = largest >= 2 * machine.sizes.independent_elements
        return fills_several and saved > machine.launch_seconds

    def _cut(
        self,
        node: Node,
        machine: CostModel,
        results: Sequence[jex.Var],
        parts: ProgramBlocks,
        beside: Sequence[StepGroup],
    ) -> ProgramBlocks | None:
        """The blocks of several programs; None if one is enough, or if they are too large. `parts`: those of one element."""
        most = machine.sizes.shared_loop_elements
        if parts.largest_whole > most:
            return None
        lanes = machine.lanes(max(map(itemsize, results)))
        room = most // parts.largest_part
        if parts.largest_part == 1:
            flops = sum(each.own_schedule.cost.flops for each in _groups_inside(node))
            flops += sum(group.node.own_schedule.cost.flops for group in beside) / _steps(node)
            is_light = flops <= self.light_operations * math.prod(parts.extents)
            room = min(room, lanes * self.held_vectors // (1 if is_light else 2))
        size = ProgramSize(
            most=room,
            fewest=machine.sizes.independent_elements,
            lanes=lanes,
            cores=machine.cores,
        )
        widths = program_widths(parts.extents, parts.largest_part, size)
        if widths is None or widths == parts.extents:
            return None
        blocks = cut_loop(node, results, parts.extents, widths)
        return None if blocks is None or blocks.largest_part > most else blocks


def nodes_inside(node: Node) -> Iterator[Node]:
    """Nodes of the bodies of control flow, also of that inside them."""
    for inner in node.inner.values():
        for each in inner.ordered:
            yield each
            yield from nodes_inside(each)


def _steps(node: Node) -> int:
    """Steps of a loop as far as they are known, one at least."""
    (eqn,) = node.eqns
    return max(params_of(eqn)["length"], 1) if eqn.primitive.name == "scan" else 1


def _groups_inside(node: Node) -> Iterator[Node]:
    return (each for each in nodes_inside(node) if each.kind == "group")


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
    """Control flow inside a kernel.

    Attributes:
      node: the control flow.
      before: groups whose results it reads: they have no operands, or move dimensions of one.
      after: groups that move dimensions of its results.
      beside: groups that its steps compute.
      blocks: what one program has of each value.
    """

    node: Node
    before: tuple[Node, ...]
    after: tuple[Node, ...]
    beside: tuple[StepGroup, ...]
    blocks: ProgramBlocks

    @property
    def steps(self) -> int:
        """Steps of a scan; 1 where values decide how many there are."""
        return _steps(self.node)

    def reads(self) -> list[jex.Var]:
        """Values that the loop reads and others make."""
        groups = (*self.before, *(group.node for group in self.beside))
        eqns = [eqn for node in groups for eqn in node.eqns]
        computed = {var for eqn in (*eqns, *self.node.eqns) for var in eqn.outvars}
        read = dict.fromkeys(var for eqn in (*eqns, *self.node.eqns) for var in atoms(eqn))
        return [var for var in read if var not in computed]

    def equations(self) -> list[jex.JaxprEqn]:
        groups = (group.node for group in self.beside)
        nodes = (*self.before, *groups, *nodes_inside(self.node), *self.after)
        return [eqn for node in nodes if node.kind != "control" for eqn in node.eqns]


def _in_kernel(
    node: Node,
    machine: CostModel,
    makers: Mapping[jex.Var, Node],
    results: Sequence[jex.Var],
    after: Sequence[Node],
    beside: Sequence[StepGroup],
    blocks: ProgramBlocks,
) -> Schedule:
    """The kernel of a loop.

    Args:
      node: the loop.
      machine: prices and sizes.
      makers: values that are made of nothing or by moving dimensions, with their nodes.
      results: those that are read.
      after: what moves dimensions of results.
      beside: groups that its steps compute.
      blocks: what one program has of each value.
    """
    (eqn,) = node.eqns
    sizes = machine.sizes
    most = sizes.shared_loop_elements if blocks.grid else sizes.loop_elements
    before = []
    for maker in dict.fromkeys(makers[var] for var in atoms(eqn) if var in makers):
        more = blocks.with_operands(maker, most if not maker.reads() else None)
        if more is not None:
            blocks = more
            before.append(maker)
    turned = {}
    for each in after:
        (moves,) = each.eqns
        (var,) = atoms(moves)
        blocks = blocks.with_moved(moves)
        turned[var] = moves.outvars[0]
    loop = KernelLoop(node, tuple(before), tuple(after), tuple(beside), blocks)
    reads = [(var, blocks.access(var)) for var in loop.reads()]
    outputs = [turned.get(var, var) for var in results]
    outputs += [var for group in beside for var in group.node.outputs if var not in eqn.invars]
    return Schedule(
        blocks.grid,
        (),
        tuple((var, blocks.access(var)) for var in outputs),
        BlockRequests({}, [], reads),
        _price(loop, machine),
        loop=loop,
    )


def _moves_rows(node: Node) -> bool:
    """Whether a group does nothing but move dimensions in front of the last one, whose elements stay together."""
    if node.kind != "group" or len(node.eqns) > 1 or not _is_plain(node):
        return False
    (eqn,) = node.eqns
    if eqn.primitive.name != "transpose" or not atoms(eqn):
        return False
    permutation = eqn.params["permutation"]
    return permutation[-1] == len(permutation) - 1


def _turned(var: jex.Var, nodes: Sequence[Node], results: Collection[jex.Var]) -> Node | None:
    """The one node that reads a value, if it does nothing but move dimensions. `results`: what others read."""
    readers = [node for node in nodes if var in node.reads()]
    is_turned = len(readers) == 1 and var not in results and _moves_rows(readers[0])
    return readers[0] if is_turned else None


def _price(loop: KernelLoop, machine: CostModel) -> Cost:
    """Arithmetic of all steps one after the other, of each program on one core."""
    costs = [each.own_schedule.cost for each in _groups_inside(loop.node)]
    beside = [group.node.own_schedule.cost for group in loop.beside]
    steps = loop.steps
    programs = math.prod(loop.blocks.grid)
    cores = sum(cost.compute * min(cost.programs, machine.cores) for cost in costs)
    cores = steps * cores + sum(cost.compute * min(cost.programs, machine.cores) for cost in beside)
    compute = cores / min(programs, machine.cores)
    of_groups = [var for group in loop.beside for var in group.node.outputs]
    moved = sum(nbytes(var.aval) for var in (*loop.reads(), *loop.node.outputs, *of_groups))
    memory = moved / machine.far_bandwidth(moved) if moved else 0.0
    flops = steps * sum(cost.flops for cost in costs) + sum(cost.flops for cost in beside)
    held = sum(cost.scratch for cost in costs)
    limit = max(steps * sum(cost.limit for cost in costs), moved / machine.memory_bandwidth)
    seconds = compute + memory + machine.launch_seconds
    return Cost(seconds, compute, memory, moved, flops, 1.0, moved + held, held, programs, limit)
