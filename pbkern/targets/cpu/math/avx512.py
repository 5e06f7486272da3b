"""Instructions of AVX-512 that MLIR has no operations for, on values that fill whole registers.

Values of other lanes go through `in_registers`, so that what a function computes does not depend on
how many lanes it was given: the last elements of a row have the same bits as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pbkern.lower.mlir.element_types import BITS, NUMPY_FLOAT
from pbkern.lower.mlir.operation import places
from pbkern.lower.mlir.ops import Builder, Ssa

# Bits of a vector register. Source: AVX-512.
REGISTER_BITS = 512


def register_lanes(el: str) -> int:
    return REGISTER_BITS // BITS[el]


def in_registers(b: Builder, x: Ssa, function: Callable[[Builder, Ssa], Ssa]) -> Ssa:
    """function(b, x), elementwise on floats, for any lanes of x: function gets whole registers; some lanes may be idle."""
    lanes = register_lanes(x.el)
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


# --- instructions
# ---------------------------------------------------------------------------------------------------


def _masked(b: Builder, instruction: str, *xs: Ssa, immediate: int | None = None) -> Ssa:
    """An instruction on one or two registers, with no lane masked and the current rounding."""
    x = xs[0]
    name = f"llvm.x86.avx512.mask.{instruction}.p{'sd'[x.el == 'f64']}.512"
    mask, rounding = b.const("-1", f"i{x.lanes}"), b.const("4", "i32")
    operands, types = [operand.name for operand in xs], [x.type] * len(xs)
    if immediate is not None:
        operands, types = [*operands, b.const(str(immediate), "i32")], [*types, "i32"]
    operands, types = [*operands, x.name, mask, rounding], [*types, x.type, f"i{x.lanes}", "i32"]
    return x._replace(
        name=b.emit(
            "llvm.call_intrinsic",
            tuple(operands),
            f"({', '.join(types)}) -> {x.type}",
            f' "{name}"({places(len(operands))})',
        )
    )


def scale(b: Builder, x: Ssa, n: Ssa) -> Ssa:
    """x * 2**floor(n), rounded once; for positive finite x infinite or zero where n is infinite, NaN where n is."""
    return _masked(b, "scalef", x, n)


def within(b: Builder, x: Ssa, bound: float) -> Ssa:
    """x with its magnitude cut to `bound`; `bound` where x is NaN."""
    return _masked(b, "range", x, b.c(bound, x.el), immediate=2)


def exponent(b: Builder, x: Ssa) -> Ssa:
    """floor(log2(|x|)), of subnormal numbers too; -inf for zeros, inf for infinities, NaN for NaN."""
    return _masked(b, "getexp", x)


def mantissa(b: Builder, x: Ssa) -> Ssa:
    """x times the power of two that brings it into [3/4, 3/2); 1 for zeros and inf, NaN for the rest below zero and NaN."""
    return _masked(b, "getmant", x, immediate=0b1111)


def lookup(b: Builder, table: np.ndarray | Sequence[float], x: Ssa) -> Ssa:
    """table[low bits of x]: a table of as many floats as a register has. x may be a float or an integer."""
    el = f"f{BITS[x.el]}"
    words = ", ".join(
        f"0x{entry.tobytes()[::-1].hex().upper()}" for entry in np.asarray(table, NUMPY_FLOAT[el])
    )
    values = b.const(f"dense<[{words}]>", x.typed(el))
    index = b.bitcast(x, f"i{BITS[x.el]}")
    name = f"llvm.x86.avx512.permvar.{'sd'[el == 'f64']}f.512"
    types = f"({x.typed(el)}, {index.type}) -> {x.typed(el)}"
    return x._replace(
        name=b.emit("llvm.call_intrinsic", (values, index.name), types, f' "{name}"(%s, %s)'),
        el=el,
    )
