"""mma and ldmatrix: what warps do together with matrices. Source: PTX ISA 8.7, sections 9.7.14.5 and 9.7.14.5.15.

Fragments are written here as the manual words them, and not by the layouts with which code is made.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from . import ops
from .counts import WARP_THREADS, Memo
from .instructions.accesses import address_of, read
from .instructions.table import MAKERS
from .operands import Mask, Reader, Step, names_of, operand
from .parse import Instruction, PtxProgram

WORD = np.dtype(np.uint32)
# Bytes of a register that holds elements.
WORD_BYTES = 4
LANES = np.arange(WARP_THREADS)
# The manual's groupID of each lane.
LANE_GROUP = LANES // 4
# The manual's threadID_in_group of each lane.
LANE_IN_GROUP = LANES % 4
# Rows of a matrix of ldmatrix.
MATRIX_ROWS = 8
# Bytes of such a row.
MATRIX_ROW_BYTES = 16
# Bits of a float32 that tf32 products read.
TF32_MASK = np.uint32(0xFFFFE000)
# Types of elements as NumPy's, and those in which products and sums are made.
KINDS = {
    "f16": (np.dtype(np.float16), np.dtype(np.float32)),
    "bf16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)),
    "tf32": (np.dtype(np.float32), np.dtype(np.float32)),
    "s8": (np.dtype(np.int8), np.dtype(np.int32)),
    "u8": (np.dtype(np.uint8), np.dtype(np.int32)),
}


def _elements(words: np.ndarray, kind: str) -> np.ndarray:
    """Elements of words, the lowest first, along a new last axis."""
    dtype, exact = KINDS[kind]
    words = words & TF32_MASK if kind == "tf32" else words
    return np.ascontiguousarray(words)[..., None].view(dtype).astype(exact)


def _mma(program: PtxProgram, instruction: Instruction) -> Step:
    shape = next(
        (re.fullmatch(r"m16n8k(\d+)", word) for word in instruction.op if "n8k" in word), None
    )
    result, first_kind, second_kind, _ = instruction.op[-4:]
    known = result in ("f32", "s32") and first_kind in KINDS and second_kind in KINDS
    if shape is None or not known or "satfinite" in instruction.op:
        raise ops.Unknown("shape or types")
    depth, each = int(shape[1]), WORD_BYTES // KINDS[first_kind][0].itemsize
    accumulator = np.dtype(np.float32 if result == "f32" else np.int32)
    targets, *inputs = (names_of(text) for text in instruction.operands)
    sources: list[list[Reader]] = [
        [operand(program, name, dtype) for name in names]
        for names, dtype in zip(inputs, (WORD, WORD, accumulator))
    ]

    def step(gang: Any, mask: Mask) -> None:
        def by_warp(reader: Reader) -> np.ndarray:
            return np.broadcast_to(reader(gang), gang.shape).reshape(gang.blocks, -1, WARP_THREADS)

        warps = (gang.blocks, gang.threads // WARP_THREADS)
        first = np.zeros((*warps, 16, depth), accumulator)
        second = np.zeros((*warps, depth, 8), accumulator)
        sums = np.zeros((*warps, 16, 8), accumulator)
        for number, reader in enumerate(sources[0]):
            values = _elements(by_warp(reader), first_kind)
            for element in range(each):
                columns = each * LANE_IN_GROUP + element + 4 * each * (number // 2)
                first[:, :, LANE_GROUP + 8 * (number % 2), columns] = values[..., element]
        for number, reader in enumerate(sources[1]):
            values = _elements(by_warp(reader), second_kind)
            for element in range(each):
                rows = each * LANE_IN_GROUP + element + 4 * each * number
                second[:, :, rows, LANE_GROUP] = values[..., element]
        for number, reader in enumerate(sources[2]):
            sums[:, :, LANE_GROUP + 8 * (number // 2), 2 * LANE_IN_GROUP + number % 2] = by_warp(
                reader
            )
        total = first @ second + sums
        for number, name in enumerate(targets):
            part = total[:, :, LANE_GROUP + 8 * (number // 2), 2 * LANE_IN_GROUP + number % 2]
            gang.put(name, part.reshape(gang.shape), mask)

    return step


def _ldmatrix(program: PtxProgram, instruction: Instruction) -> Step:
    if "m8n8" not in instruction.op or instruction.op[-1] != "b16":
        raise ops.Unknown("shape")
    names, turned, memo = names_of(instruction.operands[0]), "trans" in instruction.op, Memo()
    address = address_of(program, instruction.operands[1])

    def step(gang: Any, mask: Mask) -> None:
        here = np.ones(gang.shape, bool) if mask is None else mask
        giving = here & (gang.tid % WARP_THREADS < MATRIX_ROWS * len(names))
        rows = np.zeros((*gang.shape, MATRIX_ROW_BYTES // WORD_BYTES), WORD)
        addresses = np.broadcast_to(address(gang), gang.shape)
        rows[giving] = read(gang, addresses, giving, "shared", WORD, rows.shape[-1], memo)
        # Threads 8q to 8q + 7 give the rows of matrix q.
        halves = rows.view(np.uint16).reshape(gang.blocks, -1, 4, MATRIX_ROWS, MATRIX_ROWS)
        for number, name in enumerate(names):
            matrix = halves[:, :, number].swapaxes(-1, -2) if turned else halves[:, :, number]
            low, high = (
                matrix[:, :, LANE_GROUP, 2 * LANE_IN_GROUP + side].astype(WORD) for side in range(2)
            )
            gang.put(name, (low | high << np.uint32(16)).reshape(gang.shape), mask)

    return step


MAKERS |= {"mma": _mma, "ldmatrix": _ldmatrix}
