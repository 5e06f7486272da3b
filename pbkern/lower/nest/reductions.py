"""Reductions: one row for each, with its meaning on NumPy arrays and as MLIR operations.

Interpreters and all targets take from here what accumulators start with, how two of them are
combined, and how one more point is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.math import elementwise
from pbkern.lower.mlir.element_types import ELEMENTS, compute_el, is_float
from pbkern.lower.mlir.ops import Builder, Ssa

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


@dataclass(frozen=True, kw_only=True)
class ReductionRow:
    """An operation of reductions.

    Attributes:
      identity: of a dtype, the value that accumulators start with.
      ufunc: on NumPy arrays; of searches that of their values.
      combine: (builder, x, y, dtype) -> an accumulator for two.
      primitive: the elementwise primitive that combines two numbers, or nothing.
      across: the kind of vector.reduction that combines lanes; {sign} is s or u. None: there is none.
      bools: the operation that this is on booleans, where it is another.
      is_rounded: another order of floats changes the last bits of the result.
      is_symmetric: combine(y, x) is combine(x, y), in every bit.
    """

    identity: Callable[[np.dtype], Any]
    ufunc: np.ufunc
    combine: Callable[[Builder, Ssa, Ssa, np.dtype], Ssa]
    primitive: str
    across: str | None
    bools: str | None = None
    is_rounded: bool = False
    is_symmetric: bool = True


def _logaddexp(b: Builder, x: Ssa, y: Ssa, dtype: np.dtype) -> Ssa:
    """max + log1p(exp(min - max)); infinite maxima stand for themselves (exp of inf - inf is NaN)."""

    def call(name: str, operand: Ssa) -> Ssa:
        info = elementwise.EqnInfo(name, {"accuracy": None}, (dtype,), dtype, None)
        return elementwise.RULES.lookup(name)(b, info, operand)

    high = b.max(x, y)
    total = b.add(high, call("log1p", call("exp", b.sub(b.min(x, y), high))))
    infinite = b.cmp("eq", b.abs(high), b.c(np.inf, high.el))
    return b.select(infinite, high, total)


_SUM = ReductionRow(
    identity=lambda dtype: 0,
    ufunc=np.add,
    combine=lambda b, x, y, _: b.add(x, y),
    primitive="add",
    across="add",
    bools="or",
    is_rounded=True,
)
_MAX = ReductionRow(
    identity=lowest,
    ufunc=np.maximum,
    combine=lambda b, x, y, dtype: b.max(x, y, unsigned=dtype.kind == "u"),
    primitive="max",
    across="max{sign}i",
    bools="or",
)
_MIN = ReductionRow(
    identity=highest,
    ufunc=np.minimum,
    combine=lambda b, x, y, dtype: b.min(x, y, unsigned=dtype.kind == "u"),
    primitive="min",
    across="min{sign}i",
    bools="and",
)
REDUCTIONS = {
    "sum": _SUM,
    "dot": _SUM,
    "prod": ReductionRow(
        identity=lambda dtype: 1,
        ufunc=np.multiply,
        combine=lambda b, x, y, _: b.mul(x, y),
        primitive="mul",
        across="mul",
        bools="and",
        is_rounded=True,
    ),
    "max": _MAX,
    "min": _MIN,
    "maxnum": ReductionRow(
        identity=lowest,
        ufunc=np.fmax,
        # x is no NaN: accumulators start with a number, and keep it.
        combine=lambda b, x, y, _: b.select(b.cmp("gt", y, x), y, x),
        primitive="",
        across="maxnumf",
        is_symmetric=False,
    ),
    "and": ReductionRow(
        identity=lambda dtype: True if dtype.kind == "b" else -1,
        ufunc=np.bitwise_and,
        combine=lambda b, x, y, _: b.and_(x, y),
        primitive="and",
        across="and",
    ),
    "or": ReductionRow(
        identity=lambda dtype: 0,
        ufunc=np.bitwise_or,
        combine=lambda b, x, y, _: b.or_(x, y),
        primitive="or",
        across="or",
    ),
    "xor": ReductionRow(
        identity=lambda dtype: 0,
        ufunc=np.bitwise_xor,
        combine=lambda b, x, y, _: b.xor(x, y),
        primitive="xor",
        across="xor",
    ),
    "logaddexp": ReductionRow(
        identity=lambda dtype: -np.inf,
        ufunc=np.logaddexp,
        combine=_logaddexp,
        primitive="",
        across=None,
        is_rounded=True,
        is_symmetric=False,
    ),
    "argmax": _MAX,
    "argmin": _MIN,
}


def row_of(reduction: Reduction) -> ReductionRow:
    """The row of a reduction on its dtype."""
    row = REDUCTIONS[reduction.op]
    return REDUCTIONS[row.bools] if row.bools and reduction.dtype.kind == "b" else row


def is_rounded_sum(reduction: Reduction) -> bool:
    """Whether it adds up floats, so that long chains of additions lose digits."""
    return REDUCTIONS[reduction.op] is _SUM and _is_float(reduction.dtype)


def depends_on_order(reduction: Reduction) -> bool:
    """Whether another order of operands changes the result's last bits."""
    return REDUCTIONS[reduction.op].is_rounded and _is_float(reduction.dtype)


def _is_float(dtype: np.dtype) -> bool:
    return is_float(ELEMENTS[dtype.name][0])


# --- MLIR operations


def width(reduction: Reduction) -> int:
    """Accumulators of a reduction: of searches, a value and an index."""
    return 2 if reduction.is_search else 1


def identity(b: Builder, reduction: Reduction) -> list[Ssa]:
    """Values that the accumulators of a reduction start with."""
    value = reduction.args[0].dtype if reduction.is_search else reduction.dtype
    start = [b.c(REDUCTIONS[reduction.op].identity(value), compute_el(value))]
    if reduction.is_search:
        start.append(b.c(np.iinfo(reduction.dtype).max, compute_el(reduction.dtype)))
    return start


def identities(b: Builder, reductions: Iterable[Reduction]) -> list[Ssa]:
    """Values that the accumulators of all reductions of a point start with."""
    return [acc for reduction in reductions for acc in identity(b, reduction)]


def per_accumulator(reductions: Iterable[Reduction], of: Callable[[Reduction], Any]) -> list:
    """of(reduction) for each accumulator of one point."""
    return [of(reduction) for reduction in reductions for _ in range(width(reduction))]


def add(b: Builder, reduction: Reduction, accs: Sequence[Ssa], args: Sequence[Ssa]) -> list[Ssa]:
    """Accumulators after one more point."""
    if reduction.by is not None:
        return [reduction.by.emit(b, accs[0], args)]
    if not reduction.is_product:
        return combine(b, reduction, accs, args)
    if b.contract and args[0].el in ("f32", "f64"):
        return [b.fma(args[0], args[1], accs[0])]
    return combine(b, reduction, accs, [b.mul(args[0], args[1])])


def combine(b: Builder, reduction: Reduction, x: Sequence[Ssa], y: Sequence[Ssa]) -> list[Ssa]:
    """Two sets of accumulators of one reduction as one."""
    if reduction.is_search:
        return _better(b, reduction, x, y)
    # Extremes of floats are several instructions, which LLVM does not fold away where an operand is infinite.
    if reduction.op in ("max", "min") and list(x) == identity(b, reduction):
        return list(y)
    return [row_of(reduction).combine(b, x[0], y[0], reduction.dtype)]


def _better(b: Builder, reduction: Reduction, x: Sequence[Ssa], y: Sequence[Ssa]) -> list[Ssa]:
    """The larger (smaller) value, NaN above all; among equals the smaller index."""
    (value, index), (other, other_index) = x, y
    left, right, unsigned = value, other, reduction.args[0].dtype.kind == "u"
    if value.el == "i1":
        left, right = (b.int_resize(flag, "i8", unsigned=True) for flag in (value, other))
        unsigned = True
    predicate = "gt" if reduction.op == "argmax" else "lt"
    wins, ties = b.cmp(predicate, right, left, unsigned=unsigned), b.cmp("eq", right, left)
    if value.el in ("f32", "f64"):
        wins = b.or_(wins, b.and_(b.is_nan(other), b.not_(b.is_nan(value))))
        ties = b.or_(ties, b.and_(b.is_nan(other), b.is_nan(value)))
    wins = b.or_(wins, b.and_(ties, b.cmp("lt", other_index, index)))
    return [b.select(wins, other, value), b.select(wins, other_index, index)]


# --- NumPy arrays


def start(reduction: Reduction, dtype: np.dtype | None = None) -> np.ndarray:
    """The number that the accumulator starts with, in the reduction's dtype or another."""
    return np.asarray(row_of(reduction).identity(reduction.dtype)).astype(dtype or reduction.dtype)


def joined(reduction: Reduction, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """An accumulator for two."""
    with np.errstate(all="ignore"):
        return row_of(reduction).ufunc(x, y).astype(reduction.dtype)


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
    if reduction.is_search:
        return _first_best(reduction, args, axes, shape)
    ufunc, dtype = _operation(reduction)
    initial = start(reduction, dtype)[()]
    values = np.broadcast_to(args[0], shape).astype(dtype)
    with np.errstate(all="ignore"):
        return ufunc.reduce(values, axis=axes, initial=initial, keepdims=True).astype(
            reduction.dtype
        )


def accumulated(
    reduction: Reduction, args: Sequence[np.ndarray], axes: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """The accumulator after each point of `shape`; those along `axes` follow one another, the last axis fastest."""
    ufunc, dtype = _operation(reduction)
    values = np.moveaxis(np.broadcast_to(args[0], shape).astype(dtype), axes, range(-len(axes), 0))
    rows = values.reshape(*values.shape[: values.ndim - len(axes)], -1)
    with np.errstate(all="ignore"):
        running = ufunc.accumulate(rows, axis=-1, dtype=dtype).astype(reduction.dtype)
    return np.moveaxis(running.reshape(values.shape), range(-len(axes), 0), axes)


def _operation(reduction: Reduction) -> tuple[np.ufunc, np.dtype]:
    """(NumPy's function, the dtype in which it runs).

    Sums and products of floats are made in float64 and rounded once: closer to the truth than any
    order of additions.
    """
    row = row_of(reduction)
    exact = row.is_rounded and reduction.dtype.kind not in "iu"
    return row.ufunc, np.dtype(np.float64) if exact else reduction.dtype


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
        dims = [k for k, size in enumerate(array.shape) if size > 1]
        seen.update(dims)
        operands += [array.reshape([array.shape[axis] for axis in dims]), dims]
    remaining = [k for k in range(len(shape)) if k in seen and k not in axes]
    repeats = np.prod([shape[axis] for axis in axes if axis not in seen], dtype=dtype)
    with np.errstate(all="ignore"):
        product = (np.einsum(*operands, remaining, optimize=True) * repeats).astype(
            dtype
        )  # by BLAS where it can be
    return product.reshape([shape[k] if k in remaining else 1 for k in range(len(shape))]).astype(
        reduction.dtype
    )


def _first_best(
    reduction: Reduction, args: Sequence[np.ndarray], axes: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """The smallest index of those with the best value; NaN is better than any number."""
    value, index = (np.broadcast_to(arg, shape) for arg in args)
    value = value.astype(np.int8) if value.dtype.kind == "b" else value
    row = REDUCTIONS[reduction.op]
    best = row.ufunc.reduce(value, axis=axes, initial=row.identity(value.dtype), keepdims=True)
    is_best = (value == best) | ((value != value) & (best != best))
    last = np.iinfo(reduction.dtype).max
    return np.minimum.reduce(
        np.where(is_best, index, last), axis=axes, initial=last, keepdims=True
    ).astype(reduction.dtype)
