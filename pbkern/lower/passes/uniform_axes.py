"""Scratch that is the same all along an axis -> scratch with one position there, computed and stored once.

Kernels for TPUs keep each statistic of a row in as many copies as a vector has lanes. Before -> after:

    for r, lane: m[r, lane] = max(m[r, lane], s[r])       for r:    m[r, 0] = max(m[r, 0], s[r])
    for r, k:    p[r, k] = exp(x[r, k] - m[r, k])         for r, k: p[r, k] = exp(x[r, k] - m[r, 0])

An axis of a buffer is uniform if every store covers all of it with a value that does not vary along
it. Such a value may be made of uniform buffers, and of what the buffer itself held before: the
largest set of axes that are uniform together is what remains of all axes once those that some store
contradicts are taken out. What is read before it was stored is unspecified.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Expr,
    Gather,
    IndexValue,
    InRange,
    Let,
    Load,
    Nest,
    Pool,
    Prefetch,
    Reduction,
    Sort,
    Stmt,
    Store,
    Trace,
    every,
    with_nests,
)
from pbkern.lower.values.values import ZERO

Axes = Mapping[Buf, set[int]]


def uniform_axes(lists: Sequence[Sequence[Stmt]]) -> dict[Buf, set[int]]:
    """Uniform axes of scratch and its reinterpretations; `lists` are all statements that touch it."""
    stmts = [stmt for stmts in lists for stmt in every(stmts)]
    units = _candidates(stmts)
    unit_of = {
        (buf, axis): unit for unit in units for buf, axes in unit.axes.items() for axis in axes
    }
    stores = [(stmt, store) for stmt in stmts if isinstance(stmt, Nest) for store in stmt.stores]
    users: dict[Buf, list] = {}  # stores that what is known of a buffer decides about
    for n, store in stores:
        for buf in {store.buf, *(load.buf for load in n.loads())}:
            users.setdefault(buf, []).append((n, store))
    axes = _axes(units)
    while stores:
        wrong = {
            (store.buf, k)
            for n, store in stores
            if store.buf in axes
            for k in _contradicted(n, store, axes)
        }
        gone = {id(unit): unit for unit in (unit_of[at] for at in wrong)}
        for broken in gone.values():
            for buf, broken_axes in broken.axes.items():
                axes[buf] -= broken_axes
        units = [unit for unit in units if id(unit) not in gone]
        stores = list(
            {
                id(user_write): (n, user_write)
                for unit in gone.values()
                for buf in unit.axes
                for n, user_write in users.get(buf, ())
            }.values()
        )
    return _axes(units)


def _axes(units: list[_Unit]) -> dict[Buf, set[int]]:
    axes: dict[Buf, set[int]] = {}
    for unit in units:
        for buf, unit_axes in unit.axes.items():
            axes.setdefault(buf, set()).update(unit_axes)
    return axes


def narrowed_buffers(axes: Axes) -> dict[Buf, Buf]:
    """Buffer -> the one in its place, with one position along uniform axes."""
    narrowed: dict[Buf, Buf] = {}
    for buf in sorted(axes, key=lambda candidate: candidate.storage is not None):  # roots first
        shape = tuple(1 if k in axes[buf] else size for k, size in enumerate(buf.shape))
        narrowed[buf] = Buf(
            buf.name,
            shape,
            buf.dtype,
            buf.arena,
            None if buf.storage is None else narrowed[buf.root],
        )
    return narrowed


def narrow(
    stmts: Sequence[Stmt], axes: Axes, narrowed: Mapping[Buf, Buf], pool: Pool
) -> list[Stmt]:
    """The statements over the narrowed buffers: loads and stores at position 0, stores without loops along the axes."""
    if not axes:
        return list(stmts)

    def place(buf: Buf, index: tuple) -> tuple:
        return tuple(ZERO if k in axes[buf] else position for k, position in enumerate(index))

    def stored_once(nest: Nest) -> list[Stmt]:
        gone = {
            symbol
            for store in nest.stores
            for axis in axes.get(store.buf, ())
            for symbol in store.index[axis].symbols
        }
        dims = {dim: size for dim, size in nest.dims.items() if dim not in gone}
        return [replace(nest, dims=dims)]

    return relocated(with_nests(stmts, stored_once), narrowed.get, pool, place)


# ---------------------------------------------------------------- candidates


@dataclass(frozen=True)
class _Unit:
    """Axes that are narrowed together: of one buffer and, where it is reinterpreted, those of the same elements there."""

    axes: dict[Buf, frozenset[int]]


def _candidates(stmts: Sequence[Stmt]) -> list[_Unit]:
    """Units of scratch that only loads and stores touch, without those along which a load may be outside."""
    views, excluded, outside = _views(stmts)
    units = []
    for root, aliases in views.items():
        if (
            root in excluded
            or root.size == 0
            or any(alias.dtype != root.dtype or alias.size != root.size for alias in aliases)
        ):
            continue
        groups = {alias: _groups(root.shape, alias.shape) for alias in aliases}
        taken: set[int] = set()
        for axis, size in enumerate(root.shape):
            if size > 1 and axis not in taken:
                unit = _unit(root, axis, groups)
                taken |= unit.axes[root]
                units.append(unit)
    return [
        candidate
        for candidate in units
        if not any(open_axis in candidate.axes.get(buf, ()) for buf, open_axis in outside)
    ]


def _views(stmts: Sequence[Stmt]) -> tuple[dict[Buf, set[Buf]], set[Buf], set[tuple[Buf, int]]]:
    """(scratch -> its reinterpretations, scratch that other statements touch, axes along which a load may be outside)."""
    views: dict[Buf, set[Buf]] = {}
    excluded: set[Buf] = set()
    outside: set[tuple[Buf, int]] = set()

    def touch(buf: Buf, plain: bool) -> None:
        if buf.root.arena:
            views.setdefault(buf.root, set()).update({buf} - {buf.root})
            excluded.update(() if plain else {buf.root})

    for stmt in stmts:
        match stmt:
            case Nest() | Let():
                nest = (
                    stmt
                    if isinstance(stmt, Nest)
                    else Nest({}, reductions=(Reduction("", (stmt.value,), stmt.value.dtype),))
                )
                for load in nest.loads():
                    touch(load.buf, isinstance(load, Load))
                    if isinstance(load, Load) and load.guard:
                        outside |= {(load.buf, axis) for axis in _beyond(load, nest)}
                for store in nest.stores:
                    touch(store.buf, len(nest.stores) == 1 and not nest.ordered)
            case Sort(buffers=buffers, spare=spare):
                for buf in (*buffers, *spare):
                    touch(buf, False)
            case Trace(buffers=buffers):
                for buf in buffers:
                    touch(buf, False)
            case Prefetch(buf=buf):
                touch(buf, False)
    return views, excluded, outside


def _beyond(load: Load, nest: Nest) -> Iterator[int]:
    """Axes along which a guarded load may be outside its buffer."""
    buf, index = load.access
    for k, (position, size) in enumerate(zip(index, buf.shape)):
        known = position.symbols <= nest.dims.keys()
        low, high = position.bounds(nest.dims.__getitem__) if known else (-1, size)
        if low < 0 or high >= size:
            yield k


def _unit(root: Buf, axis: int, groups: Mapping[Buf, list]) -> _Unit:
    """The smallest unit with this axis: whole groups of each reinterpretation."""
    mine = {axis}
    while True:
        more = {
            our for group in groups.values() for ours, _ in group if mine & ours for our in ours
        }
        if more <= mine:
            break
        mine |= more
    theirs = {
        alias: frozenset(index for ours, indices in group if mine & ours for index in indices)
        for alias, group in groups.items()
    }
    return _Unit({root: frozenset(mine)} | theirs)


def _groups(shape: tuple[int, ...], other: tuple[int, ...]) -> list[tuple[set[int], set[int]]]:
    """Runs of axes of two shapes of one size that hold the same elements, as short as they get.

    (4, 8, 3) and (32, 3) are ({0, 1}, {0}) and ({2}, {1}).
    """
    groups, i, j = [], 0, 0
    while i < len(shape) or j < len(other):
        mine, theirs = {i} & set(range(len(shape))), {j} & set(range(len(other)))
        while (x := math.prod(shape[axis] for axis in mine)) != (
            y := math.prod(other[their] for their in theirs)
        ):
            if x < y:
                mine.add(i + len(mine))
            else:
                theirs.add(j + len(theirs))
        groups.append((mine, theirs))
        i, j = i + len(mine), j + len(theirs)
    return groups


# ---------------------------------------------------------------- what stores say


def _contradicted(nest: Nest, store: Store, axes: Axes) -> Iterator[int]:
    """Axes of write.buf that this store may make different from position to position."""
    varying = _varying(
        nest, [store.value] if store.mask is None else [store.value, store.mask], axes
    ) | set(nest.rdims)
    for axis in axes[store.buf]:
        if store.buf.shape[axis] == 1:
            continue
        (dim,) = store.index[axis].symbols if len(store.index[axis].symbols) == 1 else ("",)
        covers = (
            store.index[axis] == Affine.symbol(dim) and nest.dims.get(dim) == store.buf.shape[axis]
        )
        if not covers or dim in varying or dim in _symbols(store.index, without={axis}):
            yield axis


def _varying(nest: Nest, values: list[Expr], axes: Axes) -> set[str]:
    """Symbols with which values vary, as far as loads along uniform axes do not tell."""
    memo: dict[int, set[str]] = {}

    def go(expr: Expr) -> set[str]:
        if id(expr) not in memo:
            memo[id(expr)] = by_itself(expr).union(*map(go, expr.args))
        return memo[id(expr)]

    def by_itself(expr: Expr) -> set[str]:
        match expr:
            case Accumulator():
                return set().union(*map(go, nest.reductions[expr.number].args)) - set(nest.rdims)
            case IndexValue() | InRange():
                return set(expr.symbols)
            case Load():
                return _symbols(expr.index, without=axes.get(expr.buf, ()))
            case Gather():
                return _symbols(tuple(i for i in expr.index if i is not None))
        return set()

    return set().union(*map(go, values))


def _symbols(index: tuple[Affine, ...], without: Container[int] = ()) -> set:
    return {
        symbol
        for k, position in enumerate(index)
        if k not in without
        for symbol in position.symbols
    }
