"""Lengths of rows of scratch that suit the caches.

Rows of whole vectors let the loads of a stencil be aligned alike in each of them. Rows of a power
of two bytes are in the same few sets of the nearest cache, so that those of one column evict each
other: they are made a vector longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import Buf, Load, Nest, Stmt, bodies, every
from pbkern.targets.cpu.schedule.sliding_windows import LINE_VECTOR_BYTES, overlapping


@dataclass(frozen=True)
class PadScratchRows:
    """Gives scratch that the statements alone use other rows."""

    fewest_rows: int = threshold(
        4,
        "rows of scratch that is padded: fewer fit into the ways of a set. Source: six rows of 2,048 float32 in each of "
        "three buffers, Zen 4, 27 November 2026: 7.1 ms without, 3.3 with",
    )

    set_period: int = threshold(
        2048,
        "bytes between rows that evict each other: a cache of 32 KB and 8 ways has the same set again every 4 KB; half "
        "of that still leaves the rows of a tile two sets a column",
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        nests = [stmt for stmt in every(stmts) if isinstance(stmt, Nest)]
        stencils = {
            load.buf
            for nest in nests
            for load in overlapping(nest, context.policy.vector_dimension(nest))
        }
        padded = {stencil for stencil in stencils if _row_bytes(stencil) % LINE_VECTOR_BYTES}
        padded |= {
            store.buf
            for nest in nests
            for store in nest.stores
            if store.buf.arena and store.buf.storage is None and self._conflicts(store.buf)
        }
        new = {
            buf: self._padded(buf)
            for buf in padded - set(context.persistent) - _otherwise_used(stmts)
        }
        return relocated(stmts, new.get, context.pool) if new else list(stmts)

    def _conflicts(self, buf: Buf) -> bool:
        """Whether its rows fall into few cache sets."""
        rows = math.prod(buf.shape[:-1])
        return rows >= self.fewest_rows and _whole_row_bytes(buf) % self.set_period == 0

    def _padded(self, buf: Buf) -> Buf:
        row_bytes = _whole_row_bytes(buf) + LINE_VECTOR_BYTES * self._conflicts(buf)
        row = row_bytes // buf.dtype.itemsize
        return Buf(buf.name, (*buf.shape[:-1], row), buf.dtype, arena=True)


def _row_bytes(buf: Buf) -> int:
    return buf.shape[-1] * buf.dtype.itemsize


def _whole_row_bytes(buf: Buf) -> int:
    """Bytes of the whole vectors that a row fills."""
    return -(-_row_bytes(buf) // LINE_VECTOR_BYTES) * LINE_VECTOR_BYTES


def _otherwise_used(stmts: Sequence[Stmt]) -> set[Buf]:
    """Buffers whose layout others than plain accesses of nests rely on."""
    buffers = set()
    for nest in every(stmts):
        if isinstance(nest, Nest):
            places = [load.buf for load in nest.loads()] + [store.buf for store in nest.stores]
            buffers |= {place.root for place in places if place.storage is not None}
            buffers |= {load.buf.root for load in nest.loads() if not isinstance(load, Load)}
        elif not bodies(nest):
            buffers |= effects.touched([nest])
    return buffers
