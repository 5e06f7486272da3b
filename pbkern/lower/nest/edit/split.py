"""One dimension of a nest -> several that count through it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.lower.nest.ir import Nest, Pool

from .rename import renamed


def split(nest: Nest, sizes: Mapping[str, Mapping[str, int]], pool: Pool) -> Nest:
    """The nest with dimensions in place of others; `sizes`: old dimension -> size of each new one, the outermost first.

        nest [d<12]         {d: {i: 3, j: 4}}      nest [i<3, j<4]
          y[d] = x[d]              ->                y[4*i + j] = x[4*i + j]

    Raises InternalError unless the product of the new sizes is the old one.
    """
    dims: dict[str, int] = {}
    places: dict[str, Affine] = {}
    for dim, size in nest.dims.items():
        parts = sizes.get(dim)
        if parts is None:
            dims[dim] = size
            continue
        if math.prod(parts.values()) != size:
            raise InternalError(f"nest: {dim} of {size} points is not split into {dict(parts)}")
        dims |= parts
        step = 1
        place: Affine[str] = Affine()
        for part_dim, part_size in reversed(list(parts.items())):
            place, step = place + Affine.symbol(part_dim, step), step * part_size
        places[dim] = place
    rdims = tuple(new for old in nest.rdims for new in sizes.get(old, (old,)))
    return replace(renamed(nest, places, dims, pool), rdims=rdims)
