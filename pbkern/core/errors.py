"""Every error a user can meet, in one anatomy: what / at / why / try.

    KernelError: output 0 of kernel `softmax` has 1-d blocks but is 2-d
      at   model.py:14:10 (softmax)
      why  array float32[512,1024], block_shape (128,)
      try  one entry per dimension, e.g. (1, 128); None squeezes one

A kernel that fails once it is traced adds a row "file" with a program that fails the same way
(dsl/text/repro.py). Raise sites pass values; the layout lives here.
"""

from __future__ import annotations

import pathlib
from typing import Any

# Columns of a value in a message.
LONGEST_VALUE = 60


class PbkernError(Exception):
    """Base of all errors raised by pbkern.

    Args:
      what: one sentence that says what is wrong.
      at: the user's line, `file:line:column (function)`, where it is known.
      why: the values that make it wrong.
      hint: what to try.

    Attributes:
      repro: path of a program that fails the same way, or None.

    Examples:
      >>> try:
      ...     pbkern.jit(lambda x: x, compile_options={"targt": "cpu"})
      ... except pbkern.errors.PbkernError as e:
      ...     type(e).__name__, "targt" in str(e)
      ('OptionError', True)
    """

    repro: pathlib.Path | None = None

    def __init__(
        self, what: str, *, at: str | None = None, why: str | None = None, hint: str | None = None
    ):
        self.what, self.at, self.why, self.hint = what, at, why, hint
        rows = [what]
        rows += [
            f"  {label:4} {text}"
            for label, text in (("at", at), ("why", why), ("try", hint))
            if text
        ]
        super().__init__("\n".join(rows))


class KernelError(PbkernError, ValueError):
    """A kernel, BlockSpec or index map is defined wrongly."""


class ArgumentError(PbkernError, ValueError):
    """A function is called with arguments, or made of a file, that it cannot take."""


class OptionError(PbkernError, ValueError):
    """A compile option, CompilerParams field or environment variable has an unknown name or a bad value."""


class ScheduleError(PbkernError):
    """The choices made for a kernel do not fit the machine."""


class UnsupportedOp(PbkernError, NotImplementedError):
    """No target rule covers an operation, or not for this dtype."""


class UnsupportedKernel(KernelError, UnsupportedOp):
    """A kernel is asked for what kernels do not have: complex numbers in compiled ones, or a derivative of its own."""


class OutOfBoundsError(PbkernError, IndexError):
    """A kernel accessed an element outside its block or array (interpret mode)."""


class UndefinedReadError(PbkernError):
    """A kernel read scratch, or a result, before anything was stored to it (interpret mode)."""


class CheckError(PbkernError):
    """A check in a kernel's body (pbkern.check, checkify.check, pl.debug_check) failed while it ran.

    Attributes:
      check: the message of the check before values were filled in.
      kernel: name of the kernel.
    """

    check: str = ""
    kernel: str = ""


class IndexOutOfRange(CheckError, IndexError, RuntimeError):
    """An index of a compiled function of PyTorch is outside of its array."""


class DivisionByZero(CheckError, ZeroDivisionError, RuntimeError):
    """A compiled function of PyTorch divides integers by zero."""


class RaceError(PbkernError):
    """Two programs of a parallel grid dimension wrote the same element (interpret mode)."""


class SimulationError(PbkernError):
    """A simulated kernel did something that GPUs forbid.

    Attributes:
      kind: "race", "deadlock", "bounds", "uninitialised" or "divergence".
    """

    def __init__(self, what: str, *, kind: str, **rows: str | None):
        self.kind = kind
        super().__init__(what, **rows)


class FunctionError(PbkernError):
    """A function or its file, named on the command line, raised an error while it was run or traced."""


class TargetError(PbkernError):
    """A tool, library or device that a target needs is missing."""


class FallbackWarning(UserWarning):
    """Something in pbkern failed, and it fell back: results are right, perhaps slower."""


class InternalError(PbkernError):
    """A bug in pbkern itself."""

    def __init__(self, what: str, **kw):
        kw.setdefault(
            "hint",
            "set PBKERN_DUMP=<folder>, run again and report the numbered stages written there",
        )
        super().__init__(what, **kw)


def shown(value: Any) -> str:
    """A value as messages show it: on one line, cut where it is long."""
    text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


for _error in [
    var for var in vars().values() if isinstance(var, type) and var.__module__ == __name__
]:
    _error.__module__ = "pbkern.errors"  # tracebacks name the class where users find it
