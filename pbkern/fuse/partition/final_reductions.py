"""Small groups that read another group's results -> its last stage: one kernel where there were two.

A reduction over everything leaves a few numbers per program, and one program is enough to combine
them. It becomes the last
stage of the kernel that makes them:

    A: parts = partial sums of x       A: parts = partial sums of x, then mean = sum(parts) / n
    B: mean = sum(parts) / n      ->

Work that is small neither beside a launch nor beside the programs' work stays apart, where its time
is seen. Nothing that depends on A may run between A and B: so B joins the last of the groups that
it reads from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.access.blocks import Unfusable
from pbkern.fuse.access.rules import NeedsWhole
from pbkern.fuse.cost.model import CostModel
from pbkern.fuse.graph import Edge, Node, order
from pbkern.fuse.tiling.schedule import Schedule, schedule_at

from .partitioner import Partitioner


@dataclass(frozen=True)
class JoinLastStages:
    """Sets `finish` of groups of `parts`, a Partitioner, and drops the groups that became last stages."""

    most_launches: float = threshold(
        1.0, "time of a last stage, in launches: a launch is what joining the stage saves"
    )
    most_share: float = threshold(
        0.02,
        "time of a last stage, as a part of its kernel's programs' time. From 0.005 to 0.04 the benchmarks' plans for Zen 3, "
        "Zen 5, Granite Rapids and Haswell are the same, 26 November 2026",
    )

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        if not any(map(_is_one_program, parts.nodes)):
            return parts
        ordered = order(parts.nodes, (*parts.jaxpr.constvars, *parts.jaxpr.invars))
        joining = _Joining(parts, self, {id(n): k for k, n in enumerate(ordered)})
        for node in ordered:
            if _is_one_program(node):
                joining.join(node)
        return parts

    def allow(self, schedule: Schedule, maker: Node, machine: CostModel) -> bool:
        """Whether a launch's work, without the launch itself, may follow the maker's programs."""
        programs = self.most_share * maker.own_schedule.cost.seconds
        most = max(self.most_launches * machine.launch_seconds, programs)
        return schedule.cost.seconds - machine.launch_seconds <= most


def _is_one_program(node: Node) -> bool:
    return (
        node.kind == "group"
        and node.schedule is not None
        and not node.schedule.grid
        and not node.schedule.aliases
        and not node.scatters()
    )


def _is_plain(node: Node) -> bool:
    """Whether a node's one program computes whole results at once."""
    schedule = node.own_schedule
    return schedule.wave is None and schedule.loop is None and schedule.online is None


class _Joining:
    """`position` of each node in a valid order; `makers` and `readers` of values."""

    def __init__(self, parts, limits: JoinLastStages, position: dict[int, int]) -> None:
        self.parts, self.limits, self.position = parts, limits, position
        self.makers = {output: maker for maker in parts.nodes for output in maker.outputs}
        self.readers: dict = {}
        for node in parts.nodes:
            for read in node.reads():
                self.readers.setdefault(read, []).append(node)

    def join(self, node: Node) -> None:
        """Makes a node the last stage of the group that it reads from, or part of that stage."""
        views = self._views(node)
        read = {operand for view in (node, *views) for operand in view.reads()} - {
            output for view in views for output in view.outputs
        }
        makers = [self.makers[operand] for operand in read if operand in self.makers]
        if not makers or any(
            source.kind == "xla" for source in makers
        ):  # fused nodes wait for XLA's as late as they can
            return
        maker = max(makers, key=lambda source: self.position[id(source)])
        if maker.kind == "group" and not maker.own_schedule.aliases:
            self._into(maker, node, [view for view in views if self._source(view) is maker])

    def _views(self, node: Node) -> list[Node]:
        """Reshapes through which a node reads, each before its operand."""
        views: dict[int, Node] = {}
        waiting = [node]
        while waiting:
            for read in waiting.pop().reads():
                maker = self.makers.get(read)
                if maker is not None and maker.kind == "alias" and id(maker) not in views:
                    views[id(maker)] = maker
                    waiting.append(maker)
        return sorted(views.values(), key=lambda view: -self.position[id(view)])

    def _source(self, view: Node) -> Node | None:
        """The node that makes the value behind a reshape."""
        (operand,) = view.reads()
        maker = self.makers.get(operand)
        return self._source(maker) if maker is not None and maker.kind == "alias" else maker

    def _into(self, maker: Node, node: Node, views: list[Node]) -> None:
        present = [maker.finish] if maker.finish else []
        # Without these, the stage would be this node as it is, whose price is known.
        is_same = not present and not views and _is_plain(node)
        if is_same and not self.limits.allow(node.own_schedule, maker, self.parts.machine):
            return
        gone = [node]
        for view in views:
            if not any(self._is_read(output, gone) for output in view.outputs):
                gone.append(view)
        outputs = [
            output for stage in present for output in stage.outputs if self._is_read(output, gone)
        ] + node.outputs
        finish = self._finish(
            maker, [eqn for stage in (*present, *views, node) for eqn in stage.eqns], outputs
        )
        if finish is None:
            return
        outputs_of_maker = [
            output
            for output in maker.outputs
            if not any(output in stage.outputs for stage in present)
        ]
        remaining = [output for output in outputs_of_maker if self._is_read(output, gone)]
        before = maker.seconds + node.seconds
        self._forget_refusals(maker, gone, set(outputs_of_maker) - set(remaining))
        maker.finish, maker.outputs = finish, remaining + finish.outputs
        self._replace(gone, maker)
        why = "it runs as the last stage of the kernel before it"
        self.parts.edges.append(Edge(node.eqns[-1], True, why, 0, before, maker.seconds))

    def _is_read(self, var, gone: Iterable[Node]) -> bool:
        """Whether a value is a result, or a node that is not among `gone` reads it."""
        return var in self.parts.results or any(
            not any(reader is removed for removed in gone) for reader in self.readers.get(var, ())
        )

    def _finish(self, maker: Node, eqns: Iterable, outputs: Iterable) -> Node | None:
        """One program of these equations; None if there is none, or it would be too much work."""
        order = self.parts.order
        eqns = sorted({id(eqn): eqn for eqn in eqns}.values(), key=lambda eqn: order[id(eqn)])
        outputs = sorted(
            outputs, key=lambda output: (-len(output.aval.shape), -math.prod(output.aval.shape))
        )
        try:
            schedule = schedule_at(eqns, outputs, outputs[0].aval.shape, self.parts.machine)
        except (NeedsWhole, Unfusable):
            return None
        if schedule is None or not self.limits.allow(schedule, maker, self.parts.machine):
            return None
        cost = dataclasses.replace(
            schedule.cost, seconds=schedule.cost.seconds - self.parts.machine.launch_seconds
        )
        return Node("group", eqns, outputs, dataclasses.replace(schedule, cost=cost))

    def _replace(self, gone: list[Node], maker: Node) -> None:
        for node in gone:
            self.parts.nodes.remove(node)
            for read in node.reads():
                self.readers[read].remove(node)
        for read in maker.reads():
            if not any(reader is maker for reader in self.readers.setdefault(read, [])):
                self.readers[read].append(maker)
        self.makers |= dict.fromkeys(maker.outputs, maker)

    def _forget_refusals(self, maker: Node, gone: list[Node], private: set) -> None:
        """Drops refused edges to the last stage: of private values, or all of the maker's if it has no other reader."""
        shared = any(
            not any(reader is removed for removed in gone)
            for output in maker.outputs
            for reader in self.readers.get(output, ())
        )
        eqn_ids = {id(eqn) for eqn in maker.eqns if not shared or private.issuperset(eqn.outvars)}
        edges = self.parts.edges
        edges[:] = [edge for edge in edges if edge.fused or id(edge.producer) not in eqn_ids]
