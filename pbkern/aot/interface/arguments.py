"""The arrays of a C function, and the codes that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from pbkern.dsl.kernel import ArrayType

# Codes that NAME_try returns; CODES has their words in the header.
OK = 0
# Code: an argument is a null pointer.
NULL_POINTER = 1
# Code: memory cannot be allocated.
OUT_OF_MEMORY = 2
# Code: the processor lacks instructions.
UNSUITABLE_PROCESSOR = 3
CODES = {
    "OK": (OK, "done"),
    "NULL_POINTER": (NULL_POINTER, "an argument is a null pointer"),
    "OUT_OF_MEMORY": (OUT_OF_MEMORY, "memory cannot be allocated"),
    "UNSUITABLE_PROCESSOR": (
        UNSUITABLE_PROCESSOR,
        "the processor lacks instructions that the library uses",
    ),
}


@dataclass(frozen=True)
class Argument:
    """One array of the C function.

    Attributes:
      name: in C. path: in Python, as "params['w']".
      type: shape and dtype.
      is_used: whether the library touches it.
    """

    name: str
    path: str
    type: ArrayType
    is_used: bool = True
