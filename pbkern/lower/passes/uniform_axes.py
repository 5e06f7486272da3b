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
from dataclasses import dataclass

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import (
    Buf,
    Expr,
    Fetch,
    Let,
    Nest,
    Pool,
    Reduction,
    Sort,
    Stmt,
    Trace,
    Write,
    every,
    with_bodies,
)
from pbkern.lower.values.values import ZERO

Axes = Mapping[Buf, set[int]]


def uniform_axes(lists: Sequence[list[Stmt]]) -> dict[Buf, set[int]]:
    """Uniform axes of scratch and its reinterpretations; `lists` are all statements that touch it."""
    stmts = [s for stmts in lists for s in every(stmts)]
    units = _candidates(stmts)
    unit_of = {(buf, k): u for u in units for buf, found in u.axes.items() for k in found}
    stores = [(n, w) for n in stmts if isinstance(n, Nest) for w in n.writes]
    users: dict[Buf, list] = {}  # stores that what is known of a buffer decides about
    for n, w in stores:
        for buf in {w.buf, *(e.info[0] for e in n.loads())}:
            users.setdefault(buf, []).append((n, w))
    axes = _axes(units)
    while stores:
        wrong = {(w.buf, k) for n, w in stores if w.buf in axes for k in _contradicted(n, w, axes)}
        gone = {id(u): u for u in (unit_of[at] for at in wrong)}
        for u in gone.values():
            for buf, found in u.axes.items():
                axes[buf] -= found
        units = [u for u in units if id(u) not in gone]
        stores = list(
            {
                id(w): (n, w)
                for u in gone.values()
                for buf in u.axes
                for n, w in users.get(buf, ())
            }.values()
        )
    return _axes(units)


def _axes(units: list[_Unit]) -> dict[Buf, set[int]]:
    axes: dict[Buf, set[int]] = {}
    for u in units:
        for buf, found in u.axes.items():
            axes.setdefault(buf, set()).update(found)
    return axes


def narrowed_buffers(axes: Axes) -> dict[Buf, Buf]:
    """Buffer -> the one in its place, with one position along uniform axes."""
    made: dict[Buf, Buf] = {}
    for buf in sorted(axes, key=lambda b: b.storage is not None):  # roots first
        shape = tuple(1 if k in axes[buf] else n for k, n in enumerate(buf.shape))
        made[buf] = Buf(
            buf.name, shape, buf.dtype, buf.arena, None if buf.storage is None else made[buf.root]
        )
    return made


def narrow(stmts: list[Stmt], axes: Axes, made: Mapping[Buf, Buf], pool: Pool) -> list[Stmt]:
    """The statements over the narrowed buffers: loads and stores at position 0, stores without loops along the axes."""
    if not axes:
        return stmts

    def index(buf: Buf, ix: tuple) -> tuple:
        return tuple(ZERO if k in axes[buf] else i for k, i in enumerate(ix))

    def replace(e: Expr) -> Expr | None:
        if e.kind != "load" or e.info[0] not in made:
            return None
        buf, ix, guard = e.info
        return pool.make("load", e.dtype, (made[buf], index(buf, ix), guard))

    expr = pool.rewriter(replace)

    def write(w: Write) -> Write:
        if w.buf not in made:
            return w.mapped(expr)
        return w.mapped(expr, buf=made[w.buf], index=index(w.buf, w.index))

    def changed(s: Stmt) -> Stmt:
        match s:
            case Nest():
                gone = {
                    d for w in s.writes for k in axes.get(w.buf, ()) for d in w.index[k].symbols
                }
                reductions = [r.mapped(expr) for r in s.reductions]
                dims = {d: n for d, n in s.dims.items() if d not in gone}
                return Nest(
                    dims, s.rdims, reductions, [write(w) for w in s.writes], s.ordered, s.at
                )
            case Let(name=name, value=value):
                return Let(name, expr(value))
        return with_bodies(s, lambda inner: narrow(inner, axes, made, pool))

    return [changed(s) for s in stmts]


# ---------------------------------------------------------------- candidates


@dataclass(frozen=True)
class _Unit:
    """Axes that are narrowed together: of one buffer and, where it is reinterpreted, those of the same elements there."""

    axes: dict[Buf, frozenset[int]]


def _candidates(stmts: list[Stmt]) -> list[_Unit]:
    """Units of scratch that only loads and stores touch, without those along which a load may be outside."""
    views, excluded, outside = _views(stmts)
    units = []
    for root, aliases in views.items():
        if (
            root in excluded
            or root.size == 0
            or any(a.dtype != root.dtype or a.size != root.size for a in aliases)
        ):
            continue
        groups = {a: _groups(root.shape, a.shape) for a in aliases}
        taken: set[int] = set()
        for axis, n in enumerate(root.shape):
            if n > 1 and axis not in taken:
                unit = _unit(root, axis, groups)
                taken |= unit.axes[root]
                units.append(unit)
    return [u for u in units if not any(k in u.axes.get(buf, ()) for buf, k in outside)]


def _views(stmts: list[Stmt]) -> tuple[dict[Buf, set[Buf]], set[Buf], set[tuple[Buf, int]]]:
    """(scratch -> its reinterpretations, scratch that other statements touch, axes along which a load may be outside)."""
    views: dict[Buf, set[Buf]] = {}
    excluded: set[Buf] = set()
    outside: set[tuple[Buf, int]] = set()

    def touch(buf: Buf, plain: bool) -> None:
        if buf.root.arena:
            views.setdefault(buf.root, set()).update({buf} - {buf.root})
            excluded.update(() if plain else {buf.root})

    for s in stmts:
        match s:
            case Nest() | Let():
                nest = (
                    s
                    if isinstance(s, Nest)
                    else Nest({}, reductions=[Reduction("", (s.value,), s.value.dtype)])
                )
                for e in nest.loads():
                    touch(e.info[0], e.kind == "load")
                    if e.kind == "load" and e.info[2]:
                        outside |= {(e.info[0], k) for k in _beyond(e, nest)}
                for w in nest.writes:
                    touch(w.buf, len(nest.writes) == 1 and not nest.ordered)
            case Sort(buffers=buffers, spare=spare):
                for b in (*buffers, *spare):
                    touch(b, False)
            case Trace(buffers=buffers):
                for b in buffers:
                    touch(b, False)
            case Fetch(buf=b):
                touch(b, False)
    return views, excluded, outside


def _beyond(load: Expr, nest: Nest) -> Iterator[int]:
    """Axes along which a guarded load may be outside its buffer."""
    buf, index, _ = load.info
    for k, (i, n) in enumerate(zip(index, buf.shape)):
        known = i.symbols <= nest.dims.keys()
        low, high = i.bounds(nest.dims.__getitem__) if known else (-1, n)
        if low < 0 or high >= n:
            yield k


def _unit(root: Buf, axis: int, groups: Mapping[Buf, list]) -> _Unit:
    """The smallest unit with this axis: whole groups of each reinterpretation."""
    mine = {axis}
    while True:
        more = {k for g in groups.values() for ours, _ in g if mine & ours for k in ours}
        if more <= mine:
            break
        mine |= more
    theirs = {
        a: frozenset(k for ours, own in g if mine & ours for k in own) for a, g in groups.items()
    }
    return _Unit({root: frozenset(mine)} | theirs)


def _groups(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[set[int], set[int]]]:
    """Runs of axes of two shapes of one size that hold the same elements, as short as they get: (4,
    8, 3) and (32, 3) are ({0, 1}, {0}) and ({2}, {1}).
    """
    found, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        mine, theirs = {i} & set(range(len(a))), {j} & set(range(len(b)))
        while (x := math.prod(a[k] for k in mine)) != (y := math.prod(b[k] for k in theirs)):
            if x < y:
                mine.add(i + len(mine))
            else:
                theirs.add(j + len(theirs))
        found.append((mine, theirs))
        i, j = i + len(mine), j + len(theirs)
    return found


# ---------------------------------------------------------------- what stores say


def _contradicted(nest: Nest, w: Write, axes: Axes) -> Iterator[int]:
    """Axes of w.buf that this store may make different from position to position."""
    varying = _varying(nest, [w.value] if w.mask is None else [w.value, w.mask], axes) | set(
        nest.rdims
    )
    for k in axes[w.buf]:
        if w.buf.shape[k] == 1:
            continue
        (d,) = w.index[k].symbols if len(w.index[k].symbols) == 1 else ("",)
        covers = w.index[k] == Affine.symbol(d) and nest.dims.get(d) == w.buf.shape[k]
        if not covers or d in varying or d in _symbols(w.index, without={k}):
            yield k


def _varying(nest: Nest, values: list[Expr], axes: Axes) -> set[str]:
    """Symbols with which values vary, as far as loads along uniform axes do not tell."""
    memo: dict[int, set[str]] = {}

    def go(e: Expr) -> set[str]:
        if id(e) not in memo:
            memo[id(e)] = own(e).union(*map(go, e.args))
        return memo[id(e)]

    def own(e: Expr) -> set[str]:
        match e.kind:
            case "acc":
                return set().union(*map(go, nest.reductions[e.info].args)) - set(nest.rdims)
            case "index" | "range":
                return set(e.symbols)
            case "load":
                return _symbols(e.info[1], without=axes.get(e.info[0], ()))
            case "gather":
                return _symbols(tuple(i for i in e.info[1] if i is not None))
        return set()

    return set().union(*map(go, values))


def _symbols(index: tuple[Affine, ...], without: Container[int] = ()) -> set:
    return {s for k, i in enumerate(index) if k not in without for s in i.symbols}
