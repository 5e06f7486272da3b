"""Copies to shared memory of what a program reads more than once, or across rows.

t = sum x[i, :]                     c[:, :] = x[i, :]                     lanes along rows
y[i, :] = x[i, :] / t        ->     t = sum c[:, :]
                                    y[i, :] = c[:, :] / t
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects, scratch
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.stage import Box
from pbkern.lower.nest.ir import Buf, Expr, For, Let, Nest, Stmt, every, with_bodies
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
      written: arrays that some statement stores to. usual: bytes that copies take at a time, such
        that other blocks fit beside this one. most: the same where one copy of a row takes more than
        that. all_copies: those that it has placed so far.
    """

    context: NestContext[ThreadOptions]
    limits: StageLimits
    written: set[Buf]
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
        return cls(context, limits, effects.written(list(stmts)), usual, most)

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
        inside = {stmt.counter} | {x.name for x in every(stmt.body) if isinstance(x, Let)}
        before: list[Stmt] = []
        body = list(stmt.body)
        while body and any(body[0] is copy for copy in self.all_copies):
            if (
                isinstance(body[0], Nest)
                and frozenset().union(*(load.symbols for load in body[0].loads())) & inside
            ):
                break
            before.append(body.pop(0))
        return before, For(stmt.counter, stmt.trips, tuple(body))

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
