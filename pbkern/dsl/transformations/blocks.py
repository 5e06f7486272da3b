"""Block mappings of a kernel as its derivatives need them: for another order of programs, and which elements they share."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_rewrites.derivative_refusals import derivative_error
from pbkern.dsl.interpret import parallel_dims
from pbkern.dsl.kernel import ArrayType, Blocked, BlockMapping, Element, Kernel, Squeezed
from pbkern.dsl.primitives import grid
from pbkern.dsl.specs import BlockSpec


@dataclass(frozen=True)
class ProgramOrder:
    """The order of a kernel's programs, or the reverse of it, in another kernel with its grid.

    `reversed_dims`: grid dimensions that the other kernel walks backwards. Where an operand says how
    many programs these have, the other kernel's first operand has those numbers.
    """

    kernel: Kernel
    reversed_dims: tuple[int, ...] = ()

    @property
    def counted(self) -> list[tuple[int, int]]:
        """(dimension, operand with its size) of reversed dimensions."""
        return [pair for pair in self.kernel.dynamic_grid if pair[0] in self.reversed_dims]

    @property
    def size_types(self) -> list[ArrayType]:
        """Types of the other kernel's operand of sizes, if it has one."""
        return [ArrayType((len(self.counted),), np.dtype(np.int32))] if self.counted else []

    def sizes(self, operands: Sequence) -> list:
        """That operand, from those of the kernel."""
        sizes = [
            jnp.minimum(operands[operand], np.int32(self.kernel.grid[axis]))
            for axis, operand in self.counted
        ]
        return [jnp.stack(sizes)] if sizes else []

    def place(self, numbers: Sequence, sizes: Sequence) -> list:
        """Numbers in the kernel's grid of the program that has these in the other's, whose Ref to sizes is in `sizes`."""
        known: dict = dict(enumerate(map(np.int32, self.kernel.grid)))
        known |= {axis: sizes[0][n] for n, (axis, _) in enumerate(self.counted)}
        return [
            known[axis] - 1 - number if axis in self.reversed_dims else number
            for axis, number in enumerate(numbers)
        ]

    def spec(self, mapping: BlockMapping, axes: tuple[int, ...] = ()) -> BlockSpec:
        """The BlockSpec that gives the other kernel's programs the blocks of their counterparts.

        `axes`: grid dimensions that the array has in front of those of the mapping, one block each.
        """
        rank, first = len(self.kernel.grid), len(self.kernel.grid) + len(self.size_types)

        def index_map(*args):
            place = self.place(args[:rank], args[rank:first])
            block = jex.jaxpr_as_fun(mapping.index_map)(*place, *args[first:])
            return (*(place[axis] for axis in axes), *block)

        dims = (*(None,) * len(axes), *mapping.dims)
        return BlockSpec(dims, index_map, memory_space=mapping.memory_space)

    def spec_per_program(self, shape: tuple[int, ...]) -> BlockSpec:
        """The BlockSpec of an array of the grid's shape, then `shape`: a block of that for each program."""
        rank = len(self.kernel.grid)

        def index_map(*args):
            place = self.place(args[:rank], args[rank:])
            return (*place, *(0,) * len(shape))

        return BlockSpec((None,) * rank + shape, index_map)


def sequential_dims(kernel: Kernel) -> tuple[int, ...]:
    """Grid dimensions of several programs that run in order."""
    parallel = parallel_dims(kernel)
    return tuple(axis for axis, size in enumerate(kernel.grid) if size > 1 and axis not in parallel)


def are_apart(kernel: Kernel, mapping: BlockMapping) -> bool:
    """Whether no element is in the blocks of two programs."""
    return None not in mapping.starts and all(
        size <= 1 or mapping.moves_apart(axis) for axis, size in enumerate(kernel.grid)
    )


def are_everywhere(kernel: Kernel, mapping: BlockMapping) -> bool:
    """Whether each element of the array is in the block of a program, as far as it can be seen."""
    if None in mapping.starts or kernel.dynamic_grid or not kernel.num_programs:
        return False
    moving = [axis for start in mapping.starts if start for axis in start.symbols]
    return len(moving) == len(set(moving)) and all(
        _is_covered(kernel, mapping, dim) for dim in range(len(mapping.dims))
    )


def _is_covered(kernel: Kernel, mapping: BlockMapping, dim: int) -> bool:
    """Whether blocks follow one another from the start of a dimension to its end."""
    start, extent, covered = mapping.starts[dim], mapping.array.shape[dim], mapping.dims[dim].size
    assert start is not None  # it is affine
    steps = sorted((abs(start.coefficient(axis)), kernel.grid[axis]) for axis in start.symbols)
    first, _ = start.bounds(lambda axis: kernel.grid[axis])
    for stride, size in steps:
        if size > 1 and stride > covered:
            return False
        covered += stride * (size - 1)
    return first <= 0 and first + covered >= extent


# --- edges
# ------------------------------------------------------------------------------------------------


def ragged_axes(kernel: Kernel, mapping: BlockMapping) -> tuple[int, ...]:
    """Dimensions of a Ref of which some program's block reaches over the array's edge."""
    return tuple(
        axis
        for axis, dim in enumerate(_ref_dimensions(mapping))
        if _is_ragged(kernel, mapping, dim)
    )


def _ref_dimensions(mapping: BlockMapping) -> list[int]:
    """The array's dimensions that a Ref to its blocks has."""
    return [dim for dim, block in enumerate(mapping.dims) if not isinstance(block, Squeezed)]


def _is_ragged(kernel: Kernel, mapping: BlockMapping, dim: int) -> bool:
    block, start, extent = mapping.dims[dim], mapping.starts[dim], mapping.array.shape[dim]
    if start is not None and not kernel.dynamic_grid:
        first, last = start.bounds(lambda axis: kernel.grid[axis])
        return first < 0 or last + block.size > extent
    if isinstance(block, Blocked):
        return extent % block.size != 0
    return isinstance(block, Element) and block.padding != (0, 0)


def inside(kernel: Kernel, mapping: BlockMapping, ref) -> list:
    """Per dimension of a block, which positions are inside the array: bools, from a Ref that has the block."""
    ragged = ragged_axes(kernel, mapping)
    if ragged and ref is None and "in_bounds" in _primitives(kernel):
        raise derivative_error(
            kernel,
            f"it may ask in_bounds of {mapping.origin}, which has no derivative",
            "in_bounds of an operand with the same blocks",
        )
    return [
        grid.in_bounds(ref, axis) if axis in ragged and ref is not None else jnp.ones(size, bool)
        for axis, size in enumerate(mapping.ref_shape)
    ]


def _primitives(kernel: Kernel) -> set[str]:
    return {eqn.primitive.name for eqn in equations(kernel.body.jaxpr)}


def with_zeros_outside(kernel: Kernel, mapping: BlockMapping, ref) -> jax.Array:
    """A block of a Ref, with zeros where it reaches over the array's edge."""
    block = ref[...]
    for axis in ragged_axes(kernel, mapping):
        block = lax.select(_spread(ref, block, axis), block, jnp.zeros_like(block))
    return block


def with_repeats_outside(kernel: Kernel, mapping: BlockMapping, ref) -> jax.Array:
    """A block of a Ref, with elements of its own where it reaches over the array's edge.

    What a kernel computes there is dropped. Its derivative must be finite nevertheless, as it is
    multiplied by zero and summed.
    """
    block = ref[...]
    for axis in ragged_axes(kernel, mapping):
        start = mapping.starts[_ref_dimensions(mapping)[axis]]
        if start is not None and start.bounds(lambda dim: kernel.grid[dim])[0] < 0:
            return with_zeros_outside(kernel, mapping, ref)  # the first element may be outside
        first = lax.slice_in_dim(block, 0, 1, axis=axis)
        block = lax.select(_spread(ref, block, axis), block, jnp.broadcast_to(first, block.shape))
    return block


def _spread(ref, block, axis: int) -> jax.Array:
    return lax.broadcast_in_dim(grid.in_bounds(ref, axis), block.shape, (axis,))
