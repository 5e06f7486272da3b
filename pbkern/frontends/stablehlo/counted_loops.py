"""Number of rounds of a `while` whose counter, start, end and step are known; None where that is not known before it runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .constants import constant
from .operation import HloOperation, made_by, tensor_type

COMPARING = ("stablehlo.compare", "stablehlo.constant", "stablehlo.and")
# Most steps of a loop whose steps are counted: the greatest int32.
MOST_COUNTED_STEPS = 2**31 - 1
HOLDS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
}


def trip_count(op: Any, given: Sequence[Any]) -> int | None:
    """Counts a loop `while (i < n) { ..; i = i + s }` of constants n and s.

    A start among `given` is a constant as well. The operands of the comparison and of the sum are
    in any order. If several such comparisons must all hold, the one that ends first counts.
    """
    test, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
    *operations, last = [operation.operation for operation in test.operations]
    if any(operation.name not in COMPARING for operation in operations):
        return None
    counts = [
        _count(condition, test, body, given)
        for condition in _conjunction(made_by(last.operands[0])) or []
    ]
    known = [count for count in counts if count is not None]
    return min(known) if known and len(known) == len(counts) else None


def _conjunction(maker: Any) -> list[Any] | None:
    """The comparisons that a truth value is true for together; None for any other."""
    if maker is None or maker.name not in ("stablehlo.and", "stablehlo.compare"):
        return None
    if maker.name == "stablehlo.compare":
        return [maker]
    parts = [_conjunction(made_by(operand)) for operand in maker.operands]
    return None if None in parts else [condition for part in parts for condition in part or ()]


def _count(compare: Any, test: Any, body: Any, given: Sequence[Any]) -> int | None:
    """Counts how often a comparison holds before it is false for the first time."""
    comparison = _comparison(compare, test)
    if comparison is None:
        return None
    counter, direction, end = comparison
    limit = _known(end, test, given)
    start = given[counter]
    step = _step(body, counter)
    if (
        limit is None
        or step is None
        or not isinstance(start, np.ndarray | np.integer)
        or np.ndim(start)
    ):
        return None
    count = _steps(int(start), int(limit), step, direction)
    dtype = tensor_type(test.arguments[counter])[1]
    if (
        count is None
        or count > MOST_COUNTED_STEPS
        or not np.iinfo(dtype).min <= int(start) + count * step <= np.iinfo(dtype).max
    ):
        return None
    return count


def _steps(start: int, end: int, step: int, direction: str) -> int | None:
    if not HOLDS[direction](start, end):
        return 0
    if direction == "NE":
        away = end - start
        return away // step if step and away % step == 0 and away // step > 0 else None
    if direction in ("GT", "GE"):
        start, end, step = -start, -end, -step
    if step <= 0:
        return None
    return -(-(end + (direction in ("LE", "GE")) - start) // step)


MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def _comparison(comparison: Any, test: Any) -> tuple[int, str, Any] | None:
    """(number of the counter among the carries, direction, bound) of a comparison of integers."""
    direction = HloOperation(comparison).choice("comparison_direction")
    x, y = comparison.operands
    arguments = list(test.arguments)
    if direction not in MIRRORED or tensor_type(x)[1].kind not in "iu":
        return None
    if x in arguments and y not in arguments:
        return arguments.index(x), direction, y
    if y in arguments and x not in arguments:
        return arguments.index(y), MIRRORED[direction], x
    if (
        x in arguments and y in arguments
    ):  # the end is a carry that never changes, or the counter is
        return arguments.index(x), direction, y
    return None


def _known(value: Any, test: Any, given: Sequence[Any]) -> int | None:
    """A constant of the region or of the program, or a carry that starts as one and never changes."""
    arguments = list(test.arguments)
    if value in arguments:
        index = arguments.index(value)
        body = test.owner.regions[1].blocks[0]
        last = [operation.operation for operation in body.operations][-1]
        is_unchanged = last.operands[index] == body.arguments[index]
        return (
            int(given[index])
            if is_unchanged and isinstance(given[index], np.ndarray | np.integer)
            else None
        )
    maker = made_by(value)
    if maker is None or maker.name != "stablehlo.constant":
        return None
    return int(constant(maker, tensor_type(maker.results[0])[1]))


def _step(body: Any, counter: int) -> int | None:
    """The number that a loop adds to its counter."""
    last = [operation.operation for operation in body.operations][-1]
    maker = made_by(last.operands[counter])
    if maker is None or maker.name not in ("stablehlo.add", "stablehlo.subtract"):
        return None
    x, y = maker.operands
    if maker.name == "stablehlo.add" and y == body.arguments[counter]:
        x, y = y, x
    amount = made_by(y)
    if x != body.arguments[counter] or amount is None or amount.name != "stablehlo.constant":
        return None
    step = int(constant(amount, tensor_type(amount.results[0])[1]))
    return step if maker.name == "stablehlo.add" else -step
