"""Accesses to a Ref as functions of its contents: contents -> elements, contents and elements -> contents."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.dsl.primitives import atomics
from pbkern.dsl.primitives.ref_access import (
    GatheredIndex,
    Index,
    Point,
    Range,
    RefAccess,
    add_index,
    compose,
    is_whole,
    mul_index,
    stays,
    value_axes,
)


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


def read(contents: jax.Array, access: RefAccess) -> jax.Array:
    """The elements that a load reads, or that a store overwrites."""
    indices, mask = access.indices, access.mask
    if any(isinstance(index, GatheredIndex) for index in indices):
        elements = _gathered(contents, indices)
    elif all(map(is_whole, indices, contents.shape)):
        elements = contents
    else:
        elements = ContentsWindow(contents, indices, mask is not None).elements()
    if mask is None:
        return elements
    other = jnp.zeros_like(elements) if access.other is None else access.other
    return lax.select(mask, elements, other)


def written(contents: jax.Array, access: RefAccess) -> jax.Array:
    """The contents after a store, or an addition. Its indices are no arrays."""
    value, indices, mask = jnp.asarray(access.value), access.indices, access.mask
    if mask is None and all(map(is_whole, indices, contents.shape)):
        return contents + value if access.kind == "add" else value
    window = ContentsWindow(contents, indices, mask is not None)
    before = window.elements()
    value = before + value if access.kind == "add" else value
    return window.replaced(value if mask is None else lax.select(mask, value, before))


def _gathered(contents: jax.Array, indices: Sequence[Index]) -> jax.Array:
    """Elements at arrays of indices; those outside are moved inside."""
    axes, arrays = value_axes(indices), [i for i in indices if isinstance(i, GatheredIndex)]
    sizes: dict[int, int] = {}
    for index, places in zip(indices, axes):
        if isinstance(index, Range):
            sizes[places[0]] = index.size
        elif isinstance(index, GatheredIndex):
            sizes |= dict(zip(places, np.shape(index.at)))
    assert arrays
    positions = atomics.positions(tuple(indices), tuple(sizes[axis] for axis in sorted(sizes)))
    inside = [
        lax.clamp(np.int32(0), position, np.int32(size - 1))
        for position, size in zip(positions, contents.shape)
    ]
    return contents[tuple(inside)]


class ContentsWindow:
    """The part of a Ref's contents between the first and the last positions of its indices.

    Attributes:
      padded: the contents; where masks allow positions outside, with as many more at both ends.
      margins: how many, per dimension.
    """

    def __init__(self, contents: jax.Array, indices: Sequence[Index], masked: bool) -> None:
        self.indices, self.shape = indices, contents.shape
        self.extents = [
            max((index.size - 1) * index.stride + 1, 0) if isinstance(index, Range) else 1
            for index in indices
        ]
        self.margins = [
            extent if masked and not stays(index, size) else 0
            for index, extent, size in zip(indices, self.extents, contents.shape)
        ]
        self.padded = contents
        if any(self.margins):
            zero = np.zeros((), contents.dtype)
            self.padded = lax.pad(contents, zero, [(m, m, 0) for m in self.margins])
        self.starts = list(map(self._start, indices, self.margins, contents.shape))
        self.is_constant = all(isinstance(start, int) for start in self.starts)
        self.points = [axis for axis, index in enumerate(indices) if isinstance(index, Point)]
        self.steps = [index.stride if isinstance(index, Range) else 1 for index in indices]

    @staticmethod
    def _start(index: Index, margin: int, size: int):
        start = index.start if isinstance(index, Range) else index.at  # type: ignore[union-attr]
        if not margin:
            return start
        if isinstance(start, int):
            return min(max(start, -margin), size) + margin
        low, high = (np.asarray(bound, start.dtype) for bound in (-margin, size))
        return lax.clamp(low, start, high) + np.asarray(margin, start.dtype)

    def _start_operands(self) -> list:
        return [jnp.asarray(start, np.int32) for start in self.starts]

    def _whole(self) -> jax.Array:
        if self.is_constant:
            limits = [start + extent for start, extent in zip(self.starts, self.extents)]
            return lax.slice(self.padded, self.starts, limits)
        return lax.dynamic_slice(
            self.padded, self._start_operands(), self.extents, allow_negative_indices=False
        )

    def elements(self) -> jax.Array:
        """Elements of the access: every step-th of the window, without dimensions of points."""
        window = self._whole()
        if any(step > 1 for step in self.steps):
            window = lax.slice(window, [0] * window.ndim, window.shape, self.steps)
        return lax.squeeze(window, self.points)

    def replaced(self, value: jax.Array) -> jax.Array:
        """The contents with other elements."""
        update = lax.expand_dims(value, self.points)
        if any(step > 1 for step in self.steps):
            between = [(0, 0, step - 1) for step in self.steps]
            is_stored = lax.pad(jnp.ones(update.shape, bool), np.bool_(False), between)
            spread = lax.pad(update, np.zeros((), update.dtype), between)
            update = lax.select(is_stored, spread, self._whole())
        if self.is_constant and update.shape == self.padded.shape:
            return update  # there are no margins: the window is inside
        contents = lax.dynamic_update_slice(
            self.padded, update, self._start_operands(), allow_negative_indices=False
        )
        if not any(self.margins):
            return contents
        limits = [margin + size for margin, size in zip(self.margins, self.shape)]
        return lax.slice(contents, self.margins, limits)
