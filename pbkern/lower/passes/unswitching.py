"""Nests that select among arrays by a scalar -> one nest for each choice; a test takes one when the program runs.

    %o[i] = select(%flag[], %a[i], %b[i])

    let %s = %flag[]
    case 0:  %o[i] = %a[i]
    case 1:  %o[i] = %b[i]

The nest reads every array, its copies those that they want: one of a stack that is indexed, or the
old parameters where a step is skipped.

A test that differs between long rows is made for each row:

    %o[r, c] = select(%m[r], 0, %a[r, c])     ->     for %i < rows:
                                                       let %s = %m[%i]
                                                       case 0:  %o[%i, c] = 0
                                                       case 1:  %o[%i, c] = %a[%i, c]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.conditions.index_tests import BOOL, with_nests_within
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.version import holds_no_versions, settled, versioned
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Expr,
    For,
    Gather,
    Load,
    Nest,
    Op,
    Pool,
    Shifted,
    Stmt,
    nodes,
)


@dataclass(frozen=True)
class Unswitch:
    """Copies nests, inner ones too, for the sides of their selects by scalars, and by rows in a loop over these."""

    fewest_points: int = threshold(512, "points of a nest that is copied")
    fewest_row_points: int = threshold(
        512, "points of the shortest row that is worth a branch. Source: that of fewest_points"
    )
    most_nodes: int = threshold(120, "operations of a nest that is copied: bounds code size")
    most_copies: int = threshold(12, "copies of a nest: bounds code size")

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        return with_nests_within(
            stmts,
            context.bounds,
            lambda nest, _: self._row_by_row(nest, context),
            lambda stmt: holds_no_versions(stmt, context),
        )

    def _row_by_row(self, nest: Nest, context: NestContext) -> list[Stmt]:
        """The nest, or loops over the dimensions between which a test differs."""
        dims = self._tested_dims(nest, context.pool)
        if not dims:
            return self._copies(nest, context, self.most_copies)[0]
        counters = {dim: context.names("%i") for dim in dims}
        row = functools.reduce(
            lambda nest, dim: part(nest, dim, Affine.symbol(counters[dim]), 1, context.pool),
            dims,
            nest,
        )
        stmts = self._copies(row, context, self.most_copies, one_side=True)[0]
        for dim, counter in reversed(counters.items()):
            stmts = [For(counter, nest.dims[dim], tuple(stmts))]
        return stmts

    def _tested_dims(self, nest: Nest, pool: Pool) -> list[str]:
        """The dimensions of the outermost select's test, if the points of the others are a long row; none if no test suits."""
        read = {load.buf.root for load in nest.loads()}
        if nest.reductions or not read.isdisjoint(store.buf.root for store in nest.stores):
            return []
        select = self._choice(nest, pool, one_side=True, by_rows=True)
        if select is None:
            return []
        dims = [dim for dim in nest.dims if dim in select.args[0].symbols]
        # A row reads what others compute: their test is another.
        moved = {dim for node in nest.nodes() if isinstance(node, Shifted) for dim, _ in node.moves}
        return dims if moved.isdisjoint(dims) else []

    def _copies(
        self, nest: Nest, context: NestContext, most: int, one_side: bool = False
    ) -> tuple[list[Stmt], int]:
        """(statements in the nest's place, how many copies of it they hold)."""
        select = self._choice(nest, context.pool, one_side) if most > 1 else None
        if select is None:
            return [nest], 1
        test, name = select.args[0], context.names("%s")
        bodies, room = [], most
        for taken in range(2):
            side = settled(nest, test, taken, context.pool)
            body, count = self._copies(side, context, room - (taken == 0), one_side)
            bodies.append(body)
            room -= count
        return versioned(name, test, bodies, context), most - room

    def _choice(
        self, nest: Nest, pool: Pool, one_side: bool = False, by_rows: bool = False
    ) -> Expr | None:
        """A select by a scalar whose sides each read an array that the other side does without.

        Args:
          nest: the nest.
          pool: of its expressions.
          one_side: whether one such side is enough.
          by_rows: whether the test differs between rows of enough points, in place of being a scalar.
        """
        every = nest.nodes()
        if (
            nest.ordered
            or len(every) > self.most_nodes
            or math.prod(nest.dims.values()) < self.fewest_points
        ):
            return None
        if any(reduction.is_product for reduction in nest.reductions):
            return None
        written = {store.buf.root for store in nest.stores}
        for expr in reversed(every):  # the outermost of a chain first: one side of it is settled
            if (
                not isinstance(expr, Op)
                or expr.info.primitive != "select_n"
                or len(expr.args) != 3
                or expr.args[0].dtype != BOOL
            ):
                continue
            test = expr.args[0]
            is_scalar = not test.symbols & nest.dims.keys()
            suits = self._differs_between_rows(test, nest) if by_rows else is_scalar
            read = nodes([test])
            if (
                suits
                and not any(isinstance(node, Accumulator) for node in read)
                and written.isdisjoint(
                    node.buf.root for node in read if isinstance(node, Load | Gather)
                )
            ):
                each = [_arrays(settled(nest, test, taken, pool)) for taken in range(2)]
                only = [bool(each[0] - each[1]), bool(each[1] - each[0])]
                if any(only) if one_side else all(only):
                    return expr
        return None

    def _differs_between_rows(self, test: Expr, nest: Nest) -> bool:
        """Whether a test depends on the outermost dimensions alone, and the others have many points."""
        dims = [dim for dim, size in nest.dims.items() if size > 1]
        tested = [dim for dim in dims if dim in test.symbols]
        row = math.prod(nest.dims[dim] for dim in dims[len(tested) :])
        return bool(tested) and tested == dims[: len(tested)] and row >= self.fewest_row_points


def _arrays(nest: Nest) -> set[Buf]:
    """Arrays that are read at more than one place."""
    return {load.buf.root for load in nest.loads() if load.symbols & nest.dims.keys()}
