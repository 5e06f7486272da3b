"""Attributes of dense numbers -> NumPy arrays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

NUMBER = re.compile(r"0x[0-9A-Fa-f]+|true|false|nan|[-+]?inf|[-+]?\d[\d.]*(?:[eE][-+]?\d+)?")


def dense_integers(attribute: Any) -> list[int]:
    """Elements of an array attribute of integers or flags, or of a dense one of any shape, row by row."""
    for kind in (ir.DenseI64ArrayAttr, ir.DenseBoolArrayAttr, ir.DenseI32ArrayAttr):
        if isinstance(attribute, kind):
            return [int(element) for element in kind(attribute)]
    return [int(element) for element in dense(attribute).ravel()]


def dense(attribute: Any, dtype: np.dtype | None = None) -> np.ndarray:
    """An array of a dense attribute; `dtype` where MLIR's type is none of NumPy's own."""
    shape = tuple(ir.ShapedType(attribute.type).shape)
    if dtype is None or (dtype.kind in "fiu" and dtype.isbuiltin == 1) or dtype.kind == "b":
        try:
            array = np.array(attribute)
        except TypeError:  # a type that the bindings have no buffer for
            return _of_text(str(attribute), shape, dtype or np.dtype(np.int64))
        return array.reshape(shape) if dtype is None else array.reshape(shape).astype(dtype)
    return _of_text(str(attribute), shape, dtype)


def constant(op: Any, dtype: np.dtype) -> np.ndarray:
    """The array of a constant operation.

    The bindings have no attribute of complex numbers: these are read as text.
    """
    if dtype.kind != "c":
        return dense(op.attributes["value"], dtype)
    shape = tuple(ir.ShapedType(op.results[0].type).shape)
    text = op.get_asm(use_local_scope=True, enable_debug_info=False)
    return _of_text(text[text.index("dense<") :].rstrip(), shape, dtype)


def _of_text(text: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """From the printed form: hexadecimal bytes of all elements, or numbers, one for all that are equal."""
    body = text[text.index("<") + 1 : text.rindex(">", 0, text.rindex(" : "))].strip()
    if body.startswith('"0x'):
        array = np.frombuffer(bytes.fromhex(body[3:-1]), dtype)
    else:
        part = np.dtype(f"float{dtype.itemsize * 4}") if dtype.kind == "c" else dtype
        array = np.array([_number(word, part) for word in NUMBER.findall(body)], part)
        array = array.view(dtype) if dtype.kind == "c" else array
    size = int(np.prod(shape))
    return (
        array.reshape(shape)
        if array.size == size
        else np.broadcast_to(array.reshape(()), shape).copy()
    )


def _number(word: str, dtype: np.dtype) -> Any:
    if word in ("true", "false"):
        return word == "true"
    if word.startswith("0x") and dtype.kind not in "iu" and not dtype.name.endswith("int4"):
        return np.array(int(word, 16), f"u{dtype.itemsize}").view(dtype)[()]
    integral = dtype.kind in "iu" or dtype.name.endswith("int4")
    return dtype.type(int(word, 0) if integral else float(word))
