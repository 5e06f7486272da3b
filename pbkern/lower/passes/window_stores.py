"""Nests that change a window of what they store -> nests over the window.

    for i < 4096: %a[i] = %a[i] + select(0 <= i - %s < 256, %t[i - %s]?, 0)

    for i < 256: %a[i + %s] = %a[i + %s] + %t[i]

Updates of slices, and sums of their derivatives, are such nests: each program, or each round of a
loop, would walk all of an array for the sake of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.conditions.index_tests import Bounds, interval, with_nests_within
from pbkern.lower.nest.context import BOOL, INT32, NestContext
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.rename import moved
from pbkern.lower.nest.ir import (
    Block,
    Const,
    Expr,
    For,
    Gather,
    If,
    InRange,
    Let,
    Load,
    Nest,
    Op,
    Pool,
    Stmt,
    Store,
    While,
    every,
    nodes,
    with_bodies,
)


@dataclass(frozen=True)
class WalkWindows:
    """Narrows nests, inner ones too."""

    fewest_points: int = threshold(
        128,
        "points of a nest that is worth it: fewer are some vectors, which a loop may keep in registers. Source: not recorded",
    )
    fewest_windows: int = threshold(2, "windows that a dimension has room for, to be worth it")

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        return with_nests_within(
            _with_one_name(stmts, context.pool, _chosen_by(stmts), is_inner=False),
            context.bounds,
            lambda nest, bounds: self._narrowed(nest, bounds, context),
        )

    def _narrowed(self, nest: Nest, bounds: Bounds, context: NestContext) -> list[Stmt]:
        if nest.ordered or nest.reductions or nest.moves():
            return [nest]
        is_tile = context.options.one_case and all(store.buf.arena for store in nest.stores)
        if is_tile or math.prod(nest.dims.values()) < self.fewest_points:
            return [nest]
        parts = [replace(nest, stores=(store,)) for store in nest.stores]
        windows = [self._windows(alone, context) for alone in parts]
        if not all(windows):
            return [nest]
        if any(of_one != windows[0] for of_one in windows[1:]):
            if any(_touches(one, two) for one in parts for two in parts if one is not two):
                return [nest]
            return [stmt for one in parts for stmt in self._narrowed(one, bounds, context)]
        out: list[Stmt] = []
        for dim, (first, width) in windows[0].items():
            last = nest.dims[dim] - width
            reach = interval(first, bounds)
            if reach is None or reach[0] < 0 or reach[1] > last:
                name = context.names("%w")
                out.append(Let(name, context.clamped(context.pool.index(INT32, first), last)))
                context.bounds[name] = 0, last
                first = Affine.symbol(name)
            nest = part(nest, dim, first, width, context.pool)
        return [*out, nest]

    def _windows(self, nest: Nest, context: NestContext) -> dict[str, tuple[Affine, int]]:
        """dimension -> (first point, number of points) outside which the nest's store changes nothing."""
        (store,) = nest.stores
        windows: dict[str, tuple[Affine, int]] = {}
        for test in nest.nodes():
            if not isinstance(test, InRange) or len(test.symbols & nest.dims.keys()) != 1:
                continue
            (dim,) = test.symbols & nest.dims.keys()
            step, width = test.affine.coefficient(dim), test.high - test.low
            least = min(windows[dim][1] if dim in windows else nest.dims[dim], nest.dims[dim])
            is_narrow = 0 < width < least and width * self.fewest_windows <= nest.dims[dim]
            if abs(step) == 1 and is_narrow and _only_where(store, test, context):
                rest = test.affine - Affine.symbol(dim, step)
                first = rest * -1 + test.low if step == 1 else rest - (test.high - 1)
                windows[dim] = first, width
        return windows


def _only_where(store: Store, test: Expr, context: NestContext) -> bool:
    """Whether a store changes its buffer only where a test holds."""
    false = context.pool.const(BOOL, np.False_)

    def folded(node: Expr) -> Expr | None:
        if node is test:
            return false
        if not isinstance(node, Op):
            return None
        name, args = node.info.primitive, node.args
        if name == "and" and false in args:
            return false
        if name == "select_n" and args[0] is false:
            return args[1]
        if name == "add" and context.options.contract:  # a sum of zeros may have another sign
            return next((args[1 - n] for n in range(2) if _is_zero(args[n])), None)
        return None

    fold = context.pool.rewriter(folded)
    if store.mask is not None and fold(store.mask) is false:
        return True
    value = fold(store.value)
    return isinstance(value, Load) and value.access == (store.buf, store.index)


def _is_zero(expr: Expr) -> bool:
    return isinstance(expr, Const) and bool(expr.value == 0)


def _touches(nest: Nest, other: Nest) -> bool:
    """Whether a nest loads what another one stores, or stores there too."""
    stored = {store.buf.root for store in other.stores}
    touched = [load.access[0].root for load in nest.loads()]
    return not stored.isdisjoint((*touched, *(store.buf.root for store in nest.stores)))


def _chosen_by(stmts: Sequence[Stmt]) -> set[int | str]:
    """Names of Lets by which statements choose what they do."""
    names: set[int | str] = set()
    for stmt in every(stmts):
        match stmt:
            case If(index=name) | For(trips=name) | While(predicate=name):
                names.add(name)
    return names


def _with_one_name(
    stmts: Sequence[Stmt], pool: Pool, chosen: set[int | str], is_inner: bool = True
) -> list[Stmt]:
    """The statements with one name for Lets beside each other that have the same value, which no store can change.

    `is_inner`: nobody else reads the others, which are left out.
    """
    names: dict[Expr, str] = {}
    places: dict[str, Affine] = {}
    out: list[Stmt] = []
    for stmt in stmts:
        (stmt,) = moved([stmt], places, pool) if places else (stmt,)
        if isinstance(stmt, Let) and stmt.name not in chosen:
            if stmt.value in names:
                places[stmt.name] = Affine.symbol(names[stmt.value])
                out += [] if is_inner else [stmt]
                continue
            if not any(isinstance(node, Load | Gather) for node in nodes([stmt.value])):
                names[stmt.value] = stmt.name
        out.append(with_bodies(stmt, lambda block: _block(block, pool, chosen)))
    return out


def _block(stmts: Block, pool: Pool, chosen: set[int | str]) -> Block:
    return tuple(_with_one_name(stmts, pool, chosen))
