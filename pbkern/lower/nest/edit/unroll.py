"""A dimension of a nest -> a store of its own for each of its points."""

from __future__ import annotations

from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Nest, Pool


def unrolled(nest: Nest, dim: str, pool: Pool) -> Nest:
    """The nest without a dimension that is not reduced: one store per point for each of its stores.

        nest [i<8, j<2]                 nest [i<8]
          y[i, j] = x[i, j]      ->       y[i, 0] = x[i, 0]
                                          y[i, 1] = x[i, 1]

    Legal without reductions, where no point along the dimension reads what another one stores.
    """
    stores = []
    for point in range(nest.dims[dim]):
        place: dict[str, Affine[str]] = {dim: Affine((), point)}
        expression = pool.renamer(place)
        stores += [store.moved(place, expression) for store in nest.stores]
    dims = {other: size for other, size in nest.dims.items() if other != dim}
    return replace(nest, dims=dims, stores=tuple(stores))
