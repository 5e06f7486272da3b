"""Files of a library that are to be written, and their places: all of them, whole, or none."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping

from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions, nearest

from .interface.names import check_function_name

# What can be asked for, and the ends of its files' names.
KINDS = {
    "obj": ".o",
    "header": ".h",
    "shared": ".so",
    "static": ".a",
    "asm": ".s",
    "llvm": ".ll",
    "mlir": ".mlir",
    "kernels": ".py",
    "metadata": ".json",
    "cmake": "-config.cmake",
    "pkgconfig": ".pc",
    "cpp": ".hpp",
    "bench": "_bench.c",
}
# The file of weights, which compile option `weights` asks for.
WEIGHTS_END = ".weights"
DEFAULT_KINDS = ("obj", "header")
# Kinds of files that programs can be linked with; all of them need the header.
LINKED = ("obj", "shared", "static")
# Kinds of files that need one of the LINKED files beside them.
NEEDING = ("cmake", "pkgconfig", "cpp", "bench")
# Most bytes of a file's name on Linux and macOS (NAME_MAX).
LONGEST_NAME = 255
DEFAULT_NAME = CompileOptions().aot_name


@dataclass(frozen=True)
class Wanted:
    """Name of the function, and kind -> path of each file."""

    name: str
    files: Mapping[str, pathlib.Path]


def _is_folder(path: pathlib.Path, output: str | os.PathLike | None) -> bool:
    """Whether an output names a folder: one that there is, or one to be made, whose name has no end or a slash behind it."""
    new = (
        not path.exists()
        and not path.name.endswith(tuple(KINDS.values()))
        and (not path.suffix or str(output).endswith("/"))
    )
    return path.is_dir() or new


def wanted(
    own_name: str,
    options: CompileOptions,
    output: str | os.PathLike | None,
    kinds: Iterable[str] | None,
) -> Wanted:
    """Chooses the files to make.

    Raises OptionError for names that C does not allow, kinds that there are not, and places where
    nothing can be written.

    own_name: of the function in Python. output: a folder, which is made if there is none, or the
    name of one file, whose end says what it is; None: the folder in which the process runs. kinds:
    of KINDS.
    """
    given = options.aot_name != DEFAULT_NAME
    name = check_function_name(options.aot_name if given else own_name, given)
    path = pathlib.Path(output) if output is not None else pathlib.Path()
    chosen = None if kinds is None else dict.fromkeys([kinds] if isinstance(kinds, str) else kinds)
    if chosen is not None and not chosen:
        raise OptionError(
            "`emit` names no file", why="it is empty", hint=f"some of {', '.join(KINDS)}"
        )
    for kind in chosen or ():
        if kind not in KINDS:
            raise OptionError(
                f"there is no `{kind}` to emit",
                why=f"there are {', '.join(KINDS)}",
                hint=nearest(kind, KINDS),
            )
    makes_folder = _is_folder(path, output)
    if makes_folder:
        stem, given_files = path / (name if given else DEFAULT_NAME), dict[str, pathlib.Path]()
        chosen = dict.fromkeys(DEFAULT_KINDS) if chosen is None else chosen
    else:
        stem, given_files = _named(path)
        chosen = chosen or {}
    if {*NEEDING} & {*chosen, *given_files} and not {*LINKED} & {*chosen, *given_files}:
        chosen["obj"] = None
    if {*LINKED, *NEEDING} & {*chosen, *given_files}:
        chosen["header"] = None
    files = {kind: _file(stem, kind) for kind in chosen} | given_files
    if options.weights == "file":
        files["weights"] = stem.with_name(f"{stem.name.removeprefix('lib')}{WEIGHTS_END}")
    check_places(files, path if makes_folder else None)
    return Wanted(name, files)


def _named(path: pathlib.Path) -> tuple[pathlib.Path, dict[str, pathlib.Path]]:
    """(name without its end, {kind: path}) of one file."""
    kind = next(
        (k for k, end in KINDS.items() if path.name.endswith(end) and path.name != end), None
    )
    if kind is None:
        raise OptionError(
            f"what {path.name or path} is to be is not known",
            why="its end is none of a file's; it is no folder",
            hint=f"an existing folder, or an end of {', '.join(KINDS.values())}",
        )
    return path.with_name(path.name.removesuffix(KINDS[kind])), {kind: path}


def _file(stem: pathlib.Path, kind: str) -> pathlib.Path:
    """The name of a file; linkers look for libNAME."""
    prefix = "lib" if kind in ("shared", "static") and not stem.name.startswith("lib") else ""
    return stem.with_name(f"{prefix}{stem.name}{KINDS[kind]}")


def check_places(
    files: Mapping[str, pathlib.Path], folder_to_make: pathlib.Path | None = None
) -> None:
    """Raises OptionError where a file cannot be written. made: a folder that will be made."""
    for folder in {file.parent for file in files.values()}:
        if folder == folder_to_make:
            folder = next(
                parent
                for parent in (folder.absolute(), *folder.absolute().parents)
                if parent.exists()
            )
        if not folder.is_dir():
            raise OptionError(
                f"there is no folder {folder}",
                why="files would go there",
                hint=f"mkdir -p {folder}",
            )
        if not os.access(folder, os.W_OK):
            raise OptionError(
                f"nothing can be written to {folder}", why="files of the library would go there"
            )
    for path in files.values():
        if len(os.fsencode(path.name)) > LONGEST_NAME:
            why = f"{path.name[:40]}... has {len(path.name)} characters"
            longest = LONGEST_NAME - max(map(len, KINDS.values())) - len("lib")
            raise OptionError(
                "the name of a file would be too long",
                why=why,
                hint=f"aot_name: at most {longest} characters",
            )
        if path.is_dir():
            raise OptionError(
                f"{path} is a folder", why="a file has this name", hint="another name, or remove it"
            )


@contextlib.contextmanager
def all_or_none(files: Mapping[str, pathlib.Path]) -> Iterator[dict[str, pathlib.Path]]:
    """Paths beside the files', from where they are moved once the body is done; after an error, nothing is left of them.

    Folders that are not there are made, and go again after an error.
    """
    with contextlib.ExitStack() as stack:
        for folder in {file.parent for file in files.values()}:
            _make(folder, stack)
        check_places(files)
        places = {}
        for kind, path in files.items():
            beside = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".pbkern-", dir=path.parent)
            )
            places[kind] = pathlib.Path(beside) / path.name
        try:
            yield places
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            folders = ", ".join(sorted({str(path.parent.absolute()) for path in files.values()}))
            raise OptionError(
                f"files cannot be written to {folders}",
                why=e.strerror,
                hint="free some space, or another `output`",
            ) from e
        for kind, path in files.items():
            os.replace(places[kind], path)


def _make(folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
    """Makes a folder and those above it; `stack` removes those that stay empty."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OptionError(
            f"the folder {folder} cannot be made",
            why=f"{type(e).__name__}: {e.strerror or e}",
            hint="a folder below one that you may write to",
        ) from None
    for created in reversed(missing):  # the innermost goes first
        stack.callback(_remove_if_empty, created)


def _remove_if_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # it holds files
        folder.rmdir()
