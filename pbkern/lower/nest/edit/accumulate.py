"""A sum in a register of its nest -> a sum in a buffer, which other statements may go on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Accumulator, Buf, Expr, Nest, Store


def accumulated_in(
    nest: Nest, buf: Buf, context: Any, index: tuple[Affine, ...] = ()
) -> tuple[Nest, Nest, Nest]:
    """(the nest that stores zeros, the one that adds the sum to them, the one that stores what is made of the sum).

        nest [i<8, j<4, k<9*]                    nest [i<8, j<4]
          acc0 dot= a[i, k], b[k, j]               c[i, j] = 0.0
          y[i, j] = f(acc0)  (after)             nest [i<8, j<4, k<9*]
                                        ->         acc0 dot= a[i, k], b[k, j]
                                                   c[i, j] = c[i, j] + acc0  (after)
                                                 nest [i<8, j<4]
                                                   y[i, j] = f(c[i, j])

    `index`: where in the buffer the sum of a point is, a place of its own; by default at the point.

    Legal with one reduction by addition, in the type of the buffer, whose stores all come behind it.
    """
    (reduction,) = nest.reductions
    free = {dim: size for dim, size in nest.dims.items() if dim not in nest.rdims}
    index = index or tuple(map(Affine.symbol, free))
    held = context.pool.load(buf.dtype, buf, index)
    accumulator = context.pool.accumulator(reduction.dtype, 0)

    def taken(expr: Expr) -> Expr | None:
        return held if isinstance(expr, Accumulator) else None

    change = context.pool.rewriter(taken)
    total = Store(buf, index, context.op("add", buf.dtype, held, accumulator), inner=False)
    return (
        Nest(free, stores=(Store(buf, index, context.const(0, buf.dtype)),), at=nest.at),
        replace(nest, stores=(total,)),
        replace(
            nest,
            dims=free,
            rdims=(),
            reductions=(),
            stores=tuple(store.mapped(change, inner=True) for store in nest.stores),
        ),
    )
