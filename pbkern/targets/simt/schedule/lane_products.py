"""LANE_PRODUCTS: products of fragments that lanes compute by multiply-adds of their own, in the form of matrix instructions.

A warp of 32 lanes has 16 x 32 sums, a lane 4 x 4 of them. Lanes of a row read the same elements of the first operand, lanes of
a column the same of the second one. So that copies in shared memory, pipelines, masks and epilogues are those of matrix
instructions, each step of four along the depth is called one.

    4 rows of a x 4 steps, 4 steps x 4 columns of b     ->     64 multiply-adds behind 8 loads of 16 bytes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pbkern.lower.mlir.operation import Emit
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.layout import Layout, Vector

FLOAT32 = np.dtype(np.float32)
# Sums of a lane along rows and along columns, and steps along the depth: vectors of 16 bytes of each operand.
EACH = 4
# Lanes along rows and along columns.
LANES = 4, 8
# Such products, each of 16 x 32 sums, that fill a block of four warps.
FEWEST_IN_BLOCK = 4
# Lanes of the warps that have these rows.
WARP_OF_LANES = LANES[0] * LANES[1]

Words = Sequence[str]


def _multiply_adds(
    first: Callable[[int, int], int], second: Callable[[int, int], int]
) -> Callable[[Emit, Words, Words, Words], list[str]]:
    """Emission. first: (row, step) -> number of a word of the first operand. second: (step, column) -> of the second one."""

    def emit(put: Emit, sums: Words, left: Words, right: Words) -> list[str]:
        def floats(words: Words) -> list[str]:
            return [put("llvm.bitcast", (word,), "i32 to f32") for word in words]

        a, b, out = floats(left), floats(right), list(sums)
        for step in range(EACH):
            for row in range(EACH):
                for column in range(EACH):
                    number = row * EACH + column
                    factors = a[first(row, step)], b[second(step, column)]
                    out[number] = put("math.fma", (*factors, out[number]), "f32")
        return out

    return emit


def _row(first: str, second: str) -> ProductInstruction:
    """The row for operands whose neighbours in a tile follow one another along rows (`row`) or along columns (`col`)."""
    (tall, wide), steps = LANES, (1, 2)
    # Registers of a lane: what it loads as one vector comes first.
    along_depth: list[Vector] = [(0, step) for step in steps]
    down: list[Vector] = [(step, 0) for step in steps]
    lanes_down: list[Vector] = [(EACH << bit, 0) for bit in range(tall.bit_length() - 1)]
    none: list[Vector] = [(0, 0)]
    left = [*along_depth, *down] if first == "row" else [*down, *along_depth]
    # A lane's columns are neighbours where it loads them as a vector; else neighbouring lanes have neighbouring columns, whose
    # rows of a tile lie in different banks.
    unit, far = (1, EACH) if second == "row" else (wide, 1)
    columns: list[Vector] = [(0, step * unit) for step in steps]
    lanes_across: list[Vector] = [(0, far << bit) for bit in range(wide.bit_length() - 1)]
    steps_of_second: list[Vector] = [(step, 0) for step in steps]
    right = [*columns, *steps_of_second] if second == "row" else [*steps_of_second, *columns]
    fragments = (
        Layout.of(register=left, lane=[*(none * len(lanes_across)), *lanes_down]),
        Layout.of(register=right, lane=[*lanes_across, *(none * len(lanes_down))]),
        Layout.of(register=[*columns, *down], lane=[*lanes_across, *lanes_down]),
    )
    in_rows = lambda slow, fast: slow * EACH + fast
    in_columns = lambda fast, slow: slow * EACH + fast
    emit = _multiply_adds(
        in_rows if first == "row" else in_columns, in_rows if second == "row" else in_columns
    )
    return ProductInstruction(
        f"fma.m{tall * EACH}n{wide * EACH}k{EACH}.f32.{first}.{second}", "multiply_adds",
        (tall * EACH, wide * EACH, EACH), (FLOAT32, FLOAT32), FLOAT32, emit, fragments,
        is_of_lanes=True,
    )  # fmt: skip


LANE_PRODUCTS = tuple(_row(first, second) for first in ("row", "col") for second in ("row", "col"))


def operand_words(sums: int) -> int:
    """Registers of a lane for what it reads of both operands, beside so many sums, as square as can be."""
    return 2 * EACH * math.isqrt(sums)


def oriented(row: ProductInstruction, along_depth: tuple[bool, bool]) -> ProductInstruction:
    """The row of multiply-adds for operands whose neighbours in memory follow one another along the depth, or do not."""
    if row not in LANE_PRODUCTS:
        return row
    first, second = along_depth
    return LANE_PRODUCTS[2 * (not first) + second]
