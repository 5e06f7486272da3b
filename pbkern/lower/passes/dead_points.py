"""Statements -> statements that compute nothing for elements which nothing reads, as those outside an array.

    for r < 128, c < 128, k < 700: acc += a[r + 384, k]? * b[k, c + 256]?       of a[500, 700], b[700, 300]
                                   out[r + 384, c + 256]? = acc
    for r < 116, c < 44, k < 700:  acc += a[r + 384, k] * b[k, c + 256] ...

A store outside a result is dropped, and of scratch only what is read counts: how far buffers are
needed along each axis is the least that covers what is stored inside results, what that is made of,
and so on. Points of a nest beyond what it stores to such places are left out, along dimensions that
are not reduced. Scratch that programs hand on is needed as far as by any of those to whom it may
come. Of products, the tail is left out in which both operands are masked to zero.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.index_tests import BOOL, Bounds, Folder, interval
from pbkern.lower.nest.ir import (
    Buf,
    Expr,
    For,
    Let,
    Nest,
    Pool,
    Sort,
    Stmt,
    Trace,
    Write,
    bodies,
    nodes,
    with_bodies,
)
from pbkern.lower.nest.mask_intervals import mask_span
from pbkern.lower.values.values import ZERO

# Rounds until it is known how far buffers are needed: what moves along scratch step by step would
# take one per step.
MOST_ROUNDS = 24
# Bytes in which elements are multiplied together: a tail of narrow ones starts at whole words.
WORD = 4


@dataclass(frozen=True)
class Body:
    """Statements of programs within `bounds`. `handed_on`: scratch that other programs see -> what is equal for those."""

    stmts: list[Stmt]
    pool: Pool
    bounds: Bounds
    handed_on: Mapping[Buf, Hashable]


def trim(lists: Sequence[Body]) -> list[list[Stmt]]:
    """The statements of each body, without what nothing reads of any of them."""
    shortened = [replace(b, stmts=_without_tails(b)) for b in lists]
    needs = _Needs(shortened)
    if not needs.settle():
        return [b.stmts for b in shortened]
    return [
        _resized(needs.trimmed(b, b.stmts, b.bounds), needs.smaller(b), b.pool) for b in shortened
    ]


def _inner_bounds(s: Stmt, bounds: Bounds) -> Bounds:
    return (
        {**bounds, s.counter: (0, max(s.trips - 1, 0))}
        if isinstance(s, For) and isinstance(s.trips, int)
        else bounds
    )


def _flat(stmts: list[Stmt], bounds: Bounds) -> Iterator[tuple[Stmt, Bounds]]:
    """All statements, inner ones too, with what is known around them."""
    for s in stmts:
        yield s, bounds
        for inner in bodies(s):
            yield from _flat(inner, _inner_bounds(s, bounds))


# ---------------------------------------------------------------- how far buffers are needed


class _Needs:
    """Per buffer and axis, the number of elements from the first on that somebody reads."""

    def __init__(self, lists: Sequence[Body]):
        self.bodies = lists
        self.found: dict[Hashable, list[int]] = {}
        self.changed = False
        self.reinterpreted = {
            buf.root
            for b in lists
            for s, _ in _flat(b.stmts, {})
            for buf in _mentioned(s)
            if buf.storage
        }

    def settle(self) -> bool:
        """Grows the needs until they cover all that they lead to; False where that takes too long."""
        for _ in range(MOST_ROUNDS):
            self.changed = False
            for b in self.bodies:
                for s, bounds in _flat(b.stmts, b.bounds):
                    self._reads(b, s, bounds)
            if not self.changed:
                return True
        return False

    def trimmed(self, body: Body, stmts: list[Stmt], bounds: Bounds) -> list[Stmt]:
        out: list[Stmt] = []
        for s in stmts:
            s = with_bodies(
                s, lambda inner, s=s: self.trimmed(body, inner, _inner_bounds(s, bounds))
            )
            if isinstance(s, Nest):
                limits = self.limits(body, s, bounds)
                if any(limits[d] == 0 < n for d, n in s.dims.items()):
                    continue
                s = _cut(s, limits, body.pool)
            out.append(s)
        return out

    def smaller(self, body: Body) -> dict[Buf, Buf]:
        """Scratch of one program that is needed only in part -> scratch as large as that part."""
        own = {
            w.buf
            for s, _ in _flat(body.stmts, {})
            if isinstance(s, Nest)
            for w in s.writes
            if w.buf.arena
        }
        own = {b for b in own - body.handed_on.keys() - self.reinterpreted if b.storage is None}
        found = {b: tuple(self._need(body, b)) for b in own}
        return {
            b: replace(b, shape=shape)
            for b, shape in found.items()
            if shape != b.shape and 0 not in shape
        }

    def limits(self, body: Body, nest: Nest, bounds: Bounds) -> dict[str, int]:
        """Points of the nest along each dimension that matter."""
        if nest.moves():
            return dict(nest.dims)
        found = dict.fromkeys(nest.dims, 0)
        for w in nest.writes:
            own = self._points(body, nest, w, bounds)
            if 0 not in own.values():
                found = {d: max(found[d], own.get(d, n)) for d, n in nest.dims.items()}
        return found

    def _points(self, body: Body, nest: Nest, w: Write, bounds: Bounds) -> dict[str, int]:
        """dimension -> points at which a store may go to places that are needed; others all are. 0: at no point."""
        lowest = {**bounds, **{d: (0, max(n - 1, 0)) for d, n in nest.dims.items()}}
        own: dict[str, int] = {}
        for i, need in zip(w.index, self._need(body, w.buf)):
            for d, c in (*i.terms, (None, 1)):
                rest = interval(i if d is None else i - Affine.symbol(d, c), lowest)
                if (
                    rest is None
                    or c < 0
                    or d is not None
                    and (d not in nest.dims or d in nest.rdims)
                ):
                    continue
                points = -((rest[0] - need) // c)
                if d is None:
                    own |= {None: 0} if points <= 0 else {}
                else:
                    own[d] = max(min(own.get(d, nest.dims[d]), points), 0)
        return own

    def _need(self, body: Body, buf: Buf) -> list[int]:
        if not buf.root.arena or buf.root in self.reinterpreted:
            return list(buf.shape)
        return self.found.setdefault(body.handed_on.get(buf, buf), [0] * len(buf.shape))

    def _reads(self, body: Body, s: Stmt, bounds: Bounds) -> None:
        match s:
            case Nest():
                limits = self.limits(body, s, bounds)
                if all(limits.values()):
                    inside = {**bounds, **{d: (0, n - 1) for d, n in limits.items()}}
                    for e in s.loads():
                        self._read(body, e, inside)
                    for w in (
                        s.writes
                    ):  # where no point is left out, all that is written must have a place
                        uncut = [s.moves() or bool(i.symbols & {*s.rdims}) for i in w.index]
                        self._require(
                            body, w.buf, [n if whole else 0 for n, whole in zip(w.buf.shape, uncut)]
                        )
            case Let(value=value):
                for e in nodes([value]):
                    if e.kind in ("load", "gather"):
                        self._read(body, e, bounds)
            case Sort() | Trace():
                for buf in _mentioned(s):
                    self._require(body, buf, buf.shape)

    def _read(self, body: Body, load: Expr, bounds: Bounds) -> None:
        buf, index = load.info[:2]
        if not buf.root.arena:
            return
        ends = []
        for i, n in zip(index, buf.shape):
            reach = None if i is None or load.kind == "gather" else interval(i, bounds)
            ends.append(n if reach is None else max(min(reach[1] + 1, n), 1))
        self._require(body, buf, ends)

    def _require(self, body: Body, buf: Buf, ends: Sequence[int]) -> None:
        need = self._need(body, buf)
        for k, end in enumerate(ends):
            if need[k] < end:
                need[k] = end
                self.changed = True


def _cut(nest: Nest, limits: dict[str, int], pool: Pool) -> Nest:
    """The nest with that many points; a dimension of one is at 0."""
    single = {d: ZERO for d, n in limits.items() if n == 1 < nest.dims[d]}
    if limits == nest.dims:
        return nest
    rename = pool.renamer(single)
    reductions = [r.mapped(rename) for r in nest.reductions]
    writes = [
        w.mapped(rename, index=tuple(i.substitute(single.get) for i in w.index))
        for w in nest.writes
    ]
    return replace(nest, dims=limits, reductions=reductions, writes=writes)


def _resized(stmts: list[Stmt], smaller: Mapping[Buf, Buf], pool: Pool) -> list[Stmt]:
    """The statements over other buffers, at the same indices."""
    if not smaller:
        return stmts

    def replaced(e: Expr) -> Expr | None:
        if e.kind not in ("load", "gather") or e.info[0] not in smaller:
            return None
        return pool.make(e.kind, e.dtype, (smaller[e.info[0]], *e.info[1:]), e.args)

    expr = pool.rewriter(replaced)

    def write(w: Write) -> Write:
        return w.mapped(expr, buf=smaller.get(w.buf, w.buf))

    def changed(s: Stmt) -> Stmt:
        match s:
            case Nest():
                reductions = [r.mapped(expr) for r in s.reductions]
                return replace(s, reductions=reductions, writes=list(map(write, s.writes)))
            case Let(value=value):
                return replace(s, value=expr(value))
        return with_bodies(s, lambda inner: [changed(t) for t in inner])

    return [changed(s) for s in stmts]


def _mentioned(s: Stmt) -> Iterator[Buf]:
    """Buffers that a statement itself reads or writes."""
    match s:
        case Nest():
            yield from (e.info[0] for e in s.loads())
            yield from (w.buf for w in s.writes)
        case Let(value=value):
            yield from (e.info[0] for e in nodes([value]) if e.kind in ("load", "gather"))
        case Sort(buffers=buffers, spare=spare):
            yield from (*buffers, *spare)
        case Trace(buffers=buffers):
            yield from buffers


# ---------------------------------------------------------------- tails of products


def _without_tails(body: Body) -> list[Stmt]:
    """Statements whose products end where both operands stay zero."""
    if not any(isinstance(s, Nest) and _is_product(s) for s, _ in _flat(body.stmts, {})):
        return body.stmts
    zeros = _zero_tails(body)

    def change(stmts: list[Stmt], bounds: Bounds) -> list[Stmt]:
        out = []
        for s in stmts:
            s = with_bodies(s, lambda inner, s=s: change(inner, _inner_bounds(s, bounds)))
            out.append(
                _shortened(s, body.pool, zeros, bounds)
                if isinstance(s, Nest) and _is_product(s)
                else s
            )
        return out

    return change(body.stmts, body.bounds)


def _is_product(nest: Nest) -> bool:
    inner = any(w.inner for w in nest.writes)
    return (
        bool(nest.reductions)
        and not nest.ordered
        and not inner
        and all(r.op == "dot" for r in nest.reductions)
    )


def _shortened(nest: Nest, pool: Pool, zeros: Mapping, bounds: Bounds) -> Nest:
    ends = {}
    for d in nest.rdims:
        tail = max(
            _zero_from(a, d, nest, pool, zeros, bounds) for r in nest.reductions for a in r.args
        )
        step = max(WORD // min(a.dtype.itemsize for r in nest.reductions for a in r.args), 1)
        ends[d] = min(max(-(-tail // step), 1) * step, nest.dims[d])
    return replace(nest, dims=nest.dims | ends)


def _zero_tails(body: Body) -> dict[tuple[Buf, int], int]:
    """(scratch of one program, axis) -> where its tail of zeros starts, for what one store fills."""
    stores: dict[Buf, list[tuple[Nest, Write, Bounds]]] = {}
    excluded = set(body.handed_on)
    for s, bounds in _flat(body.stmts, body.bounds):
        if isinstance(s, Nest):
            for w in s.writes:
                stores.setdefault(w.buf.root, []).append((s, w, bounds))
        else:
            excluded |= {b.root for b in _mentioned(s)}
    found = {}
    for buf, writes in stores.items():
        (nest, w, bounds), *others = writes
        if (
            others
            or not buf.arena
            or buf in excluded
            or w.buf is not buf
            or w.mask is not None
            or nest.reductions
        ):
            continue
        for k, (i, n) in enumerate(zip(w.index, buf.shape)):
            d = i.terms[0][0] if len(i.terms) == 1 else None
            if i == Affine.symbol(d) and nest.dims.get(d) == n:
                found[buf, k] = _zero_from(w.value, d, nest, body.pool, found, bounds)
    return found


def _zero_from(e: Expr, dim: str, nest: Nest, pool: Pool, zeros: Mapping, bounds: Bounds) -> int:
    """The first index along `dim` from which on an expression is +0 at all points; the nest's extent where none is known."""
    n = nest.dims[dim]
    fold = Folder(pool, {**bounds, **{d: (0, max(size - 1, 0)) for d, size in nest.dims.items()}})

    def end(mask: Expr, truth: bool) -> int:
        """From where on a mask differs from `truth`."""
        highs = (interval(h, bounds) for h in mask_span(mask, truth, dim, nest.dims).highs)
        return min((max(h[1], 0) for h in highs if h is not None), default=n)

    def go(x: Expr) -> int:
        if x.kind == "const":
            return 0 if x.info == 0 and not np.signbit(x.info) else n
        if (
            x.kind == "op"
            and x.info.primitive == "convert_element_type"
            and x.args[0].dtype != BOOL
        ):
            return go(x.args[0])
        if (
            x.kind == "op"
            and x.info.primitive == "select_n"
            and len(x.args) == 3
            and x.args[0].dtype == BOOL
        ):
            mask, false, true = x.args[0], go(x.args[1]), go(x.args[2])
            return min(
                max(false, true), max(false, end(mask, True)), max(true, end(mask, False)), n
            )
        if x.kind == "load":
            axes = [k for k, i in enumerate(x.info[1]) if i == Affine.symbol(dim)]
            return min((zeros.get((x.info[0], k), n) for k in axes), default=n)
        return n

    return min(go(fold(e)), n)
