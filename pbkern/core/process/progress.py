"""Lines on stderr about compilations that take long: which kernel of how many, and which stage.

`compiling(name)` surrounds a compilation; inner ones belong to the outermost. Each `step(text)`
inside prints a line once the compilation is older than PBKERN_PROGRESS seconds (default 2; 0:
never), a second at most after the last one. A stage inside MLIR or LLVM cannot be interrupted: it
is announced when it begins, and a last line says how long all of it took. Threads that a
compilation starts take part in it if they run in a copy of its context (contextvars).
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import time
from collections.abc import Iterator

from pbkern.core import config
from pbkern.core.lazy_dataclass import dataclass

from .context_values import during

PROGRESS_SECONDS = 1.0  # seconds between lines


@dataclass
class _Compilation:
    name: str
    begin: float
    last: float = float("-inf")  # when a line was printed


_current: contextvars.ContextVar[_Compilation | None] = contextvars.ContextVar(
    "compilation", default=None
)
clock = time.monotonic


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """The body is the compilation of `name`, unless one is under way."""
    if _current.get() is not None:
        yield
        return
    compilation = _Compilation(name, clock())
    with during(_current, compilation):
        yield
        if _due(compilation, 0.0):
            _line(compilation, f"done after {clock() - compilation.begin:.1f} s")


def step(text: str) -> None:
    """Something begins. Outside of `compiling`, nothing happens."""
    compilation = _current.get()
    if compilation is not None and _due(compilation, PROGRESS_SECONDS):
        _line(compilation, f"{clock() - compilation.begin:.1f} s, {text}")


def _due(compilation: _Compilation, pause: float) -> bool:
    limit = config.current().progress
    now = clock()
    return bool(limit) and now - compilation.begin >= limit and now - compilation.last >= pause


def _line(compilation: _Compilation, text: str) -> None:
    compilation.last = clock()
    print(f"pbkern: compiling `{compilation.name}`: {text}", file=sys.stderr, flush=True)
