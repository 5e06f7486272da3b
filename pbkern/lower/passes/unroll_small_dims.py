"""Small dimensions, such as the coordinates of points or the channels of pixels, taken apart.

    nest [i<n, c<2]   t[i, c] = f(a[i, c])               nest [i<n]
    nest [i<n]        u[i] = t[i, 0] * t[i, 1]    ->       t[i, 0] = f(a[i, 0])    t[i, 1] = f(a[i, 1])
                                                           u[i] = f(a[i, 0]) * f(a[i, 1])
    nest [i<n, c<2*]  acc sum= a[i, c]            ->     nest [i<n]   0 + a[i, 0] + a[i, 1]

Nests over all components and nests over one then have the same dimensions, and become one
(merge_nests.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from pbkern.core.affine import Affine
from pbkern.lower.nest.edit.unroll import unrolled
from pbkern.lower.nest.ir import Accumulator, Buf, Expr, Load, Nest, Stmt, with_bodies
from pbkern.lower.nest.reductions import IDENTITY

# Most components of a dimension that is taken apart. Source: not recorded.
MOST_COMPONENTS = 4
# Most nodes of a nest after a dimension is taken apart: bounds code size.
MOST_UNROLLED_NODES = 160
# Fewer points than this are no loop worth having.
FEW_POINTS = 32

Axis = tuple[Buf, int]
OPERATION = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}


def unroll_dims(stmts: Sequence[Stmt], context) -> list[Stmt]:
    """Statements in which dimensions over components are gone from nests whose neighbours use single components."""
    out = [with_bodies(stmt, lambda inner: unroll_dims(inner, context)) for stmt in stmts]
    out = [sums_as_expressions(s, context) if isinstance(s, Nest) else s for s in out]
    axes = _axes_of_components(s for s in out if isinstance(s, Nest))
    while axes:
        changed: list[Nest] = []
        for at, statement in enumerate(out):
            if (
                isinstance(statement, Nest)
                and (dim := _dimension_over(statement, axes)) is not None
            ):
                nest = unrolled(statement, dim, context.pool)
                out[at] = nest
                changed.append(nest)
        axes = _axes_of_components(changed)
    return out


def _accesses(nest: Nest) -> Iterable[tuple[Buf, tuple[Affine, ...]]]:
    yield from ((load.buf, load.index) for load in nest.loads() if isinstance(load, Load))
    yield from ((store.buf, store.index) for store in nest.stores)


def _axes_of_components(nests: Iterable[Nest]) -> set[Axis]:
    """Short axes along which some nest uses single components."""
    return {
        (buf, axis)
        for nest in nests
        for buf, index in _accesses(nest)
        for axis, position in enumerate(index)
        if position.is_const
        and 1 < buf.shape[axis] <= MOST_COMPONENTS
        and math.prod(nest.dims.values()) >= FEW_POINTS
    }


def _dimension_over(nest: Nest, axes: set[Axis]) -> str | None:
    """A dimension that runs over the components of one of the axes and can be unrolled."""
    if nest.rdims or nest.ordered:
        return None
    for buf, index in _accesses(nest):
        for axis, position in enumerate(index):
            if (
                (buf, axis) in axes
                and len(position.terms) == 1
                and position.terms[0][0] in nest.dims
            ):
                dim = position.terms[0][0]
                points = math.prod(nest.dims.values()) // max(nest.dims[dim], 1)
                if (
                    points >= FEW_POINTS
                    and nest.dims[dim] * len(nest.nodes()) <= MOST_UNROLLED_NODES
                    and nest.dims[dim] == buf.shape[axis]
                ):
                    return dim
    return None


def sums_as_expressions(
    nest: Nest, context, most: int = MOST_COMPONENTS, most_nodes: int = MOST_UNROLLED_NODES
) -> Nest:
    """A nest whose reductions are over `most` elements, at most, as one without."""
    count = math.prod(nest.dims[rdim] for rdim in nest.rdims)
    points = math.prod(size for dim, size in nest.dims.items() if dim not in nest.rdims)
    if not nest.reductions or nest.ordered or not 1 <= count <= most or points < FEW_POINTS:
        return nest
    if count * len(nest.nodes()) > most_nodes or any(store.inner for store in nest.stores):
        return nest
    if any(
        reducer.op not in (*OPERATION, "dot")
        or reducer.dtype.kind not in "iuf"
        or any(arg.dtype != reducer.dtype for arg in reducer.args)
        for reducer in nest.reductions
    ):
        return nest
    sums = []
    for reduction in nest.reductions:
        total = context.const(IDENTITY[reduction.op](reduction.dtype), reduction.dtype)
        for place in itertools.product(*(range(nest.dims[rdim]) for rdim in nest.rdims)):
            term = _term(
                reduction,
                {rdim: Affine((), coord) for rdim, coord in zip(nest.rdims, place)},
                context,
            )
            total = context.op(OPERATION.get(reduction.op, "add"), reduction.dtype, total, term)
        sums.append(total)

    def replace(expr: Expr) -> Expr | None:
        return sums[expr.number] if isinstance(expr, Accumulator) else None

    stores = [store.mapped(context.pool.rewriter(replace), inner=True) for store in nest.stores]
    return Nest(
        {dim: size for dim, size in nest.dims.items() if dim not in nest.rdims},
        stores=tuple(stores),
        at=nest.at,
    )


def _term(reduction, at: dict, context) -> Expr:
    args = [context.pool.rename(arg, at) for arg in reduction.args]
    return context.op("mul", reduction.dtype, *args) if reduction.is_product else args[0]
