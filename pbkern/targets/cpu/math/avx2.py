"""Instructions of AVX2 that MLIR has no operations for, on values that fill whole registers (registers.in_registers)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbkern.lower.mlir.element_types import BITS
from pbkern.lower.mlir.ops import Builder, Ssa

from .registers import table_values

# Bits of a vector register. Source: AVX2.
AVX2_BITS = 256


def lookup(b: Builder, table: np.ndarray | Sequence[float], x: Ssa) -> Ssa:
    """table[lowest two bits of x]: a table of four floats. x may be a float32 or an int32.

    Each half of a register is looked up in a table of its own, by half the work that one table of eight floats takes.
    """
    el = f"f{BITS[x.el]}"
    values = table_values(b, [*table, *table], x.typed(el), el)
    index = b.bitcast(x, f"i{BITS[x.el]}")
    types = f"({x.typed(el)}, {index.type}) -> {x.typed(el)}"
    syntax = ' "llvm.x86.avx.vpermilvar.ps.256"(%s, %s)'
    return x._replace(
        name=b.emit("llvm.call_intrinsic", (values, index.name), types, syntax), el=el
    )
