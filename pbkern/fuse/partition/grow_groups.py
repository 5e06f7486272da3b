"""GrowGroups: equations join the groups of their readers one by one, or begin one.

Tile the destination, then pull the sources in: equations are visited in reverse, so that the readers of each have groups.
An equation joins while the modelled time falls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.access.blocks import Unfusable
from pbkern.fuse.access.equation_kinds import once_per_kind
from pbkern.fuse.cost.kinds import CONTRACTIONS, DATA_MOVEMENT, is_alias, is_heavy, nbytes
from pbkern.fuse.graph import Edge, Node
from pbkern.fuse.tiling.one_program import grows
from pbkern.fuse.tiling.schedule import Schedule
from pbkern.fuse.tiling.search_memo import memoised_search

from .control_regions import control_node
from .in_place_updates import WHOLE_STEPS, InPlaceUpdates
from .partitioner import GrowthLimits, Partitioner, alone_seconds


@dataclass(frozen=True)
class GrowGroups(GrowthLimits):
    """Equations join the groups of their readers, in reverse; later passes ask the same limits."""

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        parts.limits = self
        _Growth(parts, self).run()
        return parts


class _Growth:
    """One visit of a jaxpr's equations.

    Attributes:
      parts: nodes and edges so far.
      limits: thresholds of the pass.
      waiting: equations that join the groups of their readers at once, unpriced one by one (`may_wait`).
    """

    def __init__(self, parts: Partitioner, limits: GrowthLimits) -> None:
        self.parts, self.limits, self.machine = parts, limits, parts.machine
        self.consumers, self.nodes_of, self.results = (
            parts.consumers,
            parts.nodes_of,
            parts.results,
        )
        self.waiting: list[jex.JaxprEqn] = []

    def run(self) -> None:
        """Visits equations in reverse: each joins the group of its consumers, or begins one."""
        parts = self.parts
        parts.updates = InPlaceUpdates(self.limits).of(parts.jaxpr, parts.pairs)
        eqns_in_place = [update.eqn for update in parts.updates.values()]
        parts.alone_in_place = {
            id(eqn) for eqn in eqns_in_place if eqn.primitive.name not in WHOLE_STEPS
        }
        for eqn in reversed(parts.jaxpr.eqns):
            if self.waiting and len(self.waiting) >= self.most_waiting():
                self.join_waiting()
            if self.may_wait(eqn):
                self.waiting.append(eqn)
                continue
            self.join_waiting()
            self.place(eqn)
        self.join_waiting()

    # -- cheap arithmetic, many equations at once

    def may_wait(self, eqn) -> bool:
        """Whether an equation is cheap arithmetic that joins its group together with others, not priced by itself.

        Its readers must be cheap arithmetic of the same shape, in one group or waiting to join it. Slices may be among
        them, such as the neighbours of a stencil. For little data, such as random keys, shapes may differ, and several
        groups may get copies. Long groups of one program take all but contractions so.

        Such an equation costs the group what it costs alone, and saves the memory of its result. Pricing the whole group
        for each would be quadratic in the length of a generator's, a polynomial's or a filter's arithmetic.
        """
        if len(eqn.outvars) != 1 or self.parts.outside_kind(eqn) is not None:
            return False
        if id(eqn) in self.parts.alone_in_place:
            return False
        (var,) = eqn.outvars
        consumers = self.consumers.get(var, ())
        if (
            not consumers
            or var in self.results
            or is_heavy(eqn, self.machine)
            or self.parts.options_disable_fusion()
        ):
            return False
        groups = self.groups_of_readers(consumers)
        if not groups:
            return False
        is_small = nbytes(var.aval) <= self.limits.small_copy
        if all(grows(group.eqns, group.schedule) for group in groups):
            is_small, is_cheap = True, eqn.primitive.name not in CONTRACTIONS
        else:
            is_cheap = self.are_cheap(eqn, consumers, is_small)
        if len(groups) > 1 and not (
            is_small and self.machine.operations(eqn) <= self.limits.most_copied
        ):
            return False
        return is_cheap and not self.may_be_epilogue(eqn, groups)

    def groups_of_readers(self, consumers: Iterable) -> list[Node]:
        """The groups that hold every one of these equations, or will once those that wait have joined; else none."""
        nodes_of_readers = [
            self.nodes_of.get(id(consumer), [])
            for consumer in consumers
            if not any(consumer is member for member in self.waiting)
        ]
        if self.waiting:
            nodes_of_readers.append(self.goals())
        groups = nodes_of_readers[0]
        ids = set(map(id, groups))
        if any(set(map(id, nodes)) != ids for nodes in nodes_of_readers):
            return []
        return groups if all(group.kind == "group" for group in groups) else []

    @staticmethod
    def are_cheap(eqn, consumers: Iterable, any_shape: bool) -> bool:
        """Whether an equation and its readers are elementwise operations and slices of one shape.

        With `any_shape`, they may be views of all kinds, too.
        """
        names = {consumer.primitive.name for consumer in (eqn, *consumers)}
        if any_shape:
            return all(name in ELEMENTWISE or name in DATA_MOVEMENT for name in names)
        shape = eqn.outvars[0].aval.shape
        return names - {"slice"} <= ELEMENTWISE.keys() and all(
            consumer.outvars[0].aval.shape == shape for consumer in consumers
        )

    def goals(self) -> list[Node]:
        """The groups that waiting equations are to join: each gets a copy."""
        return self.nodes_of[id(self.consumers[self.waiting[0].outvars[0]][0])]

    def most_waiting(self) -> int:
        """Equations that join at once: a share of a long group, which is then priced a few times only."""
        shortest = min(len(group.eqns) for group in self.goals())
        return max(self.limits.many_along, shortest // self.limits.share_along)

    def join_waiting(self) -> None:
        """Joins the equations that wait to their groups at once; one by one if that does not gain."""
        waiting = self.waiting
        if len(waiting) > 1 and self.join_at_once():
            self.waiting = []
            return
        self.waiting = []
        for member in waiting:
            self.place(member)

    def join_at_once(self) -> bool:
        """Whether all equations that wait have joined their groups."""
        waiting, groups = self.waiting, list(self.goals())
        schedules: list[Schedule] = []
        for group in groups:
            schedule, _ = self.parts.attempt(
                [*waiting, *group.eqns], group.outputs, group.schedule, waiting[0]
            )
            if schedule is not None:
                schedules.append(schedule)
        apart = sum(group.seconds for group in groups) + sum(
            self.alone(member) for member in waiting if not is_alias(member)
        )
        together = sum(schedule.cost.seconds for schedule in schedules)
        if len(schedules) < len(groups) or together > apart * self.limits.tie:
            return False
        why = f"copied into {len(groups)} kernels" if len(groups) > 1 else ""
        for member in waiting:
            self.parts.record(member, True, why, apart, schedules[0])
        for group, schedule in zip(groups, schedules):
            self.parts.set_group(group, [*waiting, *group.eqns], group.outputs, schedule)
        return True

    # -- equations one by one

    def place(self, eqn) -> None:
        """Joins an equation to a group or gives it a node."""
        kind = self.parts.outside_kind(eqn)
        if kind is not None and kind[0] == "control":
            self.parts.add_node(control_node(self.parts, eqn, self.parts.partition))
            return
        if kind is not None:
            updates = self.parts.updates if kind[0] == "kernel" else {}
            shares = {var: updates[var].operand for var in eqn.outvars if var in updates}
            self.parts.add_node(
                Node(kind[0], [eqn], list(eqn.outvars), reason=kind[1], shares=shares)
            )
            return
        if id(eqn) in self.parts.alone_in_place:
            schedule, _ = self.parts.attempt([eqn], eqn.outvars, None, eqn)
            if schedule is not None:
                self.parts.add_node(Node("group", [eqn], list(eqn.outvars), schedule))
                return
            self.parts.alone_in_place.remove(id(eqn))
        users = list(
            {id(user): user for var in eqn.outvars for user in self.parts.users(var)}.values()
        )
        groups = [user for user in users if user.kind == "group"]
        outside = [user for user in users if user.kind != "group"]
        needed = outside or any(var in self.results for var in eqn.outvars)
        may_join = (
            groups
            and not self.parts.options_disable_fusion()
            and not self.may_be_epilogue(eqn, groups)
        )
        if may_join and self.join(eqn, groups, outside, bool(needed)):
            return
        if is_alias(eqn):
            self.parts.add_node(Node("alias", [eqn], list(eqn.outvars)))
            return
        self.start(eqn)

    def start(self, eqn) -> None:
        """Starts a group with this equation."""
        outputs = [var for var in eqn.outvars if var in self.results or self.parts.users(var)]
        try:
            self.parts.add_node(
                Node("group", [eqn], outputs, memoised_search([eqn], outputs, self.machine))
            )
        except (Unfusable, UnsupportedOp, NotImplementedError) as e:
            self.parts.add_node(Node("xla", [eqn], list(eqn.outvars), reason=str(e)))

    def may_be_epilogue(self, eqn, groups: Iterable[Node]) -> bool:
        """Whether a heavy contraction in the groups reads the equation's result.

        Another contraction may have it as its epilogue, so it starts a group, and merge_groups.py decides.
        """
        if eqn.primitive.name in DATA_MOVEMENT or eqn.primitive.name == "convert_element_type":
            return False
        return any(
            reader.primitive.name in CONTRACTIONS and is_heavy(reader, self.machine)
            for group in groups
            for var in eqn.outvars
            for reader in self.readers_through_views(var, group)
        )

    def readers_through_views(self, var, group: Node) -> Iterable:
        """Consumers of `var` in a group, through views and casts."""
        for consumer in self.consumers.get(var, ()):
            if group in self.nodes_of.get(id(consumer), ()):
                if (
                    consumer.primitive.name in DATA_MOVEMENT
                    or consumer.primitive.name == "convert_element_type"
                ):
                    yield from self.readers_through_views(consumer.outvars[0], group)
                else:
                    yield consumer

    def join(self, eqn, groups: list[Node], outside: list[Node], needed: bool) -> bool:
        """Joins an equation to groups that read it if the model gains.

        Args:
          eqn: the equation.
          groups: all groups that read its results.
          outside: other nodes that read them.
          needed: whether its results must be stored: `outside` is not empty, or they are results of the function.

        Returns:
          Whether it has joined, so that it needs no node.
        """
        alone = 0.0 if is_alias(eqn) else self.alone(eqn)
        if len(groups) == 1 and (not needed or not self.parts.reaches(outside, groups[0])):
            return self.try_union(eqn, groups[0], needed, alone)
        if not needed and self.duplicate(eqn, groups, alone):
            return True
        if len(groups) > 1 and self.merge_and_join(eqn, groups, outside, needed, alone):
            return True
        # It may be one more result of a group that does not depend on the others.
        for group in groups if len(groups) > 1 else ():
            rest = [*outside, *(node for node in groups if node is not group)]
            if not self.parts.reaches(rest, group) and self.try_union(eqn, group, True, alone):
                return True
        return False

    def alone(self, eqn) -> float:
        """Seconds of a kernel that does this equation only: searched if it is heavy, else estimated."""
        if is_heavy(eqn, self.machine):
            try:
                return memoised_search([eqn], list(eqn.outvars), self.machine).cost.seconds
            except (Unfusable, UnsupportedOp, NotImplementedError):
                pass
        return once_per_kind("alone", eqn, lambda: alone_seconds(eqn, self.machine))

    def most_together(self, eqn, schedule: Schedule) -> float:
        """The most time in one kernel that is accepted, over the time in two.

        One kernel wins a tie with two, but not if heavy work would be left with hardly a program
        per core: it may fuse better with producers. A reshape costs nothing apart, and its producer
        can only follow it.
        """
        if is_alias(eqn):
            return self.limits.reshaped
        are_few = schedule.cost.programs < 2 * self.machine.cores
        if are_few and is_heavy(eqn, self.machine):
            return self.limits.few_programs
        return self.limits.tie

    def try_union(self, eqn, group: Node, needed: bool, alone: float) -> bool:
        """Joins an equation to one group if the model gains, as a further result where it is needed; tells whether."""
        outputs = group.outputs + (list(eqn.outvars) if needed else [])
        outputs = [
            output for output in outputs if output in self.results or self.parts.users(output)
        ]
        schedule, why = self.parts.attempt([eqn, *group.eqns], outputs, group.schedule, eqn)
        before = group.seconds + alone
        share = self.limits.tie if schedule is None else self.most_together(eqn, schedule)
        ok = schedule is not None and schedule.cost.seconds <= before * share
        self.parts.record(eqn, ok, why, before, schedule, share)
        if schedule is not None and ok:
            self.parts.set_group(group, [eqn, *group.eqns], outputs, schedule)
        return ok

    def duplicate(self, eqn, groups: list[Node], alone: float) -> bool:
        """Copies an equation into every group that reads it, if that costs less than storing its result; tells whether."""
        if is_heavy(eqn, self.machine) or self.machine.operations(eqn) > self.limits.most_copied:
            return False
        # Where sums of arrays form a chain, as along layers, each kernel would compute all of the chain before it.
        combines = sum(math.prod(array_aval(var).shape) > 1 for var in set(atoms(eqn))) > 1
        if combines and len(groups) > self.limits.most_copies:
            return False
        schedules = []
        for group in groups:
            schedule, _ = self.parts.attempt([eqn, *group.eqns], group.outputs, group.schedule, eqn)
            if schedule is None:
                return False
            schedules.append(schedule)
        before = alone + sum(target.seconds for target in groups)
        after = sum(candidate.cost.seconds for candidate in schedules)
        if after > before:
            return False
        for group, extended in zip(groups, schedules):
            self.parts.set_group(group, [eqn, *group.eqns], group.outputs, extended)
        self.parts.edges.append(
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
        """Merges the groups that read an equation, with it in front, if the model gains; tells whether."""
        if any(
            self.parts.reaches(self.parts.successors(first), second)
            for first, second in itertools.permutations(groups, 2)
        ):
            return False
        if any(self.parts.reaches(outside, target) for target in groups):
            return False
        eqns = [eqn, *(member for target in groups for member in target.eqns)]
        outputs = [output for target in groups for output in target.outputs] + (
            list(eqn.outvars) if needed else []
        )
        schedule, why = self.parts.attempt(eqns, outputs, None, eqn)
        before = alone + sum(target.seconds for target in groups)
        ok = schedule is not None and schedule.cost.seconds <= before
        self.parts.record(
            eqn, ok, why or ("consumers side by side" if ok else ""), before, schedule
        )
        if schedule is not None and ok:
            for group in groups[1:]:
                self.parts.drop(group)
            self.parts.set_group(groups[0], eqns, outputs, schedule)
        return ok
