"""Bodies of loops -> fewer nests: what a step carries on is stored where it is computed, over what the same points have read.

    for %i < n:                                    for %i < n:
      nest [d]                                       nest [d]
        y[%i, d] = a[%i, d] * t[d]         ->          y[%i, d] = a[%i, d] * t[d]
        u[d] = a[%i, d] * t[d]                         t[d] = a[%i, d] * t[d]
      nest [d]
        t[d] = u[d]

Registers then hold t, and nothing is copied in a step. A point of a nest reads all that it reads before it stores.
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import For, Stmt, bodies, with_bodies
from pbkern.lower.passes.merge_nests import MergeNests, without_unread


def overwrite_carries(stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
    """Statements with fewer nests and less scratch in loops, inner ones too."""
    merge = MergeNests()

    def in_loops(body: Sequence[Stmt]) -> list[Stmt]:
        inner = [with_bodies(stmt, in_loops) for stmt in body]
        return [
            with_bodies(stmt, lambda body: merge.merged(body, context.pool, may_overwrite=True))
            if isinstance(stmt, For)
            else stmt
            for stmt in inner
        ]

    merged = in_loops(stmts)
    live = {buf.root for buf in context.persistent}
    return without_unread(merged, live) if any(map(bodies, stmts)) else merged
