"""Plan -> Timeline: the kernels and operations of one call in order, with the loops around them and the live memory.

Temporaries live from the step that writes them to the last that reads them, at the top level of a
program's steps, as in buffer_reuse.py; values that a later segment reads live until it has run.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.host_program import (
    BufferKind,
    Cond,
    Copy,
    HostProgram,
    HostWhile,
    Launch,
    Loop,
    Step,
)

from .buffer_reuse import lifetimes
from .plan import Plan, Segment


class TimelineKind(enum.Enum):
    KERNEL = "kernel"
    COPY = "copy"
    XLA = "xla"


@dataclass(frozen=True)
class TimelineEntry:
    """A place of a plan at which something runs.

    Attributes:
      kind: what runs.
      name: the kernel's, the copy's types, or the operations that XLA runs.
      runs: how often one call comes here, where all branches are taken; None if values decide.
      live_bytes: temporaries that hold values while it runs.
    """

    kind: TimelineKind
    name: str
    runs: int | None
    live_bytes: int


@dataclass(frozen=True)
class TimelineSpan:
    """A loop, a branch or a program around entries first .. last.

    Attributes:
      label: its text, as "64 times".
      depth: spans around it.
    """

    label: str
    first: int
    last: int
    depth: int


@dataclass(frozen=True)
class Timeline:
    """Entries in order of time, and the spans around them, outer ones first."""

    entries: tuple[TimelineEntry, ...] = ()
    spans: tuple[TimelineSpan, ...] = ()

    @property
    def peak(self) -> TimelineEntry | None:
        """The first entry at which most memory is live."""
        return max(self.entries, key=lambda entry: entry.live_bytes, default=None)

    def as_dict(self) -> dict:
        """The timeline as values that JSON has."""
        return {
            "entries": [
                {
                    "kind": entry.kind.value,
                    "name": entry.name,
                    "runs": entry.runs,
                    "live_bytes": entry.live_bytes,
                }
                for entry in self.entries
            ],
            "spans": [
                {
                    "label": span.label,
                    "first": span.first,
                    "last": span.last,
                    "depth": span.depth,
                }
                for span in self.spans
            ],
        }


def timeline_of(plan: Plan) -> Timeline:
    writer = _TimelineWriter()
    for n, segment in enumerate(plan.segments):
        live = _bytes_between(plan, n)
        if isinstance(segment.body, HostProgram):
            writer.program(segment.body, live)
        elif isinstance(segment.body, jex.ClosedJaxpr):
            operations = dict.fromkeys(left.op for left in segment.left)
            writer.add(TimelineKind.XLA, ", ".join(operations), 1, live)
    return Timeline(tuple(writer.entries), tuple(sorted(writer.spans, key=_order)))


def _order(span: TimelineSpan) -> tuple[int, int]:
    return span.first, span.depth


def _bytes_between(plan: Plan, at: int) -> int:
    """Bytes of values that segment `at` or an earlier one makes and a later one reads, or that it reads of an earlier one.

    Results of the function are the caller's.
    """
    results = {var for var in plan.jaxpr.outvars if not isinstance(var, jex.Literal)}
    before = {var for segment in plan.segments[: at + 1] for var in segment.makes} - results
    needed = _reads(plan.segments[at + 1 :]) | (
        set(plan.segments[at].reads) - set(plan.segments[at].makes)
    )
    return sum(array_aval(var).size * array_aval(var).dtype.itemsize for var in before & needed)


def _reads(segments: Sequence[Segment]) -> set:
    return {var for segment in segments for var in segment.reads}


class _TimelineWriter:
    def __init__(self) -> None:
        self.entries: list[TimelineEntry] = []
        self.spans: list[TimelineSpan] = []

    def add(self, kind: TimelineKind, name: str, runs: int | None, live: int) -> None:
        self.entries.append(TimelineEntry(kind, name, runs, live))

    def program(self, program: HostProgram, live_around: int) -> None:
        """Adds a program's steps; memory is that which is live at its top level."""
        sizes = {buffer.name: buffer.type.nbytes for buffer in program.of_kind(BufferKind.TEMP)}
        changes = [0] * (len(program.steps) + 1)
        for name, (first, last) in lifetimes(program.steps).items():
            changes[first] += sizes.get(name, 0)
            changes[last + 1] -= sizes.get(name, 0)
        live = live_around
        for step, change in zip(program.steps, changes):
            live += change
            self.step(step, 1, live, 0)

    def step(self, step: Step, runs: int | None, live: int, depth: int) -> None:
        match step:
            case Launch(kernel=kernel):
                self.add(TimelineKind.KERNEL, kernel.name, runs, live)
            case Copy(source=source):
                self.add(TimelineKind.COPY, f"copy of {source.type}", runs, live)
            case Loop(trip_count=trips, steps=inner):
                times = None if runs is None else runs * trips
                self.span(f"{trips} times", inner, times, live, depth)
            case HostWhile(condition=condition, steps=inner):
                self.span("while", (*condition, *inner), None, live, depth)
            case Cond(branches=branches):
                for n, branch in enumerate(branches):
                    self.span(f"branch {n}", branch, runs, live, depth)

    def span(
        self, label: str, steps: Sequence[Step], runs: int | None, live: int, depth: int
    ) -> None:
        first = len(self.entries)
        for step in steps:
            self.step(step, runs, live, depth + 1)
        if len(self.entries) > first:
            self.spans.append(TimelineSpan(label, first, len(self.entries) - 1, depth))
