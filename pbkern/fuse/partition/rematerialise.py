"""Rematerialisation: large values between groups -> computed again in every reader, where that costs less.

A score matrix that a gradient reads three times is written once and read three times. From its
operands, which are much smaller, each reader can compute the blocks that it needs while they are in
cache. All groups that make or read such values are rebuilt from small values (operands, statistics
of rows), groups that make the same values are joined, and the result is kept if the model prefers
it. Works on the groups of partitioner.py, which calls it last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from jax.extend import core as jex

from pbkern.core.jaxprs import atoms, leading_to
from pbkern.fuse.cost.kinds import CONTRACTIONS, is_heavy, nbytes
from pbkern.fuse.graph import Edge, Node
from pbkern.fuse.tiling.block_search import Schedule

from .merge_groups import merge

# A value is computed again only from values of at least this many times fewer elements.
SMALLER = 4
# Values up to this part of the last-level cache stay in it between two kernels.
CACHED = 0.25
# The model overestimates chains of products in one kernel, compared with arrays that go to memory:
# attention's gradient without score matrices, predicted at 1.3 to 1.4 times the time, takes 0.75 to
# 1.2 times. And it needs no memory: 4 heads of 4096 positions, predicted at 1.85 times, take 517 ms
# instead of 371 (jax.jit 1398), but 2 MB instead of 528.
SLACK = 2.0


def rematerialise_large(parts) -> None:
    """Changes the groups of `parts`, a Partitioner, where the model gains."""
    large = list(_stored(parts))
    for values in [large, *([v] for v in large if len(large) > 1)] if large else []:
        if not all(v in set(_stored(parts)) for v in values):
            continue
        before, state = _seconds(parts), _State(parts)
        if _rebuild(parts, set(values)):
            _join_sharers(parts)
            after = _seconds(parts)
            eqn = next(e for e in parts.jaxpr.eqns if any(v in values for v in e.outvars))
            saved = sum(nbytes(v.aval) for v in values)
            # With only some of them gone, the program still needs the memory.
            if after <= before * (SLACK if len(values) == len(large) else 1.0):
                parts.edges.append(
                    Edge(eqn, True, "computed again by its readers", saved, before, after)
                )
                continue
            parts.edges.append(
                Edge(eqn, False, "storing is faster than computing again", saved, before, after)
            )
        state.restore(parts)


def _seconds(parts) -> float:
    return sum(n.seconds for n in parts.nodes if n.kind == "group")


def _stored(parts) -> Iterator:
    """Values too large for the cache that only groups make and read."""
    limit = CACHED * parts.machine.shared_bytes
    for node in parts.nodes:
        for v in node.outputs if node.kind == "group" else ():
            if (
                nbytes(v.aval) > limit
                and v not in parts.results
                and all(n.kind == "group" for n in parts.users(v))
            ):
                yield v


class _State:
    """Snapshot of the partitioner, for going back."""

    def __init__(self, parts) -> None:
        self.groups = [(n, n.eqns, n.outputs, n.schedule) for n in parts.nodes]
        self.nodes_of = {k: list(v) for k, v in parts.nodes_of.items()}
        self.edges = len(parts.edges)

    def restore(self, parts) -> None:
        parts.nodes = [n for n, *_ in self.groups]
        for n, eqns, outputs, schedule in self.groups:
            n.eqns, n.outputs, n.schedule = eqns, outputs, schedule
        parts.nodes_of = self.nodes_of


# ---- groups without the large values


def _rebuild(parts, values: set) -> bool:
    """Rebuilds every group that makes or reads `values` from small values; False if that is impossible."""
    makers = {v: e for n in parts.nodes if n.kind == "group" for e in n.eqns for v in e.outvars}
    indices = _made_of_indices(parts)
    cones = {v: _cone(v, makers, indices) for v in values}
    if any(c is None for c in cones.values()):
        return False
    touched = [
        n
        for n in parts.nodes
        if n.kind == "group" and (values & n.reads() or values & set(n.outputs))
    ]
    inner = {v for c in cones.values() for e in c for v in e.outvars}
    stops = {a for c in cones.values() for e in c for a in atoms(e)} - inner
    # Equations of each group, and the results that others need.
    wanted = []
    for n in touched:
        made = dict.fromkeys(v for e in n.eqns for v in e.outvars)
        outputs = [v for v in n.outputs if v not in values] + [
            v for v in made if v in stops and v not in n.outputs
        ]
        known = {
            id(e): e
            for e in (*n.eqns, *(e for v in values & (n.reads() | made.keys()) for e in cones[v]))
        }
        wanted.append((n, list(known.values()), outputs))
    wanted = [(n, eqns, _once(n, outputs, wanted)) for n, eqns, outputs in wanted]
    return _apply(parts, wanted)


def _made_of_indices(parts) -> set:
    """Values that depend on no operand, such as masks."""
    found: set = set()
    for e in parts.jaxpr.eqns:
        if not e.effects and all(isinstance(a, jex.Literal) or a in found for a in e.invars):
            found.update(e.outvars)
    return found


def _cone(v, makers: dict, indices: set) -> list | None:
    """Backward slice: equations that compute `v` from much smaller values and indices.

    Products may also combine with values that are in memory anyway, such as biases of scores. None
    if it needs other large values.
    """
    limit, waiting, found, given = math.prod(v.aval.shape) / SMALLER, [v], {}, False
    while waiting:
        eqn = makers.get(waiting.pop())
        given |= eqn is None
        if eqn is None or id(eqn) in found:
            continue
        found[id(eqn)] = eqn
        for a in atoms(eqn):
            if math.prod(a.aval.shape) > limit or (a in indices and a in makers):
                waiting.append(a)
    products = any(e.primitive.name in CONTRACTIONS for e in found.values())
    return None if given and not products else list(found.values())


def _needed(parts, eqns: Iterable, outputs: Iterable) -> list:
    """Equations of `eqns` that `outputs` need, in order."""
    return leading_to(sorted(eqns, key=lambda e: parts.order[id(e)]), outputs)


def _once(node: Node, outputs: list, wanted: list) -> list:
    """`outputs` without those that an earlier group gives."""
    earlier = itertools.takewhile(lambda each: each[0] is not node, wanted)
    given = {v for _, _, vs in earlier for v in vs}
    return [v for v in outputs if v not in given]


def _apply(parts, wanted: list) -> bool:
    for node, eqns, outputs in wanted:
        if not outputs:
            parts.drop(node)
            continue
        made = _groups(parts, eqns, outputs)
        if not made:
            return False
        parts.set_group(node, *made[0])
        for each in made[1:]:
            parts.set_group(parts.add_node(Node("group", [])), *each)
    groups = [n for n in parts.nodes if n.kind == "group"]
    for n in groups:
        if not any(v in parts.results or parts.users(v) for v in n.outputs):
            parts.drop(n)
    groups = [n for n in parts.nodes if n.kind == "group"]
    return not any(parts.reaches(parts.successors(n), n) for n in groups)


_Group = tuple[list, list, Schedule]  # equations that the outputs need, outputs, their schedule


def _groups(parts, eqns: list, outputs: list) -> list[_Group]:
    """Groups that make `outputs`: one, or as few as possible; [] if one of them cannot be a kernel."""
    together = _scheduled(parts, eqns, outputs)
    if together is not None:
        return [together]
    made: list[_Group] = []
    for v in outputs if len(outputs) > 1 else ():
        joined = ((n, _scheduled(parts, eqns, [*vs, v])) for n, (_, vs, _) in enumerate(made))
        at, group = next(((n, g) for n, g in joined if g is not None), (len(made), None))
        group = group or _scheduled(parts, eqns, [v])
        if group is None:
            return []
        made[at : at + 1] = [group]
    return made


def _scheduled(parts, eqns: list, outputs: list) -> _Group | None:
    eqns = _needed(parts, eqns, outputs)
    heavy = sum(is_heavy(e, parts.machine) for e in eqns)
    schedule, _ = parts.attempt(
        eqns, outputs, None, eqns[-1], parts.fits_chain if heavy > 1 else lambda cost: True
    )
    return None if schedule is None else (eqns, outputs, schedule)


# ---- groups that make the same values


def _join_sharers(parts) -> None:
    """Joins groups that share expensive equations: producers with consumers, or siblings."""
    pairs = itertools.permutations([n for n in parts.nodes if n.kind == "group"], 2)
    for a, b in pairs:
        if a not in parts.nodes or b not in parts.nodes:
            continue
        shared = {id(e) for e in a.eqns} & {id(e) for e in b.eqns}
        if not any(is_heavy(e, parts.machine) for e in a.eqns if id(e) in shared):
            continue
        others = [n for n in parts.successors(a) if n is not b]
        if parts.reaches(others, b) or parts.reaches(parts.successors(b), a):
            continue
        merge(parts, a, b)
