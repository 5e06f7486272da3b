"""INSTRUCTIONS: products of words that x86-64 computes lane by lane.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS, VPDPWSSD, VPDPBUSD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.nest.tiles.instructions import WORD_BITS, ProductInstruction

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
INT8 = np.dtype(np.int8)
UINT8 = np.dtype(np.uint8)
INT16 = np.dtype(np.int16)
INT32 = np.dtype(np.int32)


def _by_intrinsic(
    name: str, element: str, count: int
) -> Callable[[Builder, Ssa, Sequence[Ssa]], Ssa]:
    """Emission by an LLVM intrinsic on vectors of words that hold `count` elements each."""

    def emit(b: Builder, acc: Ssa, args: Sequence[Ssa]) -> Ssa:
        parts = f"vector<{count * acc.lanes}x{element}>"
        x, y = (b.emit("vector.bitcast", (arg.name,), f"{arg.type} to {parts}") for arg in args)
        types = f"({acc.type}, {parts}, {parts}) -> {acc.type}"
        call = f' "llvm.x86.{name}.{WORD_BITS * acc.lanes}"(%s, %s, %s)'
        return acc._replace(name=b.emit("llvm.call_intrinsic", (acc.name, x, y), types, call))

    return emit


# Pairs of bfloat16.
DPBF16PS = ProductInstruction(
    "dpbf16ps", "bf16_pairs", (1, 1, 2), (BFLOAT16, BFLOAT16), FLOAT32,
    _by_intrinsic("avx512bf16.dpbf16ps", "bf16", 2),
)  # fmt: skip
# Pairs of int16.
VPDPWSSD = ProductInstruction(
    "vpdpwssd", "vnni", (1, 1, 2), (INT16, INT16), INT32, _by_intrinsic("avx512.vpdpwssd", "i16", 2)
)
# Four bytes, of which the first operand's have no sign.
VPDPBUSD = ProductInstruction(
    "vpdpbusd", "vnni", (1, 1, 4), (UINT8, INT8), INT32, _by_intrinsic("avx512.vpdpbusd", "i8", 4)
)
INSTRUCTIONS: dict[str, ProductInstruction] = {
    instruction.name: instruction for instruction in (DPBF16PS, VPDPWSSD, VPDPBUSD)
}


def word_product(
    options: object, operands: tuple[np.dtype, np.dtype], accumulator: np.dtype
) -> ProductInstruction | None:
    """The first row that multiplies whole words of these elements lane by lane, and that the machine has."""
    shape = (1, 1, WORD_BITS // 8 // operands[0].itemsize)
    return next(
        (
            row
            for row in INSTRUCTIONS.values()
            if (row.shape, row.operands, row.accumulator) == (shape, operands, accumulator)
            and row.is_available(options)
        ),
        None,
    )
