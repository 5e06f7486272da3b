"""Text for a call that gets no memory for temporaries: how much its program needs, and for which array of which kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from pbkern._jax import user_line
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import equations
from pbkern.dsl.host_program import BufferKind, HostProgram
from pbkern.dsl.kernel import ArrayType, Kernel

from .objects.elf_loader import Image

MEGABYTE = 1e6  # bytes
# The smallest arena whose arrays are looked for: each program pays for the search, and less memory
# is hardly ever missing.
SEARCHED_BYTES = 1 << 20


def memory_message(program: HostProgram, arena_bytes: int, lines: bool = True) -> str:
    """The text.

    Args:
      program: the program.
      arena_bytes: of one call, beside its arguments and results.
      lines: whether the user's line is named. Later processes may have another one.
    """
    text = f"out of memory: `{program.name}` needs {arena_bytes / MEGABYTE:.1f} MB for temporaries"
    arrays = (
        [entry for entry in _arrays(program) if entry[0].nbytes <= arena_bytes]
        if arena_bytes >= SEARCHED_BYTES
        else []
    )
    if not arrays:
        return text
    array, kernel, line = max(arrays, key=lambda entry: entry[0].nbytes)
    line = (line or kernel.defined_at) if lines else None
    largest = f"{array} ({array.nbytes / MEGABYTE:.1f} MB), which kernel `{kernel.name}` makes"
    return f"{text}, the largest of them {largest}{f' at {line}' if line else ''}"


def _arrays(program: HostProgram) -> Iterator[tuple[ArrayType, Kernel, str | None]]:
    """Temporaries between kernels, and values of bodies, which may need scratch memory: (type, kernel, the user's line)."""
    temporaries = {buffer.name for buffer in program.of_kind(BufferKind.TEMP)}
    for launch in program.launches:
        eqns = list(equations(launch.kernel.body.jaxpr))
        last = next((line for equation in reversed(eqns) if (line := user_line(equation))), None)
        yield from (
            (result.type, launch.kernel, last)
            for result in launch.results
            if result.buffer in temporaries
        )
        for eqn in eqns:
            for value in (
                var
                for var in eqn.outvars
                if hasattr(var.aval, "shape") and not hasattr(var.aval, "inner_aval")
            ):
                aval = array_aval(value)
                yield ArrayType(tuple(aval.shape), aval.dtype), launch.kernel, user_line(eqn)


def give_message(image: Image, text: Any) -> None:
    """Lets a program's code point to its message, a buffer of characters that lives as long as the code."""
    ctypes.c_void_p.from_address(image.address("pbk_message")).value = ctypes.addressof(text)
    image.holds = text
