"""Which programs of a kernel reach over the ends of arrays -> variants of its body, each for some of the programs.

Where blocks cross an end only at the last index of grid dimensions, each set of these dimensions is
a case of its own: 500 rows in blocks of 128 by 300 columns in blocks of 128 are 3 x 2 programs that
are inside, 2 and 3 at one end, and 1 at both. In each it is known when the body is lowered how much
of a block is inside, and that alone is computed (lower/passes/dead_points.py). Where that is not
known, or the body is long, there are two cases: all blocks are inside, or accesses are guarded.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from pbkern.core.affine import Affine
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import Kernel
from pbkern.lower.nest.conditions.index_tests import Bounds, interval
from pbkern.lower.values.values import Index

# Equations in all variants together, where more than two.
MOST_EQUATIONS = 400


@dataclass(frozen=True)
class Extent:
    """Elements start .. start + size - 1 of an array axis of `length` elements."""

    start: Affine
    size: int
    length: int

    def is_in_bounds(self, bounds: Bounds) -> bool | None:
        """Whether it does for every program within `bounds`, for none, or for some, as far as is known (None)."""
        first = interval(self.start, bounds)
        if first is None:
            return None
        if first[0] >= 0 and first[1] + self.size <= self.length:
            return True
        return False if first[1] < 0 or first[0] + self.size > self.length else None


@dataclass(frozen=True)
class EdgeVariant:
    """A body for the programs with indices in `bounds`; `guarded`: blocks may reach over the ends of arrays.

    last: of the grid dimensions along which variants differ, those at whose last index its programs
    are.
    """

    bounds: Mapping[str, tuple[int, int]]
    guarded: bool
    last: frozenset[int] = frozenset()

    @property
    def title(self) -> str:
        if self.last:
            return f"at the end of grid dimension {', '.join(map(str, sorted(self.last)))}:\n"
        return "guarded:\n" if self.guarded else ""


def extents(start: Index, dims: Sequence, shape: Sequence[int]) -> list[Extent]:
    """One per axis of a block."""
    return [Extent(i, dim.size, size) for i, dim, size in zip(start, dims, shape)]


def ragged_dimensions(blocks: Sequence[Extent], bounds: Bounds, kernel: Kernel) -> tuple[int, ...]:
    """Grid dimensions at whose last index, alone, blocks cross ends of arrays; () where others may do so, or to no use."""
    ragged = set()
    dynamic = {dim for dim, _ in kernel.dynamic_grid}
    for block in blocks:
        if block.is_in_bounds(bounds) is not None:
            continue
        if len(block.start.terms) != 1 or not str(block.start.terms[0][0]).startswith("%g"):
            return ()
        symbol = block.start.terms[0][0]
        axis = int(symbol[2:])
        before = {symbol: (0, kernel.grid[axis] - 2)}
        if axis in dynamic or kernel.grid[axis] < 2 or not block.is_in_bounds(before):
            return ()
        ragged.add(axis)
    long = (
        len(ragged) > 1
        and sum(1 for _ in equations(kernel.body.jaxpr)) << len(ragged) > MOST_EQUATIONS
    )
    return () if long else tuple(sorted(ragged))


def variants(
    dims: Sequence[int], blocks: Sequence[Extent], bounds: Bounds, kernel: Kernel
) -> list[EdgeVariant]:
    """One for each set of the ragged dimensions `dims`."""
    variants_so_far = []
    for count in range(len(dims) + 1):
        for last in map(frozenset, itertools.combinations(dims, count)):
            ends = {
                f"%g{dim}": (extent - 1, extent - 1) if dim in last else (0, extent - 2)
                for dim in dims
                for extent in [kernel.grid[dim]]
            }
            guarded = any(not block.is_in_bounds({**bounds, **ends}) for block in blocks)
            variants_so_far.append(EdgeVariant({**bounds, **ends}, guarded, last))
    return variants_so_far
