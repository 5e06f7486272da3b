"""Whole groups -> one: producers with their only consumer, and siblings that read the same arrays.

After equations have joined the groups of their consumers one by one (grow_groups.py), merging lets
contractions share a kernel, as in attention, and lets one pass over an array serve several
reductions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import CONTRACTIONS, nbytes
from pbkern.fuse.cost.model import Cost
from pbkern.fuse.graph import Node
from pbkern.fuse.tiling.one_program import grows

from .join_softmax_chains import ScoresLimit, are_scores
from .partitioner import Partitioner


@dataclass(frozen=True)
class MergeLimits(ScoresLimit):
    """When two groups become one: the most time together, relative to apart."""

    large_slack: float = threshold(
        1.05,
        "with a large value between them: what is not stored cannot fall out of the cache. Source: not recorded",
    )
    chain_slack: float = threshold(
        1.2,
        "of two contractions with a large value between them, for the same reason. Source: not recorded",
    )
    clear_gain: float = threshold(
        0.75, "of two contractions that share their operands, without a large value between them"
    )
    expansion: int = threshold(
        4, "times that results are larger than inputs, of a group that expands its inputs"
    )


def merge(
    parts: Partitioner,
    node: Node,
    consumer: Node,
    limits: MergeLimits,
    aliases: Sequence[Node] = (),
) -> bool:
    """Makes two groups one if the model gains.

    Args:
      parts: the partition, which changes.
      node: the first group.
      consumer: the second, which may read the first's results.
      limits: the pass's.
      aliases: reshapes of the first group's results, which become a part of the group, too.

    Returns:
      Whether they are one group now.
    """
    eqns = [*node.eqns, *(eqn for alias in aliases for eqn in alias.eqns), *consumer.eqns]
    inside = (node, consumer, *aliases)
    outputs = consumer.outputs + [
        output
        for output in node.outputs
        if output in parts.results or any(user not in inside for user in parts.users(output))
    ]
    num_products = sum(map(parts.is_heavy_product, eqns))
    accept = parts.fits_chain if num_products > 1 else None
    # A long group of one program grows; blocks of others are searched anew.
    current = consumer.own_schedule if grows(eqns, consumer.own_schedule) else None
    schedule, why = parts.attempt(eqns, outputs, current, node.eqns[-1], accept)
    apart = node.seconds + consumer.seconds
    slack = parts.limits.tie
    if schedule is not None:
        between = sum(nbytes(output.aval) for output in node.outputs if output not in outputs)
        in_order = sorted(eqns, key=lambda eqn: parts.order[id(eqn)])
        gives_scores = are_scores(node.outputs, in_order)
        if gives_scores or all(map(parts.has_heavy_product, (node, consumer))):
            chain = _Chain(parts, node, consumer, limits, schedule.cost, between, gives_scores)
            slack = chain.slack()
            if not chain.may_gain():
                why = "neither the value between two contractions nor a common operand is large"
        else:
            slack = _slack(parts, node, limits, schedule.cost, between)
    ok = schedule is not None and not why and schedule.cost.seconds < apart * slack
    parts.record(node.eqns[-1], ok, why, apart, schedule, slack)
    if schedule is not None and ok:
        for member in (node, *aliases):
            parts.drop(member)
        parts.set_group(consumer, eqns, outputs, schedule)
    return ok


def _slack(parts: Partitioner, node: Node, limits: MergeLimits, cost: Cost, between: int) -> float:
    """The most time of one group that is accepted, over that of `node` and its consumer.

    Args:
      parts: the partition.
      node: the producer.
      limits: the pass's.
      cost: of the one group.
      between: bytes that are not stored in one group.
    """
    # A value that is computed from much smaller arrays or from indices, such as a mask, needs hardly any memory when
    # it is fused.
    if limits.expansion * sum(nbytes(read.aval) for read in node.reads()) <= between:
        return limits.chain_slack
    has_scores = are_scores([var for eqn in node.eqns for var in eqn.outvars], node.eqns)
    # Operations that follow scores cost little beside them.
    return (
        limits.large_slack if between > 0.5 * cost.bytes_moved or has_scores else parts.limits.tie
    )


@dataclass(frozen=True, eq=False)
class _Chain:
    """Two groups that are to be one, with a contraction each, or the first with scores of attention.

    Attention gains, two layers of a network do not: writing and reading the value between, or reading what both read, must
    outweigh all other traffic.

    Attributes:
      parts: the partition.
      node, consumer: the groups.
      limits: the pass's.
      cost: of the one group.
      between: bytes that are not stored in one group.
      gives_scores: whether the first group's results are scores.
    """

    parts: Partitioner
    node: Node
    consumer: Node
    limits: MergeLimits
    cost: Cost
    between: int
    gives_scores: bool

    @property
    def shares_most(self) -> bool:
        """Whether arrays that both groups read are more than half of the traffic."""
        shared = self.node.reads() & self.consumer.reads()
        return sum(nbytes(var.aval) for var in shared) > 0.5 * self.cost.bytes_moved

    @property
    def streams(self) -> bool:
        """Whether both groups only stream their operands, as for a single query: no register tile is at stake."""
        return all(_is_memory_bound(self.parts, group) for group in (self.node, self.consumer))

    def slack(self) -> float:
        """The most time of one group that is accepted, over that of both."""
        if self.gives_scores:
            slack = self.limits.scores_slack
        elif self.between > self.cost.bytes_moved or self.shares_most:
            slack = self.limits.chain_slack
        else:
            slack = 1.0
        return max(slack, self.limits.large_slack) if self.streams else slack

    def may_gain(self) -> bool:
        """Whether one group saves much traffic or work, or is clearly faster by the model."""
        ids = set(map(id, self.node.eqns)) & set(map(id, self.consumer.eqns))
        computes_once = any(
            id(eqn) in ids and self.parts.is_heavy_product(eqn) for eqn in self.node.eqns
        )
        is_large = 2 * self.between > self.cost.bytes_moved or self.shares_most
        if is_large or self.gives_scores or computes_once or self.streams:
            return True
        apart = self.node.seconds + self.consumer.seconds
        return self.cost.seconds < self.limits.clear_gain * apart


def _is_memory_bound(parts: Partitioner, group: Node) -> bool:
    """Whether a group's arithmetic would take less than half of the time of its traffic."""
    cost = group.own_schedule.cost
    return (
        2 * cost.flops / parts.machine.flops("float32")
        < cost.bytes_moved / parts.machine.memory_bandwidth
    )


def _pull_at_once(parts: Partitioner, consumer: Node) -> bool:
    """Makes a long group of one program and all that is computed for it alone one group, if the model gains; tells whether.

    Each attempt takes time for the whole group: one by one, the gates of a circuit took a quarter of a first call. Groups with
    products that are worth a kernel are left to `merge`.
    """
    if consumer not in parts.nodes or not grows(consumer.eqns, consumer.own_schedule):
        return False
    inside = _computed_for(parts, consumer)
    producers = [node for node in inside if node.kind == "group"]
    if len(producers) < 2:
        return False
    outputs = consumer.outputs + [
        output for node in producers for output in node.outputs if output in parts.results
    ]
    eqns = [eqn for node in (*inside, consumer) for eqn in node.eqns]
    last = producers[-1].eqns[-1]
    schedule, why = parts.attempt(eqns, outputs, consumer.own_schedule, last)
    apart = consumer.seconds + sum(node.seconds for node in producers)
    if schedule is None or schedule.cost.seconds >= apart * parts.limits.tie:
        return False
    for node in producers:
        parts.record(node.eqns[-1], True, why, apart, schedule)
    for node in inside:
        parts.drop(node)
    parts.set_group(consumer, eqns, outputs, schedule)
    return True


def _computed_for(parts: Partitioner, consumer: Node) -> list[Node]:
    """Groups, and reshapes behind them, whose results only `consumer` or others of them read."""
    inside: list[Node] = []
    waiting = [group for group in reversed(parts.groups()) if group is not consumer]
    while True:
        joined = []
        for group in waiting:
            users, aliases = parts.readers(group)
            if (
                users
                and all(user is consumer or user in inside for user in users)
                and not parts.has_heavy_product(group)
            ):
                joined.append(group)
                inside += [group, *(alias for alias in aliases if alias not in inside)]
        if not joined:
            return inside
        waiting = [group for group in waiting if group not in joined]


@dataclass(frozen=True)
class MergeProducers(MergeLimits):
    """Pulls producer groups into their only consumer where the value between is expensive to store."""

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        refused: set[tuple] = set()  # pairs in this state: a pair is tried again when one has grown
        changed = True
        while changed:
            pulled = [_pull_at_once(parts, group) for group in parts.groups()]
            changed = any(pulled)
            for group in parts.groups():
                users, aliases = parts.readers(group)
                if len(users) != 1 or group not in parts.nodes:
                    continue
                (consumer,) = users
                pair = tuple(tuple(map(id, node.eqns)) for node in (group, consumer))
                if consumer.kind != "group" or pair in refused:
                    continue
                if merge(parts, group, consumer, self, aliases):
                    changed = True
                else:
                    refused.add(pair)
        return parts


@dataclass(frozen=True)
class MergeSiblings(MergeLimits):
    """Merges groups that read the same array with the same root shape, if the array is then read once.

    One may read results of the other.
    """

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        groups = [
            node
            for node in parts.nodes
            if node.kind == "group"
            and not any(eqn.primitive.name in CONTRACTIONS for eqn in node.eqns)
        ]
        for first, second in itertools.combinations(groups, 2):
            if (
                first not in parts.nodes
                or second not in parts.nodes
                or not first.reads() & second.reads()
            ):
                continue
            if first.outputs[0].aval.shape != second.outputs[0].aval.shape:
                continue
            if parts.reaches(parts.successors(second), first):
                first, second = second, first
            if parts.reaches(parts.successors(second), first) or parts.reaches(
                [successor for successor in parts.successors(first) if successor is not second],
                second,
            ):
                continue
            merge(parts, first, second, self)
        return parts
