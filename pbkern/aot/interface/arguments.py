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
# Code: no file of weights is loaded.
NO_WEIGHTS = 4
# Code of NAME_load: the file cannot be read or mapped.
UNREADABLE_WEIGHTS = 5
# Code of NAME_load: the file does not hold these weights.
OTHER_WEIGHTS = 6
CODES = {
    "OK": (OK, "done"),
    "NULL_POINTER": (NULL_POINTER, "an argument is a null pointer"),
    "OUT_OF_MEMORY": (OUT_OF_MEMORY, "memory cannot be allocated"),
    "UNSUITABLE_PROCESSOR": (
        UNSUITABLE_PROCESSOR,
        "the processor lacks instructions that the library uses",
    ),
}
# Further codes of libraries whose weights are in a file.
FILE_CODES = {
    "NO_WEIGHTS": (NO_WEIGHTS, "no file of weights is loaded"),
    "UNREADABLE_WEIGHTS": (UNREADABLE_WEIGHTS, "the file of weights cannot be read"),
    "OTHER_WEIGHTS": (
        OTHER_WEIGHTS,
        "the file does not hold the weights of this function: other names, types or shapes",
    ),
}


@dataclass(frozen=True)
class Argument:
    """One array of the C function.

    Attributes:
      name: in C. path: in Python, as "params['w']".
      type: shape and dtype.
      is_used: whether the library touches it.
      is_weight: whether it is a weight.
    """

    name: str
    path: str
    type: ArrayType
    is_used: bool = True
    is_weight: bool = False
