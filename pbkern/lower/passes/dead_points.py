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
from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import Pass, threshold
from pbkern.lower.nest.conditions.index_tests import (
    BOOL,
    Bounds,
    Folder,
    bounds_inside,
    interval,
    with_nests_within,
)
from pbkern.lower.nest.conditions.mask_intervals import mask_span
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.effects import accessed
from pbkern.lower.nest.ir import (
    Buf,
    Const,
    Expr,
    Gather,
    Let,
    Load,
    Nest,
    Op,
    Pool,
    Sort,
    Stmt,
    Store,
    Trace,
    bodies,
    nodes,
)
from pbkern.lower.values.values import ZERO

# Bytes in which elements are multiplied together: a tail of narrow ones starts at whole words.
JOINT_BYTES = 4


@dataclass(frozen=True)
class Body:
    """Statements of programs within `bounds`. `handed_on`: scratch that other programs see -> what is equal for those."""

    stmts: list[Stmt]
    pool: Pool
    bounds: Bounds
    handed_on: Mapping[Buf, Hashable]


@dataclass(frozen=True)
class DropDeadPoints:
    """Takes from the statements of each body what nothing reads of any of them."""

    most_rounds: int = threshold(
        24,
        "rounds until it is known how far buffers are needed: what moves along scratch step by step would take one per step. "
        "Source: not recorded",
    )

    def __call__(self, lists: Sequence[Body]) -> list[Body]:
        shortened = [replace(body, stmts=_without_tails(body)) for body in lists]
        needs = _Needs(shortened)
        if not needs.settle(self.most_rounds):
            return shortened
        return [
            replace(body, stmts=relocated(needs.trimmed(body), needs.smaller(body).get, body.pool))
            for body in shortened
        ]


# Runs on all cases of a kernel at once, where blocks cross the ends of arrays.
DROP_DEAD_POINTS = Pass(
    "drop dead points",
    DropDeadPoints(),
    "blocks that cross the ends of arrays compute only what is inside",
    required=True,
)


def _flat(stmts: Sequence[Stmt], bounds: Bounds) -> Iterator[tuple[Stmt, Bounds]]:
    """All statements, inner ones too, with what is known around them."""
    for stmt in stmts:
        yield stmt, bounds
        for inner in bodies(stmt):
            yield from _flat(inner, bounds_inside(stmt, bounds))


# ---------------------------------------------------------------- how far buffers are needed


class _Needs:
    """Per buffer and axis, the number of elements from the first on that somebody reads."""

    def __init__(self, lists: Sequence[Body]):
        self.bodies = lists
        self.ends: dict[Hashable, list[int]] = {}
        self.changed = False
        self.reinterpreted = {
            buf.root
            for list_ in lists
            for stmt, _ in _flat(list_.stmts, {})
            for buf in accessed(stmt)
            if buf.storage
        }

    def settle(self, most_rounds: int) -> bool:
        """Grows the needs until they cover all that they lead to; False where that takes too long."""
        for _ in range(most_rounds):
            self.changed = False
            for body in self.bodies:
                for stmt, bounds in _flat(body.stmts, body.bounds):
                    self._reads(body, stmt, bounds)
            if not self.changed:
                return True
        return False

    def trimmed(self, body: Body) -> list[Stmt]:
        def cut(nest: Nest, bounds: Bounds) -> list[Stmt]:
            limits = self.limits(body, nest, bounds)
            if any(limits[dim] == 0 < size for dim, size in nest.dims.items()):
                return []
            return [_cut(nest, limits, body.pool)]

        return with_nests_within(body.stmts, body.bounds, cut)

    def smaller(self, body: Body) -> dict[Buf, Buf]:
        """Scratch of one program that is needed only in part -> scratch as large as that part."""
        candidates = {
            store.buf
            for nest, _ in _flat(body.stmts, {})
            if isinstance(nest, Nest)
            for store in nest.stores
            if store.buf.arena
        }
        candidates = {
            buf
            for buf in candidates - body.handed_on.keys() - self.reinterpreted
            if buf.storage is None
        }
        shapes = {buf: tuple(self._need(body, buf)) for buf in candidates}
        return {
            buf: replace(buf, shape=shape)
            for buf, shape in shapes.items()
            if shape != buf.shape and 0 not in shape
        }

    def limits(self, body: Body, nest: Nest, bounds: Bounds) -> dict[str, int]:
        """Points of the nest along each dimension that matter."""
        if nest.moves():
            return dict(nest.dims)
        points = dict.fromkeys(nest.dims, 0)
        for store in nest.stores:
            reached = self._points(body, nest, store, bounds)
            if reached is not None and 0 not in reached.values():
                points = {
                    dim: max(points[dim], reached.get(dim, size)) for dim, size in nest.dims.items()
                }
        return points

    def _points(
        self, body: Body, nest: Nest, store: Store, bounds: Bounds
    ) -> dict[str, int] | None:
        """dimension -> points at which a store may go to places that are needed; others all are. None or 0: at no point."""
        lowest = {**bounds, **{axis: (0, max(size - 1, 0)) for axis, size in nest.dims.items()}}
        counts: dict[str, int] = {}
        for position, need in zip(store.index, self._need(body, store.buf)):
            for dim, coefficient in position.terms:
                rest = interval(position - Affine.symbol(dim, coefficient), lowest)
                if rest is None or coefficient < 0 or dim not in nest.dims or dim in nest.rdims:
                    continue
                points = -((rest[0] - need) // coefficient)
                counts[dim] = max(min(counts.get(dim, nest.dims[dim]), points), 0)
            reached = interval(position, lowest)
            if reached is not None and reached[0] >= need:
                return None
        return counts

    def _need(self, body: Body, buf: Buf) -> list[int]:
        if not buf.root.arena or buf.root in self.reinterpreted:
            return list(buf.shape)
        return self.ends.setdefault(body.handed_on.get(buf, buf), [0] * len(buf.shape))

    def _reads(self, body: Body, stmt: Stmt, bounds: Bounds) -> None:
        match stmt:
            case Nest():
                limits = self.limits(body, stmt, bounds)
                if all(limits.values()):
                    inside = {**bounds, **{dim: (0, limit - 1) for dim, limit in limits.items()}}
                    for load in stmt.loads():
                        self._read(body, load, inside)
                    for store in (
                        stmt.stores
                    ):  # where no point is left out, all that is written must have a place
                        uncut = [
                            stmt.moves() or bool(position.symbols & {*stmt.rdims})
                            for position in store.index
                        ]
                        self._require(
                            body,
                            store.buf,
                            [size if whole else 0 for size, whole in zip(store.buf.shape, uncut)],
                        )
            case Let(value=value):
                for node in nodes([value]):
                    if isinstance(node, Load | Gather):
                        self._read(body, node, bounds)
            case Sort() | Trace():
                for buf in accessed(stmt):
                    self._require(body, buf, buf.shape)

    def _read(self, body: Body, load: Load | Gather, bounds: Bounds) -> None:
        buf, index = load.access
        if not buf.root.arena:
            return
        ends = []
        for position, size in zip(index, buf.shape):
            reach = (
                None if position is None or isinstance(load, Gather) else interval(position, bounds)
            )
            ends.append(size if reach is None else max(min(reach[1] + 1, size), 1))
        self._require(body, buf, ends)

    def _require(self, body: Body, buf: Buf, ends: Sequence[int]) -> None:
        need = self._need(body, buf)
        for k, end in enumerate(ends):
            if need[k] < end:
                need[k] = end
                self.changed = True


def _cut(nest: Nest, limits: dict[str, int], pool: Pool) -> Nest:
    """The nest with that many points; a dimension of one is at 0."""
    single = {dim: ZERO for dim, limit in limits.items() if limit == 1 < nest.dims[dim]}
    if limits == nest.dims:
        return nest
    return renamed(nest, single, limits, pool)


# ---------------------------------------------------------------- tails of products


def _without_tails(body: Body) -> list[Stmt]:
    """Statements whose products end where both operands stay zero."""
    if not any(isinstance(stmt, Nest) and _is_product(stmt) for stmt, _ in _flat(body.stmts, {})):
        return body.stmts
    zeros = _zero_tails(body)

    def change(nest: Nest, bounds: Bounds) -> list[Stmt]:
        product = _is_product(nest)
        return [_shortened(nest, body.pool, zeros, bounds) if product else nest]

    return with_nests_within(body.stmts, body.bounds, change)


def _is_product(nest: Nest) -> bool:
    inner = any(store.inner for store in nest.stores)
    return (
        bool(nest.reductions)
        and not nest.ordered
        and not inner
        and all(reduction.is_product for reduction in nest.reductions)
    )


def _shortened(nest: Nest, pool: Pool, zeros: Mapping, bounds: Bounds) -> Nest:
    ends = {}
    for rdim in nest.rdims:
        tail = max(
            _zero_from(arg, rdim, nest, pool, zeros, bounds)
            for reduction in nest.reductions
            for arg in reduction.args
        )
        step = max(
            JOINT_BYTES
            // min(arg.dtype.itemsize for reduction in nest.reductions for arg in reduction.args),
            1,
        )
        ends[rdim] = min(max(-(-tail // step), 1) * step, nest.dims[rdim])
    return replace(nest, dims={**nest.dims, **ends})


def _zero_tails(body: Body) -> dict[tuple[Buf, int], int]:
    """(scratch of one program, axis) -> where its tail of zeros starts, for what one store fills."""
    stores: dict[Buf, list[tuple[Nest, Store, Bounds]]] = {}
    excluded = set(body.handed_on)
    for stmt, bounds in _flat(body.stmts, body.bounds):
        if isinstance(stmt, Nest):
            for store in stmt.stores:
                stores.setdefault(store.buf.root, []).append((stmt, store, bounds))
        else:
            excluded |= {touched.root for touched in accessed(stmt)}
    tails: dict[tuple[Buf, int], int] = {}
    for buf, stored in stores.items():
        (nest, store, bounds), *more_stores = stored
        if (
            more_stores
            or not buf.arena
            or buf in excluded
            or store.buf is not buf
            or store.mask is not None
            or nest.reductions
        ):
            continue
        for k, (position, size) in enumerate(zip(store.index, buf.shape)):
            if len(position.terms) != 1:
                continue
            ((dim, _),) = position.terms
            if position == Affine.symbol(dim) and nest.dims.get(dim) == size:
                tails[buf, k] = _zero_from(store.value, dim, nest, body.pool, tails, bounds)
    return tails


def _zero_from(expr: Expr, dim: str, nest: Nest, pool: Pool, zeros: Mapping, bounds: Bounds) -> int:
    """The first index along `dim` from which on an expression is +0 at all points; the nest's extent where none is known."""
    extent = nest.dims[dim]
    fold = Folder(
        pool, {**bounds, **{axis: (0, max(size - 1, 0)) for axis, size in nest.dims.items()}}
    )

    def end(mask: Expr, truth: bool) -> int:
        """From where on a mask differs from `truth`."""
        highs = (interval(high, bounds) for high in mask_span(mask, truth, dim, nest.dims).highs)
        return min((max(high[1], 0) for high in highs if high is not None), default=extent)

    def go(x: Expr) -> int:
        if isinstance(x, Const):
            return 0 if x.value == 0 and not np.signbit(x.value) else extent
        if (
            isinstance(x, Op)
            and x.info.primitive == "convert_element_type"
            and x.args[0].dtype != BOOL
        ):
            return go(x.args[0])
        if (
            isinstance(x, Op)
            and x.info.primitive == "select_n"
            and len(x.args) == 3
            and x.args[0].dtype == BOOL
        ):
            mask, false, true = x.args[0], go(x.args[1]), go(x.args[2])
            return min(
                max(false, true), max(false, end(mask, True)), max(true, end(mask, False)), extent
            )
        if isinstance(x, Load):
            axes = [k for k, i in enumerate(x.index) if i == Affine.symbol(dim)]
            return min((zeros.get((x.buf, axis), extent) for axis in axes), default=extent)
        return extent

    return min(go(fold(expr)), extent)
