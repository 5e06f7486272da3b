"""Nests that select among arrays by a scalar -> one nest for each choice; a test takes one when the program runs.

    %o[i] = select(%flag[], %a[i], %b[i])

    let %s = %flag[]
    case 0:  %o[i] = %a[i]
    case 1:  %o[i] = %b[i]

The nest reads every array, its copies those that they want: one of a stack that is indexed, or the
old parameters where a step is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.conditions.index_tests import BOOL, with_nests_within
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.version import holds_no_versions, settled, versioned
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Expr,
    Gather,
    Load,
    Nest,
    Op,
    Pool,
    Stmt,
    nodes,
)


@dataclass(frozen=True)
class Unswitch:
    """Copies nests, inner ones too, for the sides of their selects by scalars."""

    fewest_points: int = threshold(512, "points of a nest that is copied")
    most_nodes: int = threshold(120, "operations of a nest that is copied: bounds code size")
    most_copies: int = threshold(12, "copies of a nest: bounds code size")

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        return with_nests_within(
            stmts,
            context.bounds,
            lambda nest, _: self._copies(nest, context, self.most_copies)[0],
            lambda stmt: holds_no_versions(stmt, context),
        )

    def _copies(self, nest: Nest, context: NestContext, most: int) -> tuple[list[Stmt], int]:
        """(statements in the nest's place, how many copies of it they hold)."""
        select = self._choice(nest, context.pool) if most > 1 else None
        if select is None:
            return [nest], 1
        test, name = select.args[0], context.names("%s")
        bodies, room = [], most
        for taken in range(2):
            one_side = settled(nest, test, taken, context.pool)
            body, count = self._copies(one_side, context, room - (taken == 0))
            bodies.append(body)
            room -= count
        return versioned(name, test, bodies, context), most - room

    def _choice(self, nest: Nest, pool: Pool) -> Expr | None:
        """A select by a scalar whose sides each read an array that the other side does without."""
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
            scalar = not test.symbols & nest.dims.keys() and not any(
                isinstance(node, Accumulator) for node in nodes([test])
            )
            if scalar and written.isdisjoint(
                node.buf.root for node in nodes([test]) if isinstance(node, Load | Gather)
            ):
                each = [_arrays(settled(nest, test, taken, pool)) for taken in range(2)]
                if each[0] - each[1] and each[1] - each[0]:
                    return expr
        return None


def _arrays(nest: Nest) -> set[Buf]:
    """Arrays that are read at more than one place."""
    return {load.buf.root for load in nest.loads() if load.symbols & nest.dims.keys()}
