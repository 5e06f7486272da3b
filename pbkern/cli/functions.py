"""FILE.py:FUNCTION and --args -> a function and its arguments. Exceptions of the file's code are explained, at its line."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pbkern.core.errors import FunctionError, OptionError, PbkernError

HELP = """FILE.py:FUNCTION, or a file of StableHLO or of jax.export. Arguments come from --args (types), from
`function.example_args`, or from the example_args of the file: a tuple, or a function that returns one. The file is run, as
Python would run it."""
DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u64": "uint64",
    "u32": "uint32",
    "u16": "uint16",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
}


def load(
    where: str, types: Sequence[str] | None, sizes: Mapping[str, Any] | None = None
) -> tuple[Any, tuple]:
    """(function, arguments) from FILE.py:FUNCTION.

    Raises OptionError, and FunctionError where the file's code fails.

    types: of the arguments, as texts; sizes: what names in them stand for.
    """
    if where.endswith(".pt2"):
        raise OptionError(
            f"{where} is a program that PyTorch exported, which has no backend here to be compared with",
            why="functions of JAX and programs of StableHLO are run",
            hint=f"pbkern compile {where} -o model.so, then pbkern run model.so",
        )
    if ":" not in where and pathlib.Path(where).is_file() and not where.endswith(".py"):
        return _load_program(where, types)
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise OptionError("no function is named", why=f"{where!r}", hint="FILE.py:FUNCTION")
    with explained(path, f"{path} cannot be run"):
        module = _run_file(pathlib.Path(path))
    fn = module
    for part in name.split("."):
        fn = getattr(fn, part, None)
    if not callable(fn) and not _is_kernel(fn):
        decorated = [n for n, var in vars(module).items() if hasattr(var, "explain")]
        raise OptionError(
            f"{path} has no function `{name}`",
            hint=f"decorated there: {', '.join(decorated) or 'none'}",
        )
    with explained(path, f"the example arguments of {path} cannot be made"):
        args = arguments_of(fn, module, types, sizes or {})
    _check_count(name, fn, args, types)
    return fn, args


def decorated(fn: Any, options: Mapping[str, Any]) -> Any:
    """The function as pbkern.jit makes it, with these options beside its own."""
    from pbkern.api.decorators import JitFunction, polyblocks_jit_jax
    from pbkern.api.stablehlo_functions import ImportedFunction

    if isinstance(fn, ImportedFunction):
        return fn.with_options(dict(options)) if options else fn
    if isinstance(fn, JitFunction):
        if not options:
            return fn
        fn, options = fn.__wrapped__, fn.options.differing() | dict(options)
    try:
        return polyblocks_jit_jax(fn, compile_options=dict(options))
    except PbkernError:
        raise
    except ValueError as e:  # of marked arguments that the function does not have
        raise OptionError(
            "the options do not suit the function", why=str(e).splitlines()[0]
        ) from None


def _load_program(path: str, types: Sequence[str] | None) -> tuple[Any, tuple]:
    """(function, arguments) of a file of StableHLO, or of one that jax.export wrote."""
    from pbkern.api.stablehlo_functions import from_stablehlo

    if types is not None:
        raise OptionError(
            "a program has types of its own",
            why=f"--args {' '.join(types)}",
            hint="leave --args out",
        )
    program = from_stablehlo(path)
    args, named = program.example
    if named:
        raise OptionError(
            "a program with keywords is called from Python",
            why=", ".join(named),
            hint="pbkern.from_stablehlo(path)",
        )
    return program, args


@contextlib.contextmanager
def explained(where: str, what: str) -> Iterator[None]:
    """Errors that code of the user's file raises in the body, JAX's while it traces included, become FunctionErrors."""
    path = where.rpartition(":")[0] if re.search(r"\.py:", where) else where
    try:
        yield
    except PbkernError:
        raise
    except SystemExit as e:
        raise FunctionError(
            what, at=path, why=f"it ended the program with status {e.code}"
        ) from None
    except Exception as e:
        lines = [
            frame for frame in _frames(e) if pathlib.Path(frame[0]).name == pathlib.Path(path).name
        ]
        if isinstance(e, SyntaxError) and e.filename and not lines:
            lines = [(e.filename, e.lineno or 0, "")]
        if not lines:
            raise
        file, line, function = lines[-1]
        at = f"{file}:{line}" + (f" ({function})" if function and function != "<module>" else "")
        said = next((row.strip() for row in str(e).splitlines() if row.strip()), "")
        raise FunctionError(what, at=at, why=f"{type(e).__name__}: {said}") from None


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """(file, line, function) of a traceback, the innermost last, with the frames that JAX hides."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        frames.append((tb.tb_frame.f_code.co_filename, tb.tb_lineno, tb.tb_frame.f_code.co_name))
        tb = tb.tb_next
    return frames


def _is_kernel(fn: Any) -> bool:
    from pbkern.dsl.kernel import Kernel  # with JAX, which `pbkern --help` does without
    from pbkern.dsl.trace import KernelFunction

    return isinstance(fn, (Kernel, KernelFunction))


def _check_count(name: str, fn, args: tuple, types: Sequence[str] | None) -> None:
    """Raises OptionError where the function takes other arguments than there are."""
    if _is_kernel(fn):
        return
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
    return (
        f"{x.dtype}{list(x.shape)}"
        if hasattr(x, "dtype") and hasattr(x, "shape")
        else type(x).__name__
    )


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


def arguments_of(fn, module, types: Sequence[str] | None, sizes: Mapping[str, Any]) -> tuple:
    used = {word for text in types or () for word in re.findall(r"\w+", text.partition("[")[2])}
    if unused := [name for name in sizes if name not in used]:
        why = f"-D {unused[0]}={sizes[unused[0]]}"
        raise OptionError(
            f"no type of an argument has the size `{unused[0]}`",
            why=why,
            hint=f"--args 'f32[{unused[0]}]' ...",
        )
    if types is not None:
        return tuple(parse_type(type_, sizes) for type_ in types)
    if _is_kernel(fn) and fn.in_types is not None:
        return ()
    example = getattr(fn, "example_args", None) or getattr(module, "example_args", None)
    if example is None:
        raise OptionError(
            "the function's arguments are not known",
            hint="--args 'f32[1080,1920]' ..., or define example_args() in the file",
        )
    example = example() if callable(example) else example
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def parse_type(text: str, sizes: Mapping[str, Any] | None = None):
    """jax.ShapeDtypeStruct of a text such as f32[1080,1920,3], bfloat16[N] or i32[].

    Raises OptionError.
    """
    import jax

    match = re.fullmatch(r"\s*(\w+)\s*\[([\w\s,]*)\]\s*", text)
    dtype = DTYPES.get(match[1], match[1]) if match else None
    words = [word.strip() for word in match[2].split(",") if word.strip()] if match else []
    if (
        match is None
        or dtype not in DTYPES.values()
        or not all(word.isdigit() or word.isidentifier() for word in words)
    ):
        hint = f"DTYPE[SIZES] with {', '.join(DTYPES)}, e.g. f32[8,128]"
        if len(several := re.findall(r"\w+\s*\[[^\]]*\]", text)) > 1:
            hint = f"a word for each argument: --args {' '.join(map(repr, several))}"
        raise OptionError("a type is not understood", why=f"{text!r}", hint=hint)
    missing = [word for word in words if not word.isdigit() and word not in (sizes or {})]
    if missing:
        raise OptionError(
            f"the size `{missing[0]}` has no value", why=f"{text!r}", hint=f"-D {missing[0]}=1080"
        )
    return jax.ShapeDtypeStruct(
        tuple(int(word) if word.isdigit() else (sizes or {})[word] for word in words), dtype
    )


def parse_sizes(texts: Sequence[str], ranges: bool = False) -> dict[str, Any]:
    """{"H": 1080} of "H=1080"; of "B=1..64", a symbol of jax.export that has this range.

    ranges: whether those are allowed.

    Raises OptionError.
    """
    sizes: dict[str, Any] = {}
    of_symbols: dict[str, tuple[str, str]] = {}
    for text in texts:
        name, _, value = text.partition("=")
        low, dots, high = value.partition("..")
        is_range = bool(dots) and low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)
        if not name.isidentifier() or not (value.isdigit() or is_range):
            hint = "-D H=1080" + (", or -D B=1..64 for any size up to 64" if ranges else "")
            raise OptionError("a size is not understood", why=f"{text!r}", hint=hint)
        if is_range and not ranges:
            raise OptionError(
                "a range of sizes is for `pbkern compile`", why=f"{text!r}", hint="-D H=1080"
            )
        if is_range:
            of_symbols[name] = low, high
        else:
            sizes[name] = int(value)
    return sizes | _symbols(of_symbols)


def _symbols(ranges: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Symbols with least and greatest numbers, by name."""
    if not ranges:
        return {}
    from jax import export

    limits = [
        limit
        for name, (low, high) in ranges.items()
        for limit in (f"{name} >= {low}", f"{name} <= {high}")
    ]
    return dict(zip(ranges, export.symbolic_shape(",".join(ranges), constraints=limits)))
