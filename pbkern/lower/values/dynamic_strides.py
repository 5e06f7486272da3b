"""Integer expressions that move by a known step along a dimension, such as `row * stride + column` along the columns.

Where a stride is a value, what it multiplies is no affine expression, but the same along the
columns. Bends are what may keep such an expression from moving evenly: bounds that it is clamped
to, remainders that start again, and the choice by which negative indices count from the end.
Whether one shows is told by the ends alone, when the program runs. Clamped values and remainders
move less where they bend, so that the ends are nearer to each other than even steps would bring
them; a choice is the same at both ends. An expression that depends on several bends is not known
where one could make up for another.
"""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.conditions.index_tests import UNBOUNDED
from pbkern.lower.nest.ir import Const, Expr, IndexValue, InRange, Load, Op

ORDERS = ("lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Steps:
    """step: how far an expression moves as a dimension grows by one; None where that is not known.

    choices: comparisons that must be the same at both ends; bends: the clamped value or remainder
    that it depends on.
    """

    step: int | None
    choices: tuple[Expr, ...] = ()
    bends: frozenset[Expr] = frozenset()


UNKNOWN = Steps(None)


def steps_along(expr: Expr, dim: str) -> Steps:
    """Describes how an expression moves along a dimension."""
    return _Along(dim)(expr)


class _Along:
    """Steps along one dimension.

    Expressions are looked at once: as a tree, one that shares its parts is exponential.
    """

    def __init__(self, dim: str) -> None:
        self.dim = dim
        self.known: dict[Expr, Steps] = {}

    def __call__(self, expr: Expr) -> Steps:
        if expr not in self.known:
            self.known[expr] = self._steps(expr)
        return self.known[expr]

    def _steps(self, expr: Expr) -> Steps:
        if self.dim not in expr.symbols:
            return Steps(0)
        if isinstance(expr, IndexValue):
            return Steps(expr.affine.coefficient(self.dim))
        if isinstance(expr, Load):
            return _loaded(expr, self.dim)
        if not isinstance(expr, Op) or expr.dtype.kind not in "iu" or expr.dtype.itemsize < 4:
            return UNKNOWN
        parts = [self(arg) for arg in expr.args]
        if expr.info.primitive == "select_n":
            return self._chosen(expr, parts[1:])
        steps = [part.step for part in parts if part.step is not None]
        steps_of = _step(expr, steps) if len(steps) == len(parts) else None
        return _together(
            steps_of, parts, expr if expr.info.primitive in ("max", "min", "rem") else None
        )

    def _chosen(self, expr: Expr, cases: list[Steps]) -> Steps:
        """Steps of a choice between cases that move alike, by a comparison or by what does not move."""
        test, step = expr.args[0], cases[0].step
        if any(case.step != step for case in cases):
            return UNKNOWN
        if self.dim not in test.symbols:
            return _together(step, cases)
        if isinstance(test, InRange) and (test.low <= -UNBOUNDED or test.high >= UNBOUNDED):
            return _together(step, cases, choice=(test,))
        if not isinstance(test, Op) or test.info.primitive not in ORDERS:
            return UNKNOWN
        compared = [self(arg) for arg in test.args]
        ordered = None not in (operand.step for operand in compared) and 0 in (
            operand.step for operand in compared
        )
        return _together(step if ordered else None, [*cases, *compared], choice=(test,))


def _together(
    step: int | None, parts: list[Steps], bend: Expr | None = None, choice: tuple[Expr, ...] = ()
) -> Steps:
    """Joins the steps of an operation's `parts`, which may bend itself."""
    bends = frozenset().union(*(part.bends for part in parts))
    if step is None or len(bends) > 1:
        return UNKNOWN
    choices = dict.fromkeys([*(option for part in parts for option in part.choices), *choice])
    return Steps(step, tuple(choices), bends if bend is None else frozenset({bend}))


def _loaded(expr: Load, dim: str) -> Steps:
    """Steps of a load from a buffer whose elements are known to move regularly."""
    buf, index = expr.access
    if buf.step is None or any(dim in position.symbols for position in index[:-1]):
        return UNKNOWN
    return Steps(buf.step * index[-1].coefficient(dim), (), frozenset({expr}))


def _step(expr: Op, steps: list[int]) -> int | None:
    """The step of an operation whose operands have these."""
    match expr.info.primitive:
        case "add":
            return steps[0] + steps[1]
        case "sub":
            return steps[0] - steps[1]
        case "mul":
            for x, step in (expr.args[0], steps[1]), (expr.args[1], steps[0]):
                if isinstance(x, Const):
                    return int(x.value) * step
        case "convert_element_type":
            source = expr.args[0].dtype
            return steps[0] if source.kind in "iu" and source.itemsize >= 4 else None
        case "max" | "min" if 0 in steps:
            return steps[0] + steps[1]
        case "rem" if steps[1] == 0:
            return steps[0]
    return None
