"""Meaning of small regions: which operation combines two elements, which order a comparator means.

An order is found by trying: a region that only compares, selects and combines truth values can tell
apart no more than the few kinds of numbers that are tried, so that a region that agrees on all of
them agrees everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pbkern.core.lazy_dataclass import dataclass

from .constants import constant
from .operation import HloOperation, made_by, tensor_type

EXTREMES = {"stablehlo.maximum": np.maximum, "stablehlo.minimum": np.minimum}
LOGIC = {
    "stablehlo.and": np.logical_and,
    "stablehlo.or": np.logical_or,
    "stablehlo.xor": np.logical_xor,
}
COMPARISONS = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
MOST_SAMPLES = {
    1: None,
    2: 8,
    3: 6,
}  # per key, by number of keys: all combinations of pairs are tried
COMMUTATIVE = ("add", "multiply", "minimum", "maximum", "and", "or", "xor")


def combiner(block: Any) -> str | None:
    """The one operation of a region of two arguments, such as "add"; "first" or "second" for the argument that it returns."""
    names = combiners(block)
    return names[0] if len(names) == 1 else None


def combiners(block: Any) -> list[str | None]:
    """Names the combinations of a region of arguments x0, .., xn, y0, .., yn that returns one of each pair."""
    *operations, last = [operation.operation for operation in block.operations]
    arguments = list(block.arguments)
    num_values = len(arguments) // 2
    makers = {
        operation.results[0]: operation for operation in operations if len(operation.results) == 1
    }
    return [
        _combiner(makers, value, arguments[k], arguments[num_values + k])
        for k, value in enumerate(last.operands)
    ]


def _combiner(makers: dict, value: Any, x: Any, y: Any) -> str | None:
    if value in (x, y):
        return "first" if value == x else "second"
    op = makers.get(value)
    if op is None or not op.name.startswith("stablehlo.") or len(op.operands) != 2:
        return None
    name, given = op.name.removeprefix("stablehlo."), list(op.operands)
    if given == [x, y] or (name in COMMUTATIVE and given == [y, x]):
        return name if name in (*COMMUTATIVE, "subtract") else None
    return None


# --- orders
# ---------------------------------------------------------------------------------------------------------


def _is_logic(block: Any) -> bool:
    """Whether a region only compares and selects numbers, and combines truth values."""
    known = {
        *LOGIC,
        *EXTREMES,
        "stablehlo.compare",
        "stablehlo.select",
        "stablehlo.constant",
        "stablehlo.not",
        "stablehlo.return",
    }
    if any(outer is None or outer.name != "stablehlo.constant" for outer in _outer(block)):
        return False
    for view in block.operations:
        op = view.operation
        logic = op.name in LOGIC or op.name == "stablehlo.not"
        if op.name not in known or (logic and tensor_type(op.results[0])[1].kind != "b"):
            return False
    return True


def _outer(block: Any) -> list[Any]:
    """Operations outside of a region whose results it reads; None for an argument of a block outside."""
    inner = [
        *block.arguments,
        *(result for operation in block.operations for result in operation.operation.results),
    ]
    return [
        made_by(operand)
        for operation in block.operations
        for operand in operation.operation.operands
        if operand not in inner
    ]


def _constants(block: Any) -> list[np.ndarray]:
    constants = [
        operation.operation
        for operation in block.operations
        if operation.operation.name == "stablehlo.constant"
    ]
    return [
        constant(const_op, tensor_type(const_op.results[0])[1])
        for const_op in (*constants, *_outer(block))
    ]


def _samples(dtype: np.dtype, constants: Sequence[np.ndarray]) -> np.ndarray:
    """A number of each kind that comparisons can tell apart, and neighbours of the constants."""
    given = [number for number in constants if number.dtype == dtype]
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        values = [
            limits.min,
            limits.max,
            0,
            1,
            2,
            *(int(number) + shift for number in given for shift in (-1, 0, 1)),
        ]
        return np.array(
            sorted({value for value in values if limits.min <= value <= limits.max}), dtype
        )
    # The first six have all kinds of relations.
    samples = [np.array([np.nan, -0.0, 0.0, 1.0, -2.5, np.inf, -np.nan, -np.inf, 2.5, -1.0], dtype)]
    for const in given:
        with np.errstate(all="ignore"):
            samples.append(
                np.array(
                    [
                        const,
                        np.nextafter(const, dtype.type(np.inf)),
                        np.nextafter(const, dtype.type(-np.inf)),
                    ],
                    dtype,
                ).ravel()
            )
    every = np.concatenate(samples)
    first = np.unique(every.view(f"int{dtype.itemsize * 8}"), return_index=True)[1]
    return every[np.sort(first)]


def total_order(x: np.ndarray) -> np.ndarray:
    """Integers in the order -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    bits = x.view(f"int{x.dtype.itemsize * 8}")
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _run(block: Any, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A region that is logic, on many elements at once."""
    values = dict(zip(block.arguments, arguments))
    values |= {
        const_op.results[0]: constant(const_op, tensor_type(const_op.results[0])[1])
        for const_op in _outer(block)
    }
    for view in block.operations:
        op = view.operation
        given = [values[operand] for operand in op.operands]
        if op.name == "stablehlo.return":
            return [np.broadcast_to(value, arguments[0].shape) for value in given]
        values[op.results[0]] = _result(op, given)
    raise AssertionError("a region ends with a return")


def _result(op: Any, given: list[np.ndarray]) -> np.ndarray:
    if op.name == "stablehlo.constant":
        return constant(op, tensor_type(op.results[0])[1])
    if op.name == "stablehlo.compare":
        wrapped = HloOperation(op)
        if wrapped.choice("compare_type") == "TOTALORDER" and given[0].dtype.kind not in "iub":
            given = [total_order(np.asarray(value)) for value in given]
        return COMPARISONS[wrapped.choice("comparison_direction") or ""](*given)
    if op.name == "stablehlo.select":
        return np.where(given[0], given[1], given[2]).astype(given[1].dtype)
    return (
        np.logical_not(given[0])
        if op.name == "stablehlo.not"
        else (LOGIC | EXTREMES)[op.name](*given)
    )


@dataclass(frozen=True)
class Key:
    """Part of one array in an order, descending or not.

    The order is the total order of the elements' bits, or the order by value with all NaN after
    everything else and zeros alike, as lax.sort has it.
    """

    descending: bool
    total: bool

    def of(self, x: np.ndarray) -> np.ndarray:
        """Integers in this order."""
        if x.dtype.kind in "iub":
            ranks = np.unique(x, return_inverse=True)[1].reshape(x.shape)
            return -ranks if self.descending else ranks
        if self.total:
            return -total_order(x) if self.descending else total_order(x)
        value = -x if self.descending else x
        value = np.where(
            value == 0, np.zeros((), x.dtype), np.where(x != x, np.array(np.nan, x.dtype), value)
        )
        return total_order(value.astype(x.dtype))


def sort_order(block: Any) -> tuple[Key, ...] | None:
    """Keys, the most important first, of a comparator whose arguments are x0, y0, x1, y1, ..; None if it is no such order."""
    if not _is_logic(block):
        return None
    arguments = list(block.arguments)
    dtypes = [tensor_type(argument)[1] for argument in arguments[::2]]
    if any(dtype.kind not in "fiub" and dtype != ml_dtypes.bfloat16 for dtype in dtypes):
        return None
    constants = _constants(block)
    used = [k for k, argument in enumerate(arguments) if list(argument.uses)]
    count = max(used, default=-1) // 2 + 1
    if count not in MOST_SAMPLES:
        return None
    pairs = _pairs([_samples(dtype, constants)[: MOST_SAMPLES[count]] for dtype in dtypes[:count]])
    other_operands = [np.zeros(pairs[0].shape, dtype) for dtype in dtypes[count:] for _ in (0, 1)]
    (result,) = _run(block, [*pairs, *other_operands])
    return next((keys for keys in _candidates(count, dtypes) if _agrees(keys, pairs, result)), None)


def _candidates(count: int, dtypes: Sequence[np.dtype]) -> Iterator[tuple[Key, ...]]:
    kinds = [
        [
            Key(dim, is_total)
            for is_total in ((False, True) if dtype.kind not in "iub" else (False,))
            for dim in (False, True)
        ]
        for dtype in dtypes
    ]
    return itertools.product(*kinds[:count])


def _pairs(samples: Sequence[np.ndarray]) -> list[np.ndarray]:
    """x0, y0, x1, y1, ..: all combinations."""
    axes = [sample for sample in samples for _ in (0, 1)]
    grids = np.meshgrid(*[np.arange(len(axis)) for axis in axes], indexing="ij")
    return [axis[grid.ravel()] for axis, grid in zip(axes, grids)]


def _agrees(keys: Sequence[Key], pairs: list[np.ndarray], result: np.ndarray) -> bool:
    """Whether a comparator's answers are "x before y" by these keys.

    One that takes no care of NaN leaves its place open.
    """
    before, equal = np.zeros(result.shape, bool), np.ones(result.shape, bool)
    known = np.ones(result.shape, bool)
    for key, pair, y in zip(keys, pairs[::2], pairs[1::2]):
        left, right = key.of(np.stack([pair, y]))
        known &= ~equal | key.total | ((pair == pair) & (y == y))
        before |= equal & (left < right)
        equal &= left == right
    if (result == before).all():
        return True
    return bool((result == before)[known].all() and not result[~known].any())


# --- the place of an extreme
# ----------------------------------------------------------------------------------------


def extreme(block: Any) -> str | None:
    """Recognises a region (x, i, y, j) -> (an extreme, its least place): "argmax" or "argmin" of lax, NaN beyond all others.

    None if it is neither. Regions that take one of two elements by their order if one is NaN leave
    that open.
    """
    arguments = list(block.arguments)
    if len(arguments) != 4 or not _is_logic(block):
        return None
    dtype, places = tensor_type(arguments[0])[1], tensor_type(arguments[1])[1]
    if places.kind not in "iu":
        return None
    sample, few = _samples(dtype, _constants(block)), np.arange(3, dtype=places)
    x, y, i, j = _grid(sample, sample, few, few)
    x, y, i, j = (array[i != j] for array in (x, y, i, j))  # places of different elements differ
    value, place = _run(block, [x, i, y, j])
    missing = (x != x) | (y != y)
    if not _nan_wins(x, y, value):
        return None
    for name, better in (("argmax", np.greater), ("argmin", np.less)):
        first = better(x, y) | ((x == y) & (i < j))
        good = (value == np.where(better(x, y), x, y)) & (place == np.where(first, i, j))
        if good[~missing].all():
            return name
    return None


def _nan_wins(x: np.ndarray, y: np.ndarray, value: np.ndarray) -> bool:
    """Whether a region takes NaN rather than a number, or now this and now that, by their order."""
    left, right = (x != x) & (y == y), (x == x) & (y != y)
    taken = value != value
    return not left.any() or bool(taken[left].all() or taken[right].all())


def _grid(*axes: np.ndarray) -> list[np.ndarray]:
    grids = np.meshgrid(*[np.arange(len(axis)) for axis in axes], indexing="ij")
    return [axis[grid.ravel()] for axis, grid in zip(axes, grids)]
