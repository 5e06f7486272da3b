"""Slices of a Ref whose sizes are values, `ref.at[pl.ds(start, size)]`, taken apart into slices of constant sizes.

Every access of a body has a fixed shape. So what is known in size only when the kernel runs is
accessed in parts: a constant number of elements of each such dimension at a time, in a loop or
under a mask. JAX takes nothing of such a slice but the slice itself, so that it is the last of a
Ref's transforms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern import _jax


def is_dynamic(transforms: Sequence) -> bool:
    return (
        bool(transforms)
        and isinstance(transforms[-1], _jax.NDIndexer)
        and any(map(_has_size, transforms[-1].indices))
    )


def _has_size(index) -> bool:
    return _jax.is_slice(index) and not isinstance(index.size, int)


class DynamicSlices:
    """Part of a Ref that `is_dynamic` transforms take.

    dims: the view's dimensions, one entry each: its index in the last transform if its size is a
    value, else None.
    """

    def __init__(self, transforms: Sequence):
        *self._before, self._last = transforms
        slices = [axis for axis, index in enumerate(self._last.indices) if _jax.is_slice(index)]
        self.dims = [slice_ if _has_size(self._last.indices[slice_]) else None for slice_ in slices]

    def _place(self, dim: int) -> int:
        place = self.dims[dim]
        assert place is not None, "asked of dimensions whose size is a value"
        return place

    def _index(self, dim: int):
        return self._last.indices[self._place(dim)]

    def most(self, dim: int) -> int:
        """Most elements that the view's dimension can have."""
        return -(-self._last.shape[self._place(dim)] // self._index(dim).stride)

    def count(self, dim: int):
        """i32: how many elements there are of the view's dimension, those outside of the Ref not counted."""
        index, extent = self._index(dim), self._last.shape[self._place(dim)]
        room = lax.div(
            np.int32(extent + index.stride - 1) - jnp.asarray(index.start, np.int32),
            np.int32(index.stride),
        )
        return lax.min(jnp.asarray(index.size, np.int32), room)

    def part(self, taken: Mapping[int, tuple]) -> list:
        """Transforms of constant sizes.

        `taken`: {dimension of the view: (number of its first element, how many)}.
        """
        indices = list(self._last.indices)
        for dim, (first, size) in taken.items():
            index = self._index(dim)
            start = jnp.asarray(index.start, np.int32) + jnp.asarray(first, np.int32) * np.int32(
                index.stride
            )
            indices[self._place(dim)] = _jax.Slice(start, size, index.stride if size > 1 else 1)
        return [*self._before, dataclasses.replace(self._last, indices=tuple(indices))]
