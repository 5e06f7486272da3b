"""Sums of padded values that do not overlap -> the values side by side.

    pad(a, behind=3) + pad(b, front=5)       -> concatenate(a + 0, b + 0)          of a[5], b[3]
    pad(a, between=1) + pad(b, front=1, ...) -> reshape(stack(a + 0, b + 0))       elements of both in turn

Derivatives of functions that read an array's columns, its halves or every second element are such sums: each element would be
a sum of as many guarded reads as there are parts. a + 0 keeps the zero that a sum makes of -0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace

SUMS = ("add", "add_any")


@dataclass(frozen=True)
class Part:
    """A value among zeros along one axis: its element k is element start + k * step of the whole."""

    value: Any
    start: int
    size: int
    step: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class JoinParts:
    """Rewrites sums of padded values along one axis."""

    most_parts: int = threshold(
        32, "parts of a sum that are joined, each a case of the kernel's text. Source: not measured"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        names = primitive_names(closed)
        if "pad" not in names or names.isdisjoint(SUMS):
            return closed
        sums = _Sums(self.most_parts)
        return retrace(closed, {"pad": sums.note} | dict.fromkeys(SUMS, sums.join))


class _Sums:
    """Remembers, by value, (axis, its parts in their order) of padded values and of their sums."""

    def __init__(self, most_parts: int) -> None:
        self.notes, self.most_parts = Notes(), most_parts

    def note(self, eqn, operands):
        x, padding = operands
        config = eqn.params["padding_config"]
        axes = [axis for axis, of_axis in enumerate(config) if of_axis != (0, 0, 0)]
        is_zero = isinstance(padding, np.ndarray | np.generic) and bool(padding == 0)
        if len(axes) != 1 or not is_zero or 0 in x.shape:
            return None
        (axis,) = axes
        low, high, between = config[axis]
        if low < 0 or high < 0:
            return None
        return self.notes.bound(
            "parts", eqn, operands, axis, [Part(x, low, x.shape[axis], between + 1)]
        )

    def join(self, eqn, operands):
        found = [self.notes.find("parts", operand) for operand in operands]
        if None in found:
            return None
        (axis, parts), (other_axis, more) = found
        joined = sorted([*parts, *more], key=lambda part: part.start)
        if axis != other_axis or len(joined) > self.most_parts:
            return None
        shape = eqn.outvars[0].aval.shape
        if {part.step for part in joined} == {1}:
            if any(part.end > later.start for part, later in zip(joined, joined[1:])):
                return None
            value = _in_a_row(joined, axis, shape)
        else:
            value = _in_turn(joined, axis, shape)
        return None if value is None else self.notes.note("parts", value, axis, joined)


def _in_a_row(parts: Sequence[Part], axis: int, shape: Sequence[int]) -> Any:
    """Parts without gaps inside them, and zeros between and around them."""
    pieces, end = [], 0
    for part in parts:
        if part.start > end:
            pieces.append(_zeros(part, axis, part.start - end))
        pieces.append(_with_zero(part))
        end = part.end
    if shape[axis] > end:
        pieces.append(_zeros(parts[-1], axis, shape[axis] - end))
    return lax.concatenate(pieces, axis)


def _in_turn(parts: Sequence[Part], axis: int, shape: Sequence[int]) -> Any:
    """Parts of every s-th element each, and zeros for those that no part has; None where two parts meet.

    They are the columns of an array with s columns.
    """
    steps = {part.step for part in parts}
    columns = {part.start % part.step: part for part in parts}
    if len(steps) != 1 or len(columns) != len(parts):
        return None
    (step,) = steps
    rows = -(-shape[axis] // step)
    pieces = []
    for number in range(step):
        part = columns.get(number)
        if part is None:
            piece = _zeros(parts[0], axis, rows)
        else:
            before, config = part.start // step, [(0, 0, 0)] * len(shape)
            config[axis] = (before, rows - before - part.size, 0)
            piece = _with_zero(part)
            piece = lax.pad(piece, np.zeros((), piece.dtype), config)
        pieces.append(lax.expand_dims(piece, [axis + 1]))
    whole = [*shape[:axis], rows * step, *shape[axis + 1 :]]
    value = lax.reshape(lax.concatenate(pieces, axis + 1), whole)
    return lax.slice_in_dim(value, 0, shape[axis], axis=axis)


def _with_zero(part: Part) -> Any:
    """The part as a sum leaves it: -0 is 0."""
    return lax.add(part.value, np.zeros((), part.value.dtype))


def _zeros(like: Part, axis: int, size: int) -> Any:
    """Zeros of a part's shape but for an axis."""
    shape = list(like.value.shape)
    shape[axis] = size
    return lax.full(shape, 0, like.value.dtype)
