"""A loop with statements for its first or last step alone -> the loop without them, which stand before or behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pbkern.core.affine import Affine
from pbkern.lower.nest.conditions.index_tests import Folder
from pbkern.lower.nest.effects import Effects
from pbkern.lower.nest.ir import (
    Const,
    Expr,
    For,
    If,
    InRange,
    Let,
    Nest,
    Op,
    Prefetch,
    Stmt,
    While,
    every,
    nodes,
)

from .rename import moved

# Operations that keep the truth of a test as an integer of 0 or 1.
OF_TRUTHS = ("convert_element_type", "max", "min")


def peeled(loop: For, context: Any) -> list[Stmt]:
    """The loop, and around it what a test lets it do in one step only.

        for %g < 8:                                 nest [i<4]
          let %s = int32((0 <= %g < 1))               t[i] = 0.0
          case %s == 0:                             for %g < 8:
          case %s == 1:                               nest [i<4]
            nest [i<4]                     ->           t[i] = t[i] + a[%g, i]
              t[i] = 0.0
          nest [i<4]
            t[i] = t[i] + a[%g, i]

    Legal where the loop has steps whose number is known, and nothing that the test guards meets what the first step does
    before it, or the last one behind it.
    """
    if not isinstance(loop.trips, int) or loop.trips < 2:
        return [loop]
    body = list(loop.body)
    defined = [stmt for stmt in body if isinstance(stmt, Let)]
    names = {let.name for let in defined}
    steps = _steps(defined, loop.counter, loop.trips - 1, context)
    around: dict[int, list[Stmt]] = {step: [] for step in (0, loop.trips - 1)}
    for stmt in loop.body:
        step = steps.get(stmt.index) if isinstance(stmt, If) else None
        if not isinstance(stmt, If) or step is None or len(stmt.branches) != 2 or stmt.branches[0]:
            continue
        position, mine = body.index(stmt), Effects.of(stmt)
        beside = body[position + 1 :] if step else body[:position]
        is_free = all(mine.commute(Effects.of(one)) for one in beside)
        if is_free and not _symbols(stmt.branches[1]) & names:
            place: dict[str, Affine] = {loop.counter: Affine((), step)}
            around[step] += moved(stmt.branches[1], place, context.pool)
            body.remove(stmt)
    unused = steps.keys() - _symbols(body)
    body = [stmt for stmt in body if not (isinstance(stmt, Let) and stmt.name in unused)]
    before, behind = around.values()
    return [*before, For(loop.counter, loop.trips, tuple(body)), *behind]


def _steps(lets: Sequence[Let], counter: str, last: int, context: Any) -> dict[str, int]:
    """Name of a truth -> the step, the first or the last one, in which alone it is 1."""
    steps = {}
    for step, elsewhere in ((0, (1, last)), (last, (0, last - 1))):
        holds, fails = (
            Folder(context.pool, context.bounds | {counter: ends})
            for ends in ((step, step), elsewhere)
        )
        for let in lets:
            test = _test(let.value)
            if test is not None and _is(holds(test), True) and _is(fails(test), False):
                steps[let.name] = step
    return steps


def _test(value: Expr) -> InRange | None:
    """The test whose truth an integer is."""
    parts = nodes([value])
    tests = [node for node in parts if isinstance(node, InRange)]
    is_plain = all(
        isinstance(node, InRange | Const)
        or (isinstance(node, Op) and node.info.primitive in OF_TRUTHS)
        for node in parts
    )
    return tests[0] if is_plain and len(tests) == 1 else None


def _is(expr: Expr, value: bool) -> bool:
    return isinstance(expr, Const) and bool(expr.value) is value


def _symbols(stmts: Sequence[Stmt]) -> frozenset[str]:
    """Symbols that statements ask for."""
    symbols: set[str] = set()
    for stmt in every(stmts):
        match stmt:
            case Nest():
                symbols |= frozenset().union(*(expr.symbols for expr in stmt.expressions()))
                symbols |= {
                    name for x in stmt.stores for place in x.index for name in place.symbols
                }
            case Let(value=value):
                symbols |= value.symbols
            case If(index=name) | For(trips=str(name)) | While(predicate=name):
                symbols.add(name)
            case Prefetch(index=index):
                symbols |= {name for place in index for name in place.symbols}
    return frozenset(symbols)
