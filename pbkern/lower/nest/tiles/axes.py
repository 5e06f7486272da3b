"""Axes of tiles: which dimensions of a nest are the rows of a tile together, and which its columns.

The pixels of two lines are 128 rows:   nest [y<2, x<64, j<128] by mma 2x4
                                          c[64*y + x, j] = 0.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pbkern.core.affine import Affine

from .tiling import Tiling

Axis = dict[str, int]


def row_major(dims: Mapping[str, int]) -> Affine:
    """The number of a point among all points of dimensions, the last of which is the fastest."""
    number: Affine = Affine()
    for dim, size in dims.items():
        number = number * size + Affine.symbol(dim)
    return number


def tile_axes(nest: Any) -> tuple[Axis, ...]:
    """The dimensions of rows, of columns if there are any, and of the depth of a product; of a copy as it is stored."""
    if not isinstance(nest.by, Tiling):
        index = nest.stores[0].index[-2:]
        return tuple(
            {dim: size for dim, size in nest.dims.items() if dim in place.symbols}
            for place in index
        )
    is_product = any(reduction.is_product for reduction in nest.reductions)
    tile = [dim for dim in nest.dims if not (is_product and dim in nest.rdims)]
    split = max(len(tile) - 1, 1)
    axes = [tile[:split], tile[split:], list(nest.rdims) if is_product else []]
    return tuple({dim: nest.dims[dim] for dim in dims} for dims in axes if dims)


def tile_shape(axes: Sequence[Axis]) -> tuple[int, ...]:
    """Rows, columns and depth of a tile."""
    return tuple(math.prod(axis.values()) for axis in axes)
