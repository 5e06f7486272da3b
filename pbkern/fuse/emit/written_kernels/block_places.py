"""Blocks of a kernel as accesses, by which access rules find blocks of other arrays.

    y = x * s[None, :],  y: BlockSpec((64, 128), lambda i: (i, 0))  ->  x: the same,  s: BlockSpec((128,), lambda i: (0,))

Symbol d of an access counts what the author's index map gives for dimension d of the array. So the map may be any function
of the grid, and of prefetched operands; maps of other arrays are affine expressions of its values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.affine import Affine
from pbkern.core.jax_types import array_aval
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import Blocked, BlockMapping, Element, Kernel, Squeezed
from pbkern.dsl.primitives.grid import in_bounds, program_id
from pbkern.dsl.specs import canonical_index_map
from pbkern.fuse.access.blocks import BodyContext
from pbkern.fuse.access.rules import Access, Span
from pbkern.fuse.emit.group_kernel import array_type, block_mapping

from .calls import same_blocks


@dataclass(frozen=True)
class BlockPlaces:
    """Places of the blocks of one operand or result.

    Attributes:
      kernel, mapping: the author's.
      access: a block.
      first: per dimension, the value of the index map that is number 0 of its symbol.
      counts: how many values each symbol has.
    """

    kernel: Kernel
    mapping: BlockMapping
    access: Access
    first: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, kernel: Kernel, mapping: BlockMapping) -> BlockPlaces:
        spans, first, counts = [], [], []
        for axis, (dim, extent, start) in enumerate(
            zip(mapping.dims, mapping.array.shape, mapping.starts)
        ):
            unit = dim.size if isinstance(dim, Blocked) else 1
            low, high = dim.padding if isinstance(dim, Element) else (0, 0)
            if start is not None and start.is_const:
                least, most = start.const, start.const
            elif start is not None and not kernel.dynamic_grid:
                least, most = start.bounds(lambda symbol: kernel.grid[symbol])
            elif isinstance(dim, Blocked):
                least, most = 0, max(extent - 1, 0) // unit * unit
            else:
                least, most = -low, max(extent + high - dim.size, -low)
            moves = start is None or not start.is_const
            place = Affine.symbol(axis, unit) + least if moves else Affine((), least)
            spans.append(Span(place, dim.size))
            first.append(least // unit)
            counts.append((most - least) // unit + 1)
        return cls(kernel, mapping, tuple(spans), tuple(first), tuple(counts))

    def numbers(self, *args) -> list:
        """The symbols' values in a program; `args`: of the index map."""
        indices = jex.jaxpr_as_fun(self.mapping.index_map)(*args)
        return [
            lax.sub(index, np.int32(first)) if first else index
            for index, first in zip(indices, self.first)
        ]

    def context(self, refs: Sequence) -> BodyContext:
        """For access rules, in a body with these Refs."""
        rank, prefetched = len(self.kernel.grid), refs[: self.kernel.num_scalar_prefetch]
        args = [*map(program_id, range(rank)), *prefetched]
        return BodyContext(dict(enumerate(self.numbers(*args))))

    def mapping_of(self, atom, access: Access, origin: str) -> BlockMapping:
        """The blocks `access` of another array."""
        array = array_type(array_aval(atom))
        if access == self.access and array.shape == self.mapping.array.shape:
            return dataclasses.replace(self.mapping, array=array, origin=origin, memory_space="any")
        inner = block_mapping(origin, array, access, self.counts)
        avals = [_jax.fresh_aval(var.aval) for var in self.mapping.index_map.jaxpr.invars]
        with jax.enable_x64(False):
            composed = jax.make_jaxpr(
                lambda *args: jex.jaxpr_as_fun(inner.index_map)(*self.numbers(*args))
            )(*avals)
            index_map = canonical_index_map(composed, self.kernel.grid)
        return dataclasses.replace(inner, index_map=index_map)

    def inside(self, refs: Sequence, mappings: Sequence[BlockMapping], axis: int) -> jax.Array:
        """in_bounds of the block along a dimension: of a Ref that has the same one (with `mappings`), or computed."""
        for ref, mapping in zip(refs, mappings):
            if same_blocks(mapping, self.mapping):
                return in_bounds(ref, axis)
        dims = [
            dim for dim, block in enumerate(self.mapping.dims) if not isinstance(block, Squeezed)
        ]
        dim = dims[axis]
        span = self.access[dim]
        places = lax.iota(np.int32, span.size) + self.context(refs).affine(span.start, np.int32)
        return (places >= 0) & (places < np.int32(self.mapping.array.shape[dim]))


def full_block(block: jax.Array, mapping: BlockMapping) -> jax.Array:
    """A block with its squeezed dimensions."""
    return lax.expand_dims(block, squeezed(mapping))


def ref_block(block: jax.Array, mapping: BlockMapping) -> jax.Array:
    """A block as a Ref holds it."""
    return lax.squeeze(block, squeezed(mapping))


def squeezed(mapping: BlockMapping) -> tuple[int, ...]:
    return tuple(dim for dim, block in enumerate(mapping.dims) if isinstance(block, Squeezed))
