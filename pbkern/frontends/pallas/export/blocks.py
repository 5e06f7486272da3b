"""BlockMapping -> pl.BlockSpec, and the array in the shape that the spec takes.

Pallas takes every block in its interpreters. For a TPU the last two dimensions of a block must be
multiples of 8 and 128, or those of the array. Other blocks are cut apart outside of the kernel:

    float32[10,8] in blocks (1, 8)  ->  float32[10,1,8] in blocks (None, 1, 8)
    float32[37] in blocks (8,)      ->  float32[5,1,8] in blocks (None, None, 8)

So are all blocks of one dimension, of which the compiler asks the device how many elements it takes.

Windows that overlap (Element) are copied side by side:

    float32[70] in windows of 18, 16 apart  ->  float32[5,1,18] in blocks (None, None, 18)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.jaxprs.retracing import retrace_into
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import Blocked, BlockMapping, Element, Squeezed
from pbkern.dsl.primitives.grid import cdiv

# Rows and columns of a TPU's vector register, of 32-bit elements.
REGISTER_SHAPE = (8, 128)


def suits_tpu(mapping: BlockMapping) -> bool:
    """Whether Pallas's compiler for TPUs takes the blocks as they are."""
    sizes, shape = [dim.size for dim in mapping.dims], mapping.array.shape
    return len(shape) > 1 and all(
        size == extent or size % unit == 0
        for size, extent, unit in zip(sizes[-2:], shape[-2:], REGISTER_SHAPE)
    )


@dataclass(frozen=True)
class ArrayBlocks:
    """An array of a kernel as pallas_call takes it.

    Attributes:
      mapping: which block each program sees.
      grid: sizes of the kernel's grid.
      is_cut: the array is cut apart into its blocks.
      space: Pallas's memory space; None: its default.
    """

    mapping: BlockMapping
    grid: tuple[int, ...]
    is_cut: bool
    space: Any = None

    @cached_property
    def has_windows(self) -> bool:
        """Whether the blocks of an array that is cut apart may overlap."""
        return any(isinstance(dim, Element) for dim in self.mapping.dims)

    @cached_property
    def _axes(self) -> list[int]:
        """Grid dimensions along which windows move."""
        starts = self.mapping.starts
        if None in starts:
            return list(range(len(self.grid)))
        return sorted({axis for start in starts if start is not None for axis in start.symbols})

    @cached_property
    def _counts(self) -> list[int]:
        """Leading dimensions of an array that is cut apart: they count blocks."""
        if self.has_windows:
            return [self.grid[axis] for axis in self._axes]
        return [cdiv(n, dim.size) for dim, n in zip(self.mapping.dims, self.mapping.array.shape)]

    @cached_property
    def _filler(self) -> list[int]:
        """Dimensions of size 1 that make a cut array's blocks two-dimensional."""
        return [1] * (2 - len(self.mapping.ref_shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array in the call."""
        if not self.is_cut:
            return self.mapping.array.shape
        return (*self._counts, *self._filler, *self.mapping.ref_shape)

    def spec(self) -> Any:
        """The pl.BlockSpec."""
        from jax.experimental import pallas as pl

        ref_shape = self.mapping.ref_shape
        if not self.mapping.array.shape:
            return pl.BlockSpec(memory_space=self.space)
        if not self.is_cut:
            dims = [_pallas_dim(dim) for dim in self.mapping.dims]
            return pl.BlockSpec(dims, self._pallas_indices, memory_space=self.space)
        leading = [None] * (len(self._counts) + len(self._filler))
        zeros = [np.int32(0)] * (len(self._filler) + len(ref_shape))

        def index_map(*args):
            counts = [args[axis] for axis in self._axes] if self.has_windows else self.indices(args)
            return (*counts, *zeros)

        return pl.BlockSpec((*leading, *ref_shape), index_map, memory_space=self.space)

    def _pallas_indices(self, *args) -> tuple:
        """Results of the index map as Pallas counts: from the padding before an array."""
        return tuple(
            index + np.int32(dim.padding[0]) if isinstance(dim, Element) else index
            for index, dim in zip(self.indices(args), self.mapping.dims)
        )

    def indices(self, args: Sequence) -> list:
        """Results of the index map; `args`: i32 grid indices, then Refs of prefetched operands."""
        jaxpr = self.mapping.index_map.jaxpr
        args = args[: len(jaxpr.invars)]
        return retrace_into(jaxpr, self.mapping.index_map.consts, args, lambda eqn, *_: None)

    def starts(self, args: Sequence) -> list:
        """First element of the block along each dimension of the array."""
        return [
            index * np.int32(dim.size) if isinstance(dim, Blocked) else index
            for index, dim in zip(self.indices(args), self.mapping.dims)
        ]

    def given(self, array: jax.Array) -> jax.Array:
        """The array in the shape that the call takes."""
        if not self.is_cut:
            return array
        if self.has_windows:
            return self._windows(array).reshape(self.shape)
        sizes = [dim.size for dim in self.mapping.dims]
        ends = [count * size for count, size in zip(self._counts, sizes)]
        padded = jnp.pad(array, [(0, end - n) for end, n in zip(ends, array.shape)])
        parts = padded.reshape([n for pair in zip(self._counts, sizes) for n in pair])
        order = [*range(0, 2 * array.ndim, 2), *range(1, 2 * array.ndim, 2)]
        return parts.transpose(order).reshape(self.shape)

    def _windows(self, array: jax.Array) -> jax.Array:
        """The blocks of all programs, which may overlap, side by side."""
        sizes = [dim.size for dim in self.mapping.dims]
        margins = [
            dim.padding if isinstance(dim, Element) else (0, dim.size - 1)
            for dim in self.mapping.dims
        ]
        padded = jnp.pad(array, margins)
        place = jnp.indices([self.grid[axis] for axis in self._axes], np.int32)

        def window(moving):
            args = [np.int32(0)] * len(self.grid)
            for axis, index in zip(self._axes, moving):
                args[axis] = index
            starts = [start + np.int32(low) for start, (low, _) in zip(self.starts(args), margins)]
            return lax.dynamic_slice(padded, starts, sizes)

        return jax.vmap(window)(place.reshape(len(self._axes), -1).T)

    def returned(self, blocks: jax.Array) -> jax.Array:
        """The array of a result in its own shape."""
        if not self.is_cut:
            return blocks
        sizes, rank = [dim.size for dim in self.mapping.dims], len(self._counts)
        order = [axis for dim in range(rank) for axis in (dim, rank + dim)]
        whole = blocks.reshape([*self._counts, *sizes]).transpose(order)
        padded = [count * size for count, size in zip(self._counts, sizes)]
        return whole.reshape(padded)[tuple(map(slice, self.mapping.array.shape))]


def _pallas_dim(dim) -> Any:
    from jax.experimental import pallas as pl

    match dim:
        case Squeezed():
            return None
        case Element(size, padding):
            return pl.Element(size, padding)
    return dim.size
