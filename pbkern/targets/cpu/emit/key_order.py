"""Which of two elements comes first in a sorted line, as JAX orders them: NaN last, -0 equal to 0."""

from __future__ import annotations

from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.ops import Value as Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Sort

from .addressing import memref


def below(text: Text, block: Block, s: Sort, x: str, y: str) -> str:
    """Whether the element at address x comes before that at y."""
    b = text.builder(block, 0)
    less: Ssa | None = None
    equal: Ssa | None = None
    for buf in s.buffers[: s.num_keys]:
        first, second = (b.from_storage(Ssa(text.put(block, f"memref.load {buf.root.name}[{at}] : {memref(buf)}"),
                                            storage_el(buf.dtype), 0), buf.dtype) for at in (x, y))
        lt, eq = compare(b, first, second, buf.dtype.kind == "u")
        less = lt if less is None or equal is None else b.or_(less, b.and_(equal, lt))
        equal = eq if equal is None else b.and_(equal, eq)
    assert less is not None, "lines are sorted by some key"
    return less.name


def compare(b, x: Ssa, y: Ssa, unsigned: bool) -> tuple[Ssa, Ssa]:
    """(x < y, x == y) with NaN above every number and equal to itself."""
    if x.el == "i1":
        x, y, unsigned = b.int_resize(x, "i8", unsigned=True), b.int_resize(y, "i8", unsigned=True), True
    less, equal = b.cmp("lt", x, y, unsigned=unsigned), b.cmp("eq", x, y)
    if x.el in ("f32", "f64"):
        nan_x, nan_y = b.is_nan(x), b.is_nan(y)
        less = b.or_(less, b.and_(nan_y, b.not_(nan_x)))
        equal = b.or_(equal, b.and_(nan_x, nan_y))
    return less, equal
