"""Simplified jaxpr -> nodes: groups of equations that become one kernel each, and what stays outside them.

Tile the destination, then pull the sources in: equations are visited in reverse and join the group
of their consumers while the modelled time falls. Then whole producer groups merge with contractions
and attention-like chains where storing the value between costs more, and siblings that read the
same arrays merge (merge_groups.py). Every decision is recorded as an Edge for fuse/emit/explain.py.
Prices are the target's (fuse/cost/model.py), blocks fuse/tiling/block_search.py, control flow
control_regions.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from jax.extend import core as jex

from pbkern.core.errors import UnsupportedOp
from pbkern.fuse.access.blocks import Unfusable
from pbkern.fuse.access.rules import ELEMENTWISE, MAX_EXTENT, NeedsWhole, is_long, rules
from pbkern.fuse.access.windows_contractions import partial_reduce_p
from pbkern.fuse.complex.views import VIEWS_OF_COMPLEX
from pbkern.fuse.cost.kinds import CONTRACTIONS, VIEWS, is_heavy, nbytes
from pbkern.fuse.cost.model import Cost, CostModel
from pbkern.fuse.graph import Edge, Node, Partition
from pbkern.fuse.indexing.sorted_prefix import first_sorted_p
from pbkern.fuse.simplify.driver import CONTROL
from pbkern.fuse.tiling.block_search import Schedule
from pbkern.fuse.tiling.one_program import grows
from pbkern.fuse.tiling.search_memo import (
    memoised_extension,
    memoised_growth,
    memoised_search,
    tall_blocks_once,
)

from .control_regions import control_node
from .duplicate_producers import duplicate_masks, share_duplicates
from .final_reductions import join_last_stages
from .join_softmax_chains import join_softmax
from .masked_blocks import trim_masked
from .merge_groups import TIE, merge_producers, merge_siblings
from .move_consumers import sink_consumers
from .rematerialise import rematerialise_large

ALIASES = frozenset(("reshape", "squeeze", "broadcast_in_dim"))

# Most time together, relative to apart: of heavy work with few programs, and of changes of shape.
FEW_PROGRAMS, RESHAPED = 0.95, 1.01

# Most equations that join a group at once; if that fails, each is tried alone.
MANY_ALONG = 64
# Most operations per element of what is duplicated into several groups, and most bytes where many
# equations are at once.
MOST_COPIED, SMALL_COPY = 16, 1 << 12


def has_chained_reductions(eqns: Iterable) -> bool:
    """Does one reduction or contraction depend on another?"""
    after: set = set()
    for e in eqns:
        name = e.primitive.name
        reduces = name.startswith(("reduce_", "arg", "cum", "partial")) or name in CONTRACTIONS
        depends = any(a in after for a in e.invars if not isinstance(a, jex.Literal))
        if reduces and depends:
            return True
        if reduces or depends:
            after.update(e.outvars)
    return False


def is_alias(eqn) -> bool:
    """Does the equation only give an array another shape?"""
    if eqn.primitive.name not in ALIASES:
        return False
    a, b = eqn.invars[0], eqn.outvars[0]
    if isinstance(a, jex.Literal) or math.prod(a.aval.shape) != math.prod(b.aval.shape):
        return False
    return eqn.params.get("dimensions") is None or eqn.primitive.name == "squeeze"


def alone_seconds(eqn, machine: CostModel) -> float:
    """Time of a kernel that does one equation only."""
    atoms = [a for a in eqn.invars if not isinstance(a, jex.Literal)]
    far = sum(nbytes(a.aval) / machine.far_bandwidth(nbytes(a.aval)) for a in atoms)
    far += sum(2 * nbytes(v.aval) / machine.far_bandwidth(nbytes(v.aval)) for v in eqn.outvars)
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


class Partitioner:
    """One run over one jaxpr."""

    def __init__(self, jaxpr: jex.Jaxpr, machine: CostModel, supports: Callable, options) -> None:
        self.jaxpr, self.machine, self.supports, self.options = jaxpr, machine, supports, options
        self.order = {id(e): n for n, e in enumerate(jaxpr.eqns)}
        self.results = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
        self.makers = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.consumers: dict = {}
        for e in jaxpr.eqns:
            for a in e.invars:
                if not isinstance(a, jex.Literal):
                    self.consumers.setdefault(a, []).append(e)
        self.nodes_of: dict[int, list[Node]] = {}  # id(equation) -> nodes that compute it
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []

    # -- bookkeeping

    def add_node(self, node: Node) -> Node:
        self.nodes.append(node)
        for e in node.eqns:
            self.nodes_of.setdefault(id(e), []).append(node)
        return node

    def set_group(self, group: Node, eqns: Iterable, outputs: Iterable, schedule: Schedule) -> None:
        for e in group.eqns:
            self.nodes_of[id(e)].remove(group)
        unique = {id(e): e for e in eqns}
        group.eqns = sorted(unique.values(), key=lambda e: self.order[id(e)])
        group.outputs, group.schedule = list(dict.fromkeys(outputs)), schedule
        for e in group.eqns:
            self.nodes_of.setdefault(id(e), []).append(group)

    def groups(self) -> list[Node]:
        return [n for n in self.nodes if n.kind == "group"]

    def users(self, v) -> list[Node]:
        """Nodes that read `v`.

        A node that computes a copy of the consumer counts, unless it makes `v` as well.
        """
        makers = self.nodes_of.get(id(self.makers.get(v)), ())
        found: dict[int, Node] = {}
        for e in self.consumers.get(v, ()):
            for n in self.nodes_of.get(id(e), ()):
                if n not in makers:
                    found[id(n)] = n
        return list(found.values())

    def successors(self, node: Node) -> list[Node]:
        return [n for v in node.outputs for n in self.users(v) if n is not node]

    def reaches(self, sources: Iterable[Node], goal: Node) -> bool:
        seen, stack = set(), list(sources)
        while stack:
            n = stack.pop()
            if n is goal:
                return True
            if id(n) not in seen:
                seen.add(id(n))
                stack.extend(self.successors(n))
        return False

    def readers(self, group: Node) -> tuple[list[Node], list[Node]]:
        """(nodes that read a group's results, reshapes between them and it that nothing else reads)."""
        users, aliases, waiting = {}, [], self.successors(group)
        while waiting:
            n = waiting.pop()
            if (
                n.kind == "alias"
                and not any(v in self.results for v in n.outputs)
                and n not in aliases
            ):
                aliases.append(n)
                waiting += self.successors(n)
            elif n.kind != "alias" or n not in aliases:
                users[id(n)] = n
        return list(users.values()), aliases

    # -- phase 1: equations in reverse

    def run(self) -> Partition:
        along: list = []  # equations that will join the group of their consumers together
        for eqn in reversed(self.jaxpr.eqns):
            if len(along) < MANY_ALONG and self.rides_along(eqn, along):
                along.append(eqn)
                continue
            self.place_all(along)
            along = []
            self.place(eqn)
        self.place_all(along)
        if not self.options_disable_fusion():
            self.settle()
            duplicate_masks(self)
            share_duplicates(self)
            join_softmax(self)
            merge_producers(self)
            chains = not getattr(self.options, "disable_reduce_reduce_fusion", False)
            if chains:
                rematerialise_large(self)
            sink_consumers(self)
            merge_siblings(self)
            trim_masked(self)
            if chains:
                join_last_stages(self)
        self.settle_products()
        return Partition(self.nodes, self.edges)

    def settle_products(self) -> None:
        """Searches the blocks of products from a second starting point, now that their groups are final."""
        for g in self.nodes:
            if g.kind == "group" and any(e.primitive.name == "dot_general" for e in g.eqns):
                tall = tall_blocks_once(g.eqns, g.schedule, self.machine)
                if tall is not None and tall.cost.seconds < g.seconds:
                    g.schedule = tall

    def settle(self) -> None:
        """Searches the blocks of whole groups: while groups grew, cheap equations kept the blocks so far."""
        for g in self.nodes:
            if g.kind == "group" and len(g.eqns) > 1:
                try:
                    best = memoised_search(g.eqns, g.outputs, self.machine)
                except Unfusable:  # there are no blocks but those that the group grew with
                    continue
                if best.cost.seconds < g.seconds:
                    g.schedule = best

    def options_disable_fusion(self) -> bool:
        return bool(getattr(self.options, "disable_affine_fusion", False))

    def outside_kind(self, eqn) -> tuple[str, str] | None:
        """(kind, reason) of an equation that no group may hold, or None."""
        name = eqn.primitive.name
        if name == "pbkern_kernel":
            return "kernel", "hand-written"
        if eqn.effects:
            return "xla", "it has side effects"
        if name in CONTROL:
            return "control", ""
        if name not in rules and name not in VIEWS_OF_COMPLEX:
            return "xla", "no access rule"
        if any(
            math.prod(v.aval.shape) == 0
            for v in (*eqn.outvars, *eqn.invars)
            if hasattr(v.aval, "shape")
        ):
            return "xla", "an empty array"
        if is_long(eqn):
            return "xla", f"more than {MAX_EXTENT} elements along a dimension"
        if name in VIEWS_OF_COMPLEX:
            return "alias", ""
        if any(
            not hasattr(v.aval, "dtype") or str(v.aval.dtype).startswith(("key<", "complex"))
            for v in eqn.outvars
        ):
            return "xla", f"element type {eqn.outvars[0].aval.dtype}"
        # They become ordinary reductions and sorts in bodies: every target fuses them.
        reason = None if eqn.primitive in (partial_reduce_p, first_sorted_p) else self.supports(eqn)
        return ("xla", reason) if reason else None

    def rides_along(self, eqn, along: list) -> bool:
        """Can cheap arithmetic join its group without being priced? Its readers must be cheap
        arithmetic of the same shape, in one group or in `along`, which will join it. Slices may,
        such as the neighbours of a stencil. For little data, such as random keys, other parts may
        too, and several groups may get copies. To long groups of one program all but products may.

        It costs the group what it costs alone, and saves its result. Pricing the whole group for
        each such equation would be quadratic in the length of a generator's, a polynomial's or a
        filter's arithmetic.
        """
        if len(eqn.outvars) != 1 or self.outside_kind(eqn) is not None:
            return False
        (v,) = eqn.outvars
        consumers = self.consumers.get(v, ())
        if (
            not consumers
            or v in self.results
            or is_heavy(eqn, self.machine)
            or self.options_disable_fusion()
        ):
            return False
        found = [self.nodes_of.get(id(c), []) for c in consumers if not any(c is a for a in along)]
        if along:
            found.append(self.readers_of(along))
        groups = found[0]
        if not groups or any(set(map(id, g)) != set(map(id, groups)) for g in found):
            return False
        if any(g.kind != "group" for g in groups):
            return False
        small = nbytes(v.aval) <= SMALL_COPY
        if all(grows(g.eqns, g.schedule) for g in groups):
            small, like = True, eqn.primitive.name not in CONTRACTIONS
        else:
            like = self.is_like(eqn, consumers, small)
        if len(groups) > 1 and not (small and self.machine.operations(eqn) <= MOST_COPIED):
            return False
        return like and not self.waits(eqn, groups)

    @staticmethod
    def is_like(eqn, consumers: list, small: bool) -> bool:
        """Whether an equation and its readers are cheap arithmetic; of the same shape, unless that is `small`."""
        if small:
            return all(
                e.primitive.name in ELEMENTWISE or e.primitive.name in VIEWS
                for e in (eqn, *consumers)
            )
        shape = eqn.outvars[0].aval.shape
        names = {e.primitive.name for e in (eqn, *consumers)} - {"slice"}
        return names <= ELEMENTWISE and all(c.outvars[0].aval.shape == shape for c in consumers)

    def readers_of(self, along: list) -> list[Node]:
        """The groups that equations of `along` are to join: each gets a copy."""
        return self.nodes_of[id(self.consumers[along[0].outvars[0]][0])]

    def place_all(self, along: list) -> None:
        """Joins the equations of `along` to their groups at once; one by one if that does not gain."""
        if len(along) > 1:
            groups = list(self.readers_of(along))
            found = [
                self.attempt([*along, *g.eqns], g.outputs, g.schedule, along[0])[0] for g in groups
            ]
            before = sum(g.seconds for g in groups) + sum(
                self.alone(e) for e in along if not is_alias(e)
            )
            schedules = [s for s in found if s is not None]
            if (
                len(schedules) == len(groups)
                and sum(s.cost.seconds for s in schedules) <= before * TIE
            ):
                for e in along:
                    self.record(
                        e,
                        True,
                        f"copied into {len(groups)} kernels" if len(groups) > 1 else "",
                        before,
                        schedules[0],
                    )
                for g, schedule in zip(groups, schedules):
                    self.set_group(g, [*along, *g.eqns], g.outputs, schedule)
                return
        for e in along:
            self.place(e)

    def place(self, eqn) -> None:
        kind = self.outside_kind(eqn)
        if kind is not None and kind[0] == "control":
            self.add_node(control_node(self, eqn, partition))
            return
        if kind is not None:
            self.add_node(Node(kind[0], [eqn], list(eqn.outvars), reason=kind[1]))
            return
        users = list({id(n): n for v in eqn.outvars for n in self.users(v)}.values())
        groups = [n for n in users if n.kind == "group"]
        outside = [n for n in users if n.kind != "group"]
        needed = outside or any(v in self.results for v in eqn.outvars)
        if groups and not self.options_disable_fusion() and not self.waits(eqn, groups):
            if self.join(eqn, groups, outside, bool(needed)):
                return
        if is_alias(eqn):
            self.add_node(Node("alias", [eqn], list(eqn.outvars)))
            return
        self.start(eqn)

    def start(self, eqn) -> None:
        """Starts a group with this equation."""
        outputs = [v for v in eqn.outvars if v in self.results or self.users(v)]
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
            c.primitive.name in CONTRACTIONS and is_heavy(c, self.machine)
            for g in groups
            for v in eqn.outvars
            for c in self.through_views(v, g)
        )

    def through_views(self, v, group: Node) -> Iterable:
        """Consumers of `v` in a group, through views and casts."""
        for c in self.consumers.get(v, ()):
            if group in self.nodes_of.get(id(c), ()):
                if c.primitive.name in VIEWS or c.primitive.name == "convert_element_type":
                    yield from self.through_views(c.outvars[0], group)
                else:
                    yield c

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
        for g in groups if len(groups) > 1 else ():
            others = [*outside, *(n for n in groups if n is not g)]
            if not self.reaches(others, g) and self.try_union(eqn, g, True, alone):
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
            return RESHAPED
        few = schedule.cost.programs < 2 * self.machine.cores
        return FEW_PROGRAMS if few and is_heavy(eqn, self.machine) else TIE

    def try_union(self, eqn, group: Node, needed: bool, alone: float) -> bool:
        outputs = group.outputs + (list(eqn.outvars) if needed else [])
        outputs = [v for v in outputs if v in self.results or self.users(v)]
        schedule, why = self.attempt([eqn, *group.eqns], outputs, group.schedule, eqn)
        before = group.seconds + alone
        share = TIE if schedule is None else self.tie(eqn, schedule)
        ok = schedule is not None and schedule.cost.seconds <= before * share
        self.record(eqn, ok, why, before, schedule, share)
        if ok:
            self.set_group(group, [eqn, *group.eqns], outputs, schedule)
        return ok

    def duplicate(self, eqn, groups: list[Node], alone: float) -> bool:
        """A copy in every consumer: for what is cheaper to compute again than to store."""
        if is_heavy(eqn, self.machine) or self.machine.operations(eqn) > MOST_COPIED:
            return False
        found = []
        for g in groups:
            schedule, _ = self.attempt([eqn, *g.eqns], g.outputs, g.schedule, eqn)
            if schedule is None:
                return False
            found.append(schedule)
        before = alone + sum(g.seconds for g in groups)
        after = sum(s.cost.seconds for s in found)
        if after > before:
            return False
        for g, s in zip(groups, found):
            self.set_group(g, [eqn, *g.eqns], g.outputs, s)
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
        if any(self.reaches(self.successors(a), b) for a, b in itertools.permutations(groups, 2)):
            return False
        if any(self.reaches(outside, g) for g in groups):
            return False
        eqns = [eqn, *(e for g in groups for e in g.eqns)]
        outputs = [v for g in groups for v in g.outputs] + (list(eqn.outvars) if needed else [])
        schedule, why = self.attempt(eqns, outputs, None, eqn)
        before = alone + sum(g.seconds for g in groups)
        ok = schedule is not None and schedule.cost.seconds <= before
        self.record(eqn, ok, why or ("consumers side by side" if ok else ""), before, schedule)
        if ok:
            for g in groups[1:]:
                self.drop(g)
            self.set_group(groups[0], eqns, outputs, schedule)
        return ok

    def drop(self, group: Node) -> None:
        self.nodes.remove(group)
        for e in group.eqns:
            self.nodes_of[id(e)].remove(group)

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
        unique = {id(e): e for e in eqns}
        eqns = sorted(unique.values(), key=lambda e: self.order[id(e)])
        if getattr(self.options, "disable_reduce_reduce_fusion", False) and has_chained_reductions(
            eqns
        ):
            return None, "reduce-reduce fusion is disabled"
        try:
            kept = self.grown(eqns, outputs, current, accept)
            if kept is not None:
                return kept, ""
            cheap = new.primitive.name in ELEMENTWISE or new.primitive.name in VIEWS
            if current is not None and cheap and list(outputs) == [v for v, _ in current.outputs]:
                kept = memoised_extension(eqns, current, self.machine)
                taken = kept is not None and (accept is None or accept(kept.cost))
                if taken and kept.cost.recompute <= current.cost.recompute * 1.05 + 0.02:
                    return kept, ""
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
        kept = memoised_growth(eqns, outputs, current, self.machine)
        if kept is None or (accept is not None and not accept(kept.cost)):
            return None
        before = {id(s.eqn) for s in current.requests.steps}
        apart = current.cost.seconds + sum(
            alone_seconds(e, self.machine) for e in eqns if id(e) not in before and not is_alias(e)
        )
        return kept if kept.cost.seconds <= apart * RESHAPED else None

    def fits_chain(self, cost: Cost) -> bool:
        """Two contractions share a program only while what is between them, and their operands, stay in cache."""
        l2 = self.machine.near_bytes
        return cost.scratch <= l2 and cost.working_set - cost.scratch <= 2 * l2

    def record(
        self, eqn, ok: bool, why: str, before: float, schedule: Schedule | None, share: float = TIE
    ) -> None:
        """Notes a decision. share: part of the time apart that one kernel may take at most."""
        after = schedule.cost.seconds if schedule else 0.0
        text = why or ("the model gains" if ok else _refusal(before, after, share))
        self.edges.append(
            Edge(eqn, ok, text, sum(nbytes(v.aval) for v in eqn.outvars), before, after)
        )


def _refusal(before: float, after: float, share: float) -> str:
    """Why two kernels that can be one stay apart: the comparison that decided, with its margin."""
    if after > before or not before:
        return "separate kernels are faster"
    gain, least = 100 * (1 - after / before), 100 * max(1 - share, 0)
    return f"one kernel gains {gain:.1f} %, and has to gain more than {least:.1f} % here"


def partition(
    closed: jex.ClosedJaxpr, machine: CostModel, supports: Callable, options
) -> Partition:
    """Groups the equations of a simplified jaxpr."""
    return Partitioner(closed.jaxpr, machine, supports, options).run()
