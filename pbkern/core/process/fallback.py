"""Falls back after failures in the compiler, with one warning, or raises the failure.

    a pass over a jaxpr raises      the jaxpr goes on as it was
    a pass over nests raises        the kernel is built again without that pass
    scheduling or emission raises   the kernel is built again as plain code: no optional pass, scalar loops
    that raises, or the plan does   the kernel's operations stay with XLA

Errors that explain a mistake of the user's (PbkernError but InternalError) are never caught here.
`PBKERN_FALLBACK=0` and strict_target turn failures into errors. A way that gives up on purpose,
because its text would be too long for example, raises `Declined`: no defect, no warning.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

from pbkern.core import config
from pbkern.core.errors import FallbackWarning, InternalError, PbkernError

from .context_values import during


class Declined(Exception):
    """A special way gives up on purpose; the message says why."""


class PassFailed(Exception):
    """A pass raised; `__cause__` is its exception."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class InjectedFailure(RuntimeError):
    """Raised by a pass that a test makes fail."""


_failures = 0  # after which something else was done
_strict: ContextVar[bool] = ContextVar("failures are errors", default=False)
_failing: ContextVar[str | None] = ContextVar("pass that a test makes fail", default=None)


@contextlib.contextmanager
def strictly(strict: bool) -> Iterator[None]:
    """While the body runs, failures are errors if `strict`, as compile_options say."""
    with during(_strict, strict):
        yield


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """While the body runs, the pass or stage of this name raises InjectedFailure whenever it begins, in this thread."""
    with during(_failing, name):
        yield


def is_failing() -> bool:
    """Whether a test makes something fail: programs that are compiled then are not stored."""
    return _failing.get() is not None


def failures() -> int:
    """Counts the failures of this process after which something else was done."""
    return _failures


def enter(name: str) -> None:
    """Called as a pass or stage begins: where tests make it fail."""
    if _failing.get() == name:
        raise InjectedFailure(f"`{name}` was made to fail")


def is_strict() -> bool:
    return _strict.get()


def catches(error: Exception) -> bool:
    """Whether to fall back after this error."""
    if isinstance(error, Declined):
        return True
    explained = isinstance(error, PbkernError) and not isinstance(error, InternalError)
    return not explained and config.current().fallback and not _strict.get()


def warn(what: str, error: BaseException | None, instead: str, at: str | None = None) -> None:
    """One FallbackWarning: what failed, at whose line, why, what is done instead.

    Nothing for what declined on purpose.
    """
    global _failures
    if isinstance(error, Declined):
        return
    _failures += 1
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    rows = [
        f"{what}; {instead}",
        *([f"  at   {at}"] if at else []),
        f"  why  {reason}",
        "  try  PBKERN_FALLBACK=0 makes this the error it is; please report it with that",
    ]
    repro = getattr(error, "repro", None)
    warnings.warn(
        "\n".join([*rows, *([f"  file {repro}"] if repro else [])]), FallbackWarning, stacklevel=2
    )
