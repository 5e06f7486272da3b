"""Lengths of rows of scratch that suit the caches.

Rows of whole vectors let the loads of a stencil be aligned alike in each of them. Rows of a power
of two bytes are in the same few sets of the nearest cache, so that those of one column evict each
other: they are made a vector longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pbkern.core.passes import PassRecord, threshold
from pbkern.lower.nest import effects
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import Buf, Load, Nest, Pool, Stmt, bodies, every
from pbkern.targets.cpu.schedule.sliding_windows import LINE_VECTOR_BYTES, overlapping

# Bytes: the same set of a cache of 32 KB and 8 ways comes every 4 KB; half of that still leaves the
# rows of a tile two sets a column.
SET_PERIOD = 2048


@dataclass(frozen=True)
class PadScratchRows(PassRecord):
    """Gives scratch that the statements alone use other rows."""

    name = "pad scratch rows"
    why = "rows that follow one another fall into different cache sets"
    fewest_rows: int = threshold(
        16, "rows of scratch that is padded: fewer fit into the ways of a set"
    )

    def function(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        kept = set(context.kept)
        return _padded_rows(
            stmts, context.pool, context.options.vector_bits, kept, self.fewest_rows
        )


def _padded_rows(
    stmts: Sequence[Stmt], pool: Pool, vector_bits: int, kept: set[Buf], fewest_rows: int
) -> list[Stmt]:
    nests = [stmt for stmt in every(stmts) if isinstance(stmt, Nest)]
    stencils = {expr.buf for nest in nests for expr in overlapping(nest, vector_bits)}
    found = {stencil for stencil in stencils if _row_bytes(stencil) % LINE_VECTOR_BYTES}
    found |= {
        store.buf
        for nest in nests
        for store in nest.stores
        if store.buf.arena
        and store.buf.storage is None
        and _conflicts_in_sets(store.buf, fewest_rows)
    }
    new = {buf: _padded(buf, fewest_rows) for buf in found - kept - _otherwise_used(stmts)}
    return relocated(stmts, new.get, pool) if new else list(stmts)


def _row_bytes(buf: Buf) -> int:
    return buf.shape[-1] * buf.dtype.itemsize


def _conflicts_in_sets(buf: Buf, fewest_rows: int) -> bool:
    return math.prod(buf.shape[:-1]) >= fewest_rows and _row_bytes(buf) % SET_PERIOD == 0


def _padded(buf: Buf, fewest_rows: int) -> Buf:
    vectors = -(-_row_bytes(buf) // LINE_VECTOR_BYTES) + _conflicts_in_sets(buf, fewest_rows)
    return Buf(
        buf.name,
        (*buf.shape[:-1], vectors * LINE_VECTOR_BYTES // buf.dtype.itemsize),
        buf.dtype,
        arena=True,
    )


def _otherwise_used(stmts: Sequence[Stmt]) -> set[Buf]:
    """Buffers whose layout others than plain accesses of nests rely on."""
    found = set()
    for nest in every(stmts):
        if isinstance(nest, Nest):
            places = [load.buf for load in nest.loads()] + [store.buf for store in nest.stores]
            found |= {place.root for place in places if place.storage is not None}
            found |= {load.buf.root for load in nest.loads() if not isinstance(load, Load)}
        elif not bodies(nest):
            found |= effects.touched([nest])
    return found
