"""Lines on stderr about compilations that take long: which kernel of how many, and which stage.

`compiling(name)` surrounds a compilation; inner ones belong to the outermost. Each `step(text)` inside prints a line once
the compilation is older than PBKERN_PROGRESS seconds (default 2; 0: never), a second at most after the last one. A stage
inside MLIR or LLVM cannot be interrupted: it is announced when it begins, and a last line says how long all of it took.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from . import config

EVERY = 1.0  # seconds between lines


class _Local(threading.local):
    """The compilation that runs on this thread."""

    name: str | None = None
    begin = last = 0.0


_local = _Local()
clock = time.monotonic


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """The body is the compilation of `name`, unless one is under way."""
    if _local.name is not None:
        yield
        return
    _local.name, _local.begin, _local.last = name, clock(), float("-inf")
    try:
        yield
        if _due(0.0):
            _line(f"done after {clock() - _local.begin:.1f} s")
    finally:
        _local.name = None


def step(text: str) -> None:
    """Something begins. Outside of `compiling`, nothing happens."""
    if _local.name is not None and _due(EVERY):
        _line(f"{clock() - _local.begin:.1f} s, {text}")


def _due(pause: float) -> bool:
    limit = config.current().progress
    now = clock()
    return bool(limit) and now - _local.begin >= limit and now - _local.last >= pause


def _line(text: str) -> None:
    _local.last = clock()
    print(f"pbkern: compiling `{_local.name}`: {text}", file=sys.stderr, flush=True)
