"""Concatenations that are read where their operands are: a nest is cut where the operand that it reads changes.

    %t = concatenate(%a, %b); %out[d<7, e<9] = 2 * %t[d, e]    ->    %out[d<3, e<9] = 2 * %a[d, e]
                                                                     %out[d<4 + 3, e<9] = 2 * %b[d, e]

No memory is needed for such a concatenation. `materialise.py` decides which are read so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from .values import Index, Joined, Lazy, Value

# Part of a space: (start, end) of each dimension.
Box = tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """An operand of a concatenation, asked for at `place` from `start` to `end` of a dimension."""

    operand: Value
    place: Index
    start: int
    end: int


def cut_dim(value: Joined, ix: Index) -> str | None:
    """The dimension that walks along a concatenation's axis, if one alone does."""
    at = ix[value.axis]
    return at.terms[0][0] if len(at.terms) == 1 else None


def parts_along(value: Joined, ix: Index, start: int, end: int) -> Iterator[Part]:
    """The operands that are read between two positions of the dimension along the axis."""
    axis, at = value.axis, ix[value.axis]
    ((_, step),) = at.terms
    first = 0
    for operand in value.operands:
        last = first + operand.shape[axis] - 1
        # Positions p with first <= step * p + at.const <= last.
        ends = (first - at.const, last - at.const)
        low, high = (
            (-(-ends[0] // step), ends[1] // step)
            if step > 0
            else (-(-ends[1] // step), ends[0] // step)
        )
        low, high = max(low, start), min(high + 1, end)
        if low < high:
            yield Part(operand, (*ix[:axis], at - first, *ix[axis + 1 :]), low, high)
        first = last + 1


def segments(
    wanted: Iterable[tuple[Value, Index]],
    dims: Mapping[str, int],
    cut: set[int],
    resolve: Callable[[Value], Value],
) -> list[Box]:
    """Parts of a space in which each concatenation of those in `cut`, a set of ids, is one of its operands."""
    order = {name: k for k, name in enumerate(dims)}
    whole: Box = tuple((0, size) for size in dims.values())
    edges = [set(ends) for ends in whole]
    seen: set[tuple[int, Index, Box]] = set()
    left: list[tuple[Value, Index, Box]] = [(value, ix, whole) for value, ix in wanted]
    while left:
        value, ix, box = left.pop()
        value = resolve(value)
        if (id(value), ix, box) in seen:
            continue
        seen.add((id(value), ix, box))
        if isinstance(value, Lazy):
            routes = value.route(ix)
            left += [(operand, tuple(i), box) for operand, i in zip(value.operands, routes)]
        elif isinstance(value, Joined) and (part := value.part(ix, {})) is not None:
            left.append((*part, box))
        elif isinstance(value, Joined) and id(value) in cut and (name := cut_dim(value, ix)):
            k = order[name]
            for operand, place, start, end in parts_along(value, ix, *box[k]):
                edges[k] |= {start, end}
                left.append((operand, place, (*box[:k], (start, end), *box[k + 1 :])))
    return list(itertools.product(*(itertools.pairwise(sorted(along)) for along in edges)))
