"""Accesses to a Ref as functions of its contents: contents -> elements, contents and elements -> contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.primitives import atomics
from pbkern.dsl.primitives.ref_access import (
    GatheredIndex,
    Index,
    Range,
    RefAccess,
    add_index,
    compose,
    is_whole,
    mul_index,
    stays,
    value_axes,
)

# How arrays of indices address contents: those outside are moved inside.
INSIDE: dict[str, Any] = {"mode": "clip", "wrap_negative_indices": False}


def access_of(eqn, shape: tuple[int, ...], operands: Sequence) -> RefAccess:
    """The access of an equation on these operands, while a body with a Ref of this shape is traced again."""
    number, name = _jax.REF_OPERANDS[eqn.primitive.name], eqn.primitive.name
    indexers = _jax.unflatten_indexers(eqn.params["tree"], list(operands[number:]))
    indices = compose(shape, indexers, add_index, mul_index)
    value, mask, other = None, None, None
    if name == "masked_load":
        mask, other = operands[1:3]
    elif name == "masked_store":
        value, mask = operands[1:3]
    elif name != "get":
        value = operands[1]
    kind = "load" if value is None else "add" if name == "addupdate" else "store"
    return RefAccess(kind, operands[0], indices, value, mask, other)


@dataclass(frozen=True)
class Walk:
    """Positions along one dimension: a start, and steps along axes of the value.

    Attributes:
      start: the smallest position.
      steps: (axis of the value, number of positions, distance) of each, by falling distance. Steps of
        one are shorter together than a step of the one before. Negative distances: the axis runs backwards.
      is_inside: whether all positions are known to be inside.
    """

    start: int | jax.Array
    steps: tuple[tuple[int, int, int], ...]
    is_inside: bool

    @property
    def extent(self) -> int:
        """Positions from the first to the last one."""
        return extent_of(self.steps)


def extent_of(steps: Sequence[tuple[int, int, int]]) -> int:
    return max(sum((size - 1) * abs(distance) for _, size, distance in steps) + 1, 0)


def walks_of(indices: Sequence[Index], shape: Sequence[int]) -> list[Walk] | None:
    """Walks of points and slices; None if there are arrays of indices."""
    walks: list[Walk] = []
    for index, axes, size in zip(indices, value_axes(indices), shape):
        if isinstance(index, GatheredIndex):
            return None
        steps = ((axes[0], index.size, index.stride),) if isinstance(index, Range) else ()
        start = index.start if isinstance(index, Range) else index.at
        walks.append(Walk(start, steps, stays(index, size)))
    return walks


def read(contents: jax.Array, access: RefAccess, walks: Sequence[Walk] | None = None) -> jax.Array:
    """The elements that a load reads, or that a store overwrites.

    `walks`: how the indices walk along each dimension of the contents, where that is known of arrays too.
    """
    indices, mask = access.indices, access.mask
    walks = walks_of(indices, contents.shape) if walks is None else walks
    if all(map(is_whole, indices, contents.shape)):
        elements = contents
    elif walks is None:
        elements = contents.at[_positions(indices)].get(**INSIDE)
    else:
        elements = ContentsWindow(contents, walks, mask is not None).elements(_shape(access, walks))
    if mask is None:
        return elements
    other = jnp.zeros_like(elements) if access.other is None else access.other
    return lax.select(mask, elements, other)


def written(
    contents: jax.Array, access: RefAccess, walks: Sequence[Walk] | None = None
) -> jax.Array:
    """The contents after a store, or an addition. Indices of a store that are arrays have `walks`, as in `read`."""
    value, indices, mask = jnp.asarray(access.value), access.indices, access.mask
    if mask is None and all(map(is_whole, indices, contents.shape)):
        return contents + value if access.kind == "add" else value
    walks = walks_of(indices, contents.shape) if walks is None else walks
    if walks is None:
        return contents.at[_positions(indices)].add(value, **INSIDE)
    window = ContentsWindow(contents, walks, mask is not None)
    before = window.elements(value.shape)
    value = before + value if access.kind == "add" else value
    return window.replaced(value if mask is None else lax.select(mask, value, before))


def _shape(access: RefAccess, walks: Sequence[Walk]) -> tuple[int, ...]:
    """The shape of the elements that an access reads or stores."""
    given = access.value if access.mask is None else access.mask
    if given is not None:
        return np.shape(given)
    sizes = {axis: size for walk in walks for axis, size, _ in walk.steps}
    for index, axes in zip(access.indices, value_axes(access.indices)):
        if isinstance(index, GatheredIndex):
            sizes |= dict(zip(axes, np.shape(index.at)))
    return tuple(sizes[axis] for axis in sorted(sizes))


def _positions(indices: Sequence[Index]) -> tuple:
    """Positions at arrays of indices, per dimension."""
    sizes: dict[int, int] = {}
    for index, places in zip(indices, value_axes(indices)):
        if isinstance(index, Range):
            sizes[places[0]] = index.size
        elif isinstance(index, GatheredIndex):
            sizes |= dict(zip(places, np.shape(index.at)))
    return tuple(atomics.positions(tuple(indices), tuple(sizes[axis] for axis in sorted(sizes))))


class ContentsWindow:
    """The part of a Ref's contents between the first and the last positions of walks.

    Attributes:
      contents: with more elements at the end of dimensions that are shorter than the walk.
      starts: where the window begins, inside the contents.
      shifts: how much later the walk begins, where masks allow positions outside.
    """

    def __init__(self, contents: jax.Array, walks: Sequence[Walk], masked: bool) -> None:
        self.walks, self.shape = walks, contents.shape
        self.extents = [walk.extent for walk in walks]
        missing = [
            (0, max(extent - size, 0), 0) for extent, size in zip(self.extents, contents.shape)
        ]
        self.contents = _padded(contents, missing)
        places = [self._place(walk, size, masked) for walk, size in zip(walks, self.contents.shape)]
        self.starts = [start for start, _ in places]
        self.shifts = [shift for _, shift in places]
        # The axes of the value, in the order of the walks.
        self.axes = [axis for walk in walks for axis, _, _ in walk.steps]
        self.sizes = {axis: size for walk in walks for axis, size, _ in walk.steps}
        self.backwards = [
            axis for walk in walks for axis, _, distance in walk.steps if distance < 0
        ]

    @staticmethod
    def _place(walk: Walk, size: int, masked: bool) -> tuple:
        """(start inside, how much later the walk starts)."""
        start, extent = walk.start, walk.extent
        if walk.is_inside or not masked:
            return start, 0
        last = size - extent
        if isinstance(start, int):
            near = min(max(start, -extent), size)
            first = min(max(near, 0), last)
            return first, near - first
        bounds = [np.asarray(bound, start.dtype) for bound in (-extent, size, 0, last)]
        close = lax.clamp(bounds[0], start, bounds[1])
        inside = lax.clamp(bounds[2], close, bounds[3])
        return inside, close - inside

    def _part(self) -> jax.Array:
        """The window, as it is in the contents."""
        return _sliced(self.contents, self.starts, self.extents)

    def _moved(self, window: jax.Array, direction: int) -> jax.Array:
        """The window's elements as the walk meets them, zeros outside; the other way if direction is -1."""
        moving = [not isinstance(shift, int) or shift != 0 for shift in self.shifts]
        if not any(moving):
            return window
        margins = [extent if moves else 0 for extent, moves in zip(self.extents, moving)]
        starts = [
            margin + direction * shift if moves else 0
            for margin, shift, moves in zip(margins, self.shifts, moving)
        ]
        return _sliced(_padded(window, [(m, m, 0) for m in margins]), starts, self.extents)

    def elements(self, shape: tuple[int, ...]) -> jax.Array:
        """Elements of the access, in this shape; zeros beyond the walks."""
        value = self._moved(self._part(), 1)
        for axis, walk in reversed(list(enumerate(self.walks))):
            value = _unfolded(value, axis, walk.steps)
        if self.axes != sorted(self.axes):
            value = lax.transpose(value, np.argsort(self.axes))
        sizes = tuple(self.sizes.get(axis, size) for axis, size in enumerate(shape))
        if value.shape != sizes:
            value = lax.broadcast_in_dim(value, sizes, sorted(self.axes))
        if self.backwards:
            value = lax.rev(value, self.backwards)
        return _padded(value, [(0, size - named, 0) for size, named in zip(shape, sizes)])

    def replaced(self, value: jax.Array) -> jax.Array:
        """The contents with other elements."""
        is_plain = all(
            [distance for _, _, distance in walk.steps] in ([], [1]) for walk in self.walks
        ) and all(isinstance(shift, int) and shift == 0 for shift in self.shifts)
        update = self._update(value)
        if not is_plain:
            is_stored = self._update(jnp.ones(value.shape, bool))
            update = lax.select(is_stored, update, self._part())
        if update.shape == self.contents.shape:
            contents = update
        else:
            contents = lax.dynamic_update_slice(
                self.contents, update, _as_operands(self.starts), allow_negative_indices=False
            )
        return lax.slice(contents, [0] * contents.ndim, self.shape)

    def _update(self, value: jax.Array) -> jax.Array:
        """A value as a window of the contents, with zeros between its elements."""
        sizes = [self.sizes.get(axis, 1) for axis in range(value.ndim)]
        value = lax.slice(value, [0] * value.ndim, sizes)
        if self.backwards:
            value = lax.rev(value, self.backwards)
        value = lax.squeeze(value, [axis for axis in range(value.ndim) if axis not in self.sizes])
        if self.axes != sorted(self.axes):
            value = lax.transpose(value, np.argsort(np.argsort(self.axes)))
        ends = np.cumsum([len(walk.steps) for walk in self.walks])
        for walk, end in reversed(list(zip(self.walks, ends.tolist()))):
            value = _folded(value, end - len(walk.steps), walk.steps)
        return self._moved(value, -1)


def _unfolded(window: jax.Array, axis: int, steps: Sequence[tuple[int, int, int]]) -> jax.Array:
    """A window with an axis for each of the steps along one of its own."""
    if not steps:
        return lax.squeeze(window, [axis])
    (_, size, distance), *rest = steps
    if not rest:
        return lax.slice_in_dim(window, 0, None, abs(distance), axis)
    window = _padded_along(window, axis, size * abs(distance) - window.shape[axis])
    shape = (*window.shape[:axis], size, abs(distance), *window.shape[axis + 1 :])
    inner = lax.slice_in_dim(lax.reshape(window, shape), 0, extent_of(rest), axis=axis + 1)
    return _unfolded(inner, axis + 1, rest)


def _folded(value: jax.Array, axis: int, steps: Sequence[tuple[int, int, int]]) -> jax.Array:
    """The window in which steps from `axis` on walk along one axis, with zeros between."""
    if not steps:
        return lax.expand_dims(value, [axis])
    (_, size, distance), *rest = steps
    if not rest:
        between = [(0, 0, abs(distance) - 1 if n == axis else 0) for n in range(value.ndim)]
        return _padded(value, between)
    inner = _folded(value, axis + 1, rest)
    inner = _padded_along(inner, axis + 1, abs(distance) - inner.shape[axis + 1])
    shape = (*inner.shape[:axis], size * abs(distance), *inner.shape[axis + 2 :])
    return lax.slice_in_dim(lax.reshape(inner, shape), 0, extent_of(steps), axis=axis)


def _sliced(array: jax.Array, starts: Sequence, sizes: Sequence[int]) -> jax.Array:
    if all(isinstance(start, int) for start in starts):
        return lax.slice(array, starts, [start + size for start, size in zip(starts, sizes)])
    return lax.dynamic_slice(array, _as_operands(starts), sizes, allow_negative_indices=False)


def _as_operands(starts: Sequence) -> list:
    return [jnp.asarray(start, np.int32) for start in starts]


def _padded(array: jax.Array, padding: Sequence[tuple[int, int, int]]) -> jax.Array:
    if not any(map(any, padding)):
        return array
    return lax.pad(array, np.zeros((), array.dtype), padding)


def _padded_along(array: jax.Array, axis: int, missing: int) -> jax.Array:
    return _padded(array, [(0, missing if n == axis else 0, 0) for n in range(array.ndim)])
