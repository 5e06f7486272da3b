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
    """table[low bits of x]: a table of eight floats. x may be a float32 or an int32."""
    el = f"f{BITS[x.el]}"
    values = table_values(b, table, x.typed(el), el)
    index = b.bitcast(x, f"i{BITS[x.el]}")
    types = f"({x.typed(el)}, {index.type}) -> {x.typed(el)}"
    syntax = ' "llvm.x86.avx2.permps"(%s, %s)'
    return x._replace(
        name=b.emit("llvm.call_intrinsic", (values, index.name), types, syntax), el=el
    )
