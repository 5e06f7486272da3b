"""Buf: an array that nests read and write. Names: fresh names of one kernel."""

from __future__ import annotations

import functools
import itertools
import math
import operator

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.lower.nest.tiles.layout import Swizzle
from pbkern.lower.nest.tiles.tiling import Tiling

# Memories of scratch: that of a thread block, registers of its threads, matrix registers of a CPU.
SPACES = ("shared", "registers", "tiles")
# Words before the layouts of buffers in texts.
LAYOUTS: dict[type, str] = {Swizzle: "swizzle", Tiling: "by", Chunking: "by"}


@dataclass(frozen=True, eq=False)
class Buf:
    """A contiguous array: a kernel operand (`arena` False) or scratch of one task (`arena` True).

    space: memory of scratch, one of SPACES; "" where the target decides.
    layout: of shared memory, where elements lie if not in order; of registers, which threads hold them,
      if not those that compute the points at which they are touched.
    circular: the first axis counts stages, and places along it are taken modulo its size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    arena: bool = False
    storage: Buf | None = None  # another buffer whose bytes this one reinterprets (a reshape)
    # how far its elements move along the last axis but for bends, where known
    # (lower/values/dynamic_strides.py)
    step: int | None = None
    space: str = ""
    layout: Swizzle | Tiling | Chunking | None = None
    circular: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """Element strides, row major."""
        return (
            tuple(itertools.accumulate(self.shape[:0:-1], operator.mul, initial=1))[::-1]
            if self.shape
            else ()
        )

    @property
    def index_dtype(self) -> np.dtype:
        """Integers in which the places of its elements can be computed."""
        return np.dtype(np.int32 if self.size < 1 << 31 else np.int64)

    @property
    def root(self) -> Buf:
        return self.storage.root if self.storage is not None else self

    def __str__(self) -> str:
        scratch = " scratch" if self.arena else ""
        storage = f" of {self.storage.name}" if self.storage is not None else ""
        step = f" step {self.step}" if self.step is not None else ""
        shape = ",".join(map(str, self.shape))
        space = f" {self.space}" if self.space else ""
        layout = "" if self.layout is None else f" {LAYOUTS[type(self.layout)]} {self.layout}"
        circular = " circular" if self.circular else ""
        return f"{self.name}: {self.dtype.name}[{shape}]{scratch}{storage}{step}{space}{layout}{circular}"


class Names:
    """Fresh names of one kernel, numbered from `first`."""

    def __init__(self, first: int = 0) -> None:
        self._count = itertools.count(first)

    def __call__(self, prefix: str) -> str:
        return f"{prefix}{next(self._count)}"
