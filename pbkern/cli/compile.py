"""pbkern compile: a function of a file, or a program of another front end -> a library and what goes with it."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from pbkern.core.options import CompileOptions

from . import functions, option_flags


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument(
        "-o", "--output", metavar="PATH", help="a folder, or a file whose end says what it is to be; default here"
    )
    parser.add_argument("--emit", metavar="KINDS", help="what to write, with commas: obj, header, shared, static, asm, llvm, "
                        "mlir, kernels, metadata, cmake, pkgconfig, cpp, bench; default obj,header")  # fmt: skip


def run(parsed: argparse.Namespace) -> None:
    """Writes the files and prints their names."""
    from pbkern.aot.decorator import polyblocks_aot_jax

    options = option_flags.given(parsed)
    kinds = [k for k in parsed.emit.split(",") if k] if parsed.emit is not None else None
    output = pathlib.Path(parsed.output) if parsed.output is not None else None
    if functions.is_program(parsed.function):
        from pbkern.aot.frameworks import library_of_file

        given = CompileOptions.from_dict(options)
        _print(library_of_file(pathlib.Path(parsed.function), given, output, kinds))
        return
    fn, args = functions.load(parsed.function, parsed.args, functions.parse_sizes(parsed.sizes))
    with functions.explained(parsed.function, f"`{parsed.function}` cannot be traced"):
        library = polyblocks_aot_jax(compile_options=options, output=output, emit=kinds)(fn)(*args)
    _print(library)


def _print(library: Any) -> None:
    for path in library.paths.values():
        print(path)
