"""Loads across the vector dimension.

Whole squares of them are loaded by rows and transposed in registers (targets/cpu/emit/loads/squares.py).
"""

from __future__ import annotations

from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, Load, Nest

# Points that are worth turning.
FEWEST_TRANSPOSED = 4


def is_transposed(load: Expr, vector: str, along: str) -> bool:
    """Whether a load is strided along the vector dimension but contiguous, or every second element, along another one."""
    if not isinstance(load, Load) or load.guard:
        return False
    buf, index = load.access
    step = flat_coefficient(buf, index, along)
    is_word = (
        buf.dtype.itemsize > buf.root.dtype.itemsize
    )  # of several elements, loaded as neighbours only
    if storage_el(buf.dtype) != storage_el(buf.root.dtype) and not (is_word and step == 1):
        return False
    return step in (1, 2) and abs(flat_coefficient(buf, index, vector)) > step


def transposable_dims(nest: Nest, vector: str) -> list[str]:
    """Dimensions whose points may be loaded together and transposed.

    Of reductions these are reduced ones, if no load serves two points. Reductions whose loads are
    all contiguous along one dimension take vectors along that.
    """
    if not nest.rdims:
        return [dim for dim, size in nest.dims.items() if size >= FEWEST_TRANSPOSED]
    live = {dim for dim, size in nest.dims.items() if size > 1}
    inside = [
        load for reduction in nest.reductions for load in Nest({}, reductions=(reduction,)).loads()
    ]
    if nest.ordered or any(live - expr.symbols or not isinstance(expr, Load) for expr in inside):
        return []
    if all(flat_coefficient(expr.buf, expr.index, vector) != 1 for expr in inside):
        return []
    return [rdim for rdim in nest.rdims if nest.dims[rdim] >= FEWEST_TRANSPOSED]


def transposed_dim(nest: Nest, vector: str) -> tuple[str, int] | None:
    """A dimension along which loads are to be transposed, and how far apart their elements are."""
    for dim in transposable_dims(nest, vector):
        transposed = [
            load for load in nest.loads() if dim != vector and is_transposed(load, vector, dim)
        ]
        steps = [flat_coefficient(expr.buf, expr.index, dim) for expr in transposed]
        if steps:
            return dim, max(steps)
    return None
