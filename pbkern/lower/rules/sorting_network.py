"""Short lines are sorted in registers, as many side by side as a vector has lanes: odd-even transposition.

    a, b, c   ->   a, b = exchange(a, b);   b, c = exchange(b, c);   a, b = exchange(a, b)

Neighbours are exchanged only where they are out of order, so that equal keys keep theirs. Source:
Habermann 1972. Keys are compared as in targets/cpu/emit/sorts/radix_sort.py.
"""

from __future__ import annotations

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Expr
from pbkern.lower.values.values import Index, Lazy, Value

BOOL = np.dtype(bool)
INT32 = np.dtype(np.int32)
# Vector operations of comparing two keys. Source: not recorded.
COMPARE_COST = 3.0
# Vector operations of choosing one operand after a comparison. Source: not recorded.
CHOICE_COST = 1.0


def sorted_lines(builder, operands: list[Value], axis: int, keys: int) -> list[list[Value]]:
    """The elements, from first to last, of each operand sorted along `axis` by the first `keys` of them."""
    length = operands[0].shape[axis]
    lines = [[_element(builder, operand, axis, k) for operand in operands] for k in range(length)]
    for turn in range(length):
        for k in range(turn % 2, length - 1, 2):
            lines[k], lines[k + 1] = _exchanged(builder, lines[k], lines[k + 1], keys)
    return [[line[n] for line in lines] for n in range(len(operands))]


def _element(builder, value: Value, axis: int, k: int) -> Value:
    """Position `k` of every line."""
    shape = tuple(1 if dim == axis else size for dim, size in enumerate(value.shape))

    def route(ix: Index) -> list[Index]:
        return [
            tuple(Affine((), k) if dim == axis else position for dim, position in enumerate(ix))
        ]

    return builder.new(
        Lazy(shape, value.dtype, (value,), route, lambda pool, ix, xs: xs[0], is_view=True)
    )


def _exchanged(
    builder, left: list[Value], right: list[Value], keys: int
) -> tuple[list[Value], list[Value]]:
    """(smaller, larger) of two elements; `left` and `right` where neither is."""
    count = len(left)

    def chosen(number: int, first: bool) -> Value:
        def combine(pool, ix: Index, xs: list[Expr]) -> Expr:
            left_keys, right_keys = xs[:keys], xs[keys : 2 * keys]
            swapped = _less(builder, right_keys, left_keys)
            mine, other = xs[2 * keys :] if first else xs[: 2 * keys - 1 : -1]
            return builder.select(swapped, other, mine)

        asked = (*left[:keys], *right[:keys], left[number], right[number])
        cost = COMPARE_COST * keys / 2 + CHOICE_COST
        return builder.new(
            Lazy(
                left[number].shape,
                left[number].dtype,
                asked,
                lambda ix: [ix] * len(asked),
                combine,
                cost=cost,
            )
        )

    return [chosen(n, True) for n in range(count)], [chosen(n, False) for n in range(count)]


def _less(builder, xs: list[Expr], ys: list[Expr]) -> Expr:
    """Whether keys xs come before ys: the first that differ decide."""
    less = None
    for x, y in reversed(list(zip(xs, ys))):
        before, equal = _compared(builder, x, y)
        less = (
            before
            if less is None
            else builder.op("or", BOOL, before, builder.op("and", BOOL, equal, less))
        )
    assert less is not None
    return less


def _compared(builder, x: Expr, y: Expr) -> tuple[Expr, Expr]:
    """(x < y, x == y) with NaN above every number and equal to itself."""
    if x.dtype == BOOL:
        x, y = (
            builder.op("convert_element_type", INT32, operand, params={"new_dtype": INT32})
            for operand in (x, y)
        )
    less, equal = builder.op("lt", BOOL, x, y), builder.op("eq", BOOL, x, y)
    if not np.issubdtype(x.dtype, np.integer):
        number = builder.op("eq", BOOL, x, x)
        less = builder.op(
            "and", BOOL, builder.op("not", BOOL, builder.op("le", BOOL, y, x)), number
        )
        both = builder.op("and", BOOL, builder.op("ne", BOOL, x, x), builder.op("ne", BOOL, y, y))
        equal = builder.op("or", BOOL, equal, both)
    return less, equal
