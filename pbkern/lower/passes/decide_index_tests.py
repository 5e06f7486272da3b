"""Statements -> statements with index tests decided where they can be, and nests cut where a test changes.

Where a test depends on one dimension alone, the nest is cut at the boundary, so that the interior
runs without masks and only thin edges differ:

    for j < 600: y[j] = select(3 <= j < 597, x[j - 3]?, 0)    ->    for j < 3: y[j] = 0
                                                                    for j < 594: y[j + 3] = x[j]
                                                                    for j < 3: y[j + 597] = 0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.addresses import is_written
from pbkern.lower.nest.conditions.index_tests import Bounds, simplified, with_nests_within
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.ir import InRange, Nest, Pool, Stmt


@dataclass(frozen=True)
class DecideIndexTests:
    """Folds tests and cuts nests, inner statements too."""

    fewest_points: int = threshold(
        512, "points of a nest that is cut: fewer are not worth several copies of its code"
    )
    most_pieces: int = threshold(9, "pieces of a nest: bounds code size")
    most_cuts: int = threshold(4, "places at which one dimension is cut. Source: not recorded")
    long_row_vectors: int = threshold(
        16, "vectors of a row that is so long that it counts where they start"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        pool, options = context.pool, context.options

        def decided(nest: Nest, bounds: Bounds) -> list[Stmt]:
            nest = simplified(nest, pool, bounds)
            if options.one_case and all(store.buf.arena for store in nest.stores):
                return [nest]  # what tiles are made of is read as a whole
            pieces = self._cut(nest, pool, options.cut_bytes)
            return [simplified(piece, pool, bounds) for piece in pieces]

        return with_nests_within(stmts, context.bounds, decided)

    def _cut(self, nest: Nest, pool: Pool, cut_bytes: int) -> list[Nest]:
        """Pieces of the nest between the boundaries of its tests."""
        if (
            nest.ordered
            or math.prod(nest.dims.values()) < self.fewest_points
            or _carries_between_points(nest)
        ):
            return [nest]
        pieces = [nest]
        for dim in list(nest.dims):
            if dim in nest.rdims:
                continue
            cuts = self._boundaries(nest, dim, cut_bytes)
            if cuts and len(pieces) * (len(cuts) + 1) <= self.most_pieces:
                edges = [0, *cuts, nest.dims[dim]]
                pieces = [
                    part(piece, dim, Affine((), low), high - low, pool)
                    for piece in pieces
                    for low, high in itertools.pairwise(edges)
                ]
        return pieces

    def _boundaries(self, nest: Nest, dim: str, cut_bytes: int) -> list[int]:
        """Places where tests on `dim` alone change, if few."""
        cuts: set[int] = set()
        for node in nest.nodes():
            if (
                isinstance(node, InRange)
                and node.symbols == {dim}
                and abs(node.affine.coefficient(dim)) == 1
            ):
                affine, low, high = node.affine, node.low, node.high
                if affine.coefficient(dim) == 1:
                    cuts |= {low - affine.const, high - affine.const}
                else:
                    cuts |= {affine.const - low + 1, affine.const - high + 1}
        inner = sorted(
            {
                end
                for cut in cuts
                if 0 < cut < nest.dims[dim]
                for end in self._around(nest, dim, cut, cut_bytes)
            }
            - {0, nest.dims[dim]}
        )
        return inner if len(inner) <= self.most_cuts else []

    def _around(self, nest: Nest, dim: str, cut: int, cut_bytes: int) -> tuple[int, ...]:
        """The ends of the vector that a cut divides, where results are long rows along `dim`.

        Pieces between such ends start at a vector.
        """
        lanes = max(cut_bytes // max(store.buf.dtype.itemsize for store in nest.stores), 1)
        starts = {
            store.index[-1].const % lanes
            for store in nest.stores
            if store.index and store.index[-1].coefficient(dim) == 1
        }
        if len(starts) != 1 or nest.dims[dim] < self.long_row_vectors * lanes:
            return (cut,)
        (start,) = starts
        low = (cut + start) // lanes * lanes - start
        return (cut,) if low == cut else (max(low, 0), min(low + lanes, nest.dims[dim]))


def _carries_between_points(nest: Nest) -> bool:
    """Whether one point may read what another writes: then the order of points matters."""
    written = {store.buf.root: store for store in nest.stores}
    return any(
        is_written(load, nest) and load.index != written[load.buf.root].index
        for load in nest.loads()
    )
