"""ElementwisePrimitive: a row of ELEMENTWISE, and the evaluation of its meaning on NumPy arrays."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pbkern.core.lazy_dataclass import dataclass

from .elementwise_meanings import FORMATS, HALF


class ResultType(enum.Enum):
    """The element type of a result."""

    FIRST = "that of the first operand"
    SECOND = "that of the second operand"
    TRUTH = "bool"
    STATED = "a parameter's"


FIRST = ResultType.FIRST
SECOND = ResultType.SECOND
TRUTH = ResultType.TRUTH
STATED = ResultType.STATED


@dataclass(frozen=True, slots=True)
class Spelling:
    """Python source of a primitive.

    Attributes:
      function: the function that makes this equation of operands with explicit types and of parameters.
      short: an operator, or a function that converts Python's numbers to the other operand's type; "": there is none.
      kinds: kinds of operands of which `short` makes the same equation.
    """

    function: str
    short: str = ""
    kinds: str = ""


@dataclass(frozen=True, slots=True)
class ElementwisePrimitive:
    """An elementwise primitive of jaxprs.

    Attributes:
      name: the primitive's.
      kinds: kinds of the operand by whose type the rule is chosen: f floats, i integers with sign, u without, b truth
        values; of complex numbers (c), fuse/complex makes pairs first. It is the second operand where that gives the
        result's type, else the first.
      meaning: (operands, parameters as keywords) -> result. float16 and bfloat16 come as float32 unless `in_memory`.
      spelling: None: no public function makes it, and pbkern.bind does.
      price: additions that one costs, where nothing was measured.
      result: the result's type.
      parameters: those of the equation that change its meaning.
      error_ulp: bound of the error of our code in float32 and float64, in units in the last place; None: it is exact.
      approx_relative: bound of the relative error in float32 and float64 of the cheaper version that `approx=True`
        chooses; None: there is none.
      in_memory: depends on operands as they lie in memory, as bits and comparisons do: 16-bit floats are rounded for it.
      on_sub_byte: needs no reduction to the width of an integer that is narrower than its register.
      in_index_tests: comparisons of indices, and combinations of those, consist of it.
      reports: tells the process about elements, beside its result.
      unlowered: why there is no lowering rule; "": there is one.
    """

    name: str
    kinds: str
    meaning: Callable[..., np.ndarray] | None
    spelling: Spelling | None
    price: float
    result: ResultType = FIRST
    parameters: tuple[str, ...] = ()
    error_ulp: tuple[float, float] | None = None
    approx_relative: tuple[float, float] | None = None
    in_memory: bool = False
    on_sub_byte: bool = False
    in_index_tests: bool = False
    reports: bool = False
    unlowered: str = ""

    @property
    def deciding_operand(self) -> int:
        """The operand of which `kinds` speaks."""
        return 1 if self.result is SECOND else 0

    @property
    def is_exact(self) -> bool:
        """Whether code computes the number that the meaning says, correctly rounded."""
        return self.error_ulp is None

    def computed(
        self, operands: Sequence[Any], params: Mapping[str, Any], dtype: np.dtype
    ) -> np.ndarray:
        """The meaning on operands as they are, of the equation's parameters and the type of its result.

        float16 and bfloat16 are widened to float32 unless the row is `in_memory`, integers of less than a byte to bytes:
        the result may be as wide.
        """
        if self.meaning is None:
            raise TypeError(f"{self.name} has no meaning on NumPy arrays: {self.unlowered}")
        arrays = [_widened(np.asarray(operand), self.in_memory) for operand in operands]
        keywords = {
            name: dtype if name == "new_dtype" else params[name] for name in self.parameters
        }
        with np.errstate(all="ignore"):
            return np.asarray(self.meaning(*arrays, **keywords))

    def evaluated(
        self, operands: Sequence[Any], params: Mapping[str, Any], dtype: np.dtype
    ) -> np.ndarray:
        """The result in its own type."""
        return rounded(self.computed(operands, params, dtype), dtype)


def kind_of(dtype: Any) -> str:
    """f, i, u, b, or c; also of the types that NumPy lacks."""
    dtype = np.dtype(dtype)
    if dtype.kind != "V":
        return dtype.kind
    return "i" if dtype.name.startswith("int") else "u" if dtype.name.startswith("uint") else "f"


def is_evaluated(row: ElementwisePrimitive, dtypes: Sequence[np.dtype]) -> bool:
    """Whether the row's meaning covers these types of operands: it has one, and none is complex or a float of a byte."""
    return row.meaning is not None and all(
        dtype.name in FORMATS or kind_of(dtype) in "iub" for dtype in dtypes
    )


def _widened(x: np.ndarray, in_memory: bool) -> np.ndarray:
    if x.dtype.kind == "V" and kind_of(x.dtype) in "iu":
        return x.astype(np.int8 if kind_of(x.dtype) == "i" else np.uint8)
    return x.astype(np.float32) if x.dtype.name in HALF and not in_memory else x


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Computed values as they are in memory.

    NaNs keep their bits, which may be anything where bytes are moved as floats.
    """
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        result = x.astype(dtype)
    if dtype.name == "bfloat16" and x.dtype == np.float32 and (nan := np.isnan(x)).any():
        upper = (x.view(np.uint32) >> 16).astype(np.uint16)
        upper |= np.where(upper & 0x7F, 0, 0x40).astype(np.uint16)
        result = np.where(nan, upper, result.view(np.uint16)).view(dtype)
    return result
