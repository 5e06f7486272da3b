"""Small dimensions, such as the coordinates of points or the channels of pixels, taken apart.

    nest [i<n, c<2]   t[i, c] = f(a[i, c])               nest [i<n]
    nest [i<n]        u[i] = t[i, 0] * t[i, 1]    ->       t[i, 0] = f(a[i, 0])    t[i, 1] = f(a[i, 1])
                                                           u[i] = f(a[i, 0]) * f(a[i, 1])
    nest [i<n, c<2*]  acc sum= a[i, c]            ->     nest [i<n]   0 + a[i, 0] + a[i, 1]

    for i < 100:                                  for i < 100:
      nest [c<2]   s[c] = s[c] + t[c]       ->      nest []   s[0] = s[0] + t[0]    s[1] = s[1] + t[1]

Nests over all components and nests over one then have the same dimensions, and become one
(merge_nests.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.unroll import may_unroll_reductions, unrolled, unrolled_reductions
from pbkern.lower.nest.ir import (
    Buf,
    For,
    If,
    Let,
    Load,
    Nest,
    Stmt,
    While,
    every,
    with_bodies,
    with_nests,
)

Axis = tuple[Buf, int]


@dataclass(frozen=True)
class UnrollSmallDimensions:
    """Takes dimensions over components out of nests whose neighbours use single components."""

    most_components: int = threshold(
        4, "components of a dimension that is taken apart. Source: not recorded"
    )
    fewest_points: int = threshold(32, "points of a nest: fewer are no loop worth having")
    most_nodes: int = threshold(
        160, "operations of a nest after a dimension is taken apart: bounds code size"
    )

    most_loop_points: int = threshold(
        16,
        "points, reduced ones too, of each nest of a loop that is taken apart altogether, with results as many as "
        "components: a matrix of 4 x 4 by a vector. "
        "Source: not recorded",
    )
    most_loop_nodes: int = threshold(
        600, "operations of such a loop: bounds code size and registers. Source: not recorded"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        if context.options.scalar_loops:
            stmts = [self._in_scalars(stmt, context) for stmt in stmts]
        out = [with_bodies(stmt, lambda inner: self(inner, context)) for stmt in stmts]
        most = self.most_components, self.most_nodes, self.fewest_points
        out = [sums_as_expressions(s, context, *most) if isinstance(s, Nest) else s for s in out]
        axes = self._axes_of_components(s for s in out if isinstance(s, Nest))
        while axes:
            changed: list[Nest] = []
            for at, statement in enumerate(out):
                if not isinstance(statement, Nest):
                    continue
                dim = _dimension_over(statement, axes, self)
                if dim is not None:
                    taken_apart = unrolled(statement, dim, context.pool)
                    out[at] = taken_apart
                    changed.append(taken_apart)
            axes = self._axes_of_components(changed)
        return out

    def _in_scalars(self, stmt: Stmt, context: NestContext) -> Stmt:
        """A loop over arrays of few elements as one over single elements; other statements as they are."""
        if not isinstance(stmt, For | While):
            return stmt
        inside = list(every((stmt,)))
        nests = [inner for inner in inside if isinstance(inner, Nest)]
        work = sum(len(nest.nodes()) * math.prod(nest.dims.values()) for nest in nests)
        if (
            not all(isinstance(inner, Nest | Let | If | For | While) for inner in inside)
            or work > self.most_loop_nodes
            or not all(self._is_few(nest) for nest in nests)
        ):
            return with_bodies(stmt, lambda body: [self._in_scalars(s, context) for s in body])
        return with_bodies(
            stmt, lambda body: with_nests(body, lambda nest: [_one_point(nest, context)])
        )

    def _is_few(self, nest: Nest) -> bool:
        points = math.prod(nest.dims.values())
        results = math.prod(size for dim, size in nest.dims.items() if dim not in nest.rdims)
        written_out = may_unroll_reductions(nest) if nest.rdims else not nest.ordered
        few = results <= self.most_components and 1 <= points <= self.most_loop_points
        return few and written_out

    def _axes_of_components(self, nests: Iterable[Nest]) -> set[Axis]:
        """Short axes along which some nest uses single components."""
        return {
            (buf, axis)
            for nest in nests
            for buf, index in _accesses(nest)
            for axis, position in enumerate(index)
            if position.is_const
            and 1 < buf.shape[axis] <= self.most_components
            and math.prod(nest.dims.values()) >= self.fewest_points
        }


def _one_point(nest: Nest, context: NestContext) -> Nest:
    """The nest without dimensions."""
    if nest.rdims:
        nest = unrolled_reductions(nest, context)
    for dim in nest.dims:
        nest = unrolled(nest, dim, context.pool)
    return nest


def _accesses(nest: Nest) -> Iterable[tuple[Buf, tuple[Affine, ...]]]:
    yield from ((load.buf, load.index) for load in nest.loads() if isinstance(load, Load))
    yield from ((store.buf, store.index) for store in nest.stores)


def _dimension_over(nest: Nest, axes: set[Axis], limits: UnrollSmallDimensions) -> str | None:
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
                    points >= limits.fewest_points
                    and nest.dims[dim] * len(nest.nodes()) <= limits.most_nodes
                    and nest.dims[dim] == buf.shape[axis]
                ):
                    return dim
    return None


def sums_as_expressions(
    nest: Nest, context, most: int, most_nodes: int, fewest_points: int
) -> Nest:
    """A nest whose reductions are over `most` elements, at most, as one without, if it has enough points."""
    count = math.prod(nest.dims[rdim] for rdim in nest.rdims)
    points = math.prod(size for dim, size in nest.dims.items() if dim not in nest.rdims)
    if not nest.reductions or not 1 <= count <= most or points < fewest_points:
        return nest
    if count * len(nest.nodes()) > most_nodes or not may_unroll_reductions(nest):
        return nest
    return unrolled_reductions(nest, context)
