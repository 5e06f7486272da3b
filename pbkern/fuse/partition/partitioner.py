"""Partitioner: groups of equations that become one kernel each, and what stays outside them.

Tile the destination, then pull the sources in: equations are visited in reverse and join the group
of their consumers while the modelled time falls. Further phases, which merge, move and duplicate
whole groups, are the passes of passes.py. Every decision is recorded as an Edge for fuse/emit/explain.py.
Prices are the target's (fuse/cost/model.py), blocks fuse/tiling/block_search.py, control flow
control_regions.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.passes import threshold
from pbkern.fuse.access.blocks import Unfusable
from pbkern.fuse.access.rules import MAX_EXTENT, NeedsWhole, is_long, rules
from pbkern.fuse.access.windows_contractions import partial_reduce_p
from pbkern.fuse.complex.views import VIEWS_OF_COMPLEX
from pbkern.fuse.cost.kinds import (
    CONTRACTIONS,
    LOOKUPS,
    SINGLE_PASS,
    VIEWS,
    is_alias,
    is_heavy,
    nbytes,
)
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.graph import Edge, Node, Partition
from pbkern.fuse.indexing.row_views import row_view_p
from pbkern.fuse.indexing.sorted_prefix import first_sorted_p
from pbkern.fuse.simplify.driver import CONTROL
from pbkern.fuse.tiling.block_search import Schedule, schedule_at
from pbkern.fuse.tiling.one_program import grows
from pbkern.fuse.tiling.search_memo import (
    memoised_extension,
    memoised_growth,
    memoised_search,
    tall_blocks_once,
)
from pbkern.fuse.time_tiling.limits import TimeTilingLimits

from .control_regions import control_node
from .in_place_updates import InPlaceUpdates, Update, UpdateLimits

# Primitives whose results are views of their operands in memory, and run no kernel.
VIEWS_IN_MEMORY = (*VIEWS_OF_COMPLEX, row_view_p.name)


def has_chained_reductions(eqns: Iterable) -> bool:
    """Does one reduction or contraction depend on another?"""
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


@dataclass(frozen=True)
class GrowGroups(GrowthLimits):
    """Equations join the groups of their readers, in reverse; later passes ask the same limits."""

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        parts.limits = self
        parts.grow()
        return parts


class Partitioner:
    """One run over one jaxpr."""

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
        self.partition = partition  # of the bodies of control flow
        self.order = {id(member): n for n, member in enumerate(jaxpr.eqns)}
        self.results = {result for result in jaxpr.outvars if not isinstance(result, jex.Literal)}
        self.makers = {result: maker for maker in jaxpr.eqns for result in maker.outvars}
        self.consumers: dict = {}
        for eqn in jaxpr.eqns:
            for var in eqn.invars:
                if not isinstance(var, jex.Literal):
                    self.consumers.setdefault(var, []).append(eqn)
        self.nodes_of: dict[int, list[Node]] = {}  # id(equation) -> nodes that compute it
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.pairs = pairs  # result -> the operand that it may overwrite
        self.updates: dict[jex.Var, Update] = {}
        # Ids of their equations that are no control flow: each has a kernel of its own.
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
        for eqn in group.eqns:
            self.nodes_of[id(eqn)].remove(group)
        unique = {id(member): member for member in eqns}
        group.eqns = sorted(unique.values(), key=lambda member: self.order[id(member)])
        group.outputs, group.schedule = list(dict.fromkeys(outputs)), schedule
        for eqn in group.eqns:
            self.nodes_of.setdefault(id(eqn), []).append(group)

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

    # -- phase 1: equations in reverse

    def grow(self) -> None:
        """Visits equations in reverse: each joins the group of its consumers, or begins one."""
        self.updates = InPlaceUpdates(self.limits).of(self.jaxpr, self.pairs)
        eqns_in_place = [update.eqn for update in self.updates.values()]
        self.alone_in_place = {
            id(eqn) for eqn in eqns_in_place if eqn.primitive.name not in CONTROL
        }
        along: list = []  # equations that will join the group of their consumers together
        for eqn in reversed(self.jaxpr.eqns):
            if along and len(along) >= self.most_along(along):
                self.place_all(along)
                along = []
            if self.rides_along(eqn, along):
                along.append(eqn)
                continue
            self.place_all(along)
            along = []
            self.place(eqn)
        self.place_all(along)

    def most_along(self, along: list) -> int:
        """Equations that join at once: a share of a long group, so that it is not priced once for each few of its equations."""
        shortest = min(len(group.eqns) for group in self.readers_of(along))
        return max(self.limits.many_along, shortest // self.limits.share_along)

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
            self._outside_kinds[id(eqn)] = self._outside_kind(eqn)
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
        if any(
            math.prod(var.aval.shape) == 0
            for var in (*eqn.outvars, *eqn.invars)
            if hasattr(var.aval, "shape")
        ):
            return "xla", "an empty array"
        if is_long(eqn):
            return "xla", f"more than {MAX_EXTENT} elements along a dimension"
        if name in VIEWS_IN_MEMORY:
            return "alias", ""
        if any(
            not hasattr(var.aval, "dtype") or str(var.aval.dtype).startswith(("key<", "complex"))
            for var in eqn.outvars
        ):
            return "xla", f"element type {eqn.outvars[0].aval.dtype}"
        # They become ordinary reductions and sorts in bodies: every target fuses them.
        reason = None if eqn.primitive in (partial_reduce_p, first_sorted_p) else self.supports(eqn)
        return ("xla", reason) if reason else None

    def rides_along(self, eqn, along: list) -> bool:
        """Can cheap arithmetic join its group without being priced?

        Its readers must be cheap arithmetic of the same shape, in one group or in `along`, which
        will join it. Slices may, such as the neighbours of a stencil. For little data, such as
        random keys, other parts may too, and several groups may get copies. To long groups of one program all but products may.

        It costs the group what it costs alone, and saves its result. Pricing the whole group for
        each such equation would be quadratic in the length of a generator's, a polynomial's or a
        filter's arithmetic.
        """
        if len(eqn.outvars) != 1 or self.outside_kind(eqn) is not None:
            return False
        if id(eqn) in self.alone_in_place:
            return False
        (var,) = eqn.outvars
        consumers = self.consumers.get(var, ())
        if (
            not consumers
            or var in self.results
            or is_heavy(eqn, self.machine)
            or self.options_disable_fusion()
        ):
            return False
        nodes_of_readers = [
            self.nodes_of.get(id(consumer), [])
            for consumer in consumers
            if not any(consumer is rider for rider in along)
        ]
        if along:
            nodes_of_readers.append(self.readers_of(along))
        groups = nodes_of_readers[0]
        if not groups or any(
            set(map(id, copies)) != set(map(id, groups)) for copies in nodes_of_readers
        ):
            return False
        if any(group.kind != "group" for group in groups):
            return False
        small = nbytes(var.aval) <= self.limits.small_copy
        if all(grows(group.eqns, group.schedule) for group in groups):
            small, like = True, eqn.primitive.name not in CONTRACTIONS
        else:
            like = self.is_like(eqn, consumers, small)
        if len(groups) > 1 and not (
            small and self.machine.operations(eqn) <= self.limits.most_copied
        ):
            return False
        return like and not self.waits(eqn, groups)

    @staticmethod
    def is_like(eqn, consumers: list, small: bool) -> bool:
        """Whether an equation and its readers are cheap arithmetic; of the same shape, unless that is `small`."""
        if small:
            return all(
                consumer.primitive.name in ELEMENTWISE or consumer.primitive.name in VIEWS
                for consumer in (eqn, *consumers)
            )
        shape = eqn.outvars[0].aval.shape
        names = {consumer.primitive.name for consumer in (eqn, *consumers)} - {"slice"}
        return names <= ELEMENTWISE.keys() and all(
            consumer.outvars[0].aval.shape == shape for consumer in consumers
        )

    def readers_of(self, along: list) -> list[Node]:
        """The groups that equations of `along` are to join: each gets a copy."""
        return self.nodes_of[id(self.consumers[along[0].outvars[0]][0])]

    def place_all(self, along: list) -> None:
        """Joins the equations of `along` to their groups at once; one by one if that does not gain."""
        if len(along) > 1:
            groups = list(self.readers_of(along))
            attempts = [
                self.attempt([*along, *target.eqns], target.outputs, target.schedule, along[0])[0]
                for target in groups
            ]
            before = sum(target.seconds for target in groups) + sum(
                self.alone(rider) for rider in along if not is_alias(rider)
            )
            schedules = [candidate for candidate in attempts if candidate is not None]
            if (
                len(schedules) == len(groups)
                and sum(candidate.cost.seconds for candidate in schedules)
                <= before * self.limits.tie
            ):
                for member in along:
                    self.record(
                        member,
                        True,
                        f"copied into {len(groups)} kernels" if len(groups) > 1 else "",
                        before,
                        schedules[0],
                    )
                for group, schedule in zip(groups, schedules):
                    self.set_group(group, [*along, *group.eqns], group.outputs, schedule)
                return
        for member in along:
            self.place(member)

    def place(self, eqn) -> None:
        kind = self.outside_kind(eqn)
        if kind is not None and kind[0] == "control":
            self.add_node(control_node(self, eqn, self.partition))
            return
        if kind is not None:
            self.add_node(Node(kind[0], [eqn], list(eqn.outvars), reason=kind[1]))
            return
        if id(eqn) in self.alone_in_place:
            schedule, _ = self.attempt([eqn], eqn.outvars, None, eqn)
            if schedule is not None:
                self.add_node(Node("group", [eqn], list(eqn.outvars), schedule))
                return
            self.alone_in_place.remove(id(eqn))
        users = list({id(user): user for var in eqn.outvars for user in self.users(var)}.values())
        groups = [user for user in users if user.kind == "group"]
        outside = [user for user in users if user.kind != "group"]
        needed = outside or any(var in self.results for var in eqn.outvars)
        may_join = groups and not self.options_disable_fusion() and not self.waits(eqn, groups)
        if may_join and self.join(eqn, groups, outside, bool(needed)):
            return
        if is_alias(eqn):
            self.add_node(Node("alias", [eqn], list(eqn.outvars)))
            return
        self.start(eqn)

    def start(self, eqn) -> None:
        """Starts a group with this equation."""
        outputs = [var for var in eqn.outvars if var in self.results or self.users(var)]
        try:
            self.add_node(
                Node("group", [eqn], outputs, memoised_search([eqn], outputs, self.machine))
            )
        except (Unfusable, UnsupportedOp, NotImplementedError) as e:
            self.add_node(Node("xla", [eqn], list(eqn.outvars), reason=str(e)))

    def waits(self, eqn, groups) -> bool:
        """Elementwise producers of a contraction wait: they may be the epilogue of an earlier one (phase 2 decides)."""
        if eqn.primitive.name in VIEWS or eqn.primitive.name == "convert_element_type":
            return False
        return any(
            view.primitive.name in CONTRACTIONS and is_heavy(view, self.machine)
            for group in groups
            for var in eqn.outvars
            for view in self.through_views(var, group)
        )

    def through_views(self, var, group: Node) -> Iterable:
        """Consumers of `var` in a group, through views and casts."""
        for consumer in self.consumers.get(var, ()):
            if group in self.nodes_of.get(id(consumer), ()):
                if (
                    consumer.primitive.name in VIEWS
                    or consumer.primitive.name == "convert_element_type"
                ):
                    yield from self.through_views(consumer.outvars[0], group)
                else:
                    yield consumer

    def join(self, eqn, groups: list[Node], outside: list[Node], needed: bool) -> bool:
        """Pulls `eqn` into its consumers if the model gains. True if it needs no node of its own."""
        alone = 0.0 if is_alias(eqn) else self.alone(eqn)
        if len(groups) == 1 and (not needed or not self.reaches(outside, groups[0])):
            return self.try_union(eqn, groups[0], needed, alone)
        if not needed and self.duplicate(eqn, groups, alone):
            return True
        if len(groups) > 1 and self.merge_and_join(eqn, groups, outside, needed, alone):
            return True
        # As one more result of a group that does not depend on the others.
        for group in groups if len(groups) > 1 else ():
            rest = [*outside, *(node for node in groups if node is not group)]
            if not self.reaches(rest, group) and self.try_union(eqn, group, True, alone):
                return True
        return False

    def alone(self, eqn) -> float:
        """Time of a kernel of its own: searched if the arithmetic counts, else estimated."""
        if is_heavy(eqn, self.machine):
            try:
                return memoised_search([eqn], list(eqn.outvars), self.machine).cost.seconds
            except (Unfusable, UnsupportedOp, NotImplementedError):
                pass
        return alone_seconds(eqn, self.machine)

    def tie(self, eqn, schedule: Schedule) -> float:
        """The part of the time apart that is accepted together.

        One kernel wins a tie with two, but not if heavy work would be left with hardly a program
        per core: it may fuse better with producers. A reshape costs nothing apart, and its producer
        can only follow it.
        """
        if is_alias(eqn):
            return self.limits.reshaped
        few = schedule.cost.programs < 2 * self.machine.cores
        return self.limits.few_programs if few and is_heavy(eqn, self.machine) else self.limits.tie

    def try_union(self, eqn, group: Node, needed: bool, alone: float) -> bool:
        outputs = group.outputs + (list(eqn.outvars) if needed else [])
        outputs = [output for output in outputs if output in self.results or self.users(output)]
        schedule, why = self.attempt([eqn, *group.eqns], outputs, group.schedule, eqn)
        before = group.seconds + alone
        share = self.limits.tie if schedule is None else self.tie(eqn, schedule)
        ok = schedule is not None and schedule.cost.seconds <= before * share
        self.record(eqn, ok, why, before, schedule, share)
        if schedule is not None and ok:
            self.set_group(group, [eqn, *group.eqns], outputs, schedule)
        return ok

    def duplicate(self, eqn, groups: list[Node], alone: float) -> bool:
        """A copy in every consumer: for what is cheaper to compute again than to store."""
        if is_heavy(eqn, self.machine) or self.machine.operations(eqn) > self.limits.most_copied:
            return False
        # Of a sum along a chain of layers, each kernel behind would compute the whole chain.
        combines = sum(math.prod(array_aval(var).shape) > 1 for var in set(atoms(eqn))) > 1
        if combines and len(groups) > self.limits.most_copies:
            return False
        schedules = []
        for group in groups:
            schedule, _ = self.attempt([eqn, *group.eqns], group.outputs, group.schedule, eqn)
            if schedule is None:
                return False
            schedules.append(schedule)
        before = alone + sum(target.seconds for target in groups)
        after = sum(candidate.cost.seconds for candidate in schedules)
        if after > before:
            return False
        for group, extended in zip(groups, schedules):
            self.set_group(group, [eqn, *group.eqns], group.outputs, extended)
        self.edges.append(
            Edge(
                eqn,
                True,
                f"copied into {len(groups)} kernels",
                nbytes(eqn.outvars[0].aval),
                before,
                after,
            )
        )
        return True

    def merge_and_join(self, eqn, groups, outside, needed, alone) -> bool:
        """Merges the consuming groups, with the producer in front."""
        if any(
            self.reaches(self.successors(first), second)
            for first, second in itertools.permutations(groups, 2)
        ):
            return False
        if any(self.reaches(outside, target) for target in groups):
            return False
        eqns = [eqn, *(member for target in groups for member in target.eqns)]
        outputs = [output for target in groups for output in target.outputs] + (
            list(eqn.outvars) if needed else []
        )
        schedule, why = self.attempt(eqns, outputs, None, eqn)
        before = alone + sum(target.seconds for target in groups)
        ok = schedule is not None and schedule.cost.seconds <= before
        self.record(eqn, ok, why or ("consumers side by side" if ok else ""), before, schedule)
        if schedule is not None and ok:
            for group in groups[1:]:
                self.drop(group)
            self.set_group(groups[0], eqns, outputs, schedule)
        return ok

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
        """(schedule, reason of failure).

        Cheap equations keep the group's blocks; others search again.
        """
        unique = {id(eqn): eqn for eqn in eqns}
        eqns = sorted(unique.values(), key=lambda eqn: self.order[id(eqn)])
        if getattr(self.options, "disable_reduce_reduce_fusion", False) and has_chained_reductions(
            eqns
        ):
            return None, "reduce-reduce fusion is disabled"
        if self.updates and (why := self.keeps_apart(eqns)):
            return None, why
        try:
            if any(id(eqn) in self.alone_in_place for eqn in eqns):
                return self.in_one_program(eqns, outputs)
            schedule = self.grown(eqns, outputs, current, accept)
            if schedule is not None:
                return schedule, ""
            cheap = new.primitive.name in ELEMENTWISE or new.primitive.name in VIEWS
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
        """Does an equation make little of little, or is it an update itself?"""
        name, reads = eqn.primitive.name, atoms(eqn)
        if name in LOOKUPS:  # of any array
            reads = reads[1:]
        little = all(
            math.prod(var.aval.shape) <= self.limits.few_updates for var in (*eqn.outvars, *reads)
        )
        known = name in ELEMENTWISE or name in VIEWS or name in LOOKUPS or name in SINGLE_PASS
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
        return replace(schedule, aliases=((place, 0),)), ""

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
        """Two contractions share a program only while what is between them, and operands that they hold, stay in cache."""
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
        """Notes a decision. share: part of the time apart that one kernel may take at most; None: the tie."""
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
