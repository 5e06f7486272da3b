"""Nest IR: the small explicit form between a kernel's body and MLIR text.

A body becomes a list of statements over buffers. A `Nest` is an iteration space, expressions over
affine accesses, accumulators kept in registers and writes; `If`, `For` and `While` hold further
statements and their values travel through scratch buffers. Views (slice, transpose, broadcast, ...)
are only index maps and leave no trace here. lower/build.py makes nests, lower/passes/merge_nests.py
merges them, targets/cpu/emit/nests.py writes them as scf + vector text.
"""

from .buffers import SPACES, Buf, Names
from .expressions import (
    BOOL,
    FLOAT32,
    INT32,
    MAX_HEIGHT,
    UNWRITTEN_PARAMS,
    Accumulator,
    Const,
    Expr,
    Gather,
    IndexValue,
    InRange,
    Load,
    Op,
    Pool,
    Shifted,
    nodes,
    result_type,
)
from .statements import (
    AsyncCopy,
    AsyncProduct,
    Block,
    For,
    If,
    Let,
    Nest,
    Prefetch,
    Reduction,
    Sort,
    Stmt,
    Store,
    Trace,
    Wait,
    While,
    bodies,
    every,
    with_bodies,
    with_nests,
)
from .text import show

__all__ = [
    "BOOL",
    "FLOAT32",
    "INT32",
    "MAX_HEIGHT",
    "SPACES",
    "UNWRITTEN_PARAMS",
    "Accumulator",
    "AsyncCopy",
    "AsyncProduct",
    "Block",
    "Buf",
    "Const",
    "Expr",
    "For",
    "Gather",
    "If",
    "InRange",
    "IndexValue",
    "Let",
    "Load",
    "Names",
    "Nest",
    "Op",
    "Pool",
    "Prefetch",
    "Reduction",
    "Shifted",
    "Sort",
    "Stmt",
    "Store",
    "Trace",
    "Wait",
    "While",
    "bodies",
    "every",
    "nodes",
    "result_type",
    "show",
    "with_bodies",
    "with_nests",
]
