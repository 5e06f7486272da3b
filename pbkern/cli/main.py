"""The `pbkern` command: explain, dump and tune functions of a file, list targets, run benchmarks, look after the cache.

`pbkern --help` and the help of each command show examples, from EXAMPLES below.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pbkern.core import config
from pbkern.core.errors import OptionError, PbkernError, TargetError
from pbkern.core.process import disk_cache

EXAMPLES = {
    "explain": ("pbkern explain model.py:loss", "pbkern explain model.py:blur --args 'f32[1080,1920]' 'f32[5]' --measure"),
    "dump": ("pbkern dump model.py:loss --out stages",),
    "tune": ("pbkern tune model.py:loss --budget 30",),
    "targets": ("pbkern targets --coverage",),
    "cache": ("pbkern cache size",),
    "bench": ("pbkern bench softmax --quick",),
}
FUNCTIONS = """Arguments come from --args (types), from `function.example_args`, or from the example_args of the file: a
tuple, or a function that returns one. The file is run, as Python would run it."""
BROKEN_PIPE = 141  # as of programs that the signal ends
CACHE_ACTIONS = ("where", "size", "clear")
DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8", "bool": "bool",
    "c64": "complex64", "c128": "complex128",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, that of the benchmarks, or 2 after an error explained on stderr."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "bench":
            return _bench(rest)
        {"explain": _explain, "dump": _dump, "targets": _targets, "cache": _cache, "tune": _tune}[options.command](options)
        sys.stdout.flush()
    except PbkernError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pbkern", description="Look at what pbkern makes of a function.", epilog=_examples(*EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, what: str, **options: Any) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=_examples(name),
            formatter_class=argparse.RawDescriptionHelpFormatter, **options,
        )  # fmt: skip

    explain = command("explain", "what was fused and why")
    dump = command("dump", "write every stage of compilation to files")
    tune = command("tune", "search schedules with measured times, and keep what is faster")
    tune.add_argument("--budget", type=float, default=30.0, metavar="SECONDS", help="default %(default)s")
    for of_function in (explain, dump, tune):
        of_function.add_argument("function", metavar="FILE.py:FUNCTION")
        of_function.add_argument("--args", nargs="+", metavar="TYPE", help="argument types, e.g. 'f32[1080,1920,3]'")
        of_function.epilog = f"{FUNCTIONS}\n\n{of_function.epilog}"
    explain.add_argument("--measure", action="store_true", help="run each kernel alone and print its time")
    explain.add_argument("--verbose", action="store_true", help="list every fusion")
    dump.add_argument("--out", type=pathlib.Path, default=pathlib.Path("pbkern_dump"), metavar="FOLDER")
    targets = command("targets", "targets of this installation")
    targets.add_argument("--coverage", action="store_true", help="list the primitives that kernels may contain")
    kept = command("cache", "compiled programs and tuned schedules on disk")
    kept.add_argument("action", choices=CACHE_ACTIONS, help="print the folder, count what is in it, or empty it")
    command("bench", "time workloads beside their peers, from a checkout of the repository", add_help=False)
    return parser


def _examples(*commands: str) -> str:
    return "\n".join(["examples:", *(f"  {line}" for name in commands for line in EXAMPLES[name])])


class _Version(argparse.Action):
    """--version: of pbkern, and of what its results depend on."""

    def __init__(self, option_strings: Sequence[str], dest: str):
        super().__init__(option_strings, dest, nargs=0, help="print versions and exit")

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        import jax
        import jaxlib

        from pbkern import __version__

        python = ".".join(map(str, sys.version_info[:3]))
        print(f"pbkern {__version__} (jax {jax.__version__}, jaxlib {jaxlib.__version__}, Python {python})")
        parser.exit()


def _explain(options) -> None:
    fn, args = load(options.function, options.args)
    print(fn.explain(*args, measure=options.measure, verbose=options.verbose))


def _dump(options) -> None:
    fn, args = load(options.function, options.args)
    print(fn.dump(options.out, *args))


def _tune(options) -> None:
    from pbkern.api.tune import tune

    fn, args = load(options.function, options.args)
    tune(fn, *args, budget=options.budget)


def _targets(options) -> None:
    from pbkern.targets import NAMES, get_target

    for name in NAMES:
        try:
            target = get_target(name)
        except TargetError as e:
            print(f"{name}: {e.why}")
            continue
        machine = target.machine()
        print(f"{name}: {machine.cores} cores, {machine.vector_bits}-bit vectors ({machine.source})")
        for family, primitives in target.coverage().items() if options.coverage else ():
            print(f"  {family}: {', '.join(primitives)}")


def _cache(options) -> None:
    """One of CACHE_ACTIONS; what the environment switches off can be looked at and emptied all the same."""
    store = disk_cache.Store(disk_cache.folder(), config.current().cache_megabytes << 20)
    if options.action == "where":
        print(store.folder)
    elif options.action == "clear":
        count, size = store.clear()
        print(f"removed {count} files, {size / 2**20:.1f} MB")
    else:
        kinds = Counter(path.name.partition("-")[0] for path, _ in store.entries())
        shown = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "nothing"
        print(f"{store.size() / 2**20:.1f} of {store.limit >> 20} MB in {store.folder}: {shown}")


def _bench(arguments: Sequence[str]) -> int:
    """Hands the arguments to benchmarks/run.py, which lies beside the package in a checkout and is not installed."""
    checkout = pathlib.Path(__file__).parents[2]
    if not (checkout / "benchmarks" / "run.py").exists():
        raise OptionError("the benchmarks are not installed", why=f"there is no folder `benchmarks` in {checkout}",
                          hint="clone the repository and run `make bench` there")  # fmt: skip
    sys.path.insert(0, str(checkout))
    return importlib.import_module("benchmarks.run").main(arguments)


# --- functions and arguments ----------------------------------------------------------------------------------------


def load(where: str, types: Sequence[str] | None) -> tuple[Any, tuple]:
    """(decorated function, arguments) from FILE.py:FUNCTION. Raises OptionError."""
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise OptionError("no function is named", why=f"{where!r}", hint="FILE.py:FUNCTION")
    module = _run_file(pathlib.Path(path))
    fn = module
    for part in name.split("."):
        fn = getattr(fn, part, None)
    if not callable(fn):
        decorated = [n for n, v in vars(module).items() if hasattr(v, "explain")]
        raise OptionError(f"{path} has no function `{name}`", hint=f"decorated there: {', '.join(decorated) or 'none'}")
    args = arguments_of(fn, module, types)
    _check_count(name, fn, args, types)
    if not hasattr(fn, "explain"):
        from pbkern.api.decorators import polyblocks_jit_jax

        fn = polyblocks_jit_jax(fn)
    return fn, args


def _check_count(name: str, fn, args: tuple, types: Sequence[str] | None) -> None:
    """Raises OptionError where the function takes other arguments than there are."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as e:
        shown = " ".join(types) if types is not None else ", ".join(map(str, map(_type_of, args)))
        raise OptionError(
            f"`{name}` does not take {len(args)} argument{'' if len(args) == 1 else 's'}",
            why=f"{name}{signature}, given {shown or 'none'}: {e}",
            hint="one type for each parameter after --args, as 'f32[8,128]'; f32[] for a number",
        ) from None


def _type_of(x) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else type(x).__name__


def _run_file(path: pathlib.Path):
    if not path.is_file():
        raise OptionError(f"there is no file {path}", why=f"in {pathlib.Path.cwd()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is no Python file", hint="a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def arguments_of(fn, module, types: Sequence[str] | None) -> tuple:
    if types is not None:
        return tuple(map(parse_type, types))
    example = getattr(fn, "example_args", None) or getattr(module, "example_args", None)
    if example is None:
        raise OptionError("the function's arguments are not known",
                          hint="--args 'f32[1080,1920]' ..., or define example_args() in the file")  # fmt: skip
    example = example() if callable(example) else example
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def parse_type(text: str):
    """jax.ShapeDtypeStruct of a text such as f32[1080,1920,3], bfloat16[8] or i32[]. Raises OptionError."""
    import jax

    found = re.fullmatch(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*", text)
    dtype = DTYPES.get(found[1], found[1]) if found else None
    if found is None or dtype not in DTYPES.values():
        hint = f"DTYPE[SIZES] with {', '.join(DTYPES)}, e.g. f32[8,128]"
        raise OptionError("a type is not understood", why=f"{text!r}", hint=hint)
    shape = tuple(int(n) for n in found[2].split(",") if n.strip())
    return jax.ShapeDtypeStruct(shape, dtype)
