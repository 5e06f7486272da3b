"""Recorded programs: compiled like others, with marks around their steps, and what the marks have recorded.

A recorded program is compiled beside the one that runs otherwise, which knows nothing of marks
(docs/decisions/104-traces-of-launches.md). Its kernels are the same functions; @pbk_main tells the
recorder (runtime/recorder.py) when each launch, loop, branch and copy begins and ends, and its
parallel loop tells when each task does. Without a recording in force a mark counts and stores
nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import HostProgram, Step

from .loaded_program import CompiledProgram
from .objects.elf_loader import Image
from .program_text import HostText, StepHooks, Temporaries
from .runtime import recorder, xla
from .runtime.parallel import PARALLEL
from .runtime_symbols import loaded

if TYPE_CHECKING:
    from pbkern.fuse.cost.model import Cost

# Records that a recording has place for: 64 MB, of which pages are taken as they are written to.
MOST_RECORDS = 1 << 20
# Site of the program as a whole; its steps follow in their order.
PROGRAM_SITE = 0

_programs: weakref.WeakValueDictionary[int, RecordedProgram] = weakref.WeakValueDictionary()


class RecordedText(HostText):
    """The text of a program that records its steps. Copies that launches add are part of them."""

    def __init__(self, program: HostProgram, memory: Temporaries, hooks: StepHooks):
        super().__init__(program, memory, hooks)
        self.sites = {id(step): n for n, step in enumerate(program.all_steps(), PROGRAM_SITE + 1)}
        self.functions.append(recorder.DECLARATIONS)

    def text(self) -> str:
        steps, self.lines = self.lines, []
        number = self._open(PROGRAM_SITE)
        self.lines += steps
        self._close(number)
        return super().text()

    def step(self, step: Step) -> None:
        site = self.sites.get(id(step))
        if site is None:
            super().step(step)
            return
        number = self._open(site)
        super().step(step)
        self._close(number)

    def _open(self, site: int) -> str:
        program = self.put("llvm.mlir.addressof @pbk_held : !llvm.ptr")
        zero, no_parent = self.const(0), self.const(recorder.NO_PARENT)
        return self.put(
            f"func.call @{xla.PREFIX}pbk_open({program}, {self.const(site)}, {no_parent}, {zero}, {zero}) "
            ": (!llvm.ptr, i64, i64, i64, i64) -> i64"
        )

    def _close(self, number: str) -> None:
        self.lines.append(f"func.call @{xla.PREFIX}pbk_close({number}) : (i64) -> ()")


@dataclass(eq=False, kw_only=True)
class RecordedProgram(CompiledProgram):
    """A program whose calls are recorded.

    costs: what the cost model predicts of its kernels, by name.
    """

    costs: dict[str, Cost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _programs[self.image.address("pbk_held")] = self

    def entry(self, image: Image) -> Any:
        _programs[image.address("pbk_held")] = self
        return super().entry(image)

    def linked(self, symbols: Mapping[str, int]) -> Mapping[str, int]:
        return recorded_symbols(symbols)

    @functools.cached_property
    def sites(self) -> tuple[Step, ...]:
        """Its steps, in the order of their sites."""
        return tuple(self.program.all_steps())


def recorded_symbols(symbols: Mapping[str, int]) -> dict[str, int]:
    """Addresses of what a recorded program calls, of those of a program that is not: its parallel loop is one around theirs."""
    marks = _marks()
    inner = {recorder.INNER_PARALLEL: symbols[PARALLEL], **marks}
    return {**symbols, **marks, PARALLEL: _parallel_loop(tuple(inner.items()))}


@functools.cache
def _parallel_loop(symbols: tuple[tuple[str, int], ...]) -> int:
    return loaded(
        "recorder: parallel loop", recorder.PARALLEL_LOOP, PARALLEL, dict(symbols)
    ).address(PARALLEL)


def _marks() -> dict[str, int]:
    image = _recorder()
    return {xla.PREFIX + name: image.address(name) for name in recorder.SYMBOLS}


@functools.cache
def _recorder() -> Image:
    image = loaded("recorder", recorder.RECORDER, "pbk_open", {})
    image.holds = memory = mmap.mmap(-1, 8 * recorder.RECORD_WORDS * MOST_RECORDS)
    _state(image)[0] = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return image


def _state(image: Image) -> Any:
    """The recorder's words: address of records, how many it holds, how many were opened."""
    return (ctypes.c_int64 * 3).from_address(image.address("pbk_records"))


@dataclass(frozen=True)
class StepRecord:
    """A step, a loop of tasks or a task, with its times.

    Attributes:
      program: whose step it is; None for loops of tasks and tasks.
      site: the step's number, or LOOP_SITE or TASK_SITE.
      parent: a task's loop, by its number.
      low, high: first program of a task, and the one behind the last.
      thread: as threading.get_ident() has it.
      begin, end: nanoseconds, as time.monotonic_ns() counts.
    """

    program: RecordedProgram | None
    site: int
    parent: int
    low: int
    high: int
    thread: int
    begin: int
    end: int


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The process's recorder is the caller's. Raises OptionError where it is somebody else's."""
    if not _one_at_a_time.acquire(blocking=False):
        raise OptionError(
            "launches are being recorded already",
            why="a process has one recorder",
            hint="one call of pbkern.profile after the other",
        )
    try:
        yield
    finally:
        _one_at_a_time.release()


def begin() -> None:
    """Begins a recording, of all threads."""
    state = _state(_recorder())
    state[2], state[1] = 0, MOST_RECORDS


def end() -> tuple[list[StepRecord], int]:
    """Ends the recording; (its records by number, how many more found no place).

    What still runs has 0 as its end.
    """
    image = _recorder()
    state = _state(image)
    count = min(state[2], MOST_RECORDS)
    missing = max(state[2] - MOST_RECORDS, 0)
    state[1] = 0
    rows = np.frombuffer(image.holds, np.int64).reshape(-1, recorder.RECORD_WORDS)[:count]
    records = [StepRecord(_programs.get(program), *fields) for program, *fields in rows.tolist()]
    rows[:] = 0
    return records, missing
