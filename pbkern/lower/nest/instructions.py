"""ProductInstruction: what a processor computes at once of a product, with its meaning on NumPy arrays.

A reduction by products names the instruction by which it is computed (`Reduction.by`). A target's table has a row for each
(targets/cpu/schedule/instructions.py). Passes ask the row for types and shape, the interpreter for its meaning, emission for
its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
      emit: (builder, accumulator, operands) -> the next accumulator.
    """

    name: str
    needs: str
    shape: tuple[int, int, int]
    operands: tuple[np.dtype, np.dtype]
    accumulator: np.dtype
    emit: Callable[..., Any] = field(repr=False, compare=False)

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
