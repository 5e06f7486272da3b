"""Statements -> before which of them all threads of the block wait for each other.

Threads meet where one statement touches bytes that an earlier one wrote, or writes bytes that an
earlier one read: a barrier stands between, and none elsewhere. Buffers of scratch that share bytes
meet as well; what lies in registers meets nothing. At the head of a loop, the step before has
touched everything that the body touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pbkern.lower.nest import effects
from pbkern.lower.nest.ir import Buf, For, If, Stmt, While

Place = tuple[str, int, int]  # memory, first byte, one behind the last


@dataclass
class Pending:
    """Accesses of threads since the last barrier."""

    read: set[Place] = field(default_factory=set)
    written: set[Place] = field(default_factory=set)

    def meets(self, read: Iterable[Place], written: Iterable[Place]) -> bool:
        return any(
            _overlap(place, other) for place in (*read, *written) for other in self.written
        ) or any(_overlap(place, other) for place in written for other in self.read)

    def add(self, read: Iterable[Place], written: Iterable[Place]) -> None:
        self.read |= set(read)
        self.written |= set(written)

    def copy(self) -> Pending:
        return Pending(set(self.read), set(self.written))


def _overlap(place: Place, other: Place) -> bool:
    return place[0] == other[0] and place[1] < other[2] and other[1] < place[2]


class Barriers:
    """The plan for one function's statements.

    Args:
      place: where a buffer's bytes are.
      waits_inside: whether a statement's own code ends with all threads having met, behind all that
        it reads.
    """

    def __init__(self, place: Callable[[Buf], Place], waits_inside: Callable[[Stmt], bool]):
        self.place, self.waits_inside = place, waits_inside
        self.before: set[int] = set()  # ids of statements

    def effects(self, stmts: Sequence[Stmt]) -> tuple[set[Place], set[Place]]:
        every = list(stmts)
        return set(map(self.place, effects.read(every))), set(
            map(self.place, effects.written(every))
        )

    def run(self, stmts: Sequence[Stmt], pending: Pending) -> Pending:
        """Follows statements that begin with `pending` to what is pending behind them."""
        for stmt in stmts:
            pending = self.one(stmt, pending)
        return pending

    def loop(self, body: Sequence[Stmt], pending: Pending) -> Pending:
        """Follows a loop's body, which follows itself. No step may run at all."""
        start = pending.copy()
        start.add(*self.effects(body))
        after = self.run(body, start)
        after.add(pending.read, pending.written)
        return after

    def one(self, stmt: Stmt, pending: Pending) -> Pending:
        match stmt:
            case If(branches=branches):
                ends = [self.run(branch, pending.copy()) for branch in branches]
                for end in ends[1:]:
                    ends[0].add(end.read, end.written)
                return ends[0]
            case For(body=body):
                return self.loop(body, pending)
            case While(condition=condition, body=body):
                return self.loop([*condition, *body, *condition], pending)
        read, written = self.effects([stmt])
        if pending.meets(read, written):
            self.before.add(id(stmt))
            pending = Pending()
        if self.waits_inside(stmt):
            pending = Pending()
            pending.add((), written)
        else:
            pending.add(read, written)
        return pending
