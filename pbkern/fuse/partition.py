"""Simplified jaxpr -> nodes: groups of equations that become one kernel each, and what stays outside them.

Tile the destination, then pull the sources in: equations are visited in reverse and join the group of their
consumers as long as the modelled time falls. Then whole producer groups are pulled into contractions and
attention-like chains where storing the value between costs more, and groups that read the same arrays are
laid side by side. Every decision is recorded as an Edge for explain.py. Prices are cost.py, blocks
schedule.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from jax.extend import core as jex

from ..errors import UnsupportedOp
from ..machine import Machine
from ..scatter import SCATTERS
from . import access_scatter, access_shapes  # noqa: F401  (registers access rules)
from .access import ELEMENTWISE, MAX_EXTENT, NeedsWhole, is_long, rules
from .access_windows import partial_reduce_p
from .blocks import Unfusable
from .complex_views import VIEWS_OF_COMPLEX
from .copies import copy_masks, share_copies
from .cost import CONTRACTIONS, VIEWS, Cost, far_bandwidth, is_heavy, nbytes, operations_per_element
from .donation import scatter_into_carries
from .first_sorted import first_sorted_p
from .handover import hand_over
from .last_stages import join_last_stages
from .literals import operands_as_equations, outputs_as_equations
from .masks import trim_masked
from .nodes import Edge, Inner, Node, Partition, order
from .recompute import recompute_large
from .schedule import Schedule, schedule_at, search
from .scores import SCORES_SLACK, are_scores, join_scores
from .simplify import CONTROL
from .stages import split_reductions
from .time_blocks import block_time

ALIASES = frozenset(("reshape", "squeeze", "broadcast_in_dim"))


# One kernel wins a tie with two; heavy work that would be left with few programs must gain this much.
TIE, FEW_PROGRAMS, RESHAPED = 1.002, 0.95, 1.01

# Two contractions with a large value between them share a kernel even at this multiple of the modelled time, and so
# do others at a smaller one: what is not stored cannot fall out of the cache.
LARGE_SLACK = 1.05
CHAIN_SLACK = 1.2
# Where nothing large lies between two contractions, they share what they are made of: at this part of the time apart.
CLEAR_GAIN = 0.75
# Equations that join a group at once, at most: where that fails, each is asked for alone.
MANY_ALONG = 64
# Operations per element of what is copied into several groups, at most, and bytes where many equations are at once.
MOST_COPIED, SMALL_COPY = 16, 1 << 12
# So many updated elements, in place, are less work than starting several programs.
FEW_UPDATES = 1 << 14
# A group expands its inputs if its results are at least this many times as large.
EXPANSION = 4


def named_jaxprs(eqn) -> Iterable[tuple[str, jex.ClosedJaxpr]]:
    """Jaxprs of a control-flow equation by parameter name; those of a tuple are numbered."""
    for name, value in eqn.params.items():
        if isinstance(value, jex.ClosedJaxpr):
            yield name, value
        elif isinstance(value, tuple) and value and isinstance(value[0], jex.ClosedJaxpr):
            yield from ((f"{name}{n}", v) for n, v in enumerate(value))


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


def alone_seconds(eqn, machine: Machine) -> float:
    """Time of a kernel that does one equation only."""
    atoms = [a for a in eqn.invars if not isinstance(a, jex.Literal)]
    far = sum(nbytes(a.aval) / far_bandwidth(nbytes(a.aval), machine) for a in atoms)
    far += sum(2 * nbytes(v.aval) / far_bandwidth(nbytes(v.aval), machine) for v in eqn.outvars)
    work = operations_per_element(eqn, machine) * math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name in CONTRACTIONS:
        compute = work / machine.flops(str(atoms[0].aval.dtype) if atoms else "float32")
    else:
        compute = work / machine.lanes(eqn.outvars[0].aval.dtype.itemsize) / machine.clock_hz / machine.cores
    return max(far, compute) + machine.launch_seconds


class Partitioner:
    """One run over one jaxpr."""

    def __init__(self, jaxpr: jex.Jaxpr, machine: Machine, supports: Callable, options) -> None:
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
        """Nodes that read `v`; a node that computes a copy of the consumer counts, unless it makes `v` as well."""
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

    def needed(self, v, inside: Node) -> bool:
        """Is `v` read outside `inside`?"""
        return v in self.results or any(n is not inside for n in self.users(v))

    # -- phase 1: equations in reverse

    def run(self) -> Partition:
        along: list = []  # equations that wait to join the group of their consumers together
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
            copy_masks(self)
            share_copies(self)
            join_scores(self)
            self.merge_producers()
            chains = not getattr(self.options, "disable_reduce_reduce_fusion", False)
            if chains:
                recompute_large(self)
            hand_over(self)
            self.merge_siblings()
            trim_masked(self)
            if chains:
                join_last_stages(self)
        return Partition(self.nodes, self.edges)

    def settle(self) -> None:
        """Searches the blocks of whole groups: while they grew, cheap equations kept the blocks so far."""
        for g in self.nodes:
            if g.kind == "group" and len(g.eqns) > 1:
                try:
                    best = search(g.eqns, g.outputs, self.machine)
                except Unfusable:  # there are no blocks but those that it grew with
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
        if any(math.prod(v.aval.shape) == 0 for v in (*eqn.outvars, *eqn.invars) if hasattr(v.aval, "shape")):
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
        # They become ordinary reductions and sorts in bodies: they are ours on every target.
        reason = None if eqn.primitive in (partial_reduce_p, first_sorted_p) else self.supports(eqn)
        return ("xla", reason) if reason else None

    def rides_along(self, eqn, along: list) -> bool:
        """Whether cheap arithmetic is read only by such of the same shape in one group, or by `along` that is to join it.
        So may be slices, such as the neighbours of a stencil; of little data, such as random keys, other parts too, and several
        groups may get copies.

        It costs the group what it costs alone and saves its result. Asked one by one, each would price the whole group
        anew: quadratic in the length of a generator's, a polynomial's or a filter's arithmetic.
        """
        if len(eqn.outvars) != 1 or self.outside_kind(eqn) is not None:
            return False
        (v,) = eqn.outvars
        consumers, small = self.consumers.get(v, ()), nbytes(v.aval) <= SMALL_COPY
        if small:
            like = all(e.primitive.name in ELEMENTWISE or e.primitive.name in VIEWS for e in (eqn, *consumers))
        else:
            names = {e.primitive.name for e in (eqn, *consumers)} - {"slice"}
            like = names <= ELEMENTWISE and all(c.outvars[0].aval.shape == v.aval.shape for c in consumers)
        if not consumers or not like or v in self.results or is_heavy(eqn, self.machine) or self.options_disable_fusion():
            return False
        found = [self.nodes_of.get(id(c), []) for c in consumers if not any(c is a for a in along)]
        if along:
            found.append(self.readers_of(along))
        groups = found[0]
        if not groups or any(set(map(id, g)) != set(map(id, groups)) for g in found):
            return False
        if len(groups) > 1 and not (small and operations_per_element(eqn, self.machine) <= MOST_COPIED):
            return False
        return all(g.kind == "group" for g in groups) and not self.waits(eqn, groups)

    def readers_of(self, along: list) -> list[Node]:
        """The groups that equations which ride along are to join: each gets a copy."""
        return self.nodes_of[id(self.consumers[along[0].outvars[0]][0])]

    def place_all(self, along: list) -> None:
        """Joins equations that ride along to their groups at once; one by one where that does not gain."""
        if len(along) > 1:
            groups = list(self.readers_of(along))
            found = [self.attempt([*along, *g.eqns], g.outputs, g.schedule, along[0])[0] for g in groups]
            before = sum(g.seconds for g in groups) + sum(self.alone(e) for e in along if not is_alias(e))
            schedules = [s for s in found if s is not None]
            if len(schedules) == len(groups) and sum(s.cost.seconds for s in schedules) <= before * TIE:
                for e in along:
                    self.record(e, True, f"copied into {len(groups)} kernels" if len(groups) > 1 else "", before, schedules[0])
                for g, schedule in zip(groups, schedules):
                    self.set_group(g, [*along, *g.eqns], g.outputs, schedule)
                return
        for e in along:
            self.place(e)

    def place(self, eqn) -> None:
        kind = self.outside_kind(eqn)
        if kind is not None and kind[0] == "control":
            self.add_node(self.control(eqn))
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

    def control(self, eqn) -> Node:
        """Control flow is ours if all of its body is."""
        found = {}
        for name, closed in named_jaxprs(eqn):
            closed = operands_as_equations(outputs_as_equations(split_reductions(closed, self.machine)))
            if closed.consts:
                return Node("xla", [eqn], list(eqn.outvars), reason="its body holds array constants")
            parts = partition(closed, self.machine, self.supports, self.options)
            bad = next((n for n in parts.nodes if n.kind == "xla"), None)
            if bad is not None:
                reason = f"{bad.eqns[0].primitive.name} in its body: {bad.reason}"
                return Node("xla", [eqn], list(eqn.outvars), reason=reason)
            found[name] = Inner(closed.jaxpr, parts, order(parts.nodes, closed.jaxpr.invars))
        if not all(self.scatters_in_place(eqn, name, inner) for name, inner in found.items()):
            return Node("xla", [eqn], list(eqn.outvars), reason="a scatter in its body would copy its operand")
        if any(isinstance(a, jex.Literal) for a in eqn.invars):
            return Node("xla", [eqn], list(eqn.outvars), reason="an operand is a literal")
        return Node("control", [eqn], list(eqn.outvars), inner=found | self.time_blocks(eqn, found))

    def scatters_in_place(self, eqn, name: str, inner: Inner) -> bool:
        """Whether scatters into operands of a body update them where they lie, as XLA does, instead of copying them once per
        step.
        """
        nodes = inner.partition.nodes
        nested = [g for n in nodes for i in n.inner.values() for g in i.partition.groups()]
        if any(n.scatters() and n.schedule.aliases for n in nested):
            return False  # that loop starts with a copy
        given = set(inner.jaxpr.invars)
        groups = [n for n in nodes if n.kind == "group" and any(
            e.primitive.name in SCATTERS and e.invars[0] in given for e in n.eqns)]  # fmt: skip
        scatter_into_carries(eqn, name, inner)
        for n in groups:
            few = all(e.invars[2].aval.size <= FEW_UPDATES for e in n.eqns if e.primitive.name in SCATTERS)
            if few and n.schedule.aliases:  # nothing is copied: more programs than one would be started for nothing
                made = [v for v, _ in n.schedule.outputs]
                whole = schedule_at(n.eqns, made, made[0].aval.shape, self.machine)
                n.schedule = n.schedule if whole is None else whole
        scatter_into_carries(eqn, name, inner)
        return all(n.schedule.aliases for n in groups)

    def time_blocks(self, eqn, found: dict[str, Inner]) -> dict[str, Inner]:
        """{"jaxpr": several steps of a loop's body in one kernel, "rest": what remains}, where that pays."""
        p = eqn.params
        if eqn.primitive.name != "scan" or self.options_disable_fusion():
            return {}
        inner = found["jaxpr"]
        walks = len(eqn.invars) > p["num_consts"] + p["num_carry"]
        if len(inner.jaxpr.outvars) != p["num_carry"] or walks and p["reverse"]:
            return {}
        body = jex.ClosedJaxpr(inner.jaxpr, ())
        blocks = block_time(body, inner.partition, (p["num_consts"], p["num_carry"]), p["length"], self.machine)
        if blocks is None:
            return {}
        return {"jaxpr": blocks.main} | ({"rest": blocks.rest} if blocks.rest else {})

    def start(self, eqn) -> None:
        """A group of its own."""
        outputs = [v for v in eqn.outvars if v in self.results or self.users(v)]
        try:
            self.add_node(Node("group", [eqn], outputs, search([eqn], outputs, self.machine)))
        except (Unfusable, UnsupportedOp, NotImplementedError) as e:
            self.add_node(Node("xla", [eqn], list(eqn.outvars), reason=str(e)))

    def waits(self, eqn, groups) -> bool:
        """Elementwise producers of a contraction wait: they may be the epilogue of an earlier one (phase 2
        decides).
        """
        if eqn.primitive.name in VIEWS or eqn.primitive.name == "convert_element_type":
            return False
        return any(
            c.primitive.name in CONTRACTIONS and is_heavy(c, self.machine)
            for g in groups
            for v in eqn.outvars
            for c in self.through_views(v, g)
        )

    def through_views(self, v, group: Node) -> Iterable:
        """Consumers of `v` in a group, looking through views and casts."""
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
        # As one more result of a group that the others do not lead to.
        for g in groups if len(groups) > 1 else ():
            others = [*outside, *(n for n in groups if n is not g)]
            if not self.reaches(others, g) and self.try_union(eqn, g, True, alone):
                return True
        return False

    def alone(self, eqn) -> float:
        """Time of a kernel of its own: searched where the arithmetic counts, else estimated."""
        if is_heavy(eqn, self.machine):
            try:
                return search([eqn], list(eqn.outvars), self.machine).cost.seconds
            except (Unfusable, UnsupportedOp, NotImplementedError):
                pass
        return alone_seconds(eqn, self.machine)

    def tie(self, eqn, schedule: Schedule) -> float:
        """The part of the time apart that is accepted together. One kernel instead of two wins a tie, but not where heavy
        work would be left with hardly a program per core: it may find better company further up. A reshape costs nothing
        apart, and what makes its operand can only follow where it went.
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
        ok = schedule is not None and schedule.cost.seconds <= before * self.tie(eqn, schedule)
        self.record(eqn, ok, why, before, schedule)
        if ok:
            self.set_group(group, [eqn, *group.eqns], outputs, schedule)
        return ok

    def duplicate(self, eqn, groups: list[Node], alone: float) -> bool:
        """A copy in every consumer: for what is cheaper to compute again than to store."""
        if is_heavy(eqn, self.machine) or operations_per_element(eqn, self.machine) > MOST_COPIED:
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
            Edge(eqn, True, f"copied into {len(groups)} kernels", nbytes(eqn.outvars[0].aval), before, after)
        )
        return True

    def merge_and_join(self, eqn, groups, outside, needed, alone) -> bool:
        """Lays the consuming groups side by side, with the producer in front."""
        if any(self.reaches(self.successors(a), b) for a, b in itertools.permutations(groups, 2)):
            return False
        if any(self.reaches(outside, g) for g in groups):
            return False
        eqns = [eqn, *(e for g in groups for e in g.eqns)]
        outputs = [v for g in groups for v in g.outputs] + (list(eqn.outvars) if needed else [])
        schedule, why = self.attempt(eqns, outputs, None, eqn)
        before = alone + sum(g.seconds for g in groups)
        ok = schedule is not None and schedule.cost.seconds <= before
        self.record(eqn, ok, why or "consumers side by side", before, schedule)
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
        self, eqns, outputs, current: Schedule | None, new, accept=lambda cost: True
    ) -> tuple[Schedule | None, str]:
        """(schedule, reason of failure). Cheap equations keep the group's blocks; others search anew."""
        unique = {id(e): e for e in eqns}
        eqns = sorted(unique.values(), key=lambda e: self.order[id(e)])
        if getattr(self.options, "disable_reduce_reduce_fusion", False) and has_chained_reductions(eqns):
            return None, "reduce-reduce fusion is disabled"
        try:
            cheap = new.primitive.name in ELEMENTWISE or new.primitive.name in VIEWS
            if current is not None and cheap and list(outputs) == [v for v, _ in current.outputs]:
                kept = schedule_at(eqns, outputs, current.blocks, self.machine)
                if kept is not None and kept.cost.recompute <= current.cost.recompute * 1.05 + 0.02:
                    return kept, ""
            return search(eqns, outputs, self.machine, accept), ""
        except NeedsWhole:
            try:
                return search(eqns, outputs, self.machine, accept), ""
            except Unfusable as e:
                return None, str(e)
        except Unfusable as e:
            return None, str(e)
        except (UnsupportedOp, NotImplementedError) as e:
            return None, str(e).splitlines()[0]

    def record(self, eqn, ok: bool, why: str, before: float, schedule: Schedule | None) -> None:
        after = schedule.cost.seconds if schedule else 0.0
        text = why or ("the model gains" if ok else "separate kernels are faster")
        self.edges.append(Edge(eqn, ok, text, sum(nbytes(v.aval) for v in eqn.outvars), before, after))

    # -- phase 2: whole groups

    def merge_producers(self) -> None:
        """Pulls producer groups into their only consumer where the value between is dear to store."""
        refused: set[tuple] = set()  # pairs as they are: one is tried again when it has grown
        changed = True
        while changed:
            changed = False
            for group in [n for n in self.nodes if n.kind == "group"]:
                users, aliases = self.readers(group)
                if len(users) != 1 or group not in self.nodes:
                    continue
                (consumer,) = users
                pair = tuple(tuple(map(id, n.eqns)) for n in (group, consumer))
                if consumer.kind != "group" or pair in refused:
                    continue
                if self.merge(group, consumer, aliases):
                    changed = True
                else:
                    refused.add(pair)

    def readers(self, group: Node) -> tuple[list[Node], list[Node]]:
        """(nodes that read a group's results, reshapes that nobody else reads between them and it)."""
        users, aliases, waiting = {}, [], self.successors(group)
        while waiting:
            n = waiting.pop()
            if n.kind == "alias" and not any(v in self.results for v in n.outputs) and n not in aliases:
                aliases.append(n)
                waiting += self.successors(n)
            elif n.kind != "alias" or n not in aliases:
                users[id(n)] = n
        return list(users.values()), aliases

    def merge(self, a: Node, b: Node, aliases: Sequence[Node] = ()) -> bool:
        """Makes `a`, the reshapes of its results and `b` one group if the model gains."""
        eqns = [*a.eqns, *(e for n in aliases for e in n.eqns), *b.eqns]
        inside = (a, b, *aliases)
        outputs = b.outputs + [v for v in a.outputs if v in self.results or any(n not in inside for n in self.users(v))]
        heavy = [e for e in eqns if e.primitive.name in CONTRACTIONS and is_heavy(e, self.machine)]
        accept = self.fits_chain if len(heavy) > 1 else lambda cost: True
        schedule, why = self.attempt(eqns, outputs, None, a.eqns[-1], accept)
        before = a.seconds + b.seconds
        between = sum(nbytes(v.aval) for v in a.outputs if v not in outputs)
        moved = schedule.cost.bytes_moved if schedule is not None else 0
        # What is made of much smaller arrays or of indices, such as a mask, needs hardly any memory when it is fused.
        expands = EXPANSION * sum(nbytes(v.aval) for v in a.reads()) <= between
        little = are_scores([v for e in a.eqns for v in e.outvars], a.eqns)  # what follows scores is, beside them
        slack = CHAIN_SLACK if expands else LARGE_SLACK if between > 0.5 * moved or little else TIE
        ok = schedule is not None and schedule.cost.seconds < before * slack
        scores = are_scores(a.outputs, sorted(eqns, key=lambda e: self.order[id(e)]))
        if schedule is not None and (scores or self.chained(a, b)):
            # Attention gains, two layers of a network do not: the passes over the value between, which is written and
            # read, or over what both read must outweigh all other traffic.
            shared = sum(nbytes(v.aval) for v in a.reads() & b.reads())
            slack = SCORES_SLACK if scores else CHAIN_SLACK if between > moved or shared > 0.5 * moved else 1.0
            twice = set(map(id, heavy)) & set(map(id, a.eqns)) & set(map(id, b.eqns))  # computed once together
            large = 2 * between > moved or shared > 0.5 * moved or scores or twice
            # Where both only stream their operands, as for a single query, no register tile is at stake.
            streams = self.streams(a) and self.streams(b)
            gains = large or streams or schedule.cost.seconds < CLEAR_GAIN * before
            ok = gains and schedule.cost.seconds < before * (max(slack, LARGE_SLACK) if streams else slack)
            why = why or ("" if ok else "neither the value between two contractions nor a common operand is large")
        self.record(a.eqns[-1], ok, why, before, schedule)
        if ok:
            for n in (a, *aliases):
                self.drop(n)
            self.set_group(b, eqns, outputs, schedule)
        return ok

    def streams(self, group: Node) -> bool:
        """Is its arithmetic little beside its bytes?"""
        c = group.schedule.cost
        return 2 * c.flops / self.machine.flops("float32") < c.bytes_moved / self.machine.dram_bandwidth

    def fits_chain(self, cost: Cost) -> bool:
        """Two contractions share a program only while what lies between them, and their operands, stay in
        cache.
        """
        l2 = self.machine.l2_bytes
        return cost.scratch <= l2 and cost.working_set - cost.scratch <= 2 * l2

    def chained(self, a: Node, b: Node) -> bool:
        return all(
            any(e.primitive.name in CONTRACTIONS and is_heavy(e, self.machine) for e in g.eqns)
            for g in (a, b)
        )

    def merge_siblings(self) -> None:
        """Groups that read the same array with the same root shape become one where that reads it once; one may read results
        of the other.
        """
        groups = [n for n in self.nodes if n.kind == "group"]
        for a, b in itertools.combinations(groups, 2):
            if a not in self.nodes or b not in self.nodes or not a.reads() & b.reads():
                continue
            if a.outputs[0].aval.shape != b.outputs[0].aval.shape:
                continue
            if any(e.primitive.name in CONTRACTIONS for g in (a, b) for e in g.eqns):
                continue
            if self.reaches(self.successors(b), a):
                a, b = b, a
            if self.reaches(self.successors(b), a) or self.reaches([n for n in self.successors(a) if n is not b], b):
                continue
            self.merge(a, b)


def partition(closed: jex.ClosedJaxpr, machine: Machine, supports: Callable, options) -> Partition:
    """Groups the equations of a simplified jaxpr."""
    return Partitioner(closed.jaxpr, machine, supports, options).run()
