"""MATRIX_INSTRUCTIONS: products of fragments that the warps of NVIDIA's GPUs compute together.

Source: PTX ISA 8.7, sections 9.7.14.5.7 to 9.7.14.5.14, matrix fragments of mma.m16n8k8, m16n8k16 and m16n8k32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from jax.extend import core as jex

from pbkern.core.jaxprs import equations
from pbkern.lower.mlir.operation import Emit, places
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.layout import Layout, Vector

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
INT8 = np.dtype(np.int8)
UINT8 = np.dtype(np.uint8)
INT32 = np.dtype(np.int32)
# Bits of a float32 that tf32 instructions read: sign, exponent and 10 bits of the fraction.
# Source: PTX ISA 8.7, section 9.7.14.1, alternate floating point data formats.
TF32_BITS = np.uint32(0xFFFFE000)
# Results of a lane: rows g and g + 8 of two neighbouring columns.
LANE_SUMS = 4

Words = Sequence[str]


def _mma(
    kind: str, depth: int, word: str, result: str
) -> Callable[[Emit, Words, Words, Words], list[str]]:
    """Emission by nvvm.mma.sync; words come as i32."""
    struct = f"!llvm.struct<({', '.join([result] * LANE_SUMS)})>"
    facts = (
        "layoutA = #nvvm.mma_layout<row>, layoutB = #nvvm.mma_layout<col>, "
        f"multiplicandAPtxType = #nvvm.mma_type<{kind}>, "
        f"multiplicandBPtxType = #nvvm.mma_type<{kind}>, "
        f"shape = #nvvm.shape<m = 16, n = 8, k = {depth}>"
    )
    if result == "i32":
        facts += ", intOverflowBehavior = #nvvm.mma_int_overflow<wrapped>"

    def emit(put: Emit, sums: Words, first: Words, second: Words) -> list[str]:
        def as_word(name: str) -> str:
            return name if word == "i32" else put("llvm.bitcast", (name,), f"i32 to {word}")

        operands = (*map(as_word, first), *map(as_word, second), *sums)
        counts = (len(first), len(second), len(sums))
        syntax = "".join(f" {side}[{places(count)}]" for side, count in zip("ABC", counts))
        types = f"({word}, {word}, {result}) -> {struct}"
        product = put("nvvm.mma.sync", operands, types, f"{syntax} {{{facts}}}")
        return [
            put("llvm.extractvalue", (product,), struct, f" %s[{number}]")
            for number in range(LANE_SUMS)
        ]

    return emit


def _tf32(values: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(values).view(np.uint32) & TF32_BITS).view(FLOAT32)


def _row(
    name: str, kind: str, operand: np.dtype, result: np.dtype, word: str, element: str
) -> ProductInstruction:
    """The row of mma.sync.m16n8kK, whose rows of operands have K elements in 32 bytes."""
    size = operand.itemsize
    each = 4 // size  # elements of a word
    depth = 32 // size
    # Bits of the depth: within a word, then of the four lanes of a row.
    within = [1 << bit for bit in range(each.bit_length() - 1)]
    lanes = [each, 2 * each]
    groups: list[Vector] = [(1, 0), (2, 0), (4, 0)]
    turned = [(column, row) for row, column in groups]
    first = Layout.of(
        register=[*((0, step) for step in within), (8, 0), (0, 4 * each)],
        lane=[*((0, step) for step in lanes), *groups],
    )
    second = Layout.of(
        register=[*((step, 0) for step in within), (4 * each, 0)],
        lane=[*((step, 0) for step in lanes), *turned],
    )
    sums = Layout.of(register=[(0, 1), (8, 0)], lane=[(0, 2), (0, 4), *groups])
    return ProductInstruction(
        name, "tensor_cores", (16, 8, depth), (operand, operand), result,
        _mma(kind, depth, word, element), (first, second, sums),
        _tf32 if operand == FLOAT32 else None,
    )  # fmt: skip


MMA_F16 = _row("mma.m16n8k16.f16", "f16", FLOAT16, FLOAT32, "vector<2xf16>", "f32")
MMA_BF16 = _row("mma.m16n8k16.bf16", "bf16", BFLOAT16, FLOAT32, "i32", "f32")
# Reads the highest 19 bits of its operands.
MMA_TF32 = _row("mma.m16n8k8.tf32", "tf32", FLOAT32, FLOAT32, "i32", "f32")
MMA_S8 = _row("mma.m16n8k32.s8", "s8", INT8, INT32, "i32", "i32")
MMA_U8 = _row("mma.m16n8k32.u8", "u8", UINT8, INT32, "i32", "i32")
MATRIX_INSTRUCTIONS: dict[str, ProductInstruction] = {
    row.name: row for row in (MMA_F16, MMA_BF16, MMA_TF32, MMA_S8, MMA_U8)
}


def multiplied_matrices(jaxpr: jex.Jaxpr) -> int:
    """Elements of the tiles of the largest product in a body whose types some row has; 0 where none fills one instruction."""
    rows = {row.operands: row.shape for row in MATRIX_INSTRUCTIONS.values() if not row.reads}
    most = 0
    for equation in equations(jaxpr):
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            shape = rows.get(tuple(np.dtype(operand.aval.dtype) for operand in equation.invars))
            size = equation.outvars[0].aval.size
            if shape and size >= shape[0] * shape[1]:
                sides = equation.outvars[0].aval.shape
                most = max(most, math.prod(1 << (side - 1).bit_length() for side in sides))
    return most
