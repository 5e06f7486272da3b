"""Named passes: a stage of compilation is a tuple of them, which can be shown, checked and timed one by one.

    PASSES = (Pass("merge nests", merge_all, "values meet their readers in registers"), ...)
    result = run_passes("nests", PASSES, value, context)

A pass is one function (value, *context) -> value. Inside `watched()` each leaves its time and the text of its result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from . import fallback
from .process.context_values import during

T = TypeVar("T")


def _always(*context: Any) -> bool:
    return True


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
      name: as in dumps and times; unique in its stage.
      function: (value, *context) -> value.
      why: the property that is gained, or what order matters for.
      when: context -> whether the pass runs at all, for those that an option turns off.
      required: later stages rely on what it does: a failure is not passed over.
    """

    name: str
    function: Callable[..., Any]
    why: str
    when: Callable[..., bool] = _always
    required: bool = False


@dataclass(frozen=True)
class Ran:
    """One pass that has run, on one of the things that its stage works on (`of`, such as a kernel)."""

    stage: str
    of: str
    name: str
    milliseconds: float
    text: str


_watch: ContextVar[list[Ran] | None] = ContextVar("passes", default=None)


@contextlib.contextmanager
def watched() -> Iterator[list[Ran]]:
    """In a `with` block, and in this thread only, passes are noted in the list, in the order in which they run."""
    with during(_watch, []) as runs:
        assert runs is not None
        yield runs


def _raise(compiler_pass: Pass, error: Exception) -> None:
    raise fallback.PassFailed(compiler_pass.name) from error


def run_passes(
    stage: str,
    passes: Sequence[Pass],
    value: T,
    *context: Any,
    of: str = "",
    show: Callable[[T], str] = str,
    verify: Callable[[T], None] | None = None,
    failed: Callable[[Pass, Exception], None] = _raise,
) -> T:
    """The value after all passes that `context` does not turn off; `verify` raises where a watched one broke its form.

    failed(pass, error) is called for an error behind which the value goes on as it was
    (core/fallback.py); it may raise.
    """
    runs = _watch.get()
    for step in passes:
        if not step.when(*context):
            continue
        start = time.perf_counter()
        try:
            fallback.enter(step.name)
            value = step.function(value, *context)
        except Exception as e:
            if not fallback.catches(e):
                raise
            failed(step, e)
        if runs is not None:
            milliseconds = (time.perf_counter() - start) * 1e3
            runs.append(Ran(stage, of, step.name, milliseconds, show(value)))
            if verify is not None:
                verify(value)
    return value
