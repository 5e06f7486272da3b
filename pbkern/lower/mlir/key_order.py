"""Which of two elements comes first in a sorted line, as JAX orders them: NaN last, -0 equal to 0."""

from __future__ import annotations

from collections.abc import Iterable

from .ops import Builder
from .value import Ssa


def compare(b: Builder, x: Ssa, y: Ssa, unsigned: bool) -> tuple[Ssa, Ssa]:
    """(x < y, x == y) with NaN above every number and equal to itself."""
    if x.el == "i1":
        x, y, unsigned = (
            b.int_resize(x, "i8", unsigned=True),
            b.int_resize(y, "i8", unsigned=True),
            True,
        )
    less, equal = b.cmp("lt", x, y, unsigned=unsigned), b.cmp("eq", x, y)
    if x.el in ("f32", "f64"):
        nan_x, nan_y = b.is_nan(x), b.is_nan(y)
        less = b.or_(less, b.and_(nan_y, b.not_(nan_x)))
        equal = b.or_(equal, b.and_(nan_x, nan_y))
    return less, equal


def compared(b: Builder, keys: Iterable[tuple[Ssa, Ssa, bool]]) -> tuple[Ssa, Ssa]:
    """(whether x comes before y, whether they are equal), by (x's key, y's key, whether it is unsigned), in order."""
    less: Ssa | None = None
    equal: Ssa | None = None
    for x, y, unsigned in keys:
        lt, eq = compare(b, x, y, unsigned)
        less = lt if less is None or equal is None else b.or_(less, b.and_(equal, lt))
        equal = eq if equal is None else b.and_(equal, eq)
    assert less is not None, "lines are sorted by some key"
    assert equal is not None, "lines are sorted by some key"
    return less, equal
