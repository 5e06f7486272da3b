"""A dimension of a nest -> a store, or a term, of its own for each of its points."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Accumulator, Expr, Nest, Pool, Reduction
from pbkern.lower.nest.reductions import REDUCTIONS

# Reductions that can be written out term by term.
WRITTEN_OUT = ("sum", "dot", "prod", "max", "min")


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


def unrolled_reductions(nest: Nest, context: Any) -> Nest:
    """The nest without its reduced dimensions: expressions of all terms in place of accumulators.

        nest [i<8, k<2*]                nest [i<8]
          acc0 sum= x[i, k]      ->       y[i] = 0 + x[i, 0] + x[i, 1]
          y[i] = acc0  (after)

    Legal where `may_unroll_reductions`.
    """
    sums = []
    for reduction in nest.reductions:
        total = context.const(REDUCTIONS[reduction.op].identity(reduction.dtype), reduction.dtype)
        for point in itertools.product(*(range(nest.dims[rdim]) for rdim in nest.rdims)):
            places: dict[str, Affine] = {
                rdim: Affine((), at) for rdim, at in zip(nest.rdims, point)
            }
            args = tuple(context.pool.rename(arg, places) for arg in reduction.args)
            term = single_term(replace(reduction, args=args), context)
            total = context.op(REDUCTIONS[reduction.op].primitive, reduction.dtype, total, term)
        sums.append(total)
    dims = {dim: size for dim, size in nest.dims.items() if dim not in nest.rdims}
    return with_results(replace(nest, dims=dims, rdims=()), sums, context.pool)


def may_unroll_reductions(nest: Nest) -> bool:
    """Whether results of reductions are stored behind them alone, and expressions in their types can compute them."""
    return (
        not nest.ordered
        and not any(store.inner for store in nest.stores)
        and all(
            reduction.op in WRITTEN_OUT
            and reduction.dtype.kind in "iuf"
            and all(arg.dtype == reduction.dtype for arg in reduction.args)
            for reduction in nest.reductions
        )
    )


def single_term(reduction: Reduction, context: Any) -> Expr:
    """The result of a reduction over one element."""
    if reduction.op in ("argmax", "argmin"):
        return reduction.args[1]  # the place, not the element
    if reduction.is_product:
        return context.op("mul", reduction.dtype, *reduction.args)
    return reduction.args[0]


def with_results(nest: Nest, results: list[Expr], pool: Pool) -> Nest:
    """The nest without reductions, which stores expressions in place of their results."""

    def result(expr: Expr) -> Expr | None:
        return results[expr.number] if isinstance(expr, Accumulator) else None

    rewrite = pool.rewriter(result)
    stores = tuple(store.mapped(rewrite, inner=True) for store in nest.stores)
    return replace(nest, reductions=(), stores=stores)
