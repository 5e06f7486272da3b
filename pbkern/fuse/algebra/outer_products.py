"""Contractions that sum nothing -> products of their operands, which fuse like any elementwise operation.

dot_general[contracting ((), ())] a:[m] b:[n]   ->   a[:, None] * b[None, :]
"""

from __future__ import annotations

from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.walks import equations
from pbkern.fuse.simplify.driver import retrace


def multiply_outer(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The jaxpr without contractions that contract no dimension."""
    return (
        retrace(closed, {"dot_general": _products})
        if any(map(_sums_nothing, equations(closed.jaxpr)))
        else closed
    )


def _sums_nothing(eqn) -> bool:
    return eqn.primitive.name == "dot_general" and not any(eqn.params["dimension_numbers"][0])


def _products(eqn, operands):
    if not _sums_nothing(eqn):
        return None
    _, batch = eqn.params["dimension_numbers"]
    out, first, spread = eqn.outvars[0].aval, len(batch[0]), []
    for x, together in zip(operands, batch):
        free = [axis for axis in range(x.ndim) if axis not in together]
        x = lax.transpose(lax.convert_element_type(x, out.dtype), (*together, *free))
        spread.append(
            lax.broadcast_in_dim(
                x, out.shape, (*range(len(together)), *range(first, first + len(free)))
            )
        )
        first += len(free)
    return [(lax.bitwise_and if out.dtype == bool else lax.mul)(*spread)]
