"""Mistakes found while a body is traced -> KernelError, which names the kernel, the line, the reason and a remedy.

JAX and NumPy raise errors of many types that speak of tracers. Those raised in their code on behalf
of a body are said again in terms of kernels; with JAX_TRACEBACK_FILTERING=off the original is shown
as the cause. What the user's own code raises passes as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from pbkern import _jax
from pbkern._user_lines import line_of_frame
from pbkern.core.errors import KernelError, PbkernError


class Mistake(NamedTuple):
    """One kind of mistake: `says` finds it in an error's type and text; `what` and `hint` as in KernelError."""

    says: str
    what: str
    hint: str


# Texts are those of jax 0.10 and 0.11; an error that none fits is reported with its own text. The
# first that fits counts.
MISTAKES = (
    Mistake(
        r"'AbstractRef' object has no attribute '_",
        "arithmetic on a Ref",
        "read it first: x_ref[...]",
    ),
    Mistake(
        r"^TracerArrayConversionError: .*Ref\{",
        "a NumPy function on a Ref",
        "read it first, and take the function from jax.numpy: jnp.exp(x_ref[...])",
    ),
    Mistake(
        r"^TracerArrayConversionError",
        "a NumPy function on a value that is known only when the kernel runs",
        "the function of that name in jax.numpy; NumPy itself works on constants alone",
    ),
    Mistake(
        r"^TracerBoolConversionError|truth value",
        "Python control flow on a value that is known only when the kernel runs",
        "@pbkern.when(condition) for statements, jnp.where or jax.lax.cond for values, & and | for `and` and `or`",
    ),
    Mistake(
        r"^TracerIntegerConversionError|object cannot be interpreted as an integer",
        "a Python integer of a value that is known only when the kernel runs",
        "@pbkern.loop(low, high) for range, pbkern.ds(start, size) for slices with a computed start",
    ),
    Mistake(
        r"^ConcretizationTypeError|^NonConcreteBooleanIndexError",
        "a Python number or shape of a value that is known only when the kernel runs",
        "x.astype(dtype) for int(x) and float(x); shapes are constants; a mask in place of a bool index",
    ),
    Mistake(
        r"Cannot store a Ref into another Ref",
        "a Ref stored into a Ref",
        "read it first: o_ref[...] = x_ref[...]",
    ),
    Mistake(
        r"Tracer.* at position \d+|is not a valid JAX (array )?type|not a valid index|Ref\{.*array",
        "a Ref, or what is no array, where a value belongs",
        "read Refs first: x_ref[...]; numbers and arrays are values",
    ),
    Mistake(
        r"Invalid shape for `\w+`",
        "a store of a value whose shape is not that of the place it goes to",
        "index the part that it fits, or jnp.broadcast_to(value, shape)",
    ),
    Mistake(
        r"Invalid dtype for `\w+`",
        "a store of a value of another dtype than the Ref's",
        "value.astype(o_ref.dtype)",
    ),
    Mistake(
        r"must not be longer than `shape`|[Tt]oo many indices",
        "more indices than the Ref has dimensions",
        "one index per dimension; dimensions that a BlockSpec squeezes with None are absent",
    ),
    Mistake(
        r"[Oo]ut of bound",
        "a constant index outside its Ref",
        "an index inside the block, or a masked pbkern.load",
    ),
)


def explained(body: Callable, refs: Sequence, kernel: str, defined_at: str) -> Any:
    """Calls a body: errors of libraries leave it as KernelErrors of this kernel."""
    try:
        return body(*refs)
    except PbkernError as e:
        if e.at is not None:
            raise
        _raise(type(e)(e.what, at=_line_in_traceback(e) or defined_at, why=e.why, hint=e.hint), e)
    except Exception as e:
        line = _line_in_traceback(e)
        if line is None or not (_is_of_library(e) or _speaks_of_tracers(e)):
            raise
        text = _first_sentences(str(e))
        known_error = next(
            (
                mistake
                for mistake in MISTAKES
                if re.search(mistake.says, f"{type(e).__name__}: {text}", re.DOTALL)
            ),
            None,
        )
        what = (
            f"{known_error.what}, in kernel `{kernel}`"
            if known_error
            else f"body of kernel `{kernel}` cannot be traced"
        )
        _raise(
            KernelError(
                what,
                at=line,
                why=f"{type(e).__name__}: {text}",
                hint=known_error.hint
                if known_error
                else "the message is JAX's own: the same line fails in a function under jax.jit",
            ),
            e,
        )


def _raise(error: PbkernError, cause: BaseException) -> NoReturn:
    """Raises an error in place of the one that it explains, at the same frames; with that one where JAX's frames are shown."""
    raise error.with_traceback(cause.__traceback__) from (
        cause if _jax.shows_all_frames() else None
    )


def _first_sentences(text: str) -> str:
    """An error's text without what JAX appends about its own functions and documents."""
    for end in (
        "The error occurred while tracing",
        "The problem arose",
        "See https://",
        "This BatchTracer",
        "\n\n",
    ):
        text = text.split(end)[0]
    return " ".join(text.split())


def _frames(error: BaseException) -> list:
    """Entries of an error's traceback, innermost first."""
    frames, entry = [], error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    return frames[::-1]


def _is_of_library(error: BaseException) -> bool:
    """Whether code of JAX, NumPy or pbkern raised it, rather than the user's."""
    frames = _frames(error)
    return bool(frames) and not _jax.is_user_file(frames[0].tb_frame.f_code.co_filename)


def _speaks_of_tracers(error: BaseException) -> bool:
    """Whether Python itself refused a tracer, at the user's line."""
    return "Tracer" in str(error) or "AbstractRef" in str(error)


def _line_in_traceback(error: BaseException) -> str | None:
    """`file:line:column (function)` of the user's innermost line, or None."""
    for entry in _frames(error):
        code = entry.tb_frame.f_code
        if _jax.is_user_file(code.co_filename):
            return str(line_of_frame(code, entry.tb_lineno, entry.tb_lasti))
    return None
