"""Chunking: the points of a tile shared out among threads by neighbours in a row, as copies want it.

128 x 32 by chunks 4x256:   a thread has 4 neighbours of each of 4 rows that lie 32 rows apart; 8 threads have a row
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass

from .layout import Layout, steps


@dataclass(frozen=True)
class Chunking:
    """Which thread computes which points of a nest of rows and columns.

    count: neighbours along a row that a thread takes together. threads: of the block; neighbouring ones go along rows, and
    those for which no chunk is left have none.
    """

    count: int
    threads: int

    def __str__(self) -> str:
        return f"chunks {self.count}x{self.threads}"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether rows, and chunks of a row, are as many as a power of two."""
        counts = [shape[0], shape[1] // self.count] if len(shape) == 2 else [0]
        return shape[-1] % self.count == 0 and all(n > 0 and not n & (n - 1) for n in counts)

    @functools.cache  # noqa: B019 (few, and they live as long as the process)
    def held(self, shape: tuple[int, ...]) -> Layout:
        """(register, thread) -> (row, column); registers: of a chunk, then of the thread's other chunks."""
        rows, columns = shape
        vectors = (*steps(columns, self.count, 1), *steps(rows, 1, 0))
        bits = self.threads.bit_length() - 1
        registers = (*steps(self.count, 1, 1), *vectors[bits:])
        return Layout.of(register=registers, thread=vectors[:bits])
