"""Sums of integers -> the terms that all points of a nest share are added first.

    (x[d] + a) + 1    ->    x[d] + (a + 1)

Emission computes what points share once, before its loops. Rounds of random-number generators add a
word of the key and the number of the round: one addition for each vector instead of two. Exact,
because integers wrap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbkern.lower.nest.ir import Accumulator, Const, Expr, Nest, Op, Shifted, Stmt, with_nests


def reassociate_shared_sums(stmts: Sequence[Stmt], context) -> list[Stmt]:
    """Statements with such sums, inner ones too."""

    def changed(nest: Nest) -> list[Stmt]:
        shared = _Uniform(nest)
        if not any(_is_sum(node) and any(map(shared, node.args)) for node in nest.nodes()):
            return [nest]
        return [nest.mapped(context.pool.rewriter(lambda expr: _regrouped(expr, shared, context)))]

    return with_nests(stmts, changed)


class _Uniform:
    """Whether an expression has one value for all points of a nest."""

    def __init__(self, nest: Nest):
        self.dims, self.known = nest.dims.keys(), dict[Expr, bool]()

    def __call__(self, expr: Expr) -> bool:
        if expr not in self.known:
            self.known[expr] = (
                not isinstance(expr, Accumulator | Shifted)
                and not expr.symbols & self.dims
                and all(map(self, expr.args))
            )
        return self.known[expr]


def _is_sum(expr: Expr) -> bool:
    return isinstance(expr, Op) and expr.info.primitive == "add" and expr.dtype.kind in "iu"


def _regrouped(expr: Expr, shared: _Uniform, context) -> Expr | None:
    """x + (a + b) for (x + a) + b, where a and b are shared and x is not."""
    if not _is_sum(expr) or shared(expr):
        return None
    for inner, b in (expr.args, expr.args[::-1]):
        if _is_sum(inner) and shared(b) and not shared(inner):
            for x, a in (inner.args, inner.args[::-1]):
                if shared(a):
                    return context.op("add", expr.dtype, x, _sum(a, b, context))
    return None


def _sum(expr: Expr, addend: Expr, context) -> Expr:
    if isinstance(expr, Const) and isinstance(addend, Const):
        with np.errstate(over="ignore"):
            return context.const(np.add(expr.value, addend.value, dtype=expr.dtype), expr.dtype)
    return context.op("add", expr.dtype, expr, addend)
