"""Nests whose masks hold for most programs -> two nests; a test chooses one when the program runs.

    %t[r, c] = where(64 * %g0 + r < 500, %a[64 * %g0 + r, c]?, 0)     for 64 rows r

    let %all = 64 * %g0 + 63 < 500
    case 0:  the nest as it is
    case 1:  %t[r, c] = %a[64 * %g0 + r, c]

Masks cut off what is outside an array, so that inner programs, or rounds of a loop, would pay for
those at the ends. A test that moves one way along each dimension holds at all points, and at those
at a distance, if it does at the corner where it is hardest. Where a range fails for most programs, the test is of its opposite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.grid import block_shift
from pbkern.lower.nest.conditions.index_tests import (
    BOOL,
    UNBOUNDED,
    Bounds,
    Folder,
    interval,
    simplified,
    with_nests_within,
)
from pbkern.lower.nest.conditions.repeated_tests import without_repeated_tests
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.version import holds_no_versions, versioned
from pbkern.lower.nest.ir import Const, Expr, InRange, Nest, Op, Pool, Stmt
from pbkern.lower.values.dynamic_strides import ORDERS, steps_along

INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class VersionMasks:
    """Cuts nests with masks in two variants, inner statements too."""

    fewest_points: int = threshold(512, "points of a nest that is worth a second copy")
    most_tests: int = threshold(
        6, "tests of a nest that is worth a second copy. Source: not recorded"
    )
    most_nodes: int = threshold(
        120, "operations of a nest that is worth a second copy: bounds code size"
    )
    fewest_programs: int = threshold(
        4, "programs along each dimension from which on those in the middle stand for most"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        return with_nests_within(
            stmts,
            context.bounds,
            lambda nest, bounds: self._variants(nest, context, bounds),
            lambda stmt: holds_no_versions(stmt, context),
        )

    def _variants(self, nest: Nest, context: NestContext, bounds: Bounds) -> list[Stmt]:
        nest = without_repeated_tests(nest, context.pool)
        tests, fold = self._tests(nest, context.pool), Folder(context.pool, bounds)
        tests = [self._usual(test, nest, context.pool, bounds) for test in tests]
        conditions = list(
            dict.fromkeys(
                fold(condition) for test in tests for condition in _conditions(test, nest, context)
            )
        )
        if not tests or any(
            isinstance(condition, Const) and not condition.value for condition in conditions
        ):  # they hold for no program
            return [nest]
        name = context.names("%s")
        all_hold = functools.reduce(
            lambda left, right: context.op("and", BOOL, left, right), conditions
        )
        plain = simplified(nest, context.pool, bounds, tests)
        return versioned(name, all_hold, ([nest], [plain]), context)

    def _tests(self, nest: Nest, pool: Pool) -> list[Expr]:
        """Tests that move with the nest's points and with what is around it; none where a second copy is not worth it."""
        if (
            nest.ordered
            or math.prod(nest.dims.values()) < self.fewest_points
            or any(reduction.is_product for reduction in nest.reductions)
        ):
            return []
        every = nest.nodes()
        tests = [
            expr
            for expr in every
            if expr.symbols & nest.dims.keys() and _hardest(expr, nest, pool) is not None
        ]
        if (
            len(tests) > self.most_tests
            or len(every) > self.most_nodes
            or any(map(_overlaps, tests))
        ):
            return []
        return tests

    def _usual(self, test: Expr, nest: Nest, pool: Pool, bounds: Bounds) -> Expr:
        """A test that is open to one side, or the opposite where that holds at all points in the middle of `bounds`.

        In the first of many blocks, elements come from the last ones: in all others none does, `i < 100` fails everywhere.
        """
        around = test.symbols - nest.dims.keys()
        if not isinstance(test, InRange) or not around <= bounds.keys():
            return test
        if any(
            bounds[symbol][1] - bounds[symbol][0] < self.fewest_programs - 1 for symbol in around
        ):
            return test
        low, high = test.low, test.high
        opposite = (high, UNBOUNDED) if low <= -UNBOUNDED else (-UNBOUNDED, low)
        extents = nest.extents()

        def middle(symbol) -> tuple[int, int]:
            if symbol in extents:
                return 0, extents[symbol] - 1
            centre = sum(bounds[symbol]) // 2
            return centre, centre

        values = interval(test.affine, {symbol: middle(symbol) for symbol in test.symbols})
        if values is None or not (opposite[0] <= values[0] and values[1] < opposite[1]):
            return test
        return pool.in_range(test.affine, *opposite)


def _hardest(test: Expr, nest: Nest, pool: Pool) -> dict[str, Affine] | None:
    """The point of a nest where a test is hardest to pass; None where that is not known, or no program may pass it."""
    sign = _direction(test)
    if sign == 0:
        return None
    corner: dict[str, Affine] = {}
    for dim, extent in nest.extents().items():
        step = _step(test, dim)
        if step is None:
            return None
        corner[dim] = Affine((), extent - 1 if step * sign > 0 else 0)
    around = pool.rename(test, corner)
    return corner if around.symbols or isinstance(around, Op) else None


def _conditions(test: Expr, nest: Nest, context: NestContext) -> list[Expr]:
    """Scalars under which a test holds at all points."""
    hardest = _hardest(test, nest, context.pool)
    assert hardest is not None, "the others are no tests of the nest"
    conditions = [context.pool.rename(test, hardest)]
    for x in (
        arg for arg in test.args if arg.symbols & nest.dims.keys()
    ):  # which must not wrap around in between
        rises = {dim: (steps_along(x, dim).step or 0) > 0 for dim in nest.dims}
        least, greatest = (context.pool.rename(x, _corner(nest, rises, up)) for up in (False, True))
        conditions.append(context.op("le", BOOL, least, greatest))
    return conditions


def _corner(nest: Nest, rises: dict[str, bool], up: bool) -> dict[str, Affine]:
    """Corner where what rises, or falls, along each dimension is greatest; least if not `up`."""
    return {
        dim: Affine((), extent - 1 if rises[dim] is up else 0)
        for dim, extent in nest.extents().items()
    }


def _overlaps(test: Expr) -> bool:
    """Whether it moves with a block that may overlap the one before, which must store the same (lower/grid/block_shift.py)."""
    return any(str(symbol).startswith(block_shift.PREFIX) for symbol in test.symbols)


def _direction(test: Expr) -> int:
    """1 where a test of an order holds for small values of what it compares, -1 where for large ones; 0 for others."""
    if isinstance(test, InRange):
        return 1 if test.low <= -UNBOUNDED else -1 if test.high >= UNBOUNDED else 0
    if not isinstance(test, Op) or test.info.primitive not in ORDERS:
        return 0
    return 1 if test.info.primitive in ("lt", "le") else -1


def _step(test: Expr, dim: str) -> int | None:
    """Step along a dimension of what a test compares: a range's expression, or the difference of two operands."""
    if isinstance(test, InRange):
        return test.affine.coefficient(dim)
    if test.args[0].dtype.kind != "i" or test.args[0].dtype.itemsize < 4:
        return None
    x, y = (steps_along(arg, dim) for arg in test.args)
    return None if x.step is None or y.step is None or x.bends or y.bends else x.step - y.step
