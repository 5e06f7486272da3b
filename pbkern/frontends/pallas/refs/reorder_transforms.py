"""An index after a reshape, transpose or bitcast of a Ref -> an index before it, that takes as few elements.

`ref.reshape(8, 16).at[3]` of a Ref of 128 elements reads and writes 16 of them: ref.at[48:64],
reshaped. Without the exchange a store would have to read and write back the whole Ref, which takes
as long, and which other programs may write to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_rewrites import bitcasts


@dataclass(frozen=True)
class StridedRun:
    """Elements start, start + stride, ... of a dimension; `point`: one, and the dimension goes."""

    start: object
    size: int
    stride: int = 1
    point: bool = False

    def is_whole(self, extent: int) -> bool:
        return (
            self.size == extent
            and self.stride == 1
            and isinstance(self.start, int)
            and not self.point
        )

    def as_slice(self):
        return _jax.Slice(self.start, self.size, self.stride)


def runs(indexer) -> list[StridedRun] | None:
    """The Runs of an indexer; None if it has array indices."""
    runs = []
    for index in indexer.indices:
        if not _jax.is_slice(index):
            if np.ndim(index):
                return None
            runs.append(
                StridedRun(
                    int(index) if isinstance(index, (int, np.integer)) else index, 1, point=True
                )
            )
        else:
            size = int(index.size)
            runs.append(StridedRun(index.start, size, index.stride if size > 1 else 1))
    return runs


def before(
    transform, shape: Sequence[int], dtype: np.dtype, taken: Sequence[StridedRun]
) -> tuple[list[StridedRun], object] | None:
    """(Runs of t's operand, the transform of what they take), or None if they would have to take more.

    Args:
      transform: a reshape, transpose or bitcast.
      shape: of the value that it is applied to.
      dtype: of that value.
      taken: Runs of its result.
    """
    match transform:
        case _jax.ReshapeTransform(shape=after):
            return _before_reshape(shape, after, taken)
        case _jax.TransposeTransform(permutation=p):
            inverse = [taken[p.index(axis)] for axis in range(len(p))]
            dims = [axis for axis in range(len(p)) if not inverse[axis].point]
            order = tuple(dims.index(dim) for dim in p if not inverse[dim].point)
            return inverse, _jax.TransposeTransform(order)
        case _jax.BitcastTransform(dtype=new):
            return _before_bitcast(transform, bitcasts.width(dtype), bitcasts.width(new), taken)
    return None


def shape_after(transform, shape: Sequence[int], dtype: np.dtype) -> tuple[int, ...]:
    match transform:
        case _jax.ReshapeTransform(shape=after):
            return tuple(after)
        case _jax.TransposeTransform(permutation=p):
            return tuple(shape[dim] for dim in p)
    *lead, rows, columns = (1, *shape, 1) if len(shape) == 1 else shape
    new = (*lead, rows * bitcasts.width(dtype) // bitcasts.width(transform.dtype), columns)
    return (new[-2],) if len(shape) == 1 else new


def _before_bitcast(
    transform, old: int, new: int, taken: Sequence[StridedRun]
) -> tuple[list[StridedRun], object] | None:
    if old == new:
        return list(taken), transform
    if len(taken) < 2 or taken[-1].point or taken[-2].point or taken[-2].stride != 1 or new < old:
        return None
    rows, ratio = taken[-2], new // old
    return [
        *taken[:-2],
        StridedRun(_times(rows.start, ratio), rows.size * ratio),
        taken[-1],
    ], transform


def _before_reshape(
    shape: Sequence[int], after: Sequence[int], taken: Sequence[StridedRun]
) -> tuple[list[StridedRun], object] | None:
    runs: list[StridedRun] = []
    for group, new in _groups(shape, after):
        inner = _within(
            [shape[dim] for dim in group], [after[dim] for dim in new], [taken[dim] for dim in new]
        )
        if inner is None:
            return None
        runs += inner
    return runs, _jax.ReshapeTransform(tuple(run.size for run in taken if not run.point))


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest runs of dimensions of `old` and of `new` that hold the same elements, in order."""
    i = j = 0
    while i < len(old) or j < len(new):
        left, right, left_size, right_size = [], [], 1, 1
        while True:
            if i < len(old) and (left_size <= right_size or j == len(new)):
                left_size, i = left_size * old[i], i + 1
                left.append(i - 1)
            elif j < len(new):
                right_size, j = right_size * new[j], j + 1
                right.append(j - 1)
            if left_size == right_size and ((left and right) or (i == len(old) and j == len(new))):
                break
        yield left, right


def _within(old: list[int], new: list[int], taken: list[StridedRun]) -> list[StridedRun] | None:
    """Runs of a group's dimensions, of sizes `old`, that hold what `taken` takes of the same elements as sizes `new`."""
    if all(run.is_whole(extent) for run, extent in zip(taken, new)):
        return [StridedRun(0, extent) for extent in old]
    if len(old) == len(new) == 1:
        return [StridedRun(taken[0].start, taken[0].size, taken[0].stride)]
    partial = [dim for dim, (run, extent) in enumerate(zip(taken, new)) if not run.is_whole(extent)]
    last = partial[-1]
    if any(run.size != 1 for run in taken[:last]) or taken[last].stride != 1:
        return None  # what they take is not one run of the elements
    rows = [math.prod(new[dim + 1 :]) for dim in range(len(new))]
    count = taken[last].size * rows[last]
    steps = [math.prod(old[dim + 1 :]) for dim in range(len(old))]
    for axis, step in enumerate(steps):
        aligned = all(
            (run.start * row if isinstance(run.start, int) else row) % step == 0
            for run, row in zip(taken, rows)
        )
        if count % step == 0 and aligned and (axis == 0 or count == step):
            # The run starts at this many steps from the group's first element.
            start = _sum([_scaled(run.start, row, step) for run, row in zip(taken, rows)])
            return [
                *_digits(start, old[: axis + 1], count // step),
                *(StridedRun(0, extent) for extent in old[axis + 1 :]),
            ]
    return None


def _digits(start, sizes: list[int], count: int) -> list[StridedRun]:
    """The number `start` written in the places `sizes`; `count` elements from it on, in the last place."""
    digits = [StridedRun(_rem(start, sizes[-1]) if len(sizes) > 1 else start, count)]
    for axis in range(len(sizes) - 2, -1, -1):
        start = _div(start, sizes[axis + 1])
        digits.append(StridedRun(_rem(start, sizes[axis]) if axis else start, 1))
    return digits[::-1]


def _i32(x):
    return jnp.asarray(x, np.int32)


def _times(x, factor: int):
    return x * factor if isinstance(x, int) else x if factor == 1 else _i32(x) * np.int32(factor)


def _scaled(x, k: int, n: int):
    """x * k / n, where n divides it."""
    return x * k // n if isinstance(x, int) else _times(x, k // n)


def _div(x, divisor: int):
    return x // divisor if isinstance(x, int) else lax.div(_i32(x), np.int32(divisor))


def _rem(x, divisor: int):
    return x % divisor if isinstance(x, int) else lax.rem(_i32(x), np.int32(divisor))


def _sum(xs: list):
    constant = sum(x for x in xs if isinstance(x, int))
    values = [_i32(x) for x in xs if not isinstance(x, int)]
    if not values:
        return constant
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total + np.int32(constant) if constant else total
