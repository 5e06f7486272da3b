"""pbkern eject and adopt: a function's kernels as a module to edit, and edited ones tried in the function."""

from __future__ import annotations

import argparse
import functools
import pathlib

from . import functions, look

# Seconds for which a function is timed with its own kernels and with others.
TIMED_SECONDS = 1.0


def eject(parsed: argparse.Namespace) -> None:
    """Writes the module."""
    from pbkern.api.editing.eject import eject

    function, args = look.loaded(parsed)
    with functions.explained(parsed.function, f"`{parsed.function}` cannot be traced"):
        text = eject(function, *args, path=parsed.output)
    if parsed.output is None:
        print(text)


def adopt(parsed: argparse.Namespace) -> None:
    """Says that the function takes the kernels, and the times without and with them. Raises KernelError."""
    from pbkern.api.editing.adopt import adopt
    from pbkern.api.editing.adopt import loaded as loaded_module
    from pbkern.api.measured.measure import drawn, least_seconds

    function, args = look.loaded(parsed)
    edited = str(parsed.module)
    with functions.explained(edited, f"{edited} cannot be run"):
        module = loaded_module(edited)
    with (
        functions.explained(parsed.function, f"`{parsed.function}` cannot be traced"),
        functions.explained(edited, f"the kernels of {edited} cannot be traced"),
    ):
        adopted = adopt(function, module, *args)
        arrays = drawn(args)
        calls = [functools.partial(call, *arrays) for call in (function, adopted)]
        before, after = least_seconds(calls, TIMED_SECONDS)
    names = ", ".join(adopted.__wrapped__.edited)
    print(f"accepted: {names}; {before * 1e3:.3f} ms before, {after * 1e3:.3f} ms with them")


def add_eject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        dest="output",
        type=pathlib.Path,
        metavar="KERNELS.py",
        help="the file that is written; default: standard output",
    )


def add_adopt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("module", type=pathlib.Path, metavar="KERNELS.py")
