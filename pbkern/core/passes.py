"""Named passes: a stage of compilation is a tuple of them, which can be shown, checked and timed one by one.

    PASSES = (Pass("drop unread stores", drop_unread, "merging has left scratch that nothing reads"), ...)
    result = run_passes("nests", PASSES, value, context)

A pass is one function (value, *context) -> value. One that has thresholds is a frozen record of them, which a stage's text can
change by name: "nests:unswitch{most_copies=2}"; "nests:unswitch{off}" leaves the pass out. Inside `watched()` each leaves its
time and the text of its result.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import field
from typing import Any, TypeVar

from pbkern.core.lazy_dataclass import dataclass

from .errors import OptionError
from .process import fallback
from .process.context_values import during

T = TypeVar("T")


def _always(*context: Any) -> bool:
    return True


def threshold(value: float, meaning: str) -> Any:
    """A field of a pass's record: a number with what it counts, in which unit, and its source."""
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
      name: as in dumps and times; unique in its stage.
      function: (value, *context) -> value. Where it has thresholds it is a frozen record of them: a
        dataclass whose fields are made by `threshold`, and whose call is the pass.
      why: the property that is gained, or what order matters for.
      when: context -> whether the pass runs at all, for those that an option turns off.
      required: later stages rely on what it does: a failure is not passed over.
    """

    name: str
    function: Callable[..., Any]
    why: str
    when: Callable[..., bool] = _always
    required: bool = False

    @property
    def thresholds(self) -> dict[str, float]:
        """Name -> number; empty for passes without any."""
        record: Any = self.function
        fields = dataclasses.fields(record) if dataclasses.is_dataclass(record) else ()
        return {field.name: getattr(record, field.name) for field in fields}

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.thresholds.items())
        return f"{self.name}{{{values}}}" if values else self.name

    def with_settings(self, settings: dict[str, Any]) -> Pass:
        """The pass with other thresholds; with "off", which a text may say of any pass, one that changes nothing.

        Raises OptionError for names that it does not have, and for values that are no numbers.
        """
        if settings.keys() == {OFF}:
            return dataclasses.replace(self, function=_unchanged)
        names = self.thresholds
        for name, value in settings.items():
            if name not in names:
                raise OptionError(
                    f"pass `{self.name}` has no threshold `{name}`",
                    why=str(self),
                    hint=f"one of {', '.join(names)}" if names else "it has none",
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise OptionError(
                    f"threshold `{name}` of pass `{self.name}` is a number", why=f"given {value!r}"
                )
        record: Any = self.function
        return dataclasses.replace(self, function=dataclasses.replace(record, **settings))


# The setting that turns a pass off: "nests:unswitch{off}".
OFF = "off"


def _unchanged(value: T, *context: Any) -> T:
    return value


# Thresholds by which passes of these names run, in place of their own.
_settings: ContextVar[dict[str, dict[str, Any]] | None] = ContextVar("settings", default=None)


@contextlib.contextmanager
def with_settings(name: str, settings: dict[str, Any]) -> Iterator[None]:
    """In a `with` block, and in this thread only, a pass runs with other thresholds."""
    with during(_settings, {**(_settings.get() or {}), name: settings}):
        yield


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """(name, thresholds) of a text such as "unswitch{most_copies=2}", or "unswitch{off}".

    Raises OptionError for a text that is neither that nor a name.
    """
    match = re.fullmatch(r"([^{}]+)(?:\{(.*)\})?", text)
    try:
        if match is None:
            raise ValueError(text)
        if match[2] == OFF:
            return match[1], {OFF: True}
        pairs = [part.split("=", 1) for part in filter(None, (match[2] or "").split(","))]
        return match[1], {name.strip(): ast.literal_eval(value.strip()) for name, value in pairs}
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


def _raise(failed_pass: Pass, error: Exception) -> None:
    raise fallback.PassFailed(failed_pass.name) from error


def passed_over(name: str) -> Callable[[Pass, Exception], None]:
    """Lets what is called `name` go on behind a failed pass: with a warning, and as it was."""

    def failed(failed_pass: Pass, error: Exception) -> None:
        fallback.warn(
            f"the pass `{failed_pass.name}` failed on `{name}`",
            error,
            "the function is compiled without it",
        )

    return failed


def run_passes(
    stage: str,
    passes: Sequence[Pass],
    value: T,
    *context: Any,
    of: str = "",
    show: Callable[[T], str] = str,
    verify: Callable[[T], None] | None = None,
    failed: Callable[[Any, Exception], None] = _raise,
) -> T:
    """The value after all passes that `context` does not turn off; `verify` raises where a watched one broke its form.

    failed(pass, error) is called for an error, of a pass that is not required, behind which the
    value goes on as it was (core/process/fallback.py); it may raise.
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
            if step.required or not fallback.catches(e):
                raise
            failed(step, e)
        if runs is not None:
            milliseconds = (time.perf_counter() - start) * 1e3
            runs.append(Ran(stage, of, step.name, milliseconds, show(value)))
            if verify is not None:
                verify(value)
    return value
