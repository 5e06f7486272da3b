"""Environment variables: every one that pbkern reads, with type, default and meaning.

They are read at first use; an empty one counts as not set. A variable that starts with PBKERN_ and
is not one of these is an error, and so is a bad value. Tests set values for the length of a block
with `override(num_threads=1)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pbkern.core.lazy_dataclass import dataclass

from .errors import OptionError

PREFIX = "PBKERN_"
TARGETS = ("cpu", "nvgpu", "amdgpu")


@dataclass(frozen=True)
class Variable:
    """One variable: `parse` makes its value of the text, or raises ValueError; `takes` says what it accepts."""

    name: str
    default: Any
    parse: Callable[[str], Any]
    takes: str
    meaning: str


def _positive(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError
    return count


def _folders(text: str) -> tuple[pathlib.Path, ...]:
    return tuple(pathlib.Path(name) for name in text.split(os.pathsep) if name)


def _target(text: str) -> str:
    if text not in TARGETS:
        raise ValueError
    return text


def _driver(text: str) -> str:
    if text != "simulator":
        raise ValueError
    return text


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


VARIABLES = (
    Variable(
        "PBKERN_DUMP",
        None,
        pathlib.Path,
        "a folder",
        "folder for the numbered stages of every compilation",
    ),
    Variable(
        "PBKERN_NUM_THREADS",
        None,
        _positive,
        "an integer of at least 1",
        "most threads of one kernel",
    ),
    Variable(
        "PBKERN_TARGET", "cpu", _target, ", ".join(TARGETS), "target of decorators that name none"
    ),
    Variable(
        "PBKERN_MACHINE",
        None,
        str,
        "a CPU of `pbkern targets --devices`",
        "CPU whose instruction sets and figures code on CPUs is made for, in place of the one at hand, which must run it",
    ),
    Variable(
        "PBKERN_DEBUG",
        False,
        _flag,
        "0 or 1",
        "as compile_options={'debug': True} for every decorator",
    ),
    Variable(
        "PBKERN_CACHE",
        True,
        _flag,
        "0 or 1",
        "whether compiled programs and tuned schedules are kept on disk",
    ),
    Variable(
        "PBKERN_CACHE_DIR",
        None,
        pathlib.Path,
        "a folder",
        "folder of the cache; else $XDG_CACHE_HOME/pbkern or ~/.cache/pbkern",
    ),
    Variable(
        "PBKERN_CACHE_SHARED",
        (),
        _folders,
        f"folders, separated by {os.pathsep!r}",
        "further caches, which are read and never written to; they belong to root or to the user",
    ),
    Variable(
        "PBKERN_CACHE_MEGABYTES",
        512,
        _positive,
        "an integer of at least 1",
        "most megabytes (2**20 bytes) in the cache",
    ),
    Variable(
        "PBKERN_POOL_MEGABYTES",
        512,
        _count,
        "an integer, 0 for no pool",
        "most megabytes of memory for large results that are kept unused",
    ),
    Variable(
        "PBKERN_FALLBACK",
        True,
        _flag,
        "0 or 1",
        "whether a failure in the compiler falls back to XLA or to simpler code, with a warning",
    ),
    Variable(
        "PBKERN_GPU_DRIVER",
        None,
        _driver,
        "simulator",
        "what launches kernels for GPUs: `simulator` runs them on arrays of the CPU, slowly, and checks them",
    ),
    Variable(
        "PBKERN_PROGRESS",
        2.0,
        _seconds,
        "seconds, 0 for never",
        "compilations that take longer print what they are at on stderr",
    ),
)


@dataclass(frozen=True)
class Config:
    """Values of VARIABLES."""

    dump: pathlib.Path | None = None
    num_threads: int | None = None
    target: str = "cpu"
    machine: str | None = None
    debug: bool = False
    cache: bool = True
    cache_dir: pathlib.Path | None = None
    cache_shared: tuple[pathlib.Path, ...] = ()
    cache_megabytes: int = 512
    pool_megabytes: int = 512
    fallback: bool = True
    gpu_driver: str | None = None
    progress: float = 2.0


def read(environment) -> Config:
    """Raises OptionError for unknown variables and bad values."""
    known = {variable.name: variable for variable in VARIABLES}
    values = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            raise _unknown("environment variable", name, known)
        if text:
            values[_setting(name)] = _parsed(
                known[name], text, f"environment variable {name}", f"{name}={text!r}"
            )
    return Config(**values)


def _setting(variable: str) -> str:
    """The name in Config of a variable: PBKERN_NUM_THREADS -> num_threads."""
    return variable[len(PREFIX) :].lower()


def _unknown(what: str, name: str, known: Iterable[str]) -> OptionError:
    close = difflib.get_close_matches(name, known, n=1)
    return OptionError(
        f"unknown {what} {name}",
        why=f"the {what}s are {', '.join(known)}",
        hint=f"did you mean {close[0]}?" if close else None,
    )


def _parsed(variable: Variable, text: str, what: str, given: str) -> Any:
    """The variable's value. Raises OptionError, which names `what` and shows `given`."""
    try:
        return variable.parse(text)
    except (ValueError, KeyError):
        hint = f"{variable.takes}: {variable.meaning}"
        raise OptionError(f"{what} has a bad value", why=given, hint=hint) from None


def _checked(name: str, value: Any) -> Any:
    """The value of a setting, given as Python writes it.

    Raises OptionError for unknown names and bad values.
    """
    known = {_setting(variable.name): variable for variable in VARIABLES}
    if name not in known:
        raise _unknown("setting", name, known)
    if value is None and known[name].default is None:
        return None
    text = os.pathsep.join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    text = str(int(value)) if isinstance(value, bool) else text
    return _parsed(known[name], text, f"setting {name}", f"{name}={value!r}")


@functools.cache
def _from_environment() -> Config:
    return read(os.environ)


_overridden: Config | None = None


def current() -> Config:
    """The settings of the environment, or those of the innermost `override`.

    Examples:
      >>> pbkern.config.current().pool_megabytes  # unless PBKERN_POOL_MB says otherwise
      512
    """
    return _overridden if _overridden is not None else _from_environment()


def num_threads() -> int | None:
    return current().num_threads


@contextlib.contextmanager
def override(**values: Any) -> Iterator[Config]:
    """Sets values for the length of a `with` block, in every thread. Names are those of Config.

    Raises OptionError for unknown names and for values that the environment variable would not
    take.

    Examples:
      >>> with pbkern.config.override(num_threads=1) as settings:
      ...     settings.num_threads
      1
    """
    global _overridden
    checked = {name: _checked(name, value) for name, value in values.items()}
    before, _overridden = _overridden, dataclasses.replace(current(), **checked)
    try:
        yield _overridden
    finally:
        _overridden = before
