"""BuildOptions: what a target decides before there is a nest.

Defaults suit any device; a target gives its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Protocol

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ONE_EACH, PriceTable


class SortScratch(Protocol):
    """Scratch that a target's Sort statements need beside their operands.

    Its repr is part of the keys of the disk cache.
    """

    def __call__(
        self, lines: int, length: int, dtypes: Sequence, keys: int, first: int
    ) -> list[tuple[tuple[int, ...], np.dtype]]:
        """(shape, dtype) of each buffer for sorting `lines` lines of `length` elements.

        The first `keys` operands are compared; the first `first` elements are read.
        """


@dataclass(frozen=True)
class NoScratch:
    """Scratch of targets that sort in place."""

    def __call__(
        self, lines: int, length: int, dtypes: Sequence, keys: int, first: int
    ) -> list[tuple[tuple[int, ...], np.dtype]]:
        return []


@dataclass(frozen=True)
class BuildOptions:
    """Facts of a target for building nests and the shared passes.

    Plain data: it is part of the keys of the disk cache.

    Attributes:
      semantics: dimension_semantics of the kernel for this target; None: derived
        (lower/grid/parallelism.py).
      contract: sums may be reassociated, products and sums contracted.
      op_costs: elementwise primitive -> what one costs, in additions. Part of the sources, not of a key.
      store_price: additions per element that a store and the loads of it are worth.
      short_row: a costly function of rows up to this length is stored for many rows, rather than
        computed in each.
      short_line: lines of up to this many elements are sorted in registers, by a network of
        exchanges; short_line_operations: if that takes no more operations than this.
      sort_scratch: what other lines need beside themselves to be sorted.
      scatter_strip: updates of one element that are made together before they are combined one by
        one; 0: each by itself.
      scatter_row_bytes: results from this size on take all updates row by row, where windows are columns; 0: none does.
      fetch_ahead: updates between one and the window that it asks for by a Prefetch; 0: there are
        none.
      fetch_bytes: results of a scatter from this size on are asked for.
      cut_bytes: long rows are cut at index tests in multiples of this, so that parts between tests
        start at one; 1: where the test is.
      may_shift: the last block of a ragged dimension may be moved back (lower/grid/block_shift.py),
        so that some elements are computed twice, and none under a mask.
      one_case: a body has one case, whose blocks are guarded where any may cross an edge: for tiles that
        are masked at edges, and are the same everywhere.
      block_copy_bytes: blocks of inputs are copied to scratch, by a loop over the grid dimensions that run in order
        (lower/grid/block_copies.py); those that do not move along them up to this size; 0: blocks are read in place.
      scalar_loops: loops over arrays of a few elements are written out as operations on single elements, which registers
        hold from step to step.
      most_taps: convolutions of each channel by itself are sums of products where a window has no more elements than this, so
        that what pads the operand becomes edges of the sum; other convolutions are contractions of a padded copy.
      most_parts: concatenations are read where their operands are, by a nest for each part of a result, if that takes no
        more nests than this (lower/values/segments.py); 1: they are stored.
      plain: no pass is run that is not required, and emission takes the way that always works: what
        is left when a special way has failed (core/process/fallback.py).
    """

    semantics: tuple[str, ...] | None = None
    contract: bool = True
    op_costs: PriceTable = field(default=ONE_EACH, hash=False, repr=False)
    store_price: float = 4.0
    short_row: int = 8
    short_line: int = 16
    short_line_operations: int = 1600
    sort_scratch: SortScratch = NoScratch()
    scatter_strip: int = 0
    scatter_row_bytes: int = 0
    fetch_ahead: int = 0
    fetch_bytes: int = 0
    cut_bytes: int = 1
    may_shift: bool = True
    one_case: bool = False
    block_copy_bytes: int = 0
    scalar_loops: bool = False
    most_taps: int = 0
    most_parts: int = 1
    plain: bool = False

    def sorts_in_registers(self, length: int, keys: int, operands: int) -> bool:
        """Whether lines of so many elements are: neighbours compare keys, and exchange all operands."""
        exchanges = length * (length - 1) // 2
        return (
            length <= self.short_line
            and exchanges * (7 * keys + 2 * operands) <= self.short_line_operations
        )

    @property
    def policy(self) -> object:
        """The target's NestPolicy (lower/nest/context.py); None where it has no answers of its own."""
        return None

    def op_cost(self, primitive: str) -> float:
        return self.op_costs[primitive]
