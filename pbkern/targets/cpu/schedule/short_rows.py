"""Short rows that are reduced side by side.

It chooses which results become lanes of one vector (targets/cpu/emit/reductions/horizontal.py).
"""

from __future__ import annotations

from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Nest

from .nest_schedule import overwritten_by

# Elements that vectors along a short row have at least, of those that several rows take less time
# for together.
SHORTEST_ROW = 5


def batched_rows(nest: Nest, vector: str) -> str | None:
    """The dimension whose points are the lanes of what is stored behind reductions along `vector`, if there is one.

    All results are side by side along it, and no point reads what another one stores.
    """
    behind = [store for store in nest.stores if not store.inner]
    if (
        overwritten_by(nest)
        or nest.ordered
        or not behind
        or any(nest.dims[rdim] > 1 for rdim in nest.rdims if rdim != vector)
    ):
        return None
    if effects.reads_other_points(nest) or any(map(_is_bool, nest.reductions)):
        return None
    free = (dim for dim in nest.dims if dim not in nest.rdims)
    return next(
        (
            dim
            for dim in free
            if all(flat_coefficient(result.buf, result.index, dim) == 1 for result in behind)
        ),
        None,
    )


def _is_bool(reduction) -> bool:
    """Lanes of masks do not change places."""
    return reduction.dtype.kind == "b" or any(arg.dtype.kind == "b" for arg in reduction.args)
