"""Instructions of AVX-512 that MLIR has no operations for, on values that fill whole registers (registers.in_registers)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbkern.lower.mlir.element_types import BITS
from pbkern.lower.mlir.operation import places
from pbkern.lower.mlir.ops import Builder, Ssa

from .registers import table_values

# Bits of a vector register. Source: AVX-512.
REGISTER_BITS = 512


def register_lanes(el: str) -> int:
    return REGISTER_BITS // BITS[el]


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
    values = table_values(b, table, x.typed(el), el)
    index = b.bitcast(x, f"i{BITS[x.el]}")
    name = f"llvm.x86.avx512.permvar.{'sd'[el == 'f64']}f.512"
    types = f"({x.typed(el)}, {index.type}) -> {x.typed(el)}"
    return x._replace(
        name=b.emit("llvm.call_intrinsic", (values, index.name), types, f' "{name}"(%s, %s)'),
        el=el,
    )


def lanes_of_two(b: Builder, first: Ssa, second: Ssa, lanes: Ssa) -> Ssa:
    """Lanes of two registers, numbered one after the other, by a register of integers as wide."""
    kind = {"f32": "ps", "f64": "pd", "i32": "d", "i64": "q"}[first.el]
    name = f"llvm.x86.avx512.vpermi2var.{kind}.512"
    types = f"({first.type}, {lanes.type}, {second.type}) -> {first.type}"
    operands = first.name, lanes.name, second.name
    return first._replace(
        name=b.emit("llvm.call_intrinsic", operands, types, f' "{name}"(%s, %s, %s)')
    )
