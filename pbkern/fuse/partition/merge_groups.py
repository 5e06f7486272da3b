"""Whole groups -> one: producers with their only consumer, and siblings that read the same arrays.

After equations have joined the groups of their consumers one by one (partitioner.py), merging lets
contractions share a kernel, as in attention, and lets one pass over an array serve several
reductions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import CONTRACTIONS, is_heavy, nbytes
from pbkern.fuse.graph import Node

from .join_softmax_chains import ScoresLimit, are_scores


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
    parts, node: Node, consumer: Node, limits: MergeLimits, aliases: Sequence[Node] = ()
) -> bool:
    """Makes `node`, the reshapes of its results and `consumer` one group if the model gains."""
    eqns = [*node.eqns, *(eqn for alias in aliases for eqn in alias.eqns), *consumer.eqns]
    inside = (node, consumer, *aliases)
    outputs = consumer.outputs + [
        output
        for output in node.outputs
        if output in parts.results or any(user not in inside for user in parts.users(output))
    ]
    heavy = [
        eqn for eqn in eqns if eqn.primitive.name in CONTRACTIONS and is_heavy(eqn, parts.machine)
    ]
    accept = parts.fits_chain if len(heavy) > 1 else None
    schedule, why = parts.attempt(eqns, outputs, None, node.eqns[-1], accept)
    before = node.seconds + consumer.seconds
    between = sum(nbytes(output.aval) for output in node.outputs if output not in outputs)
    moved = schedule.cost.bytes_moved if schedule is not None else 0
    # What is computed from much smaller arrays or from indices, such as a mask, needs hardly any
    # memory when it is fused.
    expands = limits.expansion * sum(nbytes(read.aval) for read in node.reads()) <= between
    little = are_scores(
        [var for eqn in node.eqns for var in eqn.outvars], node.eqns
    )  # what follows scores is little beside them
    slack = (
        limits.chain_slack
        if expands
        else limits.large_slack
        if between > 0.5 * moved or little
        else parts.limits.tie
    )
    ok = schedule is not None and schedule.cost.seconds < before * slack
    scores = are_scores(node.outputs, sorted(eqns, key=lambda eqn: parts.order[id(eqn)]))
    if schedule is not None and (scores or _chained(parts, node, consumer)):
        # Attention gains, two layers of a network do not: writing and reading the value between, or
        # reading what both read, must outweigh all other traffic.
        shared = sum(nbytes(var.aval) for var in node.reads() & consumer.reads())
        slack = (
            limits.scores_slack
            if scores
            else limits.chain_slack
            if between > moved or shared > 0.5 * moved
            else 1.0
        )
        twice = (
            set(map(id, heavy)) & set(map(id, node.eqns)) & set(map(id, consumer.eqns))
        )  # computed once together
        large = 2 * between > moved or shared > 0.5 * moved or scores or twice
        # If both only stream their operands, as for a single query, no register tile is at stake.
        streams = _streams(parts, node) and _streams(parts, consumer)
        gains = large or streams or schedule.cost.seconds < limits.clear_gain * before
        slack = max(slack, limits.large_slack) if streams else slack
        ok = gains and schedule.cost.seconds < before * slack
        why = why or (
            ""
            if gains
            else "neither the value between two contractions nor a common operand is large"
        )
    parts.record(node.eqns[-1], ok, why, before, schedule, slack)
    if ok:
        for member in (node, *aliases):
            parts.drop(member)
        parts.set_group(consumer, eqns, outputs, schedule)
    return ok


def _streams(parts, group: Node) -> bool:
    """Is it memory-bound: little arithmetic per byte?"""
    cost = group.own_schedule.cost
    return (
        2 * cost.flops / parts.machine.flops("float32")
        < cost.bytes_moved / parts.machine.memory_bandwidth
    )


def _chained(parts, node: Node, consumer: Node) -> bool:
    return all(
        any(
            eqn.primitive.name in CONTRACTIONS and is_heavy(eqn, parts.machine)
            for eqn in group.eqns
        )
        for group in (node, consumer)
    )


@dataclass(frozen=True)
class MergeProducers(MergeLimits):
    """Pulls producer groups into their only consumer where the value between is expensive to store."""

    def __call__(self, parts: Any, options: object) -> Any:
        refused: set[tuple] = set()  # pairs in this state: a pair is tried again when one has grown
        changed = True
        while changed:
            changed = False
            for group in [node for node in parts.nodes if node.kind == "group"]:
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

    def __call__(self, parts: Any, options: object) -> Any:
        groups = [node for node in parts.nodes if node.kind == "group"]
        for first, second in itertools.combinations(groups, 2):
            if (
                first not in parts.nodes
                or second not in parts.nodes
                or not first.reads() & second.reads()
            ):
                continue
            if first.outputs[0].aval.shape != second.outputs[0].aval.shape:
                continue
            if any(
                eqn.primitive.name in CONTRACTIONS
                for group in (first, second)
                for eqn in group.eqns
            ):
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
