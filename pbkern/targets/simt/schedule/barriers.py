"""Statements -> before which of them all threads of the block wait for each other.

Threads meet where one statement touches bytes that an earlier one wrote, or writes bytes that an
earlier one read: a barrier stands between, and none elsewhere. Buffers of scratch that share bytes
meet as well; what lies in registers meets nothing. At the head of a loop, the step before has
touched everything that the body touches.

Copies of the device are under way until a Wait: behind it each thread knows of its own only, so
that they are written from there on. Products of the device read their tiles until a Wait for them.
Stages of a tile that differ within one step of a loop are different bytes; other steps touch any of
them, but for products under way, whose step is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest import effects
from pbkern.lower.nest.ir import (
    AsyncCopy,
    AsyncProduct,
    Buf,
    For,
    If,
    Nest,
    Stmt,
    Wait,
    While,
    every,
    show,
)


@dataclass(frozen=True)
class Bytes:
    """Bytes of a memory, from the first to one behind the last; of a tile with stages those of one, or of any (None)."""

    memory: str
    first: int
    end: int
    stages: int = 1
    stage: Affine | None = None

    def meets(self, other: Bytes) -> bool:
        overlap = self.memory == other.memory and self.first < other.end and other.first < self.end
        if not overlap or self.stage is None or other.stage is None:
            return overlap
        between = self.stage - other.stage
        same_tile = (self.first, self.end, self.stages) == (other.first, other.end, other.stages)
        return not (same_tile and between.is_const and between.const % self.stages)


@dataclass
class Pending:
    """Accesses of threads since the last barrier."""

    read: set[Bytes] = field(default_factory=set)
    written: set[Bytes] = field(default_factory=set)
    begun: set[Bytes] = field(default_factory=set)  # by copies under way
    products: tuple[frozenset[Bytes], ...] = ()  # what groups of products under way read

    def meets(self, read: Iterable[Bytes], written: Iterable[Bytes]) -> bool:
        return any(
            place.meets(other) for place in (*read, *written) for other in self.written
        ) or any(place.meets(other) for place in written for other in self.read)

    def add(self, read: Iterable[Bytes], written: Iterable[Bytes]) -> None:
        self.read |= set(read)
        self.written |= set(written)

    def join(self, other: Pending) -> None:
        """Adds what is pending on another way to the same place."""
        self.add(other.read, other.written)
        self.begun |= other.begun
        self.products = max(self.products, other.products, key=len)

    def copy(self) -> Pending:
        return Pending(set(self.read), set(self.written), set(self.begun), self.products)

    def behind_barrier(self) -> Pending:
        """Accesses that a barrier does not end: those of the device."""
        return Pending(begun=self.begun, products=self.products)

    def at_any_stage(self, counter: str | None = None) -> Pending:
        """Accesses as another step of a loop sees them; products as the next step of a loop with this counter does."""

        def earlier(stage: Affine | None) -> Affine | None:
            if counter is None or stage is None:
                return None
            return stage.substitute({counter: Affine.symbol(counter) - 1}.get)

        products = tuple(
            frozenset(replace(place, stage=earlier(place.stage)) for place in group)
            for group in self.products
        )
        read, written, begun = (
            {replace(place, stage=None) for place in places}
            for places in (self.read, self.written, self.begun)
        )
        return Pending(read, written, begun, products)


class Barriers:
    """The plan for one function's statements.

    Args:
      place: where a buffer's bytes are.
      waits_inside: whether a statement's own code ends with all threads having met, behind all that
        it reads.
      only_copies: threads wait for copies to shared memory alone, which the kernel's author does not see.
      is_one: whether threads meet in what a loop holds by atomic operations alone.
    """

    def __init__(
        self,
        place: Callable[[Buf], tuple[str, int, int]],
        waits_inside: Callable[[Stmt], bool],
        only_copies: bool = False,
        is_one: Callable[[Stmt], bool] = lambda _: False,
    ):
        self.place, self.waits_inside, self.only_copies = place, waits_inside, only_copies
        self.is_one = is_one
        self.before: set[int] = set()  # ids of statements

    def effects(self, stmts: Sequence[Stmt]) -> tuple[set[Bytes], set[Bytes]]:
        """Bytes that statements read and write, those of copies when they begin."""
        nests = [stmt for stmt in every(list(stmts)) if isinstance(stmt, Nest)]
        loads = [(load.buf, load.index) for nest in nests for load in nest.loads()]
        stores = [(store.buf, store.index) for nest in nests for store in nest.stores]
        return (
            self._bytes(effects.read(stmts), loads),
            self._bytes(effects.written(stmts), stores),
        )

    def _bytes(self, bufs: set[Buf], accesses: Sequence[tuple[Buf, Sequence]]) -> set[Bytes]:
        if self.only_copies:
            bufs = {buf for buf in bufs if buf.space}
        whole = {Bytes(*self.place(buf)) for buf in bufs if not buf.circular}
        return whole | {
            Bytes(*self.place(buf), buf.shape[0], index[0])
            for buf, index in accesses
            if buf.circular
        }

    def run(self, stmts: Sequence[Stmt], pending: Pending) -> Pending:
        """Follows statements that begin with `pending` to what is pending behind them."""
        for stmt in stmts:
            pending = self.one(stmt, pending)
        return pending

    def loop(self, body: Sequence[Stmt], pending: Pending, counter: str | None = None) -> Pending:
        """Follows a loop's body, which follows itself. No step may run at all."""
        start = pending.copy()
        copies = [stmt for stmt in every(list(body)) if isinstance(stmt, AsyncCopy)]
        begun = [stmt for stmt in every(list(body)) if isinstance(stmt, AsyncCopy | AsyncProduct)]
        inside = {id(nest) for stmt in begun for nest in stmt.body}
        synchronous = [
            stmt for stmt in every(list(body)) if id(stmt) not in inside and not _holds(stmt)
        ]
        start.add(*self.effects(synchronous))
        start.begun |= self.effects(copies)[1]
        first = self.run(body, start.at_any_stage())
        again = first.at_any_stage(counter)
        again.join(start.at_any_stage())
        after = self.run(body, again)
        after.join(pending)
        return after.at_any_stage()

    def one(self, stmt: Stmt, pending: Pending) -> Pending:
        match stmt:
            case If(branches=branches):
                ends = [self.run(branch, pending.copy()) for branch in branches]
                for end in ends[1:]:
                    ends[0].join(end)
                return ends[0]
            case For(counter=counter, body=body) if not self.is_one(stmt):
                return self.loop(body, pending, counter)
            case While(condition=condition, body=body):
                return self.loop([*condition, *body, *condition], pending)
            case Wait(groups=groups, products=True):
                ended = pending.products[: max(len(pending.products) - groups, 0)]
                pending.add(frozenset().union(*ended), ())
                return replace(pending, products=pending.products[len(ended) :])
            case Wait():
                return replace(pending, written=pending.written | pending.begun)
        read, written = self.effects([stmt])
        if any(
            place.meets(other) for place in written for group in pending.products for other in group
        ):
            raise InternalError(
                "barriers: a tile is stored to while a product reads it", why=show([stmt])
            )
        if pending.meets(read, written):
            self.before.add(id(stmt))
            pending = pending.behind_barrier()
        if isinstance(stmt, AsyncCopy):
            pending.add(read, ())
            pending.begun |= written
        elif isinstance(stmt, AsyncProduct):
            pending.products = (*pending.products, frozenset(read))
        elif self.waits_inside(stmt):
            pending = pending.behind_barrier()
            pending.add((), written)
        else:
            pending.add(read, written)
        return pending


def _holds(stmt: Stmt) -> bool:
    """Whether a statement is only what it holds, or what copies."""
    return isinstance(stmt, AsyncCopy | AsyncProduct | If | For | While)
