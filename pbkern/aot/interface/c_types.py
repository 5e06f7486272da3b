"""dtype -> how C, MLIR and Python call its elements. Types that C does not have are the integers or pairs that hold them."""

from __future__ import annotations

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import ArrayType

from .arguments import Argument


@dataclass(frozen=True)
class ElementType:
    """The types of an array's elements.

    Attributes:
      c: type of an element, or of both parts of a complex one.
      mlir: element type of a memref.
      note: text for properties that C cannot express.
    """

    c: str
    mlir: str
    note: str = ""


_PARTS = "pairs of real and imaginary parts"
TYPES = {
    "bool": ElementType("uint8_t", "i1", "bytes that are 0 or 1"),
    **{f"int{bits}": ElementType(f"int{bits}_t", f"i{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": ElementType(f"uint{bits}_t", f"ui{bits}") for bits in (8, 16, 32, 64)},
    "float16": ElementType("uint16_t", "f16", "the bits of IEEE half precision"),
    "bfloat16": ElementType("uint16_t", "bf16", "the upper 16 bits of float"),
    "float32": ElementType("float", "f32"),
    "float64": ElementType("double", "f64"),
    "complex64": ElementType("float", "complex<f32>", _PARTS),
    "complex128": ElementType("double", "complex<f64>", _PARTS),
    "float8_e4m3fn": ElementType("uint8_t", "f8E4M3FN", "the bits of a float of 8 bits"),
    "float8_e5m2": ElementType("uint8_t", "f8E5M2", "the bits of a float of 8 bits"),
}


def element_type(dtype: np.dtype, path: str) -> ElementType:
    """Raises UnsupportedOp, naming the argument `path`, for types that arrays in C cannot have."""
    row = TYPES.get(dtype.name)
    if row is None:
        raise UnsupportedOp(
            f"`{path}` cannot be an array in C",
            why=f"its elements are {dtype.name}",
            hint=f"convert it: {', '.join(TYPES)}",
        )
    return row


def memref(argument: Argument) -> str:
    """The type as MLIR writes it: memref<1080x1920x3xf32>.

    A dimension of sizes that the caller says is `?`, with its expression behind the type.
    """
    fixed: list[Affine[str]] = [Affine(const=size) for size in argument.type.shape]
    dimensions = argument.dimensions or fixed
    sizes = "".join(f"{'?' if d.terms else d.const}x" for d in dimensions)
    said = ", ".join(f"dimension {n} is {written(d)}" for n, d in enumerate(dimensions) if d.terms)
    element = element_type(argument.type.dtype, argument.path).mlir
    return f"memref<{sizes}{element}>{said and f', {said}'}"


def written(dimension: Affine[str]) -> str:
    """A dimension as C writes it: "2 * rows + 1"."""
    parts = [name if part == 1 else f"{part} * {name}" for name, part in dimension.terms]
    parts += [str(dimension.const)] * bool(dimension.const or not parts)
    return " + ".join(parts)


def elements(array: ArrayType) -> int:
    """Elements of the C array: two for a complex one."""
    return array.nbytes // max(array.dtype.itemsize, 1) * (2 if array.dtype.kind == "c" else 1)
