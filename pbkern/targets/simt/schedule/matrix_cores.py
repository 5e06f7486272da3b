"""MATRIX_CORES: products of fragments that the warps of AMD's GPUs compute together.

Sources: AMD Instinct MI200 and CDNA 3 ISA, "Matrix Arithmetic Instructions"; RDNA 3 ISA, "Wave Matrix Multiply Accumulate";
AMD matrix instruction calculator, layouts of v_mfma_f32_16x16x16_f16 and v_wmma_f32_16x16x16_f16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from pbkern.lower.mlir.operation import Emit
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.layout import Layout, Vector, steps

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
INT8 = np.dtype(np.int8)
INT32 = np.dtype(np.int32)
# Rows and columns of a result.
SIDE = 16

Words = Sequence[str]


def _multiplied(
    name: str, operand: str, element: str, count: int, rest: str
) -> Callable[[Emit, Words, Words, Words], list[str]]:
    """Emission by an operation of ROCDL. operand: type of a lane's elements of an operand. count: sums of a lane."""
    total = f"vector<{count}x{element}>"

    def whole(put: Emit, words: Words) -> str:
        if len(words) == 1:
            return put("llvm.bitcast", tuple(words), f"i32 to {operand}")
        kind = f"vector<{len(words)}xi32>"
        joined = put("vector.from_elements", tuple(words), kind)
        return put("llvm.bitcast", (joined,), f"{kind} to {operand}")

    def emit(put: Emit, sums: Words, first: Words, second: Words) -> list[str]:
        held = put("vector.from_elements", tuple(sums), total)
        operands = whole(put, first), whole(put, second), held
        types = f"({operand}, {operand}, {total}) -> {total}"
        product = put(name, operands, types, f" %s, %s, %s{rest}")
        return [
            put("vector.extract", (product,), f"{element} from {total}", f" %s[{number}]")
            for number in range(count)
        ]

    return emit


def _mfma(
    name: str, operand: np.dtype, result: np.dtype, depth: int, operation: str, kind: str
) -> ProductInstruction:
    """A row of CDNA: a fourth of the depth is in each group of 16 lanes, and a fourth of the rows of results."""
    each = depth // 4
    lanes: list[Vector] = [*steps(SIDE, 1, 0), (0, each), (0, 2 * each)]
    turned = [(column, row) for row, column in lanes]
    first = Layout.of(register=steps(each, 1, 1), lane=lanes)
    second = Layout.of(register=steps(each, 1, 0), lane=turned)
    sums = Layout.of(register=[(1, 0), (2, 0)], lane=[*steps(SIDE, 1, 1), (4, 0), (8, 0)])
    element = "i32" if result == INT32 else "f32"
    emit = _multiplied(f"rocdl.mfma.{operation}", kind, element, 4, ", 0, 0, none")
    return ProductInstruction(
        name, "mfma", (SIDE, SIDE, depth), (operand, operand), result, emit, (first, second, sums)
    )


def _wmma(name: str, operand: np.dtype, operation: str, kind: str) -> ProductInstruction:
    """A row of RDNA 3: a lane has a whole row of the first operand, which the lane 16 further on has as well."""
    lanes: list[Vector] = [*steps(SIDE, 1, 0), (0, 0)]
    turned = [(column, row) for row, column in lanes]
    first = Layout.of(register=steps(SIDE, 1, 1), lane=lanes)
    second = Layout.of(register=steps(SIDE, 1, 0), lane=turned)
    sums = Layout.of(register=steps(SIDE, 2, 0), lane=[*steps(SIDE, 1, 1), (1, 0)])
    emit = _multiplied(f"rocdl.wmma.{operation}", kind, "f32", 8, "")
    shape = (SIDE, SIDE, SIDE)
    return ProductInstruction(
        name, "wmma", shape, (operand, operand), FLOAT32, emit, (first, second, sums)
    )


MATRIX_CORES = (
    _mfma("mfma.f32.16x16x16.f16", FLOAT16, FLOAT32, 16, "f32.16x16x16f16", "vector<4xf16>"),
    _mfma("mfma.f32.16x16x16.bf16", BFLOAT16, FLOAT32, 16, "f32.16x16x16bf16.1k", "vector<4xi16>"),
    _mfma("mfma.f32.16x16x4.f32", FLOAT32, FLOAT32, 4, "f32.16x16x4f32", "f32"),
    _wmma("wmma.f32.16x16x16.f16", FLOAT16, "f32.16x16x16.f16", "vector<16xf16>"),
    _wmma("wmma.f32.16x16x16.bf16", BFLOAT16, "f32.16x16x16.bf16", "vector<16xi16>"),
)
