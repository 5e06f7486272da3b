"""Gathers of windows that start where outer dimensions say -> loads in a loop over these dimensions.

    %o[n, i, j, c] = %x[gather (n), (i) + s[n], (j) + t[n], (c)]

    for %n < N:
      let %s = s[%n]
      let %t = t[%n]
      %o[%n, i, j, c] = %x[%n, i + %s, j + %t, c]

A random crop of each image is such a nest. Once a window's start is a scalar, its places are
affine: where a pixel's channels do not fill a vector, vectors cross pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.addresses import is_written
from pbkern.lower.nest.conditions.index_tests import Bounds, Folder, with_nests_within
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.ir import (
    Expr,
    For,
    Gather,
    IndexValue,
    Let,
    Nest,
    Op,
    Stmt,
)


@dataclass(frozen=True)
class _Start:
    """An index of a window: `within`, which is affine, plus `start`, the same throughout the window."""

    within: Affine
    start: Expr

    def named(self, names: dict[Expr, str]) -> Affine:
        return self.within + Affine.symbol(names[self.start])


@dataclass(frozen=True)
class LoopOverWindowStarts:
    """Makes the loops, in inner statements too."""

    fewest_points: int = threshold(512, "points of a window that is worth a loop")

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        def looped(nest: Nest, bounds: Bounds) -> list[Stmt]:
            windows = _windows(nest, context, bounds, self.fewest_points)
            return [_loop(nest, windows, context) if windows else nest]

        return with_nests_within(stmts, context.bounds, looped)


def _loop(nest: Nest, windows: dict[Gather, list[_Start]], context: NestContext) -> Stmt:
    """Loops over the dimensions that starts of windows depend on, around the nest on one window of each."""
    outer = _outer(nest, windows)
    counters = {outer_dim: context.names("%w") for outer_dim in outer}
    places = {outer_dim: Affine.symbol(counter) for outer_dim, counter in counters.items()}
    rename = context.pool.renamer(places)
    names: dict[Expr, str] = {}
    for starts in windows.values():
        for window_start in starts:
            names.setdefault(window_start.start, context.names("%s"))

    def loaded(expr: Expr) -> Expr | None:
        if not isinstance(expr, Gather) or expr not in windows:
            return None
        starts = iter(windows[expr])
        index = tuple(next(starts).named(names) if i is None else i for i in expr.index)
        return context.pool.load(expr.dtype, expr.buf, index, False)

    dims = {dim: size for dim, size in nest.dims.items() if dim not in counters}
    body = renamed(nest.mapped(context.pool.rewriter(loaded)), places, dims, context.pool)
    stmts: list[Stmt] = [*(Let(name, rename(start)) for start, name in names.items()), body]
    for dim in reversed(outer):
        stmts = [For(counters[dim], nest.dims[dim], tuple(stmts))]
    return stmts[0]


def _windows(
    nest: Nest, context: NestContext, bounds: Bounds, fewest_points: int
) -> dict[Gather, list[_Start]]:
    """Gathers of windows -> the starts along their gathered axes. Empty where a loop would not pay."""
    if nest.ordered or nest.moves() or any(is_written(load, nest) for load in nest.loads()):
        return {}
    fold = Folder(
        context.pool, {**bounds, **{dim: (0, max(size - 1, 0)) for dim, size in nest.dims.items()}}
    )
    starts_of = {
        node: _starts(node, fold, context) for node in nest.nodes() if isinstance(node, Gather)
    }
    windows = {gather: starts for gather, starts in starts_of.items() if starts}
    outer = _outer(nest, windows)
    inner = [dim for dim in nest.dims if dim not in outer]
    within = {
        symbol for starts in windows.values() for start in starts for symbol in start.within.symbols
    }
    if (
        not outer
        or any(dim in nest.rdims for dim in outer)
        or math.prod(nest.dims[dim] for dim in inner) < fewest_points
    ):
        return {}
    widest = max(window.dtype.itemsize for window in windows)
    short = (
        nest.dims[inner[-1]] * widest < context.policy.step_bytes
    )  # rows of whole vectors are as fast where they are
    return windows if short and within.intersection(inner[:-1]) else {}


def _outer(nest: Nest, windows: dict[Gather, list[_Start]]) -> list[str]:
    """Dimensions that starts depend on."""
    symbols = {
        symbol for starts in windows.values() for start in starts for symbol in start.start.symbols
    }
    return [dim for dim in nest.dims if dim in symbols]


def _starts(gather: Gather, fold: Folder, context) -> list[_Start]:
    """The starts of a gather that certainly stays inside of its array; empty for others."""
    buf, index = gather.access
    extents = [size for position, size in zip(index, buf.shape) if position is None]
    starts = []
    for arg, extent in zip(gather.args, extents):
        bounds = fold.values_of(arg)
        if bounds is None or bounds[0] < 0 or bounds[1] >= extent:
            return []
        terms = list(_terms(arg))
        rest = [term for term in terms if not isinstance(term, IndexValue)]
        if not rest:
            return []
        within: Affine = sum(
            (term.affine for term in terms if isinstance(term, IndexValue)), Affine()
        )
        starts.append(
            _Start(
                within,
                functools.reduce(
                    lambda left, right: context.op("add", left.dtype, left, right), rest
                ),
            )
        )
    return starts


def _terms(expr: Expr) -> Iterator[Expr]:
    """Terms of a sum that does not wrap."""
    if isinstance(expr, Op) and expr.info.primitive == "add":
        for arg in expr.args:
            yield from _terms(arg)
    else:
        yield expr
