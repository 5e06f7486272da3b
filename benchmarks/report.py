"""Documents of measurements: one page per machine below docs/benchmarks, and the index of all in docs/benchmarks.md.

Measurements lie as JSON below `benchmarks/measured`, one file per machine; pages and index are written from those files.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import jax
import jaxlib
import numpy as np

import pbkern

from .workloads import WORKLOADS

CHECKOUT = pathlib.Path(__file__).parent.parent
INDEX = CHECKOUT / "docs" / "benchmarks.md"
MEASURED = CHECKOUT / "benchmarks" / "measured"
PEERS = ("jax", "numpy", "torch", "torch.compile", "iree", "halide")
# A peer whose first two calls take longer than this many times ours is timed no further.
HOPELESS = 40


@dataclass(frozen=True)
class Timing:
    """Seconds of one implementation: least and median of `calls` interleaved calls."""

    minimum: float
    median: float
    calls: int


@dataclass(frozen=True)
class KernelTime:
    """One kernel: seconds as predicted and as measured, alone, on random operands."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Row:
    """The measurements of one workload.

    Attributes:
      limit: the machine's, seconds.
      error: largest error against float64 at small shapes, relative to the largest result.
      difference: largest difference from jax.jit at full size, relative to the largest result.
      first_call: seconds of pbkern's first call: tracing, fusion, compilation and one run. These three are None in records of
        versions that did not write them.
      kernels: how many kernels pbkern made; left: operations that it left to XLA.
      timings: implementation -> Timing; "pbkern" is ours.
      each: every fused kernel alone: name, seconds that the cost model predicts, seconds measured.
    """

    name: str
    limit: float
    error: float | None
    difference: float | None
    first_call: float | None
    kernels: int
    left: int
    timings: dict[str, Timing]
    each: tuple[KernelTime, ...] = ()

    @property
    def fraction(self) -> float:
        """Share of the machine's limit that pbkern's fastest call reaches."""
        return self.limit / self.timings["pbkern"].minimum

    def ratio(self, peers: Sequence[str] = PEERS) -> float | None:
        """Least time of the best of these peers over pbkern's; None where none of them was measured."""
        times = [self.timings[peer].minimum for peer in peers if peer in self.timings]
        return min(times) / self.timings["pbkern"].minimum if times else None


@dataclass(frozen=True)
class Record:
    """All rows of one machine, with what they depend on: processor, date and versions by name."""

    versions: dict[str, str]
    rows: list[Row]
    failed: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its files, such as `znver3-2-cores`."""
        words = f"{self.versions['cpu'].split(' as ')[-1]} {self.versions['cores']} cores"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")

    def over(self, stored: Record) -> Record:
        """These rows in place of those of the same workloads in an earlier record of the machine; its other rows stay."""
        new = {row.name: row for row in self.rows}
        rows = [new.pop(row.name, row) for row in stored.rows] + list(new.values())
        measured = {row.name for row in self.rows}
        return Record(
            self.versions, rows, [*self.failed, *(n for n in stored.failed if n not in measured)]
        )

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        data = json.loads(text)
        rows = [
            Row(
                **row
                | {
                    "timings": {name: Timing(**t) for name, t in row["timings"].items()},
                    "each": tuple(KernelTime(**kernel) for kernel in row["each"]),
                }
            )
            for row in data["rows"]
        ]
        return cls(data["versions"], rows, data["failed"])


def versions() -> dict[str, str]:
    """What the numbers depend on: processor, date, versions of the packages that are loaded."""
    machine = pbkern.cpu.machine()
    processor = machine.source.split(";")[0]
    if named := pbkern.config.current().machine:  # code for another machine than this one
        model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
        processor = f"{model[1] if model else 'unknown processor'}, as {named}"
    names = {
        "cpu": processor,
        "cores": str(machine.cores),
        "vector bits": str(machine.vector_bits),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
    }
    limits = ("XLA_FLAGS", "ONEDNN_MAX_CPU_ISA")
    names |= {variable: os.environ[variable] for variable in limits if variable in os.environ}
    peers = {"torch": "torch", "iree.compiler": "iree-base-compiler", "halide": "halide"}
    return names | {
        package: importlib.metadata.version(package)
        for name, package in peers.items()
        if name in sys.modules
    }


# --- one machine's page ---------------------------------------------------------------------------------------------


def columns(rows: Sequence[Row]) -> list[str]:
    """Implementations that were measured, pbkern first."""
    return ["pbkern", *(p for p in PEERS if any(p in r.timings for r in rows))]


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Heading and one line per workload; times are minimum / median in milliseconds."""
    names = columns(rows)
    lines = [["workload", "limit", *names, "of the limit", "best / pbkern", "kernels"]]
    for r in rows:
        cells = [_pair(r.timings.get(n)) for n in names]
        ratio = r.ratio()
        kernels = str(r.kernels) + (f" + {r.left} XLA" if r.left else "")
        lines.append(
            [
                r.name,
                f"{r.limit * 1e3:.2f}",
                *cells,
                f"{r.fraction:.0%}",
                "" if ratio is None else f"{ratio:.2f}",
                kernels,
            ]
        )
    return lines


def _pair(t: Timing | None) -> str:
    return "" if t is None else f"{t.minimum * 1e3:.2f} / {t.median * 1e3:.2f}"


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is its heading and whose first column is text."""
    head, *body = lines
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def kernel_table(rows: Sequence[Row]) -> str:
    """Each kernel's predicted time beside its measured one."""
    lines = [["workload", "kernel", "predicted, us", "measured, us", "measured / predicted"]]
    for r in rows:
        for k in r.each:
            ratio = f"{k.measured / k.predicted:.2f}" if k.predicted else ""
            lines.append(
                [r.name, k.name, f"{k.predicted * 1e6:.0f}", f"{k.measured * 1e6:.0f}", ratio]
            )
    return as_markdown(lines)


def page(record: Record, plotted: bool = False) -> str:
    """The text of one machine's page; `plotted`: with the picture beside it."""
    rows = record.rows
    about = "\n".join(f"- {name}: {value}" for name, value in record.versions.items())
    notes = "\n".join(
        f"- `{r.name}`: {WORKLOADS[r.name].note}"
        for r in rows
        if r.name in WORKLOADS and WORKLOADS[r.name].note
    )
    picture = f"\n![shares of the machine's limit]({record.name}.png)\n" if plotted else ""
    kernels = (
        f"""
## Kernels

Each fused kernel alone, on random operands of its sizes: the time that the cost model predicts, and the least time
measured, which contains XLA's own microseconds for a call. Fusion compares predictions with each other; their ratio to the
measured time matters less than that it is the same everywhere.

{kernel_table(rows)}
"""
        if any(r.each for r in rows)
        else ""
    )
    return f"""# Benchmarks: {record.versions["cpu"]}, {record.versions["cores"]} cores

Written by `python -m benchmarks.run --write`. [benchmarks.md](../benchmarks.md) says how times are taken and lists the other
machines.

{as_markdown(table(rows))}
{picture}{kernels}
## Machine and notes

{about}

{notes}
"""


# --- the index ------------------------------------------------------------------------------------------------------


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(records: Sequence[Record]) -> str:
    """A table with one line per machine."""
    lines = [
        [
            "machine",
            "date",
            "workloads",
            "best peer / pbkern",
            "jax.jit / pbkern",
            "least",
            "below 0.95",
        ]
    ]
    for record in records:
        best = {r.name: ratio for r in record.rows if (ratio := r.ratio()) is not None}
        jax_only = [ratio for r in record.rows if (ratio := r.ratio(["jax"])) is not None]
        lines.append(
            [
                f"[{record.versions['cpu']}, {record.versions['cores']} cores](benchmarks/{record.name}.md)",
                record.versions["date"],
                str(len(record.rows)),
                f"{geometric_mean(list(best.values())):.2f}" if best else "",
                f"{geometric_mean(jax_only):.2f}" if jax_only else "",
                f"{min(best.values()):.2f}" if best else "",
                ", ".join(f"{name} {ratio:.2f}" for name, ratio in best.items() if ratio < 0.95),
            ]
        )
    return as_markdown(lines)


def index(records: Sequence[Record]) -> str:
    """The section of docs/benchmarks.md that names all machines."""
    return f"""Written by `python -m benchmarks.run --write`; `benchmarks/workloads.py` defines the workloads. Each was checked
before it was timed: at small shapes against NumPy in float64, at full size against `jax.jit`.

Times are minimum / median in milliseconds of calls that take turns in one process, every second round in reverse; a call
includes making its result, a new array. The limit is max(flops / peak, compulsory bytes / bandwidth) of the machine, and
"of the limit" compares it with pbkern's minimum. "best / pbkern" compares minimums with the fastest peer: above 1, pbkern
is faster. Minimums are compared because other work on the machine disturbs them least. A peer that is more
than {HOPELESS} times slower was called twice only. "AMD EPYC, as znver4" is a processor for which code and cost model are those
of LLVM's znver4 (Zen 4).
The table below has geometric means of such ratios, and the workloads whose ratio is below 0.95.

{summary(records)}"""


def replace_section(text: str, title: str, section: str) -> str:
    """A document with the section below this heading replaced, or appended where there is none."""
    pattern = re.compile(rf"^{re.escape(title)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    fresh = f"{title}\n\n{section.strip()}\n"
    old = pattern.search(text)
    if old is None:
        return f"{text.rstrip()}\n\n{fresh}"
    rest = text[old.end() :]
    return text[: old.start()] + fresh + ("\n" + rest if rest else "")


def write(record: Record, plotted: bool = False) -> pathlib.Path:
    """Stores a record, writes its page and the index of all stored records; returns the page's path.

    Workloads that the record lacks keep the rows that an earlier one of the same machine has.
    """
    MEASURED.mkdir(exist_ok=True)
    stored = MEASURED / f"{record.name}.json"
    if stored.exists():
        record = record.over(Record.from_json(stored.read_text()))
    stored.write_text(record.as_json())
    path = INDEX.with_suffix("") / f"{record.name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(record, plotted))
    records = [Record.from_json(file.read_text()) for file in sorted(MEASURED.glob("*.json"))]
    INDEX.write_text(replace_section(INDEX.read_text(), "## Machines", index(records)))
    return path
