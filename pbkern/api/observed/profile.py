"""Calls of functions -> a trace: when each kernel, loop and share of a thread ran, as Perfetto and chrome://tracing show it.

Programs are called in versions that record themselves (targets/host/recording.py). What XLA runs
beside them is in JAX's own profile of the same calls. Both are slices on one clock.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import pathlib
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pbkern import _jax
from pbkern.api import direct_plan
from pbkern.api.decorators import JitFunction, name_of
from pbkern.core.errors import OptionError, TargetError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions
from pbkern.dsl.host_program import Cond, Copy, HostWhile, Launch, Loop, Step
from pbkern.targets.host import recording
from pbkern.targets.host.recording import PROGRAM_SITE, StepRecord
from pbkern.targets.host.runtime.recorder import LOOP_SITE, TASK_SITE

# Name of slices in JAX's profile that tell how far its clock is from ours.
TICK = "pbkern.tick"
# Such slices: one of them is not interrupted.
TICKS = 20
# Nanoseconds by which the clocks may differ after that.
CLOCK_ERROR = 20_000
# The number that XLA adds to the name of an operation that has a namesake.
SUFFIX = re.compile(r"\.\d+$")
# Bytes that XLA replaces in names of operations.
NOT_IN_NAMES = re.compile(rb"[^\w.-]")


@dataclass(frozen=True)
class Slice:
    """A span of time of a trace.

    Attributes:
      kind: "call" of the function, "program", "kernel", "share" of a thread in a launch, "loop",
        "branch", "copy", "xla": an operation that XLA runs, or "xla part": one within such.
      name: the kernel's, the program's, the operation's, or words.
      track: name of the thread.
      begin, end: nanoseconds.
      args: what else is known: of a kernel its grid, and the bytes and flops that the cost model predicts.
    """

    kind: str
    name: str
    track: str
    begin: int
    end: int
    args: dict[str, Any]


@dataclass(frozen=True)
class LaunchTrace:
    """The result of `pbkern.profile`.

    Attributes:
      name: the function's.
      slices: in the order in which they began, outer ones first.
      missing: records for which there was no place.

    Examples:
      >>> trace = pbkern.profile(pbkern.jit(lambda x: jnp.exp(x).sum(0)), jnp.ones((64, 32)))
      >>> [event["args"]["grid"] for event in trace.events if event.get("cat") == "kernel"]
      [[]]
    """

    name: str
    slices: tuple[Slice, ...]
    missing: int = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of the Trace Event Format, in microseconds since the first call began."""
        tracks = {name: n for n, name in enumerate(dict.fromkeys(s.track for s in self.slices))}
        start = min((span.begin for span in self.slices), default=0)
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": n, "args": {"name": name}}
            for name, n in tracks.items()
        ]
        return names + [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": 0,
                "tid": tracks[span.track],
                "ts": (span.begin - start) / 1e3,
                "dur": (span.end - span.begin) / 1e3,
                "args": span.args,
            }
            for span in self.slices
        ]

    def seconds(self, *kinds: str) -> dict[str, tuple[int, float]]:
        """Name -> (how often, seconds of all) of slices of some kinds, the slowest first."""
        totals: dict[str, tuple[int, float]] = {}
        for span in self.slices:
            if span.kind in kinds:
                count, seconds = totals.get(span.name, (0, 0.0))
                totals[span.name] = count + 1, seconds + (span.end - span.begin) / 1e9
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def summary(self) -> str:
        """A table of kernels: launches, milliseconds of all, share of the calls' time; then copies and what XLA ran."""
        whole = sum(seconds for _, seconds in self.seconds("call").values())
        rows = [(name, *total) for name, total in self.seconds("kernel").items()]
        rows += [(name, *total) for name, total in self.seconds("copy").items()]
        rows += [(f"XLA: {name}", *total) for name, total in self.seconds("xla").items()]
        rows += [(f"all of {name}", *total) for name, total in self.seconds("call").items()]
        width = max(len("kernel"), *(len(name) for name, *_ in rows))
        lines = [f"{'kernel':{width}}  {'calls':>7}  {'total ms':>10}  share"]
        lines += [
            f"{name:{width}}  {count:7}  {seconds * 1e3:10.3f}  {100 * seconds / whole:4.1f} %"
            for name, count, seconds in rows
        ]
        if self.missing:
            lines.append(f"{self.missing} further records found no place: profile fewer calls")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()

    def save(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes the trace as JSON, and returns where. Raises OptionError where that cannot be written."""
        target = pathlib.Path(path)
        trace = {"traceEvents": self.events, "displayTimeUnit": "ns"}
        try:
            target.write_text(json.dumps(trace), encoding="utf-8")
        except OSError as e:
            raise OptionError(f"{target} cannot be written", why=str(e)) from e
        return target


def profile(
    f: Callable,
    *args: Any,
    path: str | os.PathLike | None = None,
    calls: int = 1,
    **kwargs: Any,
) -> LaunchTrace:
    """Calls a function and records when each of its kernels ran, on which threads.

    The function is a decorated one, of JAX, PyTorch or TensorFlow, or any that calls such functions,
    as `jax.grad(f)` does. What it calls on threads of its own is not recorded: kernels of such calls
    are among what XLA ran. It is called once before, which compiles versions of its programs that
    record themselves; calls that are not profiled run as ever. Recording costs about 0.25 us for
    each launch, and for each task of a thread.

    Args:
      f: the function.
      *args: its arguments. Each call gets copies of JAX's arrays where f may give them up (donate_argnums).
      path: file for the trace, which https://ui.perfetto.dev and chrome://tracing show; None: none is
        written.
      calls: how many calls are recorded.
      **kwargs: its arguments by name; parameters called `path` or `calls` are given by position.
    Returns the trace; `events`, `summary()` and `save(path)` show it.
    Raises OptionError; TargetError for programs of GPUs; what the function raises.

    Examples:
      >>> @pbkern.jit
      ... def softmax(x):
      ...     weights = jnp.exp(x - x.max(1, keepdims=True))
      ...     return weights / weights.sum(1, keepdims=True)
      >>> trace = pbkern.profile(softmax, jnp.zeros((64, 256)), calls=3)
      >>> [(name, count) for name, (count, seconds) in trace.seconds("kernel").items()]
      [('softmax_reduce0', 3)]
    """
    if not callable(f):
        raise OptionError("profile takes a function", why=f"given {f!r}")
    if not isinstance(calls, int) or calls < 1:
        raise OptionError("calls= is a number of calls", why=f"given {calls!r}", hint="1 or more")
    options = getattr(f, "options", None)
    if isinstance(options, CompileOptions) and options.target != "cpu":
        raise TargetError(
            f"launches on target `{options.target}` are not recorded",
            why="the recorder takes the times of threads of this processor",
            hint="profile_space and profile_dir of pbkern.nvgpu.CompilerParams take those of blocks",
        )
    keeps_all = isinstance(f, JitFunction) and not (
        f.options.donate_argnums or f.options.donate_argnames
    )

    def call() -> tuple[int, int]:
        given = (args, kwargs) if keeps_all else jax.tree.map(_copy, (args, kwargs))
        jax.block_until_ready(given)
        begin = time.monotonic_ns()
        jax.block_until_ready(f(*given[0], **given[1]))
        return begin, time.monotonic_ns()

    name = name_of(f)
    with tempfile.TemporaryDirectory(prefix="pbkern_profile_") as folder:
        with recording.alone(), direct_plan.recorded(), _jax.recorded():
            call()
            with _xla_profile(folder, name):
                ticks = _ticks()
                recording.begin()
                try:
                    spans = [call() for _ in range(calls)]
                finally:
                    records, missing = recording.end()
        tracks = _Tracks()
        caller = tracks.name(threading.get_ident())
        slices = [Slice("call", name, caller, *span, {}) for span in spans]
        slices += _slices(records, tracks)
        slices += _of_xla_alone(_xla_slices(folder, ticks), slices)
    ordered = sorted(slices, key=lambda span: (span.begin, -span.end))
    result = LaunchTrace(name, tuple(ordered), missing)
    if path is not None:
        result.save(path)
    return result


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


class _Tracks:
    """Names of threads: the calling one's first."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.known = {thread.ident: thread.name for thread in threading.enumerate()}

    def name(self, thread: int) -> str:
        number = len(self.names)
        usual = self.known.get(thread, f"pool thread {number}") if number else "calling thread"
        return self.names.setdefault(thread, usual)


def _slices(records: Sequence[StepRecord], tracks: _Tracks) -> list[Slice]:
    """Slices of what ended, in place of tasks the share of each thread in a launch."""
    slices: list[Slice] = []
    launches: dict[int, StepRecord] = {}  # loop of tasks, by number -> its launch
    shares: dict[tuple[int, int], list[StepRecord]] = {}
    latest: dict[int, StepRecord] = {}  # thread -> the step of a program that began last
    for number, record in enumerate(records):
        if record.site == TASK_SITE:
            # The loop of a task that another thread ran as the recording began is not among these records.
            is_known = record.parent in launches and records[record.parent].begin <= record.begin
            if is_known and record.end:
                shares.setdefault((record.parent, record.thread), []).append(record)
        elif record.site == LOOP_SITE:
            if record.thread in latest:
                launches[number] = latest[record.thread]
        elif record.program is not None:
            latest[record.thread] = record
            if record.end:
                kind, name, args = _step(record)
                track = tracks.name(record.thread)
                slices.append(Slice(kind, name, track, record.begin, record.end, args))
    for (loop, thread), tasks in shares.items():
        _, name, _ = _step(launches[loop])
        args = {
            "tasks": len(tasks),
            "programs": sum(task.high - task.low for task in tasks),
            "busy_us": sum(task.end - task.begin for task in tasks) / 1e3,
        }
        ends = min(task.begin for task in tasks), max(task.end for task in tasks)
        slices.append(Slice("share", f"share of {name}", tracks.name(thread), *ends, args))
    return slices


def _step(record: StepRecord) -> tuple[str, str, dict[str, Any]]:
    """(kind, name, what is known) of a record of a program's step."""
    program = record.program
    assert program is not None
    if record.site == PROGRAM_SITE:
        return "program", program.program.name, {}
    step: Step = program.sites[record.site - PROGRAM_SITE - 1]
    match step:
        case Launch(kernel=kernel):
            args: dict[str, Any] = {"grid": list(kernel.grid)}
            cost = program.costs.get(kernel.name)
            if cost is not None:
                args |= {
                    "predicted_bytes": cost.bytes_moved,
                    "predicted_flops": cost.flops,
                    "predicted_us": cost.seconds * 1e6,
                }
            return "kernel", kernel.name, args
        case Copy(source=source):
            return "copy", f"copy of {source.type}", {"bytes": source.type.nbytes}
        case Loop(trip_count=trips):
            return "loop", f"{trips} times", {"trips": trips}
        case HostWhile():
            return "loop", "while", {}
        case Cond(branches=branches):
            return "branch", f"one of {len(branches)} branches", {}


@contextlib.contextmanager
def _xla_profile(folder: str, function: str) -> Iterator[None]:
    """JAX's own profile, below a folder. Raises OptionError where one is being taken."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # frames of Python would take longer than small functions
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as e:
        raise OptionError(
            f"`{function}` cannot be profiled here",
            why=str(e),
            hint="call pbkern.profile outside of jax.profiler.trace, which shows programs by name as well",
        ) from None
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def _ticks() -> list[tuple[int, int]]:
    """Times before and after short slices in JAX's profile, by which its clock is set."""
    ticks = []
    for _ in range(TICKS):
        begin = time.monotonic_ns()
        with jax.profiler.TraceAnnotation(TICK):
            pass
        ticks.append((begin, time.monotonic_ns()))
    return ticks


def _xla_slices(folder: str, ticks: Sequence[tuple[int, int]]) -> list[Slice]:
    """Operations that XLA ran, in JAX's profile below a folder; `ticks`: when its first slices were taken."""
    (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
    lines = [
        line
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
    ]
    marks = sorted(e.start_ns for line in lines for e in line.events if e.name == TICK)
    # A thread that waits for a core between a time and its slice makes the distance too small, never too large.
    ahead = max(begin - mark for (begin, _), mark in zip(ticks, marks, strict=True))
    slices = []
    for line in lines:
        end = 0.0  # of the last operation that is not within another
        for event in sorted(line.events, key=lambda event: (event.start_ns, -event.duration_ns)):
            if not any(key == "hlo_op" for key, _ in event.stats):
                continue
            kind = "xla" if event.start_ns >= end else "xla part"
            end = max(end, event.end_ns)
            begin = round(event.start_ns + ahead)
            span = begin, begin + round(event.duration_ns)
            name = SUFFIX.sub("", event.name)
            slices.append(Slice(kind, name, f"XLA: {line.name}", *span, {"operation": event.name}))
    return slices


def _of_xla_alone(operations: Sequence[Slice], slices: Sequence[Slice]) -> list[Slice]:
    """The operations that are no calls of programs: such have the name of a program or kernel, and hold a program's slice."""
    names = {
        NOT_IN_NAMES.sub(b"_", span.name.encode()).decode()
        for span in slices
        if span.kind in ("program", "kernel")
    }
    middles = sorted((span.begin + span.end) // 2 for span in slices if span.kind == "program")

    def is_ours(operation: Slice) -> bool:
        at = bisect.bisect_left(middles, operation.begin - CLOCK_ERROR)
        ended = operation.end + CLOCK_ERROR
        return operation.name in names and at < len(middles) and middles[at] <= ended

    return [operation for operation in operations if not is_ours(operation)]
