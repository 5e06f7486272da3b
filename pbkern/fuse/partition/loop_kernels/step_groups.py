"""Elementwise groups beside a loop -> parts of its steps: what makes elements of xs, and what reads values of each step.

    u = exp(x)
    ys = scan(c = c + u; y = c, over u)        ->        zs = scan(c = c + exp(x); z = c * w, over x, w)
    zs = ys * w

u and ys then need no memory. A step computes the rows of a group that belong to it. Access rules say which rows of other
values they need: of each value one row, that of the same step, or all of it in every step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from jax.extend import core as jex

from pbkern._jax import params_of
from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.access.blocks import request
from pbkern.fuse.cost.kinds import itemsize, nbytes
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.graph import Node

from .program_blocks import ProgramBlocks

# Operations that name elements otherwise.
RENAMING = frozenset(("broadcast_in_dim", "squeeze", "transpose", "copy", "iota"))


@dataclass(frozen=True)
class StepGroup:
    """A group that a loop's steps compute.

    Attributes:
      node: the group.
      blocks: what a step of a program has of the values that the group reads and makes; the last grid axis are the steps.
    """

    node: Node
    blocks: ProgramBlocks

    @property
    def step_dims(self) -> dict[jex.Var, int]:
        """Value -> its dimension along which each step has one element; steps read all of others."""
        steps = len(self.blocks.extents) - 1
        return {var: axes.index(steps) for var, axes in self.blocks.axes.items() if steps in axes}

    @property
    def operands(self) -> list[jex.Var]:
        return [var for var in self.blocks.axes if var not in self.node.outputs]


def groups_of_steps(
    loop: Node,
    nodes: Sequence[Node],
    results: Collection[jex.Var],
    blocks: ProgramBlocks,
    machine: CostModel,
) -> list[StepGroup]:
    """Groups beside a loop that its steps compute in less time.

    Args:
      loop: the loop.
      nodes: the loop, and what stands beside it.
      results: values that are read behind all nodes.
      blocks: what one program of the loop has of each value.
      machine: prices.
    """
    (eqn,) = loop.eqns
    if eqn.primitive.name != "scan":
        return []
    groups: list[StepGroup] = []
    for group in (*_makers(loop, nodes, results, blocks), *_readers(loop, nodes, blocks)):
        if _pays(group, groups, loop, nodes, results, blocks, machine):
            groups.append(group)
    return groups


def with_step_groups(blocks: ProgramBlocks, groups: Sequence[StepGroup]) -> ProgramBlocks:
    """Blocks of a kernel's programs with those of values that groups of its steps read and make."""
    axes = dict(blocks.axes)
    for group in groups:
        axes |= _of_all_steps(group.blocks)
    return replace(blocks, axes=axes)


def _of_all_steps(blocks: ProgramBlocks) -> dict[jex.Var, tuple[int | None, ...]]:
    steps = len(blocks.extents) - 1
    return {
        var: tuple(None if axis == steps else axis for axis in axes)
        for var, axes in blocks.axes.items()
    }


def _makers(
    loop: Node, nodes: Sequence[Node], results: Collection[jex.Var], blocks: ProgramBlocks
) -> Iterator[StepGroup]:
    """Groups whose results are xs of the loop, and nothing else."""
    (eqn,) = loop.eqns
    params = params_of(eqn)
    first = params["num_consts"] + params["num_carry"]
    xs = set(eqn.invars[first:]) - set(eqn.invars[:first]) - set(results)
    xs -= {var for node in nodes if node is not loop for var in node.reads()}
    for node in nodes:
        if xs >= set(node.outputs) and _is_elementwise(node):
            axes = {var: (len(blocks.extents), *_axes(blocks, var)[1:]) for var in node.outputs}
            group = _group(node, loop, blocks, axes)
            if group is not None:
                yield group


def _readers(loop: Node, nodes: Sequence[Node], blocks: ProgramBlocks) -> Iterator[StepGroup]:
    """Groups that read values of each step, and of others what is there before the loop."""
    (eqn,) = loop.eqns
    carried = params_of(eqn)["num_carry"]
    ys = dict.fromkeys(eqn.outvars[carried:])
    later = _later(loop, nodes)
    for node in nodes:
        if ys.keys().isdisjoint(node.reads()) or not _is_elementwise(node):
            continue
        if any(var in later and var not in ys for var in node.reads()):
            continue
        shape = array_aval(node.outputs[0]).shape
        if any(array_aval(var).shape != shape for var in node.outputs):
            continue
        of_ys = {y: (len(blocks.extents), *_axes(blocks, y)[1:]) for y in ys if y in node.reads()}
        extents = (*blocks.extents, params_of(eqn)["length"])
        for dims in itertools.permutations(range(len(shape)), len(extents)):
            if tuple(shape[dim] for dim in dims) != extents:
                continue
            axes = tuple(dims.index(dim) if dim in dims else None for dim in range(len(shape)))
            group = _group(node, loop, blocks, dict.fromkeys(node.outputs, axes))
            if group is not None and all(
                group.blocks.axes[y] == wanted for y, wanted in of_ys.items()
            ):
                yield group
                break


def _is_elementwise(node: Node) -> bool:
    return (
        node.kind == "group"
        and node.finish is None
        and node.own_schedule.wave is None
        and node.own_schedule.loop is None
        and not node.own_schedule.aliases
        and bool(node.reads())
        and all(
            eqn.primitive.name in ELEMENTWISE or eqn.primitive.name in RENAMING for eqn in node.eqns
        )
        and any(eqn.primitive.name in ELEMENTWISE for eqn in node.eqns)
    )


def _later(loop: Node, nodes: Sequence[Node]) -> set[jex.Var]:
    """Values that need the loop to have run."""
    later = set(loop.outputs)
    count = -1
    while len(later) > count:
        count = len(later)
        for node in nodes:
            if not later.isdisjoint(node.reads()):
                later.update(node.outputs)
    return later


def _axes(blocks: ProgramBlocks, var: jex.Var) -> tuple[int | None, ...]:
    return blocks.axes.get(var, (None,) * len(array_aval(var).shape))


def _group(
    node: Node, loop: Node, blocks: ProgramBlocks, axes: dict[jex.Var, tuple[int | None, ...]]
) -> StepGroup | None:
    """The group of steps with these axes of its results; None if a step would need more than its rows of other values."""
    (eqn,) = loop.eqns
    length = params_of(eqn)["length"]
    stepped = ProgramBlocks((*blocks.extents, length), (*blocks.widths, 1), axes).with_operands(
        node, None
    )
    if stepped is None:
        return None
    known = {*blocks.axes, *loop.reads()}
    if any(
        var in known and of_all_steps != _axes(blocks, var)
        for var, of_all_steps in _of_all_steps(stepped).items()
    ):
        return None
    group = StepGroup(node, stepped)
    if _counts_steps(group):
        return None
    # Rows whose elements are apart in memory are not read one by one.
    dims = [(dim, array_aval(var).ndim) for var, dim in group.step_dims.items()]
    return None if any(0 < dim == ndim - 1 for dim, ndim in dims) else group


def _counts_steps(group: StepGroup) -> bool:
    """Whether what a step computes depends on its number, which bodies do not know."""
    wanted = [(var, group.blocks.access(var)) for var in group.node.outputs]
    return any(
        len(group.blocks.extents) - 1 in step.out[step.eqn.params["dimension"]].start.symbols
        for step in request(group.node.eqns, wanted).steps
        if step.eqn.primitive.name == "iota"
    )


def _pays(
    group: StepGroup,
    before: Sequence[StepGroup],
    loop: Node,
    nodes: Sequence[Node],
    results: Collection[jex.Var],
    blocks: ProgramBlocks,
    machine: CostModel,
) -> bool:
    """Whether a group in the loop's programs takes less time than in a kernel of its own. `before`: groups that are in them."""
    node = group.node
    (eqn,) = loop.eqns
    row = max(math.prod(group.blocks.shape(var)) for var in node.outputs)
    lanes = machine.lanes(max(map(itemsize, node.outputs)))
    programs = min(math.prod(blocks.grid), machine.cores)
    compute = core_seconds([group], machine) / programs * max(lanes / row, 1.0)

    read_elsewhere = {var for each in nodes if each not in (node, loop) for var in each.reads()}
    read_elsewhere.update(results)
    loop_reads = {*eqn.invars, *(var for each in before for var in each.operands)}
    more = [var for var in group.operands if var not in loop_reads and var not in eqn.outvars]
    less = [var for var in group.operands if var in eqn.outvars and var not in read_elsewhere]
    if set(node.outputs) <= set(eqn.invars):
        less += node.outputs
    else:
        more += node.outputs
    moved = sum(nbytes(var.aval) for var in more) - sum(nbytes(var.aval) for var in less)
    memory = moved / machine.far_bandwidth(moved) if moved > 0 else 0.0
    return max(compute, memory) < node.own_schedule.cost.seconds


def core_seconds(groups: Sequence[StepGroup], machine: CostModel) -> float:
    """Time that the arithmetic of groups takes on one core."""
    costs = [group.node.own_schedule.cost for group in groups]
    return sum(cost.compute * min(cost.programs, machine.cores) for cost in costs)
