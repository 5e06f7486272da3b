"""The `pbkern` command.

Its commands make libraries of functions, run functions on each backend, say what was fused and why,
list targets, run benchmarks and manage the cache.

`pbkern --help` and the help of each command show examples, from EXAMPLES below. Each command is a
function of cli/.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from pbkern.core.errors import OptionError, PbkernError

from . import compile, edit, functions, look, machine, option_flags, run

EXAMPLES = {
    "compile": (
        "pbkern compile model.py:loss -o build/ --emit=obj,header,shared",
        "pbkern compile image.py:blur --args 'f32[H,W]' -D H=1080 -D W=1920 -aot-name blur -device x86-64-v3,x86-64-v4",
        "pbkern image.py:blur -aot -aot-name blur",
        "pbkern compile model.mlir -o libmodel.so",
        "pbkern compile model.pt2 -aot-name model",
    ),
    "run": ("pbkern run model.py:loss -num-iters 10 -skip-std", "pbkern run libblur.so image.npy"),
    "explain": (
        "pbkern explain model.py:loss",
        "pbkern explain model.py:blur --args 'f32[1080,1920]' 'f32[5]' --measure",
    ),
    "profile": ("pbkern profile model.py:loss -o trace.json --calls 3",),
    "dump": ("pbkern dump model.py:loss --out stages",),
    "tune": ("pbkern tune model.py:loss --budget 30",),
    "eject": ("pbkern eject model.py:loss -o kernels.py",),
    "adopt": ("pbkern adopt model.py:loss kernels.py",),
    "targets": ("pbkern targets --coverage", "pbkern targets --devices"),
    "machine": ("pbkern machine", "pbkern machine --json"),
    "calibrate": ("pbkern calibrate", "pbkern calibrate --forget"),
    "cache": ("pbkern cache size",),
    "demo": ("pbkern demo",),
    "bench": ("pbkern bench softmax --quick",),
}
OTHER_FILES = {"run": "|LIBRARY.so", "compile": "|PROGRAM"}
BROKEN_PIPE = 141  # as of programs that the signal ends
COMMANDS = {
    "compile": compile.run,
    "run": run.run,
    "explain": look.explain,
    "profile": look.profile,
    "dump": look.dump,
    "tune": look.tune,
    "eject": edit.eject,
    "adopt": edit.adopt,
    "targets": look.targets,
    "machine": machine.machine,
    "calibrate": machine.calibrate,
    "cache": look.cache,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, that of the benchmarks, or 2 after an error explained on stderr."""
    parser = _parser()
    options, rest = parser.parse_known_args(
        normalised(sys.argv[1:] if arguments is None else arguments)
    )
    if rest and options.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "bench":
            return _bench(rest)
        if options.command == "demo":
            return int(importlib.import_module("pbkern.cli.demo").main())
        COMMANDS[options.command](options)
        sys.stdout.flush()
    except PbkernError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0


def normalised(arguments: Sequence[str]) -> list[str]:
    """The arguments as the parser knows them: long options with two hyphens, and a command in front.

    `pbkern FILE.py:FUNCTION -aot ...`, as the document writes it, is `compile`; without -aot,
    `run`.
    """
    words = list(arguments)
    if words[:1] == ["bench"]:
        return words
    words = [
        option_flags.as_switch(f"-{arg}" if re.match(r"-[a-z][a-z0-9-]+(=|$)", arg) else arg)
        for arg in words
    ]
    if words and words[0] not in EXAMPLES and any(re.search(r"\.py:\w", arg) for arg in words):
        return ["compile" if "--aot" in words else "run", *words]
    return words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pbkern",
        description="Make libraries of functions, and look at what pbkern makes of them.",
        epilog=_examples(*EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (what, add_arguments) in OF_FUNCTIONS.items():
        command = _command(commands, name, what)
        _add_function(command, OTHER_FILES.get(name, ""))
        add_arguments(command)
    look.add_targets(_command(commands, "targets", "targets of this installation"))
    what = "figures of the CPU that code is made for, with their sources"
    machine.add_machine(_command(commands, "machine", what))
    what = "measure this computer's bandwidths and keep their classes for later processes"
    machine.add_calibrate(_command(commands, "calibrate", what))
    look.add_cache(_command(commands, "cache", "compiled programs and tuned schedules on disk"))
    what = "filter a photograph and time a transformer block beside jax.jit; pictures go to demo_output/"
    _command(commands, "demo", what)
    what = "time workloads beside their peers, from a checkout of the repository"
    _command(commands, "bench", what, add_help=False)
    return parser


def _command(commands: Any, name: str, what: str, **options: Any) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=_examples(name),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


# Command of functions -> what it does, and what adds its own arguments.
OF_FUNCTIONS = {
    "compile": ("make a C library of a function", compile.add),
    "run": ("run a function on each backend and compare them, or run a library", run.add),
    "explain": ("what was fused and why", look.add_explain),
    "profile": ("when each kernel ran, on which threads, as a trace", look.add_profile),
    "dump": ("write every stage of compilation to files", look.add_out),
    "tune": ("search schedules with measured times, and keep what is faster", look.add_tune),
    "eject": ("write a function's kernels as a module that can be edited", edit.add_eject),
    "adopt": ("check edited kernels in a function, and time it with them", edit.add_adopt),
}


def _add_function(command: argparse.ArgumentParser, other_files: str) -> None:
    """Adds the function, the types of its arguments, and the options of its compilation."""
    command.add_argument("function", metavar="FILE.py:FUNCTION" + other_files)
    command.add_argument(
        "--args", nargs="+", metavar="TYPE", help="argument types, e.g. 'f32[1080,1920,3]'"
    )
    command.add_argument(
        "-D",
        dest="sizes",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="what a name in --args stands for; of compile, LOW..HIGH as well: a size that the caller of the library says",
    )
    command.epilog = f"{functions.HELP}\n\n{command.epilog}"
    option_flags.add(command)


def _examples(*commands: str) -> str:
    return "\n".join(["examples:", *(f"  {line}" for name in commands for line in EXAMPLES[name])])


class _Version(argparse.Action):
    """--version: versions of pbkern and of the packages that its results depend on."""

    def __init__(self, option_strings: Sequence[str], dest: str):
        super().__init__(option_strings, dest, nargs=0, help="print versions and exit")

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        import jax
        import jaxlib

        from pbkern import __version__

        python = ".".join(map(str, sys.version_info[:3]))
        print(
            f"pbkern {__version__} (jax {jax.__version__}, jaxlib {jaxlib.__version__}, Python {python})"
        )
        parser.exit()


def _bench(arguments: Sequence[str]) -> int:
    """Hands the arguments to benchmarks/run.py, which is beside the package in a checkout and is not installed."""
    checkout = pathlib.Path(__file__).parents[2]
    if not (checkout / "benchmarks" / "run.py").exists():
        raise OptionError(
            "the benchmarks are not installed",
            why=f"there is no folder `benchmarks` in {checkout}",
            hint="clone the repository and run `make bench` there",
        )
    sys.path.insert(0, str(checkout))
    return importlib.import_module("benchmarks.run").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
