"""Rematerialisation: large values between groups -> computed again in every reader, where that costs less.

A score matrix that a gradient reads three times is written once and read three times. From its
operands, which are much smaller, each reader can compute the blocks that it needs while they are in
cache. All groups that make or read such values are rebuilt from small values (operands, statistics
of rows), groups that make the same values are joined, and the result is kept if the model prefers
it. Works on the groups of partitioner.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import atoms, leading_to
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import CONTRACTIONS, is_heavy, nbytes
from pbkern.fuse.graph import Edge, Node
from pbkern.fuse.tiling.schedule import Schedule

from .merge_groups import MergeLimits, merge
from .partitioner import Partitioner


@dataclass(frozen=True)
class Rematerialise(MergeLimits):
    """Changes the groups of `parts`, a Partitioner, where the model gains."""

    recomputed_smaller: int = threshold(
        4, "times fewer elements of values from which a value is computed again"
    )
    cached_share: float = threshold(
        0.25,
        "part of the last-level cache: values up to it stay there between two kernels",
    )
    # The model overestimates chains of products in one kernel, compared with arrays that go to
    # memory: attention's gradient without score matrices, predicted at 1.3 to 1.4 times the time,
    # takes 0.75 to 1.2 times. And it needs no memory: 4 heads of 4096 positions, predicted at 1.85
    # times, take 517 ms instead of 371 (jax.jit 1398), but 2 MB instead of 528.
    slack: float = threshold(2.0, "modelled time afterwards, relative to before, at most")
    # Zen 3, a last layer of 32,000 words: of 256 tokens, predicted at 1.64 times, it takes 188 ms instead of 101 without 33 MB
    # of scores, beside 66 MB of weights and their gradient; of 100 tokens, at 1.61, 30 instead of 21 without 26 beside 25.
    # Scores of attention are 2 times (512 positions of 64 elements) to 16 times (4096) as large.
    worth_all: float = threshold(
        4.0,
        "times larger than operands and results: values whose memory is worth the whole slack; of smaller ones, a part of it",
    )

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        stored = list(_stored(parts, self.cached_share))
        makers, indices = _makers(parts), _made_of_indices(parts)
        large = [
            value
            for value in stored
            if _cone(value, makers, indices, self.recomputed_smaller) is not None
        ]
        # What is left beside them, such as results of products, is little memory where scores are large.
        are_most = 2 * _bytes(large) >= _bytes(stored)
        for values in [large, *([single] for single in large if len(large) > 1)] if large else []:
            if not all(value in set(_stored(parts, self.cached_share)) for value in values):
                continue
            before, state = _seconds(parts), _State(parts)
            if _rebuild(parts, set(values), self.recomputed_smaller):
                _join_sharers(parts, self)
                after = _seconds(parts)
                eqn = next(
                    candidate
                    for candidate in parts.jaxpr.eqns
                    if any(var in values for var in candidate.outvars)
                )
                saved = _bytes(values)
                # With only some of them gone, the program still needs the memory.
                is_all = len(values) == len(large) and are_most
                share = saved / (self.worth_all * max(_bytes(_held(parts)), 1)) if is_all else 0.0
                if after <= before * (1 + (self.slack - 1) * min(share, 1.0)):
                    parts.edges.append(
                        Edge(eqn, True, "computed again by its readers", saved, before, after)
                    )
                    continue
                parts.edges.append(
                    Edge(eqn, False, "storing is faster than computing again", saved, before, after)
                )
            state.restore(parts)
        return parts


def _seconds(parts) -> float:
    return sum(node.seconds for node in parts.nodes if node.kind == "group")


def _bytes(values: Iterable) -> int:
    return sum(nbytes(value.aval) for value in values)


def _held(parts) -> set:
    """Operands and results of the program."""
    return {*parts.jaxpr.invars, *parts.jaxpr.constvars, *parts.results}


def _stored(parts, cached_share: float) -> Iterator:
    """Values too large for the cache that only groups make and read."""
    limit = cached_share * parts.machine.shared_bytes
    for node in parts.nodes:
        for output in node.outputs if node.kind == "group" else ():
            if (
                nbytes(output.aval) > limit
                and output not in parts.results
                and all(user.kind == "group" for user in parts.users(output))
            ):
                yield output


class _State:
    """Snapshot of the partitioner, for going back."""

    def __init__(self, parts) -> None:
        self.groups = [(node, node.eqns, node.outputs, node.schedule) for node in parts.nodes]
        self.nodes_of = {k: list(members) for k, members in parts.nodes_of.items()}
        self.edges = len(parts.edges)

    def restore(self, parts) -> None:
        parts.nodes = [n for n, *_ in self.groups]
        for n, eqns, outputs, schedule in self.groups:
            n.eqns, n.outputs, n.schedule = eqns, outputs, schedule
        parts.nodes_of = self.nodes_of


# ---- groups without the large values


def _rebuild(parts, values: set, times_smaller: int) -> bool:
    """Rebuilds every group that makes or reads `values` from small values; False if that is impossible."""
    makers = _makers(parts)
    indices = _made_of_indices(parts)
    cones: dict = {}
    for value in values:
        cone = _cone(value, makers, indices, times_smaller)
        if cone is None:
            return False
        cones[value] = cone
    touched = [
        node
        for node in parts.nodes
        if node.kind == "group" and (values & node.reads() or values & set(node.outputs))
    ]
    inner = {var for cone in cones.values() for eqn in cone for var in eqn.outvars}
    stops = {atom for cone in cones.values() for eqn in cone for atom in atoms(eqn)} - inner
    touched = _with_makers(parts, touched, stops)
    # Equations of each group, and the results that others need.
    wanted = []
    for group in touched:
        computed = dict.fromkeys(var for eqn in group.eqns for var in eqn.outvars)
        outputs = [output for output in group.outputs if output not in values] + [
            var for var in computed if var in stops and var not in group.outputs
        ]
        known = {
            id(equation): equation
            for equation in (
                *group.eqns,
                *(
                    equation
                    for value in values & (group.reads() | computed.keys())
                    for equation in cones[value]
                ),
            )
        }
        wanted.append((group, list(known.values()), outputs))
    wanted = [(n, eqns, _once(n, outputs, wanted)) for n, eqns, outputs in wanted]
    return _apply(parts, wanted)


def _with_makers(parts, touched: list[Node], stops: set) -> list[Node]:
    """`touched`, and groups that make one of `stops` for themselves alone, as one that makes a mask makes its operands."""
    given = {output for node in parts.nodes for output in node.outputs}
    hidden = stops - given - {var for node in touched for eqn in node.eqns for var in eqn.outvars}
    more = []
    for node in parts.groups():
        computed = hidden & {var for eqn in node.eqns for var in eqn.outvars}
        if computed:
            more.append(node)
            hidden -= computed
    return [node for node in parts.nodes if node in touched or node in more]


def _makers(parts) -> dict:
    """Value -> the equation that computes it in a group."""
    return {
        var: eqn
        for node in parts.nodes
        if node.kind == "group"
        for eqn in node.eqns
        for var in eqn.outvars
    }


def _made_of_indices(parts) -> set:
    """Values that depend on no operand, such as masks."""
    variables: set = set()
    for eqn in parts.jaxpr.eqns:
        if not eqn.effects and all(
            isinstance(var, jex.Literal) or var in variables for var in eqn.invars
        ):
            variables.update(eqn.outvars)
    return variables


def _cone(var, makers: dict, indices: set, times_smaller: int) -> list | None:
    """Backward slice: equations that compute `var` from much smaller values and indices.

    Products may also combine with values that are in memory anyway, such as biases of scores. None
    if it needs other large values.
    """
    limit, waiting, eqns, given = math.prod(var.aval.shape) / times_smaller, [var], {}, False
    while waiting:
        eqn = makers.get(waiting.pop())
        given |= eqn is None
        if eqn is None or id(eqn) in eqns:
            continue
        eqns[id(eqn)] = eqn
        for atom in atoms(eqn):
            if math.prod(array_aval(atom).shape) > limit or (atom in indices and atom in makers):
                waiting.append(atom)
    products = any(equation.primitive.name in CONTRACTIONS for equation in eqns.values())
    return None if given and not products else list(eqns.values())


def _needed(parts, eqns: Iterable, outputs: Iterable) -> list:
    """Equations of `eqns` that `outputs` need, in order."""
    return leading_to(sorted(eqns, key=lambda eqn: parts.order[id(eqn)]), outputs)


def _once(node: Node, outputs: list, wanted: list) -> list:
    """`outputs` without those that an earlier group gives."""
    earlier = itertools.takewhile(lambda each: each[0] is not node, wanted)
    given = {value for _, _, vs in earlier for value in vs}
    return [output for output in outputs if output not in given]


def _apply(parts, wanted: list) -> bool:
    for node, eqns, outputs in wanted:
        if not outputs:
            parts.drop(node)
            continue
        new_groups = _groups(parts, eqns, outputs)
        if not new_groups:
            return False
        parts.set_group(node, *new_groups[0])
        for each in new_groups[1:]:
            parts.set_group(parts.add_node(Node("group", [])), *each)
    groups = [member for member in parts.nodes if member.kind == "group"]
    for group in groups:
        if not any(output in parts.results or parts.users(output) for output in group.outputs):
            parts.drop(group)
    groups = [member for member in parts.nodes if member.kind == "group"]
    return not any(parts.reaches(parts.successors(member), member) for member in groups)


_Group = tuple[list, list, Schedule]  # equations that the outputs need, outputs, their schedule


def _groups(parts, eqns: list, outputs: list) -> list[_Group]:
    """Groups that make `outputs`: one, or as few as possible; [] if one of them cannot be a kernel.

    Outputs without heavy equations, such as operands in another type, have a group of their own: readers of them would wait
    for the others, and could not be joined with what makes these.
    """
    light = [
        output
        for output in outputs
        if not any(is_heavy(eqn, parts.machine) for eqn in _needed(parts, eqns, [output]))
    ]
    if 0 < len(light) < len(outputs):
        heavy = [output for output in outputs if output not in light]
        parted = [_groups(parts, eqns, some) for some in (heavy, light)]
        return [group for groups in parted for group in groups] if all(parted) else []
    together = _scheduled(parts, eqns, outputs)
    if together is not None:
        return [together]
    groups: list[_Group] = []
    for output in outputs if len(outputs) > 1 else ():
        joined = (
            (n, _scheduled(parts, eqns, [*vs, output])) for n, (_, vs, _) in enumerate(groups)
        )
        at, group = next(
            ((n, candidate) for n, candidate in joined if candidate is not None),
            (len(groups), None),
        )
        group = group or _scheduled(parts, eqns, [output])
        if group is None:
            return []
        groups[at : at + 1] = [group]
    return groups


def _scheduled(parts, eqns: list, outputs: list) -> _Group | None:
    eqns = _needed(parts, eqns, outputs)
    heavy = sum(is_heavy(eqn, parts.machine) for eqn in eqns)
    schedule, _ = parts.attempt(
        eqns, outputs, None, eqns[-1], parts.fits_chain if heavy > 1 else lambda cost: True
    )
    return None if schedule is None else (eqns, outputs, schedule)


# ---- groups that make the same values


def _join_sharers(parts, limits: MergeLimits) -> None:
    """Joins groups that share expensive equations: producers with consumers, or siblings."""
    pairs = itertools.permutations([node for node in parts.nodes if node.kind == "group"], 2)
    for producer, consumer in pairs:
        if producer not in parts.nodes or consumer not in parts.nodes:
            continue
        shared = {id(eqn) for eqn in producer.eqns} & {id(eqn) for eqn in consumer.eqns}
        if not any(is_heavy(eqn, parts.machine) for eqn in producer.eqns if id(eqn) in shared):
            continue
        other_readers = [
            successor for successor in parts.successors(producer) if successor is not consumer
        ]
        if parts.reaches(other_readers, consumer) or parts.reaches(
            parts.successors(consumer), producer
        ):
            continue
        merge(parts, producer, consumer, limits)
