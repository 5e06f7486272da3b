"""Partitioner: groups of equations that become one kernel each, and what stays outside them.

The passes of passes.py change it: the first makes groups (grow_groups.py), others merge, move and duplicate whole groups.
Each decision is recorded as an Edge for fuse/emit/explain.py. Prices are the target's (fuse/cost/model.py), blocks
fuse/tiling/block_search.py, control flow control_regions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.scatter import SCATTERS
from pbkern.core.passes import threshold
from pbkern.fuse.access.blocks import Unfusable
from pbkern.fuse.access.equation_kinds import once_per_kind
from pbkern.fuse.access.rules import MAX_EXTENT, NeedsWhole, is_long, rules
from pbkern.fuse.access.windows_contractions import partial_reduce_p
from pbkern.fuse.complex.views import VIEWS_OF_COMPLEX
from pbkern.fuse.cost.kinds import (
    CONTRACTIONS,
    DATA_MOVEMENT,
    LOOKUPS,
    SINGLE_PASS,
    is_alias,
    is_heavy,
    nbytes,
)
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.graph import Edge, Node, Partition
from pbkern.fuse.indexing.row_views import row_view_p
from pbkern.fuse.indexing.sorted_prefix import first_sorted_p
from pbkern.fuse.simplify.driver import CONTROL
from pbkern.fuse.tiling.one_program import grows
from pbkern.fuse.tiling.schedule import Schedule, schedule_at
from pbkern.fuse.tiling.search_memo import (
    memoised_extension,
    memoised_growth,
    memoised_search,
    tall_blocks_once,
)
from pbkern.fuse.time_tiling.limits import TimeTilingLimits

from .in_place_updates import Update, UpdateLimits

# Primitives whose results are views of their operands in memory, and run no kernel.
VIEWS_IN_MEMORY = (*VIEWS_OF_COMPLEX, row_view_p.name)


def has_chained_reductions(eqns: Iterable) -> bool:
    """Whether one reduction or contraction depends on another."""
    after: set = set()
    for eqn in eqns:
        name = eqn.primitive.name
        reduces = name.startswith(("reduce_", "arg", "cum", "partial")) or name in CONTRACTIONS
        depends = any(var in after for var in eqn.invars if not isinstance(var, jex.Literal))
        if reduces and depends:
            return True
        if reduces or depends:
            after.update(eqn.outvars)
    return False


def _is_of_numbers(aval) -> bool:
    """Whether kernels compute values of this type: arrays, neither complex ones nor those of PRNG keys."""
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind != "c"


def alone_seconds(eqn, machine: CostModel) -> float:
    """Time of a kernel that does one equation only."""
    atoms = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
    far = sum(nbytes(atom.aval) / machine.far_bandwidth(nbytes(atom.aval)) for atom in atoms)
    far += sum(
        2 * nbytes(var.aval) / machine.far_bandwidth(nbytes(var.aval)) for var in eqn.outvars
    )
    work = machine.operations(eqn) * math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name in CONTRACTIONS:
        compute = work / machine.flops(str(atoms[0].aval.dtype) if atoms else "float32")
    else:
        compute = (
            work
            / machine.lanes(eqn.outvars[0].aval.dtype.itemsize)
            / machine.clock_hz
            / machine.cores
        )
    return max(far, compute) + machine.launch_seconds


@dataclass(frozen=True)
class GrowthLimits(TimeTilingLimits, UpdateLimits):
    """When equations join groups, one by one or many together, and steps of loops share kernels."""

    tie: float = threshold(
        1.002,
        "time together, relative to apart: one kernel wins a tie with two. With 1.0, 1.01 and 1.02 one of the benchmarks has "
        "another plan for Zen 3 and Zen 5, none for Granite Rapids, one for Haswell, 26 November 2026",
    )
    few_programs: float = threshold(
        0.95,
        "the same, of heavy work that would be left with few programs. Source: not recorded",
    )
    reshaped: float = threshold(1.01, "the same, of a change of shape. Source: not recorded")
    many_along: int = threshold(
        64, "equations that join a group at once; if that fails, each is tried alone"
    )
    share_along: int = threshold(
        4,
        "divisor of a long group's length: so many of its equations join at once. A chain of 4,000 operations grew in 0.6 s "
        "to the same kernel, in 1.9 with 64 at once. Zen 3, 27 November 2026",
    )
    most_copies: int = threshold(
        8, "kernels that compute a value of several arrays again, each reading all of them"
    )
    most_copied: int = threshold(
        16,
        "operations per element of an equation that is duplicated into several groups. Source: not recorded",
    )
    small_copy: int = threshold(
        1 << 12,
        "bytes of a value that is duplicated where many equations are at once. Source: not recorded",
    )


class Partitioner:
    """The nodes of one jaxpr while they are made and changed.

    Attributes:
      jaxpr: the function.
      machine: the target's prices.
      supports: equation -> why the target cannot lower it; None if it can.
      options: the user's (fuse/options.py).
      limits: thresholds of the pass "grow groups", which later passes ask, too.
      partition: partitions the bodies of control flow.
      order: id of an equation -> its place in the jaxpr.
      results: the jaxpr's results.
      makers: value -> the equation that makes it.
      consumers: value -> the equations that read it.
      nodes, edges: the partition so far.
      nodes_of: id of an equation -> nodes that compute it.
      pairs: result of an equation -> the operand that it may overwrite.
      updates: results of updates in place.
      alone_in_place: ids of the equations of `updates` that are no control flow: each has its own kernel.
    """

    def __init__(
        self,
        jaxpr: jex.Jaxpr,
        machine: CostModel,
        supports: Callable,
        options: object,
        partition: Callable,
        pairs: Mapping,
    ) -> None:
        self.jaxpr, self.machine, self.supports, self.options = jaxpr, machine, supports, options
        self.limits = GrowthLimits()
        self.partition = partition
        self.order = {id(member): n for n, member in enumerate(jaxpr.eqns)}
        self.results = {result for result in jaxpr.outvars if not isinstance(result, jex.Literal)}
        self.makers = {result: maker for maker in jaxpr.eqns for result in maker.outvars}
        self.consumers: dict = {}
        for eqn in jaxpr.eqns:
            for var in eqn.invars:
                if not isinstance(var, jex.Literal):
                    self.consumers.setdefault(var, []).append(eqn)
        self.nodes_of: dict[int, list[Node]] = {}
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.pairs = pairs
        self.updates: dict[jex.Var, Update] = {}
        self.alone_in_place: set[int] = set()
        self._outside_kinds: dict[int, tuple[str, str] | None] = {}

    def __str__(self) -> str:
        return str(Partition(self.nodes, self.edges))

    # -- bookkeeping

    def add_node(self, node: Node) -> Node:
        self.nodes.append(node)
        for eqn in node.eqns:
            self.nodes_of.setdefault(id(eqn), []).append(node)
        return node

    def set_group(self, group: Node, eqns: Iterable, outputs: Iterable, schedule: Schedule) -> None:
        unique = {id(member): member for member in eqns}
        for eqn in group.eqns:
            nodes = self.nodes_of[id(eqn)]
            if nodes[-1] is not group or id(eqn) not in unique:
                nodes.remove(group)
        group.eqns = self.in_order(unique)
        group.outputs, group.schedule = list(dict.fromkeys(outputs)), schedule
        for number in unique:
            nodes = self.nodes_of.setdefault(number, [])
            if not nodes or nodes[-1] is not group:
                nodes.append(group)

    def in_order(self, unique: dict[int, jex.JaxprEqn]) -> list[jex.JaxprEqn]:
        """Equations by their ids -> the same in program order."""
        return [unique[number] for number in sorted(unique, key=self.order.__getitem__)]

    def groups(self) -> list[Node]:
        return [node for node in self.nodes if node.kind == "group"]

    def users(self, var) -> list[Node]:
        """Nodes that read `var`.

        A node that computes a copy of the consumer counts, unless it makes `var` as well.
        """
        makers = self.nodes_of.get(id(self.makers.get(var)), ())
        nodes: dict[int, Node] = {}
        for consumer in self.consumers.get(var, ()):
            for node in self.nodes_of.get(id(consumer), ()):
                if node not in makers:
                    nodes[id(node)] = node
        return list(nodes.values())

    def successors(self, node: Node) -> list[Node]:
        return [user for output in node.outputs for user in self.users(output) if user is not node]

    def reaches(self, sources: Iterable[Node], goal: Node) -> bool:
        seen, stack = set(), list(sources)
        while stack:
            node = stack.pop()
            if node is goal:
                return True
            if id(node) not in seen:
                seen.add(id(node))
                stack.extend(self.successors(node))
        return False

    def readers(self, group: Node) -> tuple[list[Node], list[Node]]:
        """(nodes that read a group's results, reshapes between them and it that nothing else reads)."""
        users, aliases, waiting = {}, [], self.successors(group)
        while waiting:
            node = waiting.pop()
            if (
                node.kind == "alias"
                and not any(output in self.results for output in node.outputs)
                and node not in aliases
            ):
                aliases.append(node)
                waiting += self.successors(node)
            elif node.kind != "alias" or node not in aliases:
                users[id(node)] = node
        return list(users.values()), aliases

    # -- blocks of whole groups

    def search_blocks_of_products(self) -> None:
        """Searches the blocks of products from a second starting point, now that their groups are final."""
        for node in self.nodes:
            if node.kind == "group" and any(
                eqn.primitive.name == "dot_general" for eqn in node.eqns
            ):
                tall = tall_blocks_once(node.eqns, node.own_schedule, self.machine)
                if tall is not None and tall.cost.seconds < node.seconds:
                    node.schedule = tall

    def search_blocks(self) -> None:
        """Searches the blocks of whole groups: while groups grew, cheap equations kept the blocks so far."""
        for node in self.nodes:
            if node.kind == "group" and len(node.eqns) > 1 and not node.own_schedule.aliases:
                try:
                    best = memoised_search(node.eqns, node.outputs, self.machine)
                except Unfusable:  # there are no blocks but those that the group grew with
                    continue
                if best.cost.seconds < node.seconds:
                    node.schedule = best

    def options_disable_fusion(self) -> bool:
        return bool(getattr(self.options, "disable_affine_fusion", False))

    def outside_kind(self, eqn) -> tuple[str, str] | None:
        """(kind, reason) of an equation that no group may hold, or None."""
        if id(eqn) not in self._outside_kinds:
            self._outside_kinds[id(eqn)] = once_per_kind(
                "outside", eqn, lambda: self._outside_kind(eqn)
            )
        return self._outside_kinds[id(eqn)]

    def _outside_kind(self, eqn) -> tuple[str, str] | None:
        name = eqn.primitive.name
        if name == "pbkern_kernel":
            return "kernel", "hand-written"
        if eqn.effects:
            return "xla", "it has side effects"
        if name in CONTROL:
            return "control", ""
        if name not in rules and name not in VIEWS_IN_MEMORY:
            return "xla", "no access rule"
        if any(0 in getattr(var.aval, "shape", ()) for var in (*eqn.outvars, *eqn.invars)):
            return "xla", "an empty array"
        if is_long(eqn):
            return "xla", f"more than {MAX_EXTENT} elements along a dimension"
        if name in VIEWS_IN_MEMORY:
            return "alias", ""
        if not all(_is_of_numbers(var.aval) for var in eqn.outvars):
            return "xla", f"element type {eqn.outvars[0].aval.dtype}"
        # They become ordinary reductions and sorts in bodies: every target fuses them.
        reason = None if eqn.primitive in (partial_reduce_p, first_sorted_p) else self.supports(eqn)
        return ("xla", reason) if reason else None

    def is_heavy_product(self, eqn) -> bool:
        """Whether an equation is a contraction that is worth a kernel."""
        return eqn.primitive.name in CONTRACTIONS and is_heavy(eqn, self.machine)

    def has_heavy_product(self, group: Node) -> bool:
        return any(map(self.is_heavy_product, group.eqns))

    def drop(self, group: Node) -> None:
        self.nodes.remove(group)
        for eqn in group.eqns:
            self.nodes_of[id(eqn)].remove(group)

    def attempt(
        self,
        eqns,
        outputs,
        current: Schedule | None,
        new,
        accept: Callable[[Cost], bool] | None = None,
    ) -> tuple[Schedule | None, str]:
        """Schedules equations as one kernel.

        Args:
          eqns: the equations, in any order, each at least once.
          outputs: the kernel's results.
          current: the schedule of the group before `new` joined it; None for a group that was none before.
          new: the equation that joins. If it is cheap, the group's blocks stay; else they are searched again.
          accept: refuses schedules by their cost; None accepts all.

        Returns:
          (schedule, ""), or (None, reason).
        """
        unique = {id(eqn): eqn for eqn in eqns}
        eqns = self.in_order(unique)
        if getattr(self.options, "disable_reduce_reduce_fusion", False) and has_chained_reductions(
            eqns
        ):
            return None, "reduce-reduce fusion is disabled"
        if self.updates and (why := self.keeps_apart(eqns)):
            return None, why
        try:
            if not self.alone_in_place.isdisjoint(unique):
                return self.in_one_program(eqns, outputs)
            schedule = self.grown(eqns, outputs, current, accept)
            if schedule is not None:
                return schedule, ""
            cheap = new.primitive.name in ELEMENTWISE or new.primitive.name in DATA_MOVEMENT
            if (
                current is not None
                and cheap
                and list(outputs) == [var for var, _ in current.outputs]
            ):
                schedule = memoised_extension(eqns, current, self.machine)
                if schedule is not None and accept is not None and not accept(schedule.cost):
                    schedule = None
                if (
                    schedule is not None
                    and schedule.cost.recompute <= current.cost.recompute * 1.05 + 0.02
                ):
                    return schedule, ""
            return memoised_search(eqns, outputs, self.machine, accept), ""
        except NeedsWhole:
            try:
                return memoised_search(eqns, outputs, self.machine, accept), ""
            except Unfusable as e:
                return None, str(e)
        except Unfusable as e:
            return None, str(e)
        except (UnsupportedOp, NotImplementedError) as e:
            return None, str(e).splitlines()[0]

    def keeps_apart(self, eqns: Sequence) -> str:
        """Why equations cannot share a kernel for the sake of an update in place; "" if they can."""
        ids = set(map(id, eqns))
        for update in self.updates.values():
            if ids & update.readers and ids & update.after:
                return "an update between them overwrites what one reads"
        return ""

    def is_quick(self, eqn) -> bool:
        """Whether an equation may share a kernel with an update in place: it makes and reads little, or is the update."""
        name, reads = eqn.primitive.name, atoms(eqn)
        if name in LOOKUPS:  # of any array
            reads = reads[1:]
        little = all(
            math.prod(var.aval.shape) <= self.limits.few_updates for var in (*eqn.outvars, *reads)
        )
        known = (
            name in ELEMENTWISE or name in DATA_MOVEMENT or name in LOOKUPS or name in SINGLE_PASS
        )
        return id(eqn) in self.alone_in_place or (known and little)

    def in_one_program(self, eqns: list, outputs: Sequence) -> tuple[Schedule | None, str]:
        """The schedule of an update in place, and of cheap equations that make its window."""
        update, *more = (eqn for eqn in eqns if id(eqn) in self.alone_in_place)
        operand, output = update.invars[0], update.outvars[0]
        if more or list(outputs) != [output] or not all(map(self.is_quick, eqns)):
            return None, "an update in place has a kernel of its own"
        schedule = schedule_at(eqns, [output], output.aval.shape, self.machine)
        if schedule is None:
            return None, "the model has no price"
        place = [var for var, _ in schedule.requests.inputs].index(operand)
        cost = self.cost_of_window(schedule.cost, update)
        return replace(schedule, aliases=((place, 0),), cost=cost), ""

    def cost_of_window(self, cost: Cost, update) -> Cost:
        """The price of an update that reads and stores its window alone, from that of a copy of the whole array."""
        window = update.invars[1] if update.primitive.name not in SCATTERS else update.invars[2]
        whole, changed = nbytes(update.outvars[0].aval), nbytes(window.aval)
        moved = max(cost.bytes_moved - 2 * (whole - changed), 0)
        share = moved / max(cost.bytes_moved, 1)
        start = self.machine.launch_seconds + self.machine.program_seconds
        return replace(
            cost,
            seconds=start + max(cost.seconds - start, 0.0) * share,
            compute=cost.compute * share,
            memory=cost.memory * share,
            bytes_moved=moved,
            flops=cost.flops * share,
            working_set=min(cost.working_set, moved),
            limit=cost.limit * share,
        )

    def grown(
        self,
        eqns: list,
        outputs: Sequence,
        current: Schedule | None,
        accept: Callable[[Cost], bool] | None,
    ) -> Schedule | None:
        """A long group of one program with more equations, as one program again: None unless that gains.

        Searched like others, it would be walked several times for each equation.
        """
        if current is None or not grows(eqns, current):
            return None
        schedule = memoised_growth(eqns, outputs, current, self.machine)
        if schedule is None or (accept is not None and not accept(schedule.cost)):
            return None
        before = current.requests.equations
        apart = current.cost.seconds + sum(
            alone_seconds(eqn, self.machine)
            for eqn in eqns
            if id(eqn) not in before and not is_alias(eqn)
        )
        return schedule if schedule.cost.seconds <= apart * self.limits.reshaped else None

    def fits_chain(self, cost: Cost) -> bool:
        """Whether a program of two contractions fits the near cache: the value between them, and operands that stay."""
        l2 = self.machine.near_bytes
        operands = cost.working_set - cost.scratch
        return cost.scratch <= l2 and (cost.streams or operands <= 2 * l2)

    def record(
        self,
        eqn,
        ok: bool,
        why: str,
        before: float,
        schedule: Schedule | None,
        share: float | None = None,
    ) -> None:
        """Records whether an equation joined its consumers.

        Args:
          eqn: the equation.
          ok: whether it joined.
          why: the reason; "" says it by the prices.
          before: seconds in two kernels.
          schedule: of the one kernel; None where there is none.
          share: the most time in one kernel that is accepted, over the time in two; None: limits.tie.
        """
        after = schedule.cost.seconds if schedule else 0.0
        text = why or (
            "the model gains" if ok else _refusal(before, after, share or self.limits.tie)
        )
        self.edges.append(
            Edge(eqn, ok, text, sum(nbytes(var.aval) for var in eqn.outvars), before, after)
        )


def _refusal(before: float, after: float, share: float) -> str:
    """Why two kernels that can be one stay apart: the comparison that decided, with its margin."""
    if after > before or not before:
        return "separate kernels are faster"
    gain, least = 100 * (1 - after / before), 100 * max(1 - share, 0)
    return f"one kernel gains {gain:.1f} %, and has to gain more than {least:.1f} % here"
