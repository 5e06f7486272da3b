"""Named passes: a stage of compilation is a tuple of them, which can be shown, checked and timed one by one.

    PASSES = (Pass("drop unread stores", drop_unread, "merging has left scratch that nothing reads"), ...)
    result = run_passes("nests", PASSES, value, context)

A pass is one function (value, *context) -> value. One that has thresholds is a frozen record of them (`PassRecord`), which a
stage's text can change by name: "nests:unswitch{most_copies=2}". Inside `watched()` each leaves its time and the text of its
result.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from . import fallback
from .errors import OptionError
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

    def with_settings(self, settings: dict[str, Any]) -> Pass:
        """Raises OptionError: the pass has no thresholds."""
        raise OptionError(
            f"pass `{self.name}` has no threshold `{next(iter(settings))}`", hint="it has none"
        )


def threshold(value: float, meaning: str) -> Any:
    """A field of a PassRecord: a number with what it counts, in which unit, and its source."""
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True)
class PassRecord:
    """A pass whose fields are its thresholds, each made by `threshold`.

    Class attributes are what `Pass` has as fields: name, why, required.
    """

    name: ClassVar[str]
    why: ClassVar[str]
    required: ClassVar[bool] = False

    def when(self, *context: Any) -> bool:
        """Whether the pass runs at all."""
        return True

    def function(self, value: Any, *context: Any) -> Any:
        """The value after the pass."""
        raise NotImplementedError(type(self).__name__)

    def __str__(self) -> str:
        values = (f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))
        return f"{self.name}{{{', '.join(values)}}}"

    def with_settings(self, settings: dict[str, Any]) -> PassRecord:
        """The pass with other thresholds.

        Raises OptionError for names that it does not have, and for values that are no numbers.
        """
        names = [f.name for f in dataclasses.fields(self)]
        for name, value in settings.items():
            if name not in names:
                raise OptionError(
                    f"pass `{self.name}` has no threshold `{name}`",
                    why=str(self),
                    hint=f"one of {', '.join(names)}",
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise OptionError(
                    f"threshold `{name}` of pass `{self.name}` is a number", why=f"given {value!r}"
                )
        return dataclasses.replace(self, **settings)


# What a stage is a tuple of.
AnyPass = Pass | PassRecord

# Thresholds by which passes of these names run, in place of their own.
_settings: ContextVar[dict[str, dict[str, Any]] | None] = ContextVar("settings", default=None)


@contextlib.contextmanager
def with_settings(name: str, settings: dict[str, Any]) -> Iterator[None]:
    """In a `with` block, and in this thread only, a pass runs with other thresholds."""
    with during(_settings, {**(_settings.get() or {}), name: settings}):
        yield


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """(name, thresholds) of a text such as "unswitch{most_copies=2}".

    Raises OptionError for a text that is neither that nor a name.
    """
    found = re.fullmatch(r"([^{}]+)(?:\{(.*)\})?", text)
    try:
        if found is None:
            raise ValueError(text)
        pairs = [part.split("=", 1) for part in filter(None, (found[2] or "").split(","))]
        return found[1], {name.strip(): ast.literal_eval(value.strip()) for name, value in pairs}
    except (ValueError, SyntaxError):
        raise OptionError(
            f"`{text}` names no pass with thresholds", hint="write it as unswitch{most_copies=2}"
        ) from None


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


def _raise(compiler_pass: AnyPass, error: Exception) -> None:
    raise fallback.PassFailed(compiler_pass.name) from error


def run_passes(
    stage: str,
    passes: Sequence[AnyPass],
    value: T,
    *context: Any,
    of: str = "",
    show: Callable[[T], str] = str,
    verify: Callable[[T], None] | None = None,
    failed: Callable[[Any, Exception], None] = _raise,
) -> T:
    """The value after all passes that `context` does not turn off; `verify` raises where a watched one broke its form.

    failed(pass, error) is called for an error behind which the value goes on as it was
    (core/fallback.py); it may raise.
    """
    runs, settings = _watch.get(), _settings.get() or {}
    for step in passes:
        if step.name in settings:
            step = step.with_settings(settings[step.name])
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
