"""The arrays of a C function, and the codes that it returns."""

from __future__ import annotations

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
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
# Code: a size is out of the range that the library is made for.
UNSUITABLE_SIZE = 7
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


# A further code of libraries with sizes that the caller says.
SIZE_CODES = {"UNSUITABLE_SIZE": (UNSUITABLE_SIZE, "a size is out of the library's range")}


@dataclass(frozen=True)
class Argument:
    """One array of the C function.

    Attributes:
      name: in C. path: in Python, as "params['w']".
      type: shape and dtype.
      is_used: whether the library touches it.
      is_weight: whether it is a weight.
      number: its place among the function's inputs or outputs.
      dimensions: its shape as expressions of sizes that the caller says; () where it is fixed.
        `type` has the largest sizes.
    """

    name: str
    path: str
    type: ArrayType
    is_used: bool = True
    is_weight: bool = False
    number: int = 0
    dimensions: tuple[Affine[str], ...] = ()
