"""One operation of a program as rules see it: its attributes as Python's numbers, its regions as functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass

from .constants import dense, dense_integers
from .places import SourcePlaces

FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
DTYPES: dict[str, np.dtype] = {
    "i1": np.dtype(np.bool_),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "complex<f32>": np.dtype(np.complex64),
    "complex<f64>": np.dtype(np.complex128),
    **{f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "i4": np.dtype(ml_dtypes.int4),
    "ui4": np.dtype(ml_dtypes.uint4),
    **{
        f"f8{suffix.upper()}": np.dtype(getattr(ml_dtypes, f"float8_{suffix}")) for suffix in FLOAT8
    },
}


def type_problem(type_: ir.Type) -> str | None:
    """Why values of a type cannot be imported; None if they can."""
    text = str(type_)
    if text.startswith("!stablehlo.token"):
        return None
    if isinstance(type_, ir.TupleType):
        parts = ir.TupleType(type_)
        return next(
            filter(None, (type_problem(parts.get_type(k)) for k in range(parts.num_types))), None
        )
    if not isinstance(type_, ir.RankedTensorType):
        return f"type {text}"
    tensor = ir.RankedTensorType(type_)
    if not tensor.has_static_shape:
        return f"shape that is known only when it runs: {text}"
    return None if str(tensor.element_type) in DTYPES else f"element type {tensor.element_type}"


@functools.lru_cache(maxsize=4096)
def _dtype_of(text: str) -> np.dtype:
    return DTYPES[text]


def tensor_type(value: ir.Value) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) of a value that type_problem lets pass."""
    tensor = ir.RankedTensorType(value.type)
    return tuple(tensor.shape), _dtype_of(str(tensor.element_type))


def made_by(value: ir.Value) -> Any:
    """The operation that makes a value; None for an argument of a block."""
    return getattr(value.owner, "operation", None)


def _no_scope(*_: Any) -> list:
    raise AssertionError("an operation that is read outside of a scope runs nothing")


@dataclass(frozen=True)
class HloOperation:
    """An operation and the scope it is in; without a scope its attributes can be read.

    Attributes:
      mlir: the operation itself.
      run_block: (block, arguments) -> results, with the values of the scope in reach.
      call: (function's name, arguments) -> results.
      places: of the program's operations.
    """

    mlir: Any
    run_block: Callable[[Any, Sequence[Any]], list] = _no_scope
    call: Callable[[str, Sequence[Any]], list] = _no_scope
    places: SourcePlaces = SourcePlaces()

    @property
    def name(self) -> str:
        return self.mlir.name

    def type(self, position: int = 0) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the result at a position."""
        return tensor_type(self.mlir.results[position])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type()[0]

    @property
    def dtype(self) -> np.dtype:
        return self.type()[1]

    def attribute(self, name: str) -> Any:
        """None where it is absent."""
        return self.mlir.attributes.get(name, None)

    def integer(self, name: str) -> int:
        return ir.IntegerAttr(self.attribute(name)).value

    def number(self, name: str) -> float:
        return ir.FloatAttr(self.attribute(name)).value

    def text(self, name: str) -> str:
        """Returns the text of a string, or the name of a symbol."""
        value = self.attribute(name)
        return (ir.StringAttr if isinstance(value, ir.StringAttr) else ir.FlatSymbolRefAttr)(
            value
        ).value

    def flag(self, name: str) -> bool:
        value = self.attribute(name)
        return value is not None and ir.BoolAttr(value).value

    def integers(self, name: str, default: Sequence[int] | None = None) -> list[int]:
        value = self.attribute(name)
        if value is None:
            assert default is not None, f"{self.name} has no {name}"
            return list(default)
        return dense_integers(value)

    def pairs(self, name: str, rank: int) -> list[tuple[int, int]]:
        """A pair per dimension, zeros where it is absent."""
        value = self.attribute(name)
        if value is None:
            return [(0, 0)] * rank
        return [(int(first), int(second)) for first, second in dense(value).reshape(-1, 2)]

    def choice(self, name: str, default: str | None = None) -> str | None:
        """The word of an enumeration, such as LT of #stablehlo<comparison_direction LT>."""
        value = self.attribute(name)
        return default if value is None else str(value).rstrip(">").replace("<", " ").split()[-1]

    @property
    def precision(self) -> tuple[str, ...] | None:
        """Precision of a contraction's operands, in lower case; None for the default."""
        value = self.attribute("precision_config")
        words = (
            ()
            if value is None
            else tuple(str(entry).rstrip(">").split()[-1].lower() for entry in ir.ArrayAttr(value))
        )
        return None if all(word == "default" for word in words) else words

    def region(self, position: int) -> Callable[..., list]:
        """A region of one block as a function of its arguments."""
        block = self.mlir.regions[position].blocks[0]
        return lambda *arguments: self.run_block(block, arguments)

    def block(self, position: int) -> Any:
        return self.mlir.regions[position].blocks[0]


def described(op: Any, places: SourcePlaces) -> str:
    """An operation's name, and its place where the program tells it."""
    name = op.name
    if name == "stablehlo.custom_call":
        name = f"custom_call @{ir.StringAttr(op.attributes['call_target_name']).value}"
    place = places.of(op)
    return f"{name} at {place.file}:{place.line}" if place else name


def refused(op: HloOperation, why: str) -> UnsupportedOp:
    """The error of one operation that has a rule, which does not cover this case."""
    return UnsupportedOp(
        f"{described(op.mlir, op.places)} is not imported",
        why=why,
        hint="compute it outside of the program",
    )
