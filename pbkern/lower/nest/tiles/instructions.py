"""ProductInstruction: what a processor computes at once of a product, with its meaning on NumPy arrays.

A reduction by products names the instruction by which it is computed (`Reduction.by`). A target's table has a row for each
(targets/cpu/schedule/instructions.py). Passes ask the row for types and shape, the interpreter for its meaning, emission for
its text.

Instructions that work lane by lane take words, of which each lane has its own. Matrix instructions take fragments: their row
says by three layouts which register of which lane holds which element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np

from pbkern.core.lazy_dataclass import dataclass

from .layout import Layout, steps

# Bits of a word, in which neighbouring elements along the depth lie side by side.
WORD_BITS = 32


@dataclass(frozen=True)
class ProductInstruction:
    """accumulator[m, n] += sum over k of first[m, k] * second[k, n].

    Attributes:
      name: unique among a target's.
      needs: the option of the target that says whether the machine has it.
      shape: (m, n, k) elements of one result: (1, 1, k) for instructions that work lane by lane.
      operands: types of the elements of both operands, k of which are in a word of WORD_BITS bits, the first lowest.
      accumulator: type of results.
      emit: (builder, accumulator, operands) -> the next accumulator. Of a matrix instruction these are lists: the
        accumulators of a lane, and the words of both operands.
      fragments: layouts of both operands and of the accumulator: (row, depth), (depth, column), (row, column). None: words,
        lane by lane.
      warps: of a device's threads, that compute one result together.
      row_bytes: of tiles in shared memory that the instruction reads by itself: bytes of a row along the depth, or of a panel's
        row (layout.Panels). Its operands are then a descriptor, and `emit` gets one word of each. 0: it reads registers.
      is_of_lanes: whether lanes compute it by operations of their own, with operands that several of them read.
      reads: the part of an operand's elements that takes part in products, on NumPy arrays; None: all of them.
    """

    name: str
    needs: str
    shape: tuple[int, int, int]
    operands: tuple[np.dtype, np.dtype]
    accumulator: np.dtype
    emit: Callable[..., Any] = field(repr=False, compare=False)
    fragments: tuple[Layout, Layout, Layout] | None = None
    warps: int = 1
    row_bytes: int = 0
    is_of_lanes: bool = False
    reads: Callable[[np.ndarray], np.ndarray] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def layouts(self) -> tuple[Layout, Layout, Layout]:
        """Layouts of both operands and of the accumulator; a register of a word is one of its elements."""
        depth = self.shape[-1]
        first, second = (Layout.of(register=steps(depth, 1, axis)) for axis in (1, 0))
        return self.fragments or (first, second, Layout.of())

    def meaning(self, accumulator: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The next accumulator of whole operands. Sums of floats are made in float64 and rounded once."""
        exact = np.dtype(np.int64 if self.accumulator.kind == "i" else np.float64)
        operands = (self.as_read(operand).astype(exact) for operand in (first, second))
        return (accumulator.astype(exact) + np.matmul(*operands)).astype(self.accumulator)

    def as_read(self, operand: np.ndarray) -> np.ndarray:
        """Elements as they take part in products."""
        return operand if self.reads is None else self.reads(operand)

    @property
    def is_of_tiles(self) -> bool:
        """Whether it multiplies tiles of many rows and columns, and not lane by lane."""
        return self.shape[:2] != (1, 1)

    @property
    def word_elements(self) -> int:
        """Elements of a word."""
        return WORD_BITS // 8 // self.operands[0].itemsize

    def is_available(self, options: object) -> bool:
        """Whether a target's options say that the machine has it."""
        return bool(getattr(options, self.needs))

    def elements(self, operand: int, words: np.ndarray) -> np.ndarray:
        """The elements of an operand's words, along a new last axis."""
        dtype = self.operands[operand]
        flat = np.ascontiguousarray(words).astype(f"u{WORD_BITS // 8}")
        return flat.reshape(*np.shape(words), 1).view(dtype)
