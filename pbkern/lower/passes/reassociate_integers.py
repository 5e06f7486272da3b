"""Sums of integers -> the terms that all points of a nest share are added first.

    (x[d] + a) + 1    ->    x[d] + (a + 1)

Emission computes what points share once, before its loops. Rounds of random-number generators add a
word of the key and the number of the round: one addition for each vector instead of two. Exact,
because integers wrap.
"""

from __future__ import annotations

import numpy as np

from pbkern.lower.nest.ir import Expr, Nest, Stmt, with_bodies


def reassociate_shared_sums(stmts: list[Stmt], context) -> list[Stmt]:
    """Statements with such sums, inner ones too."""

    def changed(s: Stmt) -> Stmt:
        if not isinstance(s, Nest):
            return with_bodies(s, lambda body: list(map(changed, body)))
        shared = _Shared(s)
        if not any(_is_sum(e) and any(map(shared, e.args)) for e in s.nodes()):
            return s
        return s.mapped(context.pool.rewriter(lambda e: _regrouped(e, shared, context)))

    return list(map(changed, stmts))


class _Shared:
    """Whether an expression has one value for all points of a nest."""

    def __init__(self, nest: Nest):
        self.dims, self.known = nest.dims.keys(), dict[Expr, bool]()

    def __call__(self, e: Expr) -> bool:
        if e not in self.known:
            self.known[e] = (
                e.kind not in ("acc", "moved")
                and not e.symbols & self.dims
                and all(map(self, e.args))
            )
        return self.known[e]


def _is_sum(e: Expr) -> bool:
    return e.kind == "op" and e.info.primitive == "add" and e.dtype.kind in "iu"


def _regrouped(e: Expr, shared: _Shared, context) -> Expr | None:
    """x + (a + b) for (x + a) + b, where a and b are shared and x is not."""
    if not _is_sum(e) or shared(e):
        return None
    for inner, b in (e.args, e.args[::-1]):
        if _is_sum(inner) and shared(b) and not shared(inner):
            for x, a in (inner.args, inner.args[::-1]):
                if shared(a):
                    return context.op("add", e.dtype, x, _sum(a, b, context))
    return None


def _sum(a: Expr, b: Expr, context) -> Expr:
    if a.kind == b.kind == "const":
        with np.errstate(over="ignore"):
            return context.const(np.add(a.info, b.info, dtype=a.dtype), a.dtype)
    return context.op("add", a.dtype, a, b)
