"""A kernel that failed -> one Python file that fails the same way: its source, its operands, and the call.

Written to PBKERN_DUMP or the system's folder for temporary files; the error's last row is the path.
Files are named by their contents, so that the same failure leaves one file.
"""

from __future__ import annotations

import base64
import hashlib
import pathlib
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pbkern.core import config
from pbkern.core.errors import OptionError, PbkernError
from pbkern.dsl.kernel import ArrayType, Kernel

from .spelling import dtype_name

# Operands are part of the file up to this size, compressed; larger ones are drawn from a seed.
LARGEST_OPERANDS = 64 << 20

FILE = '''"""{title}

This file holds the kernel, its operands and the call that failed. {operands}
"""

import base64
import zlib

import numpy as np

{source}
{x64}
def operand_of_text(text, dtype, shape):
    """An array from its compressed bytes."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)


RNG = np.random.default_rng(0)
ARGS = [
{args}
]
{call}
'''
X64 = 'jax.config.update("jax_enable_x64", True)\n\n'


def attach(
    error: Exception,
    kernel: Kernel,
    arrays: Sequence | None = None,
    interpreted: bool = False,
    **options: Any,
) -> None:
    """Writes the file and adds its path to the error, unless it has one already or is of an option.

    Args:
      error: what the call raised.
      kernel: the kernel that failed.
      arrays: operands of the failed call; () if they were too large to keep; None if it failed
        before there were any.
      interpreted: whether the interpreter failed, or native code.
      **options: the interpreter's.
    """
    if getattr(error, "repro", None) is not None or isinstance(error, OptionError):
        return
    try:
        path = write(error, kernel, arrays, interpreted, **options)
    except (PbkernError, OSError) as e:  # the failure itself matters more
        note = f"not written: {e}"
    else:
        note = str(path)
        vars(error)["repro"] = path  # whatever class the error is of
    if isinstance(error, PbkernError):
        error.args = (f"{error.args[0]}\n  file {note}",)
    else:
        error.add_note(f"pbkern: a file that fails the same way: {note}")


def write(
    error: Exception, kernel: Kernel, arrays: Sequence | None, interpreted: bool, **options: Any
) -> pathlib.Path:
    """The file of one failure. Raises UnsupportedOp for kernels that do not print, OSError."""
    values = [np.asarray(array) for array in arrays or ()]
    known = (
        arrays is not None
        and len(values) == len(kernel.in_types)
        and sum(value.nbytes for value in values) <= LARGEST_OPERANDS
    )
    shown = values if known else [None] * len(kernel.in_types)
    given = "".join(f", {k}={option!r}" for k, option in options.items())
    call = (
        f"pbkern.interpret({kernel.name}.trace(), *ARGS{given})"
        if interpreted
        else f"print({kernel.name}(*ARGS))"
    )
    why = (
        "Those are random: any will do."
        if arrays is None
        else "They were too large, so these are random ones."
    )
    text = FILE.format(
        title=f"{type(error).__name__} in kernel `{kernel.name}`.",
        operands="They are those of the failed call." if known else why,
        source=kernel.source(),
        x64=X64
        if any(type_.dtype.itemsize == 8 for type_ in (*kernel.in_types, *kernel.out_types))
        else "",
        args="\n".join(
            f"    {_argument(type_, value)}," for type_, value in zip(kernel.in_types, shown)
        ),
        call=call,
    )
    folder = config.current().dump or pathlib.Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = folder / f"pbkern_repro_{kernel.name}_{digest}.py"
    path.write_text(text)
    return path


def _argument(array_type: ArrayType, value: np.ndarray | None) -> str:
    """Source of an operand: its values, or random ones of its type."""
    dtype = dtype_name(array_type.dtype)
    if value is None:
        return f"jnp.asarray(RNG.uniform(0, 4, {array_type.shape!r})).astype({dtype})"
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(value).tobytes(), 9)).decode()
    return f'operand_of_text("{text}", {dtype}, {array_type.shape!r})'
