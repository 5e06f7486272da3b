"""Records of a launch -> a Chrome trace: a process per SM, a thread per block, its steps inside."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from typing import Any

import numpy as np

from pbkern.targets.simt.emit.kernel import ThreadFunction
from pbkern.targets.simt.emit.recorder import Profile

_serial = itertools.count()


def write(function: ThreadFunction, records: np.ndarray) -> pathlib.Path:
    """Writes `profile_dir`/kernel-process-number.trace.json, which chrome://tracing and Perfetto show.

    Raises OSError.

    Args:
      function: the kernel that was launched.
      records: int64[blocks * words], as the launch stored them (emit/recorder.py).
    """
    assert function.profile is not None
    folder = pathlib.Path(function.profile.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{function.name}-{os.getpid()}-{next(_serial)}.trace.json"
    path.write_text(
        json.dumps(
            {
                "traceEvents": events(function.name, function.profile, records),
                "displayTimeUnit": "ns",
            }
        )
    )
    return path


def events(name: str, profile: Profile, records: np.ndarray) -> list[dict[str, Any]]:
    """Events of all blocks in microseconds since the first block started."""
    rows = records.reshape(-1, profile.words)
    first = int(rows[:, 1].min(initial=np.iinfo(np.int64).max))
    trace_events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": int(sm), "args": {"name": f"SM {sm}"}}
        for sm in np.unique(rows[:, 0])
    ]
    for block, row in enumerate(rows.tolist()):
        sm, start, end, start_cycles, end_cycles, *steps = row
        cycles = end_cycles - start_cycles
        # ns of a cycle; the timer may not have ticked
        each = (end - start) / cycles if end > start and cycles > 0 else 1.0

        def event(what: str, low: int, high: int, **args: Any) -> dict[str, Any]:
            at = start - first + (low - start_cycles) * each  # noqa: B023
            microseconds = {"ts": at / 1e3, "dur": (high - low) * each / 1e3}  # noqa: B023
            return {"ph": "X", "name": what, "pid": sm, "tid": block, "args": args} | microseconds  # noqa: B023

        trace_events.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": sm,
                "tid": block,
                "args": {"name": f"block {block}"},
            }
        )
        trace_events.append(event(name, start_cycles, end_cycles, cycles=cycles))
        for n, (low, high) in enumerate(zip(steps[::2], steps[1::2])):
            if high:  # it was taken
                trace_events.append(event(_step(profile, n), low, high, cycles=high - low))
    return trace_events


def _step(profile: Profile, number: int) -> str:
    """A step by its indices along the sequential grid dimensions."""
    sizes = [size for _, size in profile.steps]
    index = np.unravel_index(number, sizes)
    return "step " + ", ".join(
        f"program_id({dim}) = {position}" for (dim, _), position in zip(profile.steps, index)
    )
