"""Times of a block and of its steps along sequential dimensions, which its first thread stores.

    word of a block    0     1, 2                   3, 4                  5, 6       7, 8       ...
                       SM    start and end in ns    the same in cycles    step 0     step 1     start and end in cycles

Cycles are exact and those of one SM; nanoseconds are the same for all SMs, and tick rarely. All
threads wait for each other before a time is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.text import Block, Text
from pbkern.targets.simt.device import Nvidia

# Words of 64 bits before those of the steps; see above.
RECORD_HEADER_WORDS = 5


@dataclass(frozen=True)
class Profile:
    """Record of one kernel.

    Attributes:
      space: events of a block: itself, then its first steps. folder: where traces are written.
      steps: (grid dimension, size) of the sequential ones, slowest first.
    """

    space: int
    folder: str
    steps: tuple[tuple[int, int], ...]

    @property
    def words(self) -> int:
        """Words of 64 bits, for one block."""
        return RECORD_HEADER_WORDS + 2 * (self.space - 1)


@dataclass
class Recorder:
    """Appends what records.

    `record`: a memref of i64 with all blocks' words; `thread`, `block`: their numbers.
    """

    text: Text
    device: Nvidia
    profile: Profile
    record: str
    record_type: str
    thread: str
    block: str
    barrier: Callable[[Block], None]

    def begin(self, block: Block) -> None:
        """The block starts: none of its steps has been taken."""

        def fill(inner: Block) -> None:
            for n in range(RECORD_HEADER_WORDS, self.profile.words):
                self._store(inner, Affine((), n), self.text.const("0", "i64"))
            processor = self.device.processor(partial(self.text.put, inner))
            self._store(
                inner, Affine(), self.text.put(inner, "arith.extui", (processor,), "i32 to i64")
            )
            self._times(inner, 0)

        self._first(block, fill)

    def end(self, block: Block) -> None:
        self.barrier(block)
        self._first(block, lambda inner: self._times(inner, 1))

    def around(self, block: Block, number: Affine, program: Callable[[Block], None]) -> None:
        """A program of the block, and the times at which it starts and ends; `number`: of its step."""
        self._step(block, number, is_end=False)
        program(block)
        self._step(block, number, is_end=True)

    def _step(self, block: Block, number: Affine, is_end: bool) -> None:
        self.barrier(block)

        def fill(inner: Block) -> None:
            cycles = self.device.cycles(partial(self.text.put, inner))
            self._store(inner, number * 2 + (RECORD_HEADER_WORDS + is_end), cycles)

        place = self.text.affine(block, number)[1]
        is_kept = self.text.put(
            block,
            "arith.cmpi",
            (place, self.text.index(self.profile.space - 1)),
            "index",
            " ult, %s, %s",
        )
        self._first(block, lambda inner: self.text.when(inner, is_kept, fill))

    def _times(self, block: Block, offset: int) -> None:
        for first, time in ((1, self.device.nanoseconds), (3, self.device.cycles)):
            self._store(block, Affine((), first + offset), time(partial(self.text.put, block)))

    def _first(self, block: Block, fill: Callable[[Block], None]) -> None:
        test = self.text.put(
            block, "arith.cmpi", (self.thread, self.text.index(0)), "index", " eq, %s, %s"
        )
        self.text.when(block, test, fill)

    def _store(self, block: Block, word: Affine, value: str) -> None:
        at = self.text.affine(block, Affine.symbol(self.block, self.profile.words) + word)[1]
        block.add("memref.store", (value, self.record, at), self.record_type)
