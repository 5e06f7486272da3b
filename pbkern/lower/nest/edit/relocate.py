"""Accesses of some buffers -> the same accesses of other buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pbkern.lower.nest.ir import Buf, Expr, Gather, Let, Load, Nest, Pool, Stmt, Store, with_bodies


def relocated(
    stmts: Sequence[Stmt],
    other: Callable[[Buf], Buf | None],
    pool: Pool,
    place: Callable[[Buf, tuple], tuple] = lambda buf, index: index,
    *,
    loaded: Callable[[Expr], Expr] = lambda value: value,
    stored: Callable[[Expr], Expr] = lambda value: value,
) -> list[Any]:
    """The statements, inner ones too, over other buffers; `other` gives the one in a buffer's place, or None.

        %t: float32[5,3] scratch                                    %u: float32[3,5] scratch
        nest [i<5, j<3]                                             nest [i<5, j<3]
          %t[i, j] = %a[i, j]        place (i, j) -> (j, i)           %u[j, i] = %a[i, j]
        nest [i<5, j<3]                      ->                     nest [i<5, j<3]
          %b[i, j] = %t[i, j]                                         %b[i, j] = %u[j, i]

    `place`: where an element of a buffer is in the other one. `stored`: what is stored there for a value, and `loaded`:
    the value of a load from there, for buffers of other types.

    Legal where `place` takes elements with different values to different ones inside the other buffer, `loaded` undoes
    `stored`, and nothing else touches the buffers: neither other statements, nor sorts or traces, nor views.
    """

    def moved(expr: Expr) -> Expr | None:
        if not isinstance(expr, Load | Gather):
            return None
        there = other(expr.buf)
        if there is None:
            return None
        index = place(expr.buf, expr.index)
        if there.dtype == expr.buf.dtype:
            return pool.with_access(expr, there, index)
        assert isinstance(expr, Load), "gathers are of the type of their buffer"
        return loaded(pool.load(there.dtype, there, index, expr.guard))

    change = pool.rewriter(moved)

    def moved_store(store: Store) -> Store:
        there = other(store.buf)
        if there is None:
            return store.mapped(change)
        moved = store.mapped(change, buf=there, index=place(store.buf, store.index))
        return replace(moved, value=stored(moved.value))

    def changed(stmt: Stmt) -> Stmt:
        match stmt:
            case Nest():
                return replace(
                    stmt,
                    reductions=tuple(reduction.mapped(change) for reduction in stmt.reductions),
                    stores=tuple(map(moved_store, stmt.stores)),
                )
            case Let(value=value):
                return replace(stmt, value=change(value))
        return with_bodies(stmt, lambda block: [changed(inner) for inner in block])

    return [changed(stmt) for stmt in stmts]
