"""Copies to shared memory of what a program reads more than once, or across rows.

t = sum x[i, :]                     c[:, :] = x[i, :]                     lanes along rows
y[i, :] = x[i, :] / t        ->     t = sum c[:, :]
                                    y[i, :] = c[:, :] / t
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, replace

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects, scratch
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.stage import Box
from pbkern.lower.nest.ir import Buf, Expr, For, Let, Load, Nest, Stmt, bodies, every, with_bodies
from pbkern.simulate.counts import BANK_BYTES
from pbkern.targets.simt.options import ThreadOptions

from .regions import BoxRegion, is_contraction, regions, staged_loads


@dataclass(frozen=True)
class StageLimits:
    """Which copies are worth shared memory, and how much of it they may take."""

    fewest_element_reads: int = threshold(
        2, "reads of an element, on average, that are worth a copy"
    )
    reserved_bytes: int = threshold(2048, "bytes that warps need to reduce together")


@dataclass(frozen=True)
class StageInSharedMemory(StageLimits):
    """Copies what is read again, or across rows, inner statements too."""

    def __call__(self, stmts: Sequence[Stmt], context: NestContext[ThreadOptions]) -> list[Stmt]:
        return Stage.of(stmts, context, self).staged(stmts)


@dataclass
class Stage:
    """Shared memory for copies.

    Attributes:
      limits: which copies are wanted.
      written: arrays that some statement stores to. users: number of statements that touch each root buffer. usual: bytes
        that copies take at a time, such that other blocks fit beside this one. most: the same where one copy of a row takes
        more than that. all_copies: those that it has placed so far.
    """

    context: NestContext[ThreadOptions]
    limits: StageLimits
    written: set[Buf]
    users: Counter[Buf]
    usual: int
    most: int
    all_copies: list[Nest] = field(default_factory=list)

    @classmethod
    def of(
        cls, stmts: Sequence[Stmt], context: NestContext[ThreadOptions], limits: StageLimits
    ) -> Stage:
        options = context.options
        held = sum(
            scratch.padded_bytes(buf)
            for buf in effects.touched(list(stmts)) | set(context.persistent)
            if buf.arena
        )
        room = max(options.shared_bytes - held - limits.reserved_bytes, 0)
        usual = min(options.copy_bytes, room)
        most = min(options.row_bytes, room)
        leaves = [stmt for stmt in every(stmts) if not bodies(stmt)]
        users = Counter(buf.root for stmt in leaves for buf in effects.touched([stmt]))
        return cls(context, limits, effects.written(list(stmts)), users, usual, most)

    def wanted(self, stmts: Sequence[Stmt]) -> list[BoxRegion]:
        """Regions that are worth a copy, most first."""
        candidates = [
            region
            for region in regions(stmts, self.context.options, self.written)
            if region.is_wanted(self.limits.fewest_element_reads)
        ]
        return sorted(
            candidates, key=lambda box: (-box.turned, -box.reads / box.size, box.buf.name)
        )

    def staged(self, stmts: Sequence[Stmt], room: int | None = None) -> list[Stmt]:
        """The statements, inner ones too, with copies before the first that reads one."""
        whole = room = self.usual if room is None else room
        out: list[Stmt] = list(stmts)
        copies: dict[int, list[Nest]] = {}
        alive: list[tuple[range, int]] = []
        for region in self.wanted(stmts):
            size = self.nbytes(region)
            used = self.usual - room
            if size > room and not (size <= self.most - used and self._is_row(region, stmts)):
                continue
            room -= size
            padded = self.context.new_buffer(_rows(region), region.buf.dtype)
            alive.append((range(min(region.readers), max(region.readers)), size))
            self.all_copies.append(_copy(region, padded, self.context, stmts))
            copies.setdefault(min(region.readers), []).append(self.all_copies[-1])
            for at in region.readers:
                nest = out[at]
                assert isinstance(nest, Nest)
                out[at] = nest.mapped(self._reading(region, padded, nest))
        result: list[Stmt] = []
        for at, stmt in enumerate(out):
            result += copies.get(at, [])
            left = whole - sum(size for span, size in alive if at in span)
            before, inner = self._hoisted(with_bodies(stmt, lambda body: self.staged(body, left)))  # noqa: B023
            result += [*before, inner]
        return result

    def _hoisted(self, stmt: Stmt) -> tuple[list[Stmt], Stmt]:
        """(copies at the head of a loop's body that are the same in every step, the loop without them)."""
        if not isinstance(stmt, For):
            return [], stmt
        inside = {x.name for x in every(stmt.body) if isinstance(x, Let)}
        before: list[Stmt] = []
        new: list[Stmt] = []
        after: list[Stmt] = []
        body = list(stmt.body)
        while body and any(body[0] is copy for copy in self.all_copies):
            copy = body[0]
            assert isinstance(copy, Nest)
            moving = frozenset().union(*(load.symbols for load in copy.loads()))
            slides = None if moving & inside else _sliding(stmt, copy, self.context)
            if slides is not None:
                for stmts, nest in zip((before, new, after), slides):
                    stmts.append(nest)
            elif moving & {stmt.counter, *inside}:
                break
            else:
                before.append(copy)
            body.pop(0)
        return before, For(stmt.counter, stmt.trips, (*new, *body, *after))

    def _is_row(self, region: BoxRegion, stmts: Sequence[Stmt]) -> bool:
        """Whether a copy makes one load of what several statements read, along rows."""
        readers = [stmt for at in region.readers if isinstance(stmt := stmts[at], Nest)]
        again = region.reads >= self.limits.fewest_element_reads * region.size
        return again and not region.turned and not any(map(is_contraction, readers))

    def nbytes(self, region: BoxRegion) -> int:
        """Shared memory of a region's copy."""
        return scratch.padded_bytes(Buf("", _rows(region), region.buf.dtype))

    def _reading(self, region: BoxRegion, copy: Buf, nest: Nest) -> Callable[[Expr], Expr]:
        """Rewrites expressions of a nest to read the copy."""
        pool = self.context.pool
        copies: dict[Expr, Expr] = {
            load: pool.load(load.dtype, copy, region.box.within(load.index))
            for load in staged_loads(nest, self.written)
            if load.buf is region.buf and Box.around(load.index, nest.dims).base == region.box.base
        }
        return pool.rewriter(copies.get)


def _sliding(loop: For, copy: Nest, context: NestContext) -> tuple[Nest, Nest, Nest] | None:
    """(what a copy has in front of the first step, what is new in each step, what the next step reads again); None: nothing.

    c[d, :] = x[8 i + d, :] for all d < 12, in each step i      ->      before:   c[d, :] = x[d, :] for all d < 4
                                                                        begun by: c[d + 4, :] = x[8 i + d + 4, :], d < 8
                                                                        ended by: c[d, :] = c[d + 8, :], d < 4
    """
    (store,) = copy.stores
    load = store.value
    is_repeated = isinstance(loop.trips, int) and loop.trips > 1
    if not is_repeated or not isinstance(load, Load) or loop.counter not in load.symbols:
        return None
    steps = [place.coefficient(loop.counter) for place in load.index]
    (axis, *more) = [axis for axis, step in enumerate(steps) if step]
    dim, step = list(copy.dims)[axis], steps[axis]
    again = copy.dims[dim] - step
    if more or not 0 < again <= step:
        return None
    pool = context.pool

    def rows(first: int, count: int) -> Nest:
        return part(copy, dim, Affine((), first), count, pool)

    first = pool.renamer({loop.counter: Affine()})
    before = rows(0, again)
    moved = pool.load(
        load.dtype,
        store.buf,
        tuple(
            place + step if at == axis else place for at, place in enumerate(before.stores[0].index)
        ),
    )
    shift = replace(before, stores=(replace(before.stores[0], value=moved),))
    return before.mapped(first), rows(again, step), shift


def _rows(region: BoxRegion) -> tuple[int, ...]:
    """The shape of a copy: rows that threads read across have a length at which these fall into different banks."""
    *outer, row = region.box.shape
    if region.turned:
        size = region.buf.dtype.itemsize
        step = max(BANK_BYTES // size, 1)  # elements of a bank
        words = -(-row // step)
        row = (words + (words % 2 == 0)) * step
    return *outer, row


def _copy(region: BoxRegion, copy: Buf, context: NestContext, stmts: Sequence[Stmt]) -> Nest:
    first = stmts[min(region.readers)]
    assert isinstance(first, Nest), "regions are those of nests"
    return region.box.copied(
        lambda index: context.pool.load(region.buf.dtype, region.buf, index, region.guard),
        copy,
        [context.names("d") for _ in region.box.shape],
        first.at,
    )
