"""Statements -> several versions of them, of which a test takes one when the program runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pbkern.lower.nest.ir import AsyncCopy, AsyncProduct, Expr, If, Let, Nest, Op, Pool, Stmt


def versioned(
    name: str, test: Expr, versions: Sequence[Sequence[Stmt]], context: Any
) -> list[Stmt]:
    """A Let of a test, and the version for its value: of a truth the first for false, the second for true.

                                               let %s = %f[0]
        nest [i<8]                             case %s == 0:
          y[i] = select_n(%f[0], a[i], b[i])     nest [i<8]
                                        ->         y[i] = a[i]
                                               case %s == 1:
                                                 nest [i<8]
                                                   y[i] = b[i]

    Legal where each version means the same as the statements if the test has its value, and nothing in them changes it.
    """
    return [
        Let(name, context.clamped(test, None)),
        If(name, tuple(tuple(version) for version in versions)),
    ]


def holds_no_versions(stmt: Stmt, context: Any) -> bool:
    """Whether a statement holds nests alone: what is under way does, and a branch would end the registers of a loop."""
    return isinstance(stmt, AsyncCopy | AsyncProduct) or context.policy.keeps_in_registers(stmt)


def settled(nest: Nest, test: Expr, value: int, pool: Pool) -> Nest:
    """The nest with each select by a test as the operand that it takes for a value of the test."""

    def decided(expr: Expr) -> Expr | None:
        is_select = isinstance(expr, Op) and expr.info.primitive == "select_n"
        return expr.args[1 + value] if is_select and expr.args[0] is test else None

    return nest.mapped(pool.rewriter(decided))
