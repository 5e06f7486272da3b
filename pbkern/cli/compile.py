"""pbkern compile: a function of a file, or a program of another front end -> a library and its files."""

from __future__ import annotations

import argparse
import pathlib
import sys

from pbkern.aot.files import KINDS
from pbkern.core.errors import OptionError
from pbkern.core.options import CompileOptions

from . import functions, option_flags


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="a file whose end says what it is to be, or a folder, which takes all; default: .o and .h, here",
    )
    parser.add_argument(
        "--emit", metavar="KINDS", help=f"what to write, with commas: {', '.join(KINDS)}"
    )


def run(parsed: argparse.Namespace) -> None:
    """Writes the files and prints their names."""
    from pbkern.aot.decorator import polyblocks_aot_jax

    options = option_flags.given(parsed)
    kinds = None if parsed.emit is None else [kind for kind in parsed.emit.split(",") if kind]
    if kinds is None and parsed.output is not None and pathlib.Path(parsed.output).is_dir():
        kinds = _all(options.get("device"))
    if parsed.function.endswith(".pt2"):
        from pbkern.aot.frameworks import library_of_torch_file

        if parsed.args is not None:
            raise OptionError(
                "an exported program has types of its own",
                why=f"--args {' '.join(parsed.args)}",
                hint="leave --args out, or export the program for other types",
            )
        library = library_of_torch_file(
            parsed.function, CompileOptions.from_dict(options), parsed.output, kinds
        )
    else:
        fn, args = functions.load(
            parsed.function, parsed.args, functions.parse_sizes(parsed.sizes, ranges=True)
        )
        with functions.explained(parsed.function, f"`{parsed.function}` cannot be traced"):
            library = polyblocks_aot_jax(compile_options=options, output=parsed.output, emit=kinds)(
                fn
            )(*args)
    for size in library.metadata["sizes"]:
        text = f"{library.name} takes the size `{size['name']}`, {size['low']} to {size['high']}"
        print(text, file=sys.stderr)
    for path in library.paths.values():
        print(path)


def _all(device: str | None) -> list[str]:
    """Kinds of files for a folder: of libraries for other systems, those that need no linker."""
    from pbkern.targets.cpu.machines.devices import devices_of

    here = all(target.is_here for target in devices_of(device))
    return [kind for kind in KINDS if here or kind not in ("shared", "static")]
