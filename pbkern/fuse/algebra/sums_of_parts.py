"""Sums of values that are zero where the others are not -> the values side by side, or one choice.

    pad(a, behind=3) + pad(b, front=5)       -> concatenate(a + 0, b + 0)          of a[5], b[3]
    pad(a, between=1) + pad(b, front=1, ...) -> reshape(stack(a + 0, b + 0))       elements of both in turn
    (x + pad(a, ...)) + pad(b, ...)          -> x + the same
    select(c, a, 0) + select(c, 0, b)        -> select(c, a, b) + 0

Derivatives of functions that read an array's columns, its halves or every second element are such sums: each element would be
a sum of as many guarded reads as there are parts. Those of remainders choose twice between the same value and zero.
a + 0 keeps the zero that a sum makes of -0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.calls import has_calls
from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import neighbours
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace

SUMS = ("add", "add_any")


@dataclass(frozen=True)
class PaddedPart:
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
    """Rewrites sums of values padded along one axis, and of choices by the same condition."""

    most_parts: int = threshold(
        32, "parts of a sum that are joined, each a case of the kernel's text. Source: not measured"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        parts = itertools.product(SUMS, ("pad", "select_n"))
        if neighbours(closed).isdisjoint(parts) and not has_calls(closed):
            return closed
        sums = _SumsOfParts(self.most_parts)
        rules = {
            "pad": sums.note_part,
            "broadcast_in_dim": sums.note_zeros,
            "select_n": sums.note_cases,
        }
        return retrace(closed, rules | dict.fromkeys(SUMS, sums.join))


class _SumsOfParts:
    """Remembers, by value, what is zero where.

    Of padded values and their sums: axis, parts in their order. Of choices: what chooses, and the cases, None for zeros. Of
    sums of another value with padded ones: that value, and the sum of these.
    """

    def __init__(self, most_parts: int) -> None:
        self.notes, self.most_parts = Notes(), most_parts

    def note_part(self, eqn, operands):
        x, padding = operands
        config = eqn.params["padding_config"]
        axes = [axis for axis, of_axis in enumerate(config) if of_axis != (0, 0, 0)]
        if len(axes) != 1 or not _is_zero(padding) or 0 in x.shape:
            return None
        (axis,) = axes
        low, high, between = config[axis]
        if low < 0 or high < 0:
            return None
        return self.notes.bound(
            "parts", eqn, operands, axis, [PaddedPart(x, low, x.shape[axis], between + 1)]
        )

    def note_zeros(self, eqn, operands):
        return self.notes.bound("zeros", eqn, operands) if _is_zero(operands[0]) else None

    def note_cases(self, eqn, operands):
        which, *values = operands
        cases = [None if self.notes.find("zeros", value) is not None else value for value in values]
        if all(case is not None for case in cases):
            return None
        return self.notes.bound("cases", eqn, operands, which, cases)

    def join(self, eqn, operands):
        shapes = {operand.shape for operand in operands}
        if len(shapes) > 1:  # lax repeats dimensions of size 1: the parts are not of one array
            return None
        return (
            self._joined_parts(eqn, operands)
            or self._joined_cases(operands)
            or self._joined_beside(eqn, operands)
        )

    def _joined_beside(self, eqn, operands):
        """(x + parts) + parts -> x + parts, and a note of the first sum."""
        for whole, padded in (operands, operands[::-1]):
            if self.notes.find("parts", padded) is None:
                continue
            sum_before = self.notes.find("sum with parts", whole)
            if sum_before is None:
                return self.notes.bound("sum with parts", eqn, operands, whole, padded)
            x, padded_before = sum_before
            joined = self._joined_parts(eqn, (padded_before, padded))
            if joined is not None:
                return self.notes.note("sum with parts", lax.add(x, *joined), x, *joined)
        return None

    def _joined_parts(self, eqn, operands):
        facts = [self.notes.find("parts", operand) for operand in operands]
        if None in facts:
            return None
        (axis, parts), (other_axis, more) = facts
        joined = sorted([*parts, *more], key=lambda part: part.start)
        if axis != other_axis or len(joined) > self.most_parts:
            return None
        shape = eqn.outvars[0].aval.shape
        is_row = all(part.step == 1 for part in joined)
        value = (_in_a_row if is_row else _in_turn)(joined, axis, shape)
        return None if value is None else self.notes.note("parts", value, axis, joined)

    def _joined_cases(self, operands):
        facts = [self.notes.find("cases", operand) for operand in operands]
        if None in facts:
            return None
        (which, cases), (other, more) = facts
        meet = any(first is not None and second is not None for first, second in zip(cases, more))
        if which is not other or meet:
            return None
        zeros = lax.full_like(operands[0], 0)
        cases = [second if first is None else first for first, second in zip(cases, more)]
        first = cases[0]
        if first is not None and all(case is first for case in cases):
            return [_plus_zero(first)]
        values = [zeros if case is None else _plus_zero(case) for case in cases]
        return self.notes.note("cases", lax.select_n(which, *values), which, cases)


def _in_a_row(parts: Sequence[PaddedPart], axis: int, shape: Sequence[int]) -> Any:
    """Parts without gaps inside them, and zeros between and around them; None where two parts meet."""
    if any(part.end > later.start for part, later in itertools.pairwise(parts)):
        return None
    pieces, end = [], 0
    for part in parts:
        if part.start > end:
            pieces.append(_zeros(part, axis, part.start - end))
        pieces.append(_plus_zero(part.value))
        end = part.end
    if shape[axis] > end:
        pieces.append(_zeros(parts[-1], axis, shape[axis] - end))
    return lax.concatenate(pieces, axis)


def _in_turn(parts: Sequence[PaddedPart], axis: int, shape: Sequence[int]) -> Any:
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
            piece = _plus_zero(part.value)
            piece = lax.pad(piece, np.zeros((), piece.dtype), config)
        pieces.append(lax.expand_dims(piece, [axis + 1]))
    whole = [*shape[:axis], rows * step, *shape[axis + 1 :]]
    value = lax.reshape(lax.concatenate(pieces, axis + 1), whole)
    return lax.slice_in_dim(value, 0, shape[axis], axis=axis)


def _is_zero(x) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.ndim == 0 and bool(x == 0)


def _plus_zero(x) -> Any:
    """A value as a sum leaves it: -0 is 0."""
    return lax.add(x, np.zeros((), x.dtype))


def _zeros(like: PaddedPart, axis: int, size: int) -> Any:
    """Zeros of a part's shape but for an axis."""
    shape = list(like.value.shape)
    shape[axis] = size
    return lax.full(shape, 0, like.value.dtype)
