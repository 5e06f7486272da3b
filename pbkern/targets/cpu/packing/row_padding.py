"""Lengths of rows of scratch that suit the caches.

Rows of whole vectors let the loads of a stencil be aligned alike in each of them. Rows of a power
of two bytes are in the same few sets of the nearest cache, so that those of one column evict each
other: they are made a vector longer.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pbkern.lower.nest import scratch
from pbkern.lower.nest.ir import Buf, Expr, Nest, Pool, Stmt, bodies, every, with_bodies
from pbkern.targets.cpu.schedule.sliding_windows import VECTOR_BYTES, overlapping

# The same set of a cache of 32 KB and 8 ways comes every 4 KB; half of that still leaves the rows
# of a tile two sets a column.
SET_PERIOD = 2048
# Fewer rows fit into the ways of a set.
MANY_ROWS = 16


def pad_rows(stmts: list[Stmt], pool: Pool, vector_bits: int, kept: set[Buf]) -> list[Stmt]:
    """Statements with other rows in scratch that they alone use."""
    nests = [s for s in every(stmts) if isinstance(s, Nest)]
    stencils = {e.info[0] for n in nests for e in overlapping(n, vector_bits)}
    found = {b for b in stencils if _row_bytes(b) % VECTOR_BYTES}
    found |= {
        w.buf
        for n in nests
        for w in n.writes
        if w.buf.arena and w.buf.storage is None and _conflicts_in_sets(w.buf)
    }
    new = {b: _padded(b) for b in found - kept - _otherwise_used(stmts)}
    return _replace(stmts, new, pool) if new else stmts


def _row_bytes(buf: Buf) -> int:
    return buf.shape[-1] * buf.dtype.itemsize


def _conflicts_in_sets(buf: Buf) -> bool:
    return math.prod(buf.shape[:-1]) >= MANY_ROWS and _row_bytes(buf) % SET_PERIOD == 0


def _padded(buf: Buf) -> Buf:
    vectors = -(-_row_bytes(buf) // VECTOR_BYTES) + _conflicts_in_sets(buf)
    return Buf(
        buf.name,
        (*buf.shape[:-1], vectors * VECTOR_BYTES // buf.dtype.itemsize),
        buf.dtype,
        arena=True,
    )


def _otherwise_used(stmts: list[Stmt]) -> set[Buf]:
    """Buffers whose layout others than plain accesses of nests rely on."""
    found = set()
    for s in every(stmts):
        if isinstance(s, Nest):
            places = [e.info[0] for e in s.loads()] + [w.buf for w in s.writes]
            found |= {b.root for b in places if b.storage is not None}
            found |= {e.info[0].root for e in s.loads() if e.kind != "load"}
        elif not bodies(s):
            found |= scratch.touched([s])
    return found


def _replace(stmts: list[Stmt], new: dict[Buf, Buf], pool: Pool) -> list[Stmt]:
    def moved(x: Expr) -> Expr | None:
        return (
            pool.make("load", x.dtype, (new[x.info[0]], *x.info[1:]))
            if x.kind == "load" and x.info[0] in new
            else None
        )

    expr = pool.rewriter(moved)

    def change(s: Stmt) -> Stmt:
        s = with_bodies(s, lambda body: _replace(body, new, pool))
        if not isinstance(s, Nest):
            return s
        writes = [w.mapped(expr, buf=new.get(w.buf, w.buf)) for w in s.writes]
        return replace(s, reductions=[r.mapped(expr) for r in s.reductions], writes=writes)

    return [change(s) for s in stmts]
