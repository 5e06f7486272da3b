"""pbkern explain, profile, dump, tune, targets and cache."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections import Counter
from typing import TYPE_CHECKING

from pbkern.core import config
from pbkern.core.errors import OptionError, TargetError
from pbkern.core.process import disk_cache

from . import functions, option_flags

if TYPE_CHECKING:
    from pbkern.api.report.report import Report

CACHE_ACTIONS = ("where", "size", "clear")


def loaded(parsed: argparse.Namespace, function: str | None = None) -> tuple:
    """(decorated function, arguments); of another function than the command's first, with arguments and options alike."""
    fn, args = functions.load(
        function or parsed.function, parsed.args, functions.parse_sizes(parsed.sizes)
    )
    return functions.decorated(fn, option_flags.given(parsed)), args


def explain(parsed: argparse.Namespace) -> None:
    if parsed.html is None:
        if parsed.beside is not None:
            raise OptionError(
                "--beside needs a page", why="two reports are shown by --html", hint="--html FILE"
            )
        report = _report(parsed, parsed.function)
        print(json.dumps(report.as_dict(), indent=1) if parsed.json else report)
        return
    if parsed.json:
        raise OptionError("--html and --json exclude each other", hint="one of them")
    report = _report(parsed, parsed.function)
    beside = None if parsed.beside is None else _report(parsed, parsed.beside)
    try:
        parsed.html.write_text(report.html(beside), encoding="utf-8")
    except OSError as e:
        raise OptionError(f"{parsed.html} cannot be written", why=str(e)) from e
    print(parsed.html)


def _report(parsed: argparse.Namespace, function: str) -> Report:
    fn, args = loaded(parsed, function)
    with functions.explained(function, f"`{function}` cannot be traced"):
        return fn.explain(*args, measure=parsed.measure, verbose=parsed.verbose, top=parsed.top)


def profile(parsed: argparse.Namespace) -> None:
    from pbkern.api.measured.measure import drawn
    from pbkern.api.observed.profile import profile

    fn, args = loaded(parsed)
    with functions.explained(parsed.function, f"`{parsed.function}` cannot be profiled"):
        trace = profile(fn, *drawn(args), calls=parsed.calls)
    print(trace.summary())
    print(trace.save(parsed.output))


def dump(parsed: argparse.Namespace) -> None:
    fn, args = loaded(parsed)
    with functions.explained(parsed.function, f"`{parsed.function}` cannot be traced"):
        print(fn.dump(parsed.out, *args))


def tune(parsed: argparse.Namespace) -> None:
    from pbkern.api.tune import tune

    fn, args = loaded(parsed)
    with functions.explained(parsed.function, f"`{parsed.function}` cannot be traced"):
        tune(fn, *args, budget=parsed.budget)


def targets(parsed: argparse.Namespace) -> None:
    from pbkern.targets import NAMES, get_target

    for name in NAMES:
        try:
            target = get_target(name)
        except TargetError as e:
            print(f"{name}: {e.why}")
            continue
        machine = target.machine()
        print(
            f"{name}: {machine.cores} cores, {machine.vector_bits}-bit vectors ({machine.source})"
        )
        for family, primitives in target.coverage().items() if parsed.coverage else ():
            print(f"  {family}: {', '.join(primitives)}")
    if parsed.devices:
        _devices()


def _devices() -> None:
    """Prints the devices that libraries can be made for."""
    from pbkern.targets.cpu.machines.devices import device_of, names

    for name in names()[1:]:
        device = device_of(name)
        machine = device.machine
        print(
            f"{name}: {device.triple}, {machine.vector_bits}-bit vectors, {machine.registers} registers, "
            f"{machine.cores} cores; {', '.join(device.needs)}"
        )


def cache(parsed: argparse.Namespace) -> None:
    """One of CACHE_ACTIONS, also for caches that the environment switches off."""
    store = disk_cache.DiskStore(disk_cache.folder(), config.current().cache_megabytes << 20)
    if parsed.action == "where":
        print(store.folder)
    elif parsed.action == "clear":
        count, size = store.clear()
        print(f"removed {count} files, {size / 2**20:.1f} MB")
    else:
        kinds = Counter(path.name.partition("-")[0] for path, _ in store.entries())
        shown = (
            ", ".join(f"{kind_count} {kind}" for kind, kind_count in sorted(kinds.items()))
            or "nothing"
        )
        print(f"{store.size() / 2**20:.1f} of {store.limit >> 20} MB in {store.folder}: {shown}")


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure", action="store_true", help="run each kernel alone and print its time"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="list every kernel, refusal and fusion"
    )
    parser.add_argument(
        "--top",
        type=int,
        default=12,
        metavar="N",
        help="most kernels and refusals that are listed, default %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--html",
        type=pathlib.Path,
        metavar="FILE",
        help="write the report as one page of HTML, with each kernel's code",
    )
    parser.add_argument(
        "--beside",
        metavar="FILE.py:FUNCTION",
        help="with --html: a second function, shown beside the first",
    )


def add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("trace.json"),
        metavar="FILE",
        help="the trace, for ui.perfetto.dev and chrome://tracing; default %(default)s",
    )
    parser.add_argument(
        "--calls",
        type=int,
        default=1,
        metavar="N",
        help="calls that are recorded, default %(default)s",
    )


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget", type=float, default=30.0, metavar="SECONDS", help="default %(default)s"
    )


def add_targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coverage", action="store_true", help="list the primitives that kernels may contain"
    )
    parser.add_argument(
        "--devices", action="store_true", help="list the processors that libraries can be made for"
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=CACHE_ACTIONS,
        help="print the folder, count what is in it, or empty it",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("pbkern_dump"), metavar="FOLDER"
    )
