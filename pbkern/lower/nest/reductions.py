"""Operations of reductions: what their accumulators start with, and their meaning on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pbkern.lower.mlir.element_types import ELEMENTS, is_float

from .ir import Reduction


def lowest(dtype: np.dtype) -> Any:
    """Identity of max."""
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def highest(dtype: np.dtype) -> Any:
    """Identity of min."""
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


IDENTITY: dict[str, Callable[[np.dtype], Any]] = {
    "sum": lambda dtype: 0,
    "dot": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lowest,
    "min": highest,
    "maxnum": lowest,
    "and": lambda dtype: True if dtype.kind == "b" else -1,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "logaddexp": lambda dtype: -np.inf,
    "argmax": lowest,
    "argmin": highest,
}

# Sums and products of floats are made in float64 and rounded once: closer to the truth than any
# order of additions.
UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "maxnum": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "logaddexp": np.logaddexp,
}
ON_BOOLS = {"sum": np.logical_or, "max": np.logical_or, "min": np.logical_and}


def is_rounded_sum(reduction: Reduction) -> bool:
    """Whether it adds up floats, so that long chains of additions lose digits."""
    return reduction.op in ("sum", "dot") and _is_float(reduction.dtype)


def depends_on_order(reduction: Reduction) -> bool:
    """Whether another order of operands changes the result's last bits."""
    return reduction.op in ("sum", "dot", "prod", "logaddexp") and _is_float(reduction.dtype)


def _is_float(dtype: np.dtype) -> bool:
    return is_float(ELEMENTS[dtype.name][0])


def reduced(
    reduction: Reduction, args: Sequence[np.ndarray], axes: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """The accumulator once all points of `shape` are done, with size 1 along `axes`.

    `args` broadcast to `shape`.
    """
    if reduction.by is not None:
        elements = [reduction.by.elements(k, words) for k, words in enumerate(args)]
        shape_of_elements = (*shape, reduction.by.shape[-1])
        sums = _sum_of_products(reduction, elements, (*axes, len(shape)), shape_of_elements)
        return sums[..., 0]
    if reduction.is_product:
        return _sum_of_products(reduction, args, axes, shape)
    if reduction.op in ("argmax", "argmin"):
        return _first_best(reduction, args, axes, shape)
    ufunc, dtype = _operation(reduction)
    start = np.asarray(IDENTITY[reduction.op](reduction.dtype)).astype(dtype)[()]
    values = np.broadcast_to(args[0], shape).astype(dtype)
    with np.errstate(all="ignore"):
        return ufunc.reduce(values, axis=axes, initial=start, keepdims=True).astype(reduction.dtype)


def accumulated(
    reduction: Reduction, args: Sequence[np.ndarray], axes: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """The accumulator after each point of `shape`; those along `axes` follow one another, the last axis fastest."""
    ufunc, dtype = _operation(reduction)
    values = np.moveaxis(np.broadcast_to(args[0], shape).astype(dtype), axes, range(-len(axes), 0))
    rows = values.reshape(*values.shape[: values.ndim - len(axes)], -1)
    with np.errstate(all="ignore"):
        found = ufunc.accumulate(rows, axis=-1, dtype=dtype).astype(reduction.dtype)
    return np.moveaxis(found.reshape(values.shape), range(-len(axes), 0), axes)


def _operation(reduction: Reduction) -> tuple[np.ufunc, np.dtype]:
    """(NumPy's function, the dtype in which it runs)."""
    if reduction.dtype.kind == "b":
        return ON_BOOLS.get(reduction.op, UFUNCS[reduction.op]), reduction.dtype
    exact = reduction.op in ("sum", "prod", "logaddexp") and reduction.dtype.kind not in "iu"
    return UFUNCS[reduction.op], np.dtype(np.float64) if exact else reduction.dtype


def _sum_of_products(
    reduction: Reduction, args: Sequence[np.ndarray], axes: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """Sums products by einsum: the products take no memory."""
    dtype = np.dtype(np.float64) if reduction.dtype.kind not in "iub" else reduction.dtype
    operands: list = []
    seen: set[int] = set()
    for array in args:
        array = np.broadcast_to(
            array, [1] * (len(shape) - np.ndim(array)) + list(np.shape(array))
        ).astype(dtype)
        own = [k for k, size in enumerate(array.shape) if size > 1]
        seen.update(own)
        operands += [array.reshape([array.shape[axis] for axis in own]), own]
    kept = [k for k in range(len(shape)) if k in seen and k not in axes]
    repeats = np.prod([shape[axis] for axis in axes if axis not in seen], dtype=dtype)
    with np.errstate(all="ignore"):
        found = (np.einsum(*operands, kept, optimize=True) * repeats).astype(
            dtype
        )  # by BLAS where it can be
    return found.reshape([shape[k] if k in kept else 1 for k in range(len(shape))]).astype(
        reduction.dtype
    )


def _first_best(
    reduction: Reduction, args: Sequence[np.ndarray], axes: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """The smallest index of those with the best value; NaN is better than any number."""
    value, index = (np.broadcast_to(arg, shape) for arg in args)
    value = value.astype(np.int8) if value.dtype.kind == "b" else value
    better = np.maximum if reduction.op == "argmax" else np.minimum
    best = better.reduce(
        value, axis=axes, initial=IDENTITY[reduction.op](value.dtype), keepdims=True
    )
    is_best = (value == best) | ((value != value) & (best != best))
    last = np.iinfo(reduction.dtype).max
    return np.minimum.reduce(
        np.where(is_best, index, last), axis=axes, initial=last, keepdims=True
    ).astype(reduction.dtype)
