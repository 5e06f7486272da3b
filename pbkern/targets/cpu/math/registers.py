"""Functions on whole registers, for values of any lanes; tables that fill a register.

Values of other lanes go through `in_registers`, so that what a function computes does not depend on
how many lanes it was given: the last elements of a row have the same bits as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pbkern.lower.mlir.element_types import BITS, NUMPY_FLOAT
from pbkern.lower.mlir.ops import Builder, Ssa


def in_registers(
    b: Builder, x: Ssa, function: Callable[[Builder, Ssa], Ssa], register_bits: int
) -> Ssa:
    """function(b, x), elementwise on floats, for any lanes of x: function gets whole registers; some lanes may be idle."""
    lanes = register_bits // BITS[x.el]
    wide = b.with_lanes(lanes)
    if x.lanes == lanes:
        return function(wide, x)
    if not x.lanes:
        y = function(wide, b.broadcast(x, lanes))
        return b.first_lane(y)
    parts = [function(wide, _part(b, x, at, lanes)) for at in range(0, x.lanes, lanes)]
    return _joined(b, parts, x.lanes)


def _part(b: Builder, x: Ssa, at: int, count: int) -> Ssa:
    """Lanes at .. at + count; those that x does not have repeat its last."""
    return b.shuffle(x, x, [min(k, x.lanes - 1) for k in range(at, at + count)])


def _joined(b: Builder, parts: Sequence[Ssa], lanes: int) -> Ssa:
    """The parts one after the other, cut to `lanes`."""
    while len(parts) > 1:
        pairs = list(zip(parts[::2], parts[1::2]))
        odd = (
            [b.shuffle(parts[-1], parts[-1], range(2 * parts[-1].lanes))] if len(parts) % 2 else []
        )
        parts = [
            b.shuffle(left, right, range(left.lanes + right.lanes)) for left, right in pairs
        ] + odd
    return parts[0] if parts[0].lanes == lanes else b.shuffle(parts[0], parts[0], range(lanes))


def table_values(b: Builder, table: np.ndarray | Sequence[float], type_: str, el: str) -> str:
    """The name of a constant vector."""
    words = ", ".join(
        f"0x{entry.tobytes()[::-1].hex().upper()}" for entry in np.asarray(table, NUMPY_FLOAT[el])
    )
    return b.const(f"dense<[{words}]>", type_)


def in_general_register(b: Builder, x: Ssa) -> Ssa:
    """One float16 that comes to its vector register from a general one.

    LLVM loads it by an instruction of SSE that keeps the other lanes, so that each load waits for what the register held
    before. An empty assembly statement hides from LLVM where the number comes from. Measured on Zen 3, 700,000 additions to
    float16 at places that an array chooses: 3.9 ms so loaded, 2.0 by way of a general register.
    """
    word = b.int_resize(b.bitcast(x, "i16"), "i32", unsigned=True)
    hidden = b.emit("llvm.inline_asm", (word.name,), "(i32) -> i32", ' "", "=r,0" %s')
    return b.bitcast(b.int_resize(word._replace(name=hidden), "i16"), "f16")
