"""INSTRUCTIONS: products of words that x86-64 computes, lane by lane or tile by tile.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS, VPDPWSSD, VPDPBUSD, TDPBF16PS,
TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD, PMADDWD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from pbkern.lower.mlir.operation import TILE
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.nest.tiles.instructions import WORD_BITS, ProductInstruction
from pbkern.lower.nest.tiles.layout import Layout, steps

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


# Bits of a vector -> the intrinsic that adds the products of neighbouring int16.
PAIR_SUMS = {128: "sse2.pmadd.wd", 256: "avx2.pmadd.wd", 512: "avx512.pmaddw.d.512"}


def _by_pair_sums(b: Builder, acc: Ssa, args: Sequence[Ssa]) -> Ssa:
    """Emission by a multiplication that adds neighbours, and an addition of its own."""
    parts = f"vector<{2 * acc.lanes}xi16>"
    x, y = (b.emit("vector.bitcast", (arg.name,), f"{arg.type} to {parts}") for arg in args)
    return _plus_pair_sums(b, acc, x, y)


def _plus_pair_sums(b: Builder, acc: Ssa, x: str, y: str) -> Ssa:
    """The accumulator plus the sums of products of neighbouring int16."""
    parts = f"vector<{2 * acc.lanes}xi16>"
    call = f' "llvm.x86.{PAIR_SUMS[WORD_BITS * acc.lanes]}"(%s, %s)'
    pairs = b.emit("llvm.call_intrinsic", (x, y), f"({parts}, {parts}) -> {acc.type}", call)
    return acc._replace(name=b.emit("arith.addi", (acc.name, pairs), acc.type))


def _by_widened_bytes(*signed: bool) -> Callable[[Builder, Ssa, Sequence[Ssa]], Ssa]:
    """Emission on words of four bytes: those at even places become pairs of int16, and then those at odd places.

    `signed`: whether each operand's bytes have a sign.
    """

    def emit(b: Builder, acc: Ssa, args: Sequence[Ssa]) -> Ssa:
        parts = f"vector<{2 * acc.lanes}xi16>"
        byte = b.emit("arith.constant", (), parts, " dense<8>")
        even, odd = [], []
        for arg, is_signed in zip(args, signed, strict=True):
            pairs = b.emit("vector.bitcast", (arg.name,), f"{arg.type} to {parts}")
            shift = "arith.shrsi" if is_signed else "arith.shrui"
            above = b.emit("arith.shli", (pairs, byte), parts)
            even.append(b.emit(shift, (above, byte), parts))
            odd.append(b.emit(shift, (pairs, byte), parts))
        return _plus_pair_sums(b, _plus_pair_sums(b, acc, *even), *odd)

    return emit


# Rows of a tile register, and words of one of its rows.
TILE_ROWS = 16
# Bytes of a tile's row.
TILE_ROW_BYTES = TILE_ROWS * WORD_BITS // 8
POINTER = "!llvm.ptr"


def tile_call(b: Builder, name: str, operands: Sequence[str], types: Sequence[str]) -> str:
    """Emits an LLVM intrinsic of AMX whose result is a whole tile. Its operands follow rows and bytes of a row."""
    return b.emit("llvm.call_intrinsic", *tile_operands(b, name, operands, types, TILE))


def tile_operands(
    b: Builder, name: str, operands: Sequence[str], types: Sequence[str], result: str
) -> tuple[tuple[str, ...], str, str]:
    """(operands, types, syntax) of an intrinsic on whole tiles."""
    shape = b.const(str(TILE_ROWS), "i16"), b.const(str(TILE_ROW_BYTES), "i16")
    signature = f"({', '.join(('i16', 'i16', *types))}) -> {result}"
    places = ", ".join(["%s"] * (2 + len(operands)))
    return (*shape, *operands), signature, f' "llvm.x86.{name}.internal"({places})'


def _fragments(word: int) -> tuple[Layout, Layout, Layout]:
    """Which row of a tile register, and which of its elements, holds what; a word has so many elements of an operand.

    Registers are counted as bytes of a tile are: row by row. The second operand's rows hold words of neighbours along the
    depth.
    """
    deep = word * TILE_ROWS
    first = Layout.of(register=(*steps(deep, 1, 1), *steps(TILE_ROWS, 1, 0)))
    inside, across = steps(word, 1, 0), steps(TILE_ROWS, 1, 1)
    second = Layout.of(register=(*inside, *across, *steps(deep, word, 0)))
    sums = Layout.of(register=(*steps(TILE_ROWS, 1, 1), *steps(TILE_ROWS, 1, 0)))
    return first, second, sums


def _by_tiles(name: str) -> Callable[[Builder, Ssa, Sequence[Ssa]], Ssa]:
    """Emission by an intrinsic on whole tiles of words."""

    def emit(b: Builder, acc: Ssa, args: Sequence[Ssa]) -> Ssa:
        depth = b.const(str(TILE_ROW_BYTES), "i16")
        operands = depth, acc.name, *(arg.name for arg in args)
        return acc._replace(name=tile_call(b, name, operands, ("i16", TILE, TILE, TILE)))

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
# The same without AVX512-VNNI. A sum of two products wraps as those of single ones do: it leaves int32 where all four
# numbers are the least of int16, and is the least of int32 then.
PMADDWD = ProductInstruction(
    "pmaddwd", "pair_sums", (1, 1, 2), (INT16, INT16), INT32, _by_pair_sums
)
# Four bytes, of which the first operand's have no sign.
VPDPBUSD = ProductInstruction(
    "vpdpbusd", "vnni", (1, 1, 4), (UINT8, INT8), INT32, _by_intrinsic("avx512.vpdpbusd", "i8", 4)
)
# Four bytes without AVX512-VNNI, for operands that are read where they are.
WIDENED_BYTES = tuple(
    ProductInstruction(
        f"pmaddwd_{first.name}_{second.name}", "pair_sums", (1, 1, 4), (first, second), INT32,
        _by_widened_bytes(first == INT8, second == INT8),
    )
    for first, second in ((INT8, INT8), (UINT8, UINT8), (UINT8, INT8))
)  # fmt: skip
# Tiles: 16 rows of 16 words times 16 rows of 16 words, of which the second operand's hold neighbours along the depth.
TDPBF16PS = ProductInstruction(
    "tdpbf16ps", "amx_bf16", (TILE_ROWS, TILE_ROWS, 2 * TILE_ROWS), (BFLOAT16, BFLOAT16), FLOAT32,
    _by_tiles("tdpbf16ps"), _fragments(2),
)  # fmt: skip
_BYTE_TILES = tuple(
    ProductInstruction(
        name,
        "amx_int8",
        (TILE_ROWS, TILE_ROWS, 4 * TILE_ROWS),
        operands,
        INT32,
        _by_tiles(name),
        _fragments(4),
    )
    for name, operands in (
        ("tdpbssd", (INT8, INT8)),
        ("tdpbsud", (INT8, UINT8)),
        ("tdpbusd", (UINT8, INT8)),
        ("tdpbuud", (UINT8, UINT8)),
    )
)
INSTRUCTIONS: dict[str, ProductInstruction] = {
    instruction.name: instruction
    for instruction in (
        DPBF16PS,
        VPDPWSSD,
        PMADDWD,
        VPDPBUSD,
        *WIDENED_BYTES,
        TDPBF16PS,
        *_BYTE_TILES,
    )
}


def word_product(
    options: object, operands: tuple[np.dtype, np.dtype], accumulator: np.dtype
) -> ProductInstruction | None:
    """The first row that multiplies whole words of these elements lane by lane, and that the machine has."""
    shape = (1, 1, WORD_BITS // 8 // operands[0].itemsize)
    return _row(options, operands, accumulator, lambda row: row.shape == shape)


def tile_product(
    options: object, operands: tuple[np.dtype, np.dtype], accumulator: np.dtype
) -> ProductInstruction | None:
    """The first row that multiplies tiles of these elements, and that the machine has."""
    return _row(options, operands, accumulator, lambda row: row.is_of_tiles)


def _row(
    options: object,
    operands: tuple[np.dtype, np.dtype],
    accumulator: np.dtype,
    suits: Callable[[ProductInstruction], bool],
) -> ProductInstruction | None:
    return next(
        (
            row
            for row in INSTRUCTIONS.values()
            if (row.operands, row.accumulator) == (operands, accumulator)
            and suits(row)
            and row.is_available(options)
        ),
        None,
    )
