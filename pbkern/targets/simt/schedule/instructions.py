"""MATRIX_INSTRUCTIONS: products of fragments that the warps of GPUs compute together; here those of NVIDIA.

Source: PTX ISA 8.7, sections 9.7.14.5.7 to 9.7.14.5.14, matrix fragments of mma.m16n8k8, m16n8k16 and m16n8k32; section
9.7.15.5, wgmma.mma_async.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jax.extend import core as jex

from pbkern.core.jaxprs.walks import equations
from pbkern.lower.mlir.operation import Emit, places
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.layout import Layout, Vector, steps

from .lane_products import LANE_PRODUCTS
from .matrix_cores import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, MATRIX_CORES

UINT8 = np.dtype(np.uint8)
# Bits of a float32 that tf32 instructions read: sign, exponent and 10 bits of the fraction.
# Source: PTX ISA 8.7, section 9.7.14.1, alternate floating point data formats.
TF32_BITS = np.uint32(0xFFFFE000)
# Results of a lane: rows g and g + 8 of two neighbouring columns.
LANE_SUMS = 4
# Rows of results of a group of four warps.
GROUP_ROWS = 64
# Columns of results of the instructions of such groups that are used here, the most first.
GROUP_COLUMNS = (256, 128, 64)
# Bytes of elements whose rows in a tile may run across the depth.
# Source: PTX ISA 8.7, section 9.7.15.5.1, wgmma.mma_async, imm-trans-a and imm-trans-b.
WIDEST_TURNED_BYTES = 2
# Registers of a multiprocessor. Source: CUDA C++ Programming Guide, technical specifications per compute capability.
REGISTERS = 1 << 16
# Bytes of a row of tiles that groups of warps read: the widest swizzle.
GROUP_ROW_BYTES = 128

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
        reads=_tf32 if operand == FLOAT32 else None,
    )  # fmt: skip


MMA_F16 = _row("mma.m16n8k16.f16", "f16", FLOAT16, FLOAT32, "vector<2xf16>", "f32")
MMA_BF16 = _row("mma.m16n8k16.bf16", "bf16", BFLOAT16, FLOAT32, "i32", "f32")
# Reads the highest 19 bits of its operands.
MMA_TF32 = _row("mma.m16n8k8.tf32", "tf32", FLOAT32, FLOAT32, "i32", "f32")
MMA_S8 = _row("mma.m16n8k32.s8", "s8", INT8, INT32, "i32", "i32")
MMA_U8 = _row("mma.m16n8k32.u8", "u8", UINT8, INT32, "i32", "i32")


def _wgmma(kind: str, shape: tuple[int, int, int], element: str) -> Callable[..., list[str]]:
    """Emission by nvvm.wgmma.mma_async. Words of an operand: its descriptor, and whether its rows run along the depth."""
    rows, columns, depth = shape
    count = columns // 2
    struct = f"!llvm.struct<({', '.join([element] * count)})>"
    sizes = f"<m = {rows}, n = {columns}, k = {depth}>"
    result, overflow = ("s32", ", <wrapped>") if element == "i32" else ("f32", "")

    def side(layout: str) -> str:
        return f"[<{kind}>, #nvvm.wgmma_scale_in<one>, <{layout}>]"

    def emit(put: Emit, sums: Words, first: Words, second: Words) -> list[str]:
        held = put("llvm.mlir.undef", (), struct)
        for number, value in enumerate(sums):
            held = put("llvm.insertvalue", (value, held), struct, f" %s, %s[{number}]")
        ways = side("row" if first[1] else "col"), side("col" if second[1] else "row")
        syntax = (
            f" %s, %s, %s, {sizes}, D [<{result}>, #nvvm.wgmma_scale_out<one>{overflow}], "
            f"A {ways[0]}, B {ways[1]}"
        )
        operands, types = (first[0], second[0], held), f"{struct} -> {struct}"
        product = put("nvvm.wgmma.mma_async", operands, types, syntax)
        return [
            put("llvm.extractvalue", (product,), struct, f" %s[{number}]")
            for number in range(count)
        ]

    return emit


def _group_row(
    kind: str, columns: int, operand: np.dtype, result: np.dtype, element: str
) -> ProductInstruction:
    """The row of wgmma.m64nNkK. A warp has 16 rows of the results, with columns as mma.m16n8 has them, 8 at a time."""
    shape = GROUP_ROWS, columns, 32 // operand.itemsize
    depth = shape[-1]
    groups: list[Vector] = [(1, 0), (2, 0), (4, 0)]
    sums = Layout.of(
        register=[(0, 1), (8, 0), *steps(columns, 8, 1)],
        lane=[(0, 2), (0, 4), *groups],
        warp=[(16, 0), (32, 0)],
    )
    # Of tiles in shared memory, which no lane holds.
    first = Layout.of(register=[*steps(depth, 1, 1), *steps(GROUP_ROWS, 1, 0)])
    second = Layout.of(register=[*steps(depth, 1, 0), *steps(columns, 1, 1)])
    return ProductInstruction(
        f"wgmma.m64n{columns}k{depth}.{kind}", "warpgroups", shape, (operand, operand), result,
        _wgmma(kind, shape, element), (first, second, sums), warps=4, row_bytes=GROUP_ROW_BYTES,
    )  # fmt: skip


# Instructions of one warp of NVIDIA's GPUs.
MMA_INSTRUCTIONS = (MMA_F16, MMA_BF16, MMA_TF32, MMA_S8, MMA_U8)
# Instructions of one warp, and what lanes of one compute in their place.
WARP_INSTRUCTIONS = (*MMA_INSTRUCTIONS, *MATRIX_CORES, *LANE_PRODUCTS)
# Instructions of four warps, those of the most columns first.
GROUP_INSTRUCTIONS = tuple(
    _group_row(kind, columns, operand, result, element)
    for kind, operand, result, element in (
        ("f16", FLOAT16, FLOAT32, "f32"),
        ("bf16", BFLOAT16, FLOAT32, "f32"),
        ("s8", INT8, INT32, "i32"),
        ("u8", UINT8, INT32, "i32"),
    )
    for columns in GROUP_COLUMNS
)
MATRIX_INSTRUCTIONS: dict[str, ProductInstruction] = {
    row.name: row for row in (*WARP_INSTRUCTIONS, *GROUP_INSTRUCTIONS)
}


def has_matrix_instructions(options: object) -> bool:
    """Whether some row is the device's."""
    return any(row.is_available(options) for row in WARP_INSTRUCTIONS)


def multiplied_matrices(jaxpr: jex.Jaxpr, options: object) -> int:
    """Elements of the tiles of the largest product in a body whose types some row has; 0 where none fills an instruction."""
    rows = {
        row.operands: row.shape
        for row in WARP_INSTRUCTIONS
        if row.is_available(options) and not row.reads
    }
    most = 0
    for equation in equations(jaxpr):
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            shape = rows.get(tuple(np.dtype(operand.aval.dtype) for operand in equation.invars))
            size = equation.outvars[0].aval.size
            if shape and size >= shape[0] * shape[1]:
                sides = equation.outvars[0].aval.shape
                most = max(most, math.prod(1 << (side - 1).bit_length() for side in sides))
    return most
