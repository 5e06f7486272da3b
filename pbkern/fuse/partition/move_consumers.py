"""Consumer sinking: readers of a large value move into the group that makes it, if a smaller value is left to pass on.

Groups grow from their results. A mean takes the look-up of log-probabilities into its group. It
cannot be divided among
programs as their softmax is, so all of them would be stored for it:

    A: p = log_softmax(x)              A: q = log_softmax(x)[labels]
    B: mean(p[labels])          ->     B: mean(q)

Likewise, what follows from a reduction takes another reduction of the same array into its group,
though that need not wait for
it. Back with the first, one pass over the array is left:

    A: l = maxima of chunks of x                  A: l = maxima of chunks of x, s = sums of exp(x - l)
    B: m = max(l)                            ->   B: m = max(l)
    C: t = sums of exp(x - l) * exp(l - m)        C: t = s * exp(l - m)

Works on the groups of partitioner.py, once none of them can merge with another as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jax.extend import core as jex

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.cost.kinds import nbytes
from pbkern.fuse.graph import Edge, Node
from pbkern.fuse.tiling.schedule import Schedule

from .partitioner import Partitioner


@dataclass(frozen=True)
class MoveConsumers:
    """Moves equations between the groups of `parts`, a Partitioner, where the model gains."""

    passed_smaller: int = threshold(4, "times that the value passed on instead is smaller")
    searched_share: float = threshold(
        0.25, "part of the private cache: smaller values are not worth the search"
    )
    most_time: float = threshold(0.98, "modelled time after a move, relative to before")

    def __call__(self, parts: Partitioner, options: object) -> Partitioner:
        for maker in [node for node in parts.nodes if node.kind == "group"]:
            for var in [
                output
                for output in maker.outputs
                if nbytes(output.aval) > self.searched_share * parts.machine.near_bytes
            ]:
                readers = [user for user in parts.users(var) if user is not maker]
                if len(readers) == 1 and readers[0].kind == "group" and var not in parts.results:
                    _sink_consumer(parts, maker, readers[0], var, self)
        for reader in [node for node in parts.nodes if node.kind == "group"]:
            for maker in _makers(parts, reader):
                if any(_is_large(parts, shared) for shared in maker.reads() & reader.reads()):
                    _restore_consumer(parts, maker, reader, self)
        return parts


def _makers(parts, reader: Node) -> list[Node]:
    """Groups whose results a group reads, last first."""
    reads = reader.reads()
    eqns = [parts.makers[read] for read in reads if read in parts.makers]
    makers = {
        id(node): node
        for eqn in eqns
        for node in parts.nodes_of.get(id(eqn), ())
        if node.kind == "group" and reads & set(node.outputs)
    }
    return sorted(makers.values(), key=lambda maker: -parts.order[id(maker.eqns[-1])])


def _is_large(parts, var) -> bool:
    return nbytes(var.aval) > parts.machine.near_bytes


@dataclass(frozen=True)
class _Move:
    """Two groups after a move: each one's equations, results and schedule."""

    maker: tuple[list, list, Schedule]
    reader: tuple[list, list, Schedule]

    @property
    def seconds(self) -> float:
        return self.maker[2].cost.seconds + self.reader[2].cost.seconds


def _sink_consumer(parts, maker: Node, reader: Node, var, limits: MoveConsumers) -> None:
    """Tries to move the readers of `var`, and their readers as long as results get smaller."""
    before = maker.seconds + reader.seconds
    moves = [
        candidate
        for prefix in _prefixes(reader, var, limits.passed_smaller)
        if (candidate := _moved(parts, maker, reader, *prefix)) is not None
    ]
    best = min(moves, key=lambda move: move.seconds, default=None)
    if best is None or best.seconds >= limits.most_time * before:
        return
    if _apply(parts, maker, reader, best):
        why = "its readers joined its kernel"
        parts.edges.append(
            Edge(parts.makers[var], True, why, nbytes(var.aval), before, best.seconds)
        )


def _restore_consumer(parts, maker: Node, reader: Node, limits: MoveConsumers) -> None:
    """Tries to move back equations that need no values which other nodes compute from the maker's results."""
    late = _made_after(parts, maker, reader)
    moved: list = []
    rest: list = []
    for eqn in reader.eqns:
        waits = any(not isinstance(var, jex.Literal) and var in late for var in eqn.invars)
        late.update(eqn.outvars if waits else ())
        (rest if waits else moved).append(eqn)
    shared = [var for var in maker.reads() & reader.reads() if _is_large(parts, var)]
    read_later, outputs_of_reader = _read(rest), set(reader.outputs)
    passed = [
        var
        for member in moved
        for var in member.outvars
        if var in outputs_of_reader or var in read_later
    ]
    if (
        not moved
        or not rest
        or not read_later.isdisjoint(shared)
        or not outputs_of_reader.isdisjoint(passed)
    ):
        return
    if sum(nbytes(var.aval) for var in passed) > sum(nbytes(var.aval) for var in shared):
        return  # would store more than it saves in reads
    move, before = _moved(parts, maker, reader, moved, passed), maker.seconds + reader.seconds
    if (
        move is not None
        and move.seconds < limits.most_time * before
        and _apply(parts, maker, reader, move)
    ):
        why = "it joined the kernel that reads the same array"
        saved = sum(nbytes(var.aval) for var in shared)
        parts.edges.append(Edge(moved[-1], True, why, saved, before, move.seconds))


def _made_after(parts, maker: Node, reader: Node) -> set:
    """Results of nodes that depend on the maker, but not through the reader."""
    nodes, seen, waiting = set(), {id(maker), id(reader)}, parts.successors(maker)
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            nodes.update(node.outputs)
            waiting += parts.successors(node)
    return nodes


def _apply(parts, maker: Node, reader: Node, best: _Move) -> bool:
    """Makes a move, unless groups would then wait for each other."""
    old = [(node, node.eqns, node.outputs, node.schedule) for node in (maker, reader)]
    parts.set_group(maker, *best.maker)
    parts.set_group(reader, *best.reader)
    if any(parts.reaches(parts.successors(node), node) for node in (maker, reader)):
        for n, *state in old[::-1]:
            parts.set_group(n, *state)
        return False
    return True


def _moved(parts, maker: Node, reader: Node, moved: list, passed: list) -> _Move | None:
    """The groups once the maker computes `moved` and passes on `passed`; None if either cannot be a kernel."""
    moving = set(map(id, moved))
    rest = [eqn for eqn in reader.eqns if id(eqn) not in moving]
    read_later = _read(rest)
    remaining = [
        output
        for output in maker.outputs
        if output in parts.results
        or output in read_later
        or any(user is not reader for user in parts.users(output))
    ]
    eqns, outputs = [*maker.eqns, *moved], list(dict.fromkeys(remaining + passed))
    first, _ = parts.attempt(eqns, outputs, None, maker.eqns[-1])
    second, _ = parts.attempt(rest, reader.outputs, None, rest[-1])
    if first is None or second is None:
        return None
    return _Move((eqns, outputs, first), (rest, reader.outputs, second))


def _read(eqns: Iterable) -> set:
    return {var for eqn in eqns for var in eqn.invars if not isinstance(var, jex.Literal)}


def _prefixes(reader: Node, var, times_smaller: int) -> Iterator[tuple[list, list]]:
    """(equations, values that they pass on) of ever longer prefixes of a group.

    Each holds all readers of `var`, and each passes on less than the one before.
    """
    makers = {output: eqn for eqn in reader.eqns for output in eqn.outvars}
    moved: dict[int, object] = {}

    def take(eqn) -> None:
        if id(eqn) not in moved:
            moved[id(eqn)] = eqn
            for operand in eqn.invars:
                if not isinstance(operand, jex.Literal) and operand in makers:
                    take(makers[operand])

    for candidate in reader.eqns:
        if var in _read([candidate]):
            take(candidate)
    smallest, outputs = nbytes(var.aval) / times_smaller, set(reader.outputs)
    while len(moved) < len(reader.eqns):
        eqns = [eqn for eqn in reader.eqns if id(eqn) in moved]
        rest = [eqn for eqn in reader.eqns if id(eqn) not in moved]
        read_later = _read(rest)
        passed = [
            output
            for eqn in eqns
            for output in eqn.outvars
            if output in outputs or output in read_later
        ]
        if not outputs.isdisjoint(passed):
            return  # a result of the reader, which has a buffer of its own
        size = sum(nbytes(output.aval) for output in passed)
        if size < smallest:
            smallest = size
            yield eqns, passed
        after = next(
            (follower for follower in rest if not _read([follower]).isdisjoint(passed)), None
        )
        if after is None:
            return
        take(after)
