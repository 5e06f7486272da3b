"""Explanation -> the values that its page shows, as JSON has them.

Kernels that are equal are one kernel of the page, with the names of all; entries of the timeline
name it by its number.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pbkern.core.machine import Machine
from pbkern.core.process import progress
from pbkern.fuse.emit.explain import Explanation, KernelReport

# `file:line:column (function)`, as _user_lines.UserLine prints it.
PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)")
# Lines of a file that are shown before and after one that takes time.
AROUND = 3


def contents_of(
    report: Explanation,
    target: str,
    machine: Machine,
    texts_of: Callable[[str], Mapping[str, str]],
) -> dict[str, Any]:
    """The page's values: those of `as_dict`, equal kernels once and with code, and the lines of source files.

    Args:
      report: of a function.
      target: name of the target.
      machine: the device for which times are predicted.
      texts_of: kernel's name -> its text after each stage.
    """
    values = report.as_dict()
    groups = _equal_kernels(report.kernels)
    values["kernels"] = [
        _kernel(report, values["kernels"], group, texts_of, f"{n + 1} of {len(groups)}")
        for n, group in enumerate(groups)
    ]
    number_of = {
        report.kernels[member].name: n for n, group in enumerate(groups) for member in group
    }
    for entry in values["timeline"]["entries"]:
        entry["kernel"] = number_of.get(entry["name"]) if entry["kind"] == "kernel" else None
    values["seconds_by_line"] = _by_file_and_line(report.by_line())
    values["sources"] = _sources(values["seconds_by_line"])
    values["target"] = target
    values["machine"] = {
        "name": machine.name,
        "cores": machine.cores,
        "flops": machine.flops("float32"),
        "bandwidth": machine.dram_bandwidth,
        "source": machine.source,
    }
    return values


def _equal_kernels(kernels: Sequence[KernelReport]) -> list[list[int]]:
    """Numbers of kernels, those that are equal together, in launch order."""
    groups: dict[tuple, list[int]] = {}
    for n, kernel in enumerate(kernels):
        groups.setdefault(kernel.content, []).append(n)
    return list(groups.values())


def _kernel(
    report: Explanation,
    values: list[dict],
    group: Sequence[int],
    texts_of: Callable[[str], Mapping[str, str]],
    count: str,
) -> dict[str, Any]:
    kernel = report.kernels[group[0]]
    progress.step(f"report: kernel {count}")
    return {
        **values[group[0]],
        "equal": [report.kernels[member].name for member in group],
        "seconds_of_one": kernel.cost.seconds if kernel.measured is None else kernel.measured,
        "seconds": sum(report.kernels[member].seconds for member in group),
        "lines": sorted({line for _, at in kernel.ops if (line := _line_of(at))}),
        "texts": texts_of(kernel.name),
    }


def _line_of(place: str | None) -> str | None:
    """`file:line` of a place, None where it names none."""
    match = PLACE.fullmatch(place or "")
    return match and f"{match['file']}:{match['line']}"


def _by_file_and_line(seconds: dict[str, float]) -> dict[str, float]:
    """`file:line` -> seconds, of places that differ by their column alone together."""
    lines: dict[str, float] = {}
    for place, part in seconds.items():
        line = _line_of(place) or place
        lines[line] = lines.get(line, 0.0) + part
    return dict(sorted(lines.items(), key=lambda item: -item[1]))


def _sources(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Files with the lines that take time and those around them, the file of the slowest line first."""
    numbers: dict[str, list[int]] = {}
    for line in lines:
        file, _, number = line.rpartition(":")
        if number.isdigit():
            numbers.setdefault(file, []).append(int(number))
    sources = []
    for file, wanted in numbers.items():
        text = linecache.getlines(file)
        near = {
            line
            for number in wanted
            for line in range(number - AROUND, number + AROUND + 1)
            if 1 <= line <= len(text)
        }
        shown = [{"number": line, "text": text[line - 1].rstrip("\n")} for line in sorted(near)]
        if not shown:  # the file is not here
            shown = [{"number": line, "text": ""} for line in sorted(wanted)]
        sources.append({"file": file, "lines": shown})
    return sources
