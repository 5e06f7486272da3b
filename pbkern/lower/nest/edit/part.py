"""Some neighbouring points of a nest along one dimension."""

from __future__ import annotations

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Nest, Pool

from .rename import renamed


def part(nest: Nest, dim: str, start: Affine, length: int, pool: Pool) -> Nest:
    """The points `start` .. `start + length - 1` along a dimension, which are counted from 0 on.

        nest [i<8]          part(i, 5, 3)      nest [i<3]
          y[i] = x[i]            ->              y[i + 5] = x[i + 5]

    Parts that together have every point once mean the same as the nest if its points are independent along the dimension;
    of a reduced dimension, each part makes results of its own.
    """
    place = start + Affine.symbol(dim) if length > 1 else start
    return renamed(nest, {dim: place}, {**nest.dims, dim: length}, pool)
