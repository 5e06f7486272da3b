"""Prints and failed checks of bodies.

The first thread of a block stores them for the host process to read after the launch.

    words    0                        1 ...                                          ...
             words that all prints    each check: how often it failed, values of     prints: site, block, values of each, in
             asked for                the first time                                 the order in which blocks stored them

Every value starts at a whole word. A check has its own place, so that it is found however much is
printed. What launches do with the words is in launch/reports.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Buf, Trace
from pbkern.lower.rules.debug_callbacks import SITES, Type

# Bytes of a word of a report: an i64.
REPORT_WORD_BYTES = 8
# For prints of one launch. Source: CUDA C++ Programming Guide, formatted output: what its printf
# keeps by default.
PRINTED_BYTES = 1 << 20
PRINT_HEADER_WORDS = 2  # words of a print before its values
NO_PRINT = -1  # in the place of the site: it did not fit


@dataclass(frozen=True)
class Reports:
    """Reports of one kernel.

    Attributes:
      prints, checks: numbers in lower.rules.debug_callbacks.SITES.
      copied: operands of which the launch keeps a copy, since the kernel updates what a failed
        check shows.
    """

    prints: tuple[int, ...]
    checks: tuple[int, ...]
    copied: tuple[int, ...] = ()

    @classmethod
    def of(cls, traces: Sequence[Trace], copied: Sequence[int]) -> Reports | None:
        sites = sorted({trace.site for trace in traces})
        checks = tuple(site for site in sites if SITES[site].is_check)
        return (
            cls(tuple(site for site in sites if not SITES[site].is_check), checks, tuple(copied))
            if sites
            else None
        )

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """Check -> its first word."""
        places, at = {}, 1
        for check in self.checks:
            places[check], at = at, at + 1 + words(SITES[check].types)
        return places

    @property
    def first_print(self) -> int:
        return 1 + sum(1 + words(SITES[check].types) for check in self.checks)

    @property
    def room(self) -> int:
        """Words for prints."""
        longest = max(
            (PRINT_HEADER_WORDS + words(SITES[site].types) for site in self.prints), default=0
        )
        return max(PRINTED_BYTES // REPORT_WORD_BYTES, longest) if self.prints else 0

    @property
    def nbytes(self) -> int:
        """A word more than there is room: the first print that does not fit says so."""
        return (self.first_print + self.room + bool(self.room)) * REPORT_WORD_BYTES

    @property
    def cleared_bytes(self) -> int:
        """From the start, which are zero before a launch."""
        return self.first_print * REPORT_WORD_BYTES

    @property
    def operands(self) -> tuple[Type, ...]:
        """Types of those that a failed check hands over."""
        return next((SITES[check].operands for check in self.checks), ())


def words(types: Sequence[Type]) -> int:
    """Words for values of these types."""
    return sum(map(value_words, types))


def value_words(of_type: Type) -> int:
    shape, dtype = of_type
    return -(-math.prod(shape) * dtype.itemsize // REPORT_WORD_BYTES)


@dataclass
class ReportWriter:
    """Appends what stores them.

    `memory`: a memref of bytes; `thread`, `block`: their numbers; `memref`: type of a buffer's.
    """

    text: Text
    reports: Reports
    memory: str
    thread: str
    block: str
    memref: Callable[[Buf], str]

    @property
    def type(self) -> str:
        return f"memref<{self.reports.nbytes}xi8>"

    def begin(self, top: Block) -> None:
        """Names the words."""
        self.words_type = f"memref<{self.reports.nbytes // REPORT_WORD_BYTES}xi64>"
        self.words = self.text.put(
            top,
            "memref.view",
            (self.memory, self.text.index(0)),
            f"{self.type} to {self.words_type}",
        )

    def store(self, block: Block, trace: Trace) -> None:
        """Stores what one statement reports.

        Of its buffers, operands come last, which the launch reads.
        """
        first = self.text.put(
            block, "arith.cmpi", (self.thread, self.text.index(0)), "index", " eq, %s, %s"
        )
        one = self._check if SITES[trace.site].is_check else self._print
        self.text.when(block, first, lambda inner: one(inner, trace))

    def _check(self, block: Block, trace: Trace) -> None:
        at = self.reports.places[trace.site]
        before = self._added(block, at, 1)
        never = self.text.put(block, "arith.cmpi", (before, self._i64(0)), "i64", " eq, %s, %s")
        self.text.when(block, never, lambda inner: self._values(inner, trace, Affine((), at + 1)))

    def _print(self, block: Block, trace: Trace) -> None:
        count = PRINT_HEADER_WORDS + words(SITES[trace.site].types)
        before = self._added(block, 0, count)
        fits = self.text.put(
            block,
            "arith.cmpi",
            (before, self._i64(self.reports.room - count)),
            "i64",
            " ule, %s, %s",
        )
        is_next = self.text.put(
            block, "arith.cmpi", (before, self._i64(self.reports.room)), "i64", " ule, %s, %s"
        )

        def start_of(inner: Block) -> Affine[str]:
            inner.values["%report"] = self.text.put(
                inner, "arith.index_cast", (before,), "i64 to index"
            )
            return Affine.symbol("%report") + self.reports.first_print

        def fill(inner: Block) -> None:
            start = start_of(inner)
            self._word(inner, start, self._i64(trace.site))
            self._word(
                inner,
                start + 1,
                self.text.put(inner, "arith.index_cast", (self.block,), "index to i64"),
            )
            self._values(inner, trace, start + PRINT_HEADER_WORDS)

        def end(inner: Block) -> None:
            self._word(inner, start_of(inner), self._i64(NO_PRINT))

        self.text.when(block, fits, fill, lambda inner: self.text.when(inner, is_next, end))

    def _values(self, block: Block, trace: Trace, at: Affine) -> None:
        for of_type, buf in zip(SITES[trace.site].types, trace.buffers):
            self._copy(block, buf, at)
            at = at + value_words(of_type)

    def _copy(self, block: Block, buf: Buf, at: Affine) -> None:
        """All elements of a buffer, to the words from `at` on."""
        source = self.memref(buf)
        target = f"memref<{max(buf.size, 1)}x{mlir_type(storage_el(buf.dtype))}>"
        place = self.text.affine(block, at * REPORT_WORD_BYTES)[1]
        view = self.text.put(block, "memref.view", (self.memory, place), f"{self.type} to {target}")

        def fill(inner: Block, _: object) -> list:
            index = self.text.affine(inner, Affine.symbol("%element"))[1]
            value = self.text.put(inner, "memref.load", (buf.root.name, index), source)
            inner.add("memref.store", (value, view, index), target)
            return []

        self.text.loop(block, "%element", 0, buf.size, 1, fill)

    def _added(self, block: Block, word: int, count: int) -> str:
        """A word before `count` is added to it, by one thread of all at a time."""
        return self.text.put(
            block,
            "memref.atomic_rmw",
            (self._i64(count), self.words, self.text.index(word)),
            f"(i64, {self.words_type}) -> i64",
            " addi %s, %s[%s]",
        )

    def _word(self, block: Block, at: Affine, value: str) -> None:
        place = self.text.affine(block, at)[1]
        block.add("memref.store", (value, self.words, place), self.words_type)

    def _i64(self, value: int) -> str:
        return self.text.const(str(value), "i64")
