"""Integer expressions that move by a known step along a dimension, such as `row * stride + column` along the columns.

Where a stride is a value, what it multiplies is no affine expression, but the same along the columns. Bends are what may keep
such an expression from moving evenly: bounds that it is clamped to, and the choice by which negative indices count from the
end. Whether one shows is told by the ends alone, when the program runs: if the choice is the same at both and their distance
is that of even steps, all steps between are even, as an expression has bends on one path of it only.
"""

from __future__ import annotations

from dataclasses import dataclass

from .nest import Expr
from .predicates import FAR

ORDERS = ("lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Steps:
    """step: how far an expression moves as a dimension grows by one; None where that is not known.

    choices: comparisons that must be the same at both ends; bent: whether it may be clamped.
    """

    step: int | None
    choices: tuple[Expr, ...] = ()
    bent: bool = False


UNKNOWN = Steps(None)


def steps_along(e: Expr, dim: str) -> Steps:
    """How an expression moves along a dimension."""
    if dim not in e.symbols:
        return Steps(0)
    if e.kind == "index":
        return Steps(e.info.coefficient(dim))
    if e.kind != "op" or e.dtype.kind not in "iu" or e.dtype.itemsize < 4:
        return UNKNOWN
    if e.info.primitive == "select_n":
        return _chosen(e, dim)
    parts = [steps_along(a, dim) for a in e.args]
    if any(p.step is None for p in parts) or sum(p.bent for p in parts) > 1:
        return UNKNOWN
    step, bends = _combined(e, [p.step for p in parts])
    choices = tuple(c for p in parts for c in p.choices)
    return Steps(step, choices, bends or any(p.bent for p in parts))


def _combined(e: Expr, steps: list[int]) -> tuple[int | None, bool]:
    """(step of an operation whose operands have these, whether it bends)."""
    match e.info.primitive:
        case "add":
            return steps[0] + steps[1], False
        case "sub":
            return steps[0] - steps[1], False
        case "mul":
            for x, step in (e.args, steps[1]), (e.args[::-1], steps[0]):
                if x[0].kind == "const":
                    return int(x[0].info) * step, False
        case "convert_element_type":
            source = e.args[0].dtype
            return (steps[0] if source.kind in "iu" and source.itemsize >= 4 else None), False
        case "max" | "min" if 0 in steps:
            return steps[0] + steps[1], True
    return None, False


def _chosen(e: Expr, dim: str) -> Steps:
    """Of a choice by a comparison between cases that move alike."""
    test, *cases = e.args
    parts = [steps_along(c, dim) for c in cases]
    if len({p.step for p in parts}) != 1 or any(p.bent or p.choices for p in parts):
        return UNKNOWN
    if dim not in test.symbols:
        return parts[0]
    return Steps(parts[0].step, (test,), True) if _is_order(test, dim) else UNKNOWN


def _is_order(test: Expr, dim: str) -> bool:
    """Whether a test tells an expression that moves evenly from one that does not move, as larger or smaller."""
    if test.kind == "range":
        return test.info[1] <= -FAR or test.info[2] >= FAR
    if test.kind != "op" or test.info.primitive not in ORDERS:
        return False
    compared = [steps_along(a, dim) for a in test.args]
    return not any(c.step is None or c.bent for c in compared) and 0 in (c.step for c in compared)
