"""Results that are computed beside what they are made of, and copied over it -> stores over it, where the walk allows.

    for i < n: t[i] = a[i] + a[i + 1] + a[i + 2]
    for i < n: a[i] = t[i]                             ->     for i < n: a[i] = a[i] + a[i + 1] + a[i + 2]

A step may store over elements that no later one loads. Rows before it are done with; along the
vector dimension, what is before it is in registers, which hand it from step to step
(targets/cpu/schedule/sliding_windows.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pbkern.core.affine import Affine
from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import apart
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Pool, Stmt, Store

from .strips.strip_mining import inside, nests_of

# Where a store goes.
Place = tuple[Affine, ...]


def store_in_place(stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
    """Statements with fewer copies, inner ones too."""
    return _stored(stmts, context, {buf.root for buf in context.persistent})


def _stored(stmts: Sequence[Stmt], context: NestContext, live: set[Buf]) -> list[Stmt]:
    """Statements with fewer copies. `live`: root buffers that others touch."""
    out = inside(stmts, live, lambda body, elsewhere: _stored(body, context, elsewhere))
    for at in range(len(out) - 1, 0, -1):
        copy, beside = out[at], _copied(out[at])
        if isinstance(copy, Nest) and beside and not beside & live:
            makers = _makers(out, at, beside)
            joined = _joined(makers, copy, context) if makers else None
            if joined is not None:
                out[at - len(makers) : at + 1] = joined
    return out


def _copied(stmt: Stmt) -> set[Buf]:
    """The scratch that a statement copies elsewhere, if that is all it does."""
    if (
        not isinstance(stmt, Nest)
        or stmt.rdims
        or stmt.ordered
        or any(not isinstance(store.value, Load) for store in stmt.stores)
    ):
        return set()
    targets = {store.buf.root for store in stmt.stores}
    loads = [cast(Load, store.value) for store in stmt.stores]
    buffers = {load.buf for load in loads}
    plain = all(
        not load.guard and not store.guard and store.mask is None
        for load, store in zip(loads, stmt.stores)
    )
    apart_from = (
        len(buffers) == len(targets) == len(stmt.stores)
        and not {buf.root for buf in buffers} & targets
    )
    return (
        buffers
        if plain and apart_from and all(buf.arena and buf.storage is None for buf in buffers)
        else set()
    )


def _makers(stmts: Sequence[Stmt], at: int, beside: set[Buf]) -> list[Nest]:
    """The nests right before a copy that make what it copies; none if others touch that."""
    first = at
    while first and _makes(stmts[first - 1], beside):
        first -= 1
    if first == at or beside & effects.touched([*stmts[:first], *stmts[at + 1 :]]):
        return []
    return nests_of(stmts[first:at])


def _makes(stmt: Stmt, beside: set[Buf]) -> bool:
    """Whether a statement stores once at each of its points, to each of these buffers, and does nothing else."""
    if not isinstance(stmt, Nest) or stmt.rdims or stmt.ordered:
        return False
    if beside & {load.buf.root for load in stmt.loads()}:
        return False
    live = sorted(dim for dim, size in stmt.dims.items() if size > 1)
    once = all(
        sorted(_steps(store)) == live and not store.guard and store.mask is None
        for store in stmt.stores
    )
    return (
        once and len(stmt.stores) == len(beside) and {store.buf for store in stmt.stores} == beside
    )


def _steps(store: Store) -> list:
    """Dimensions that walk an axis alone, step by step."""
    return [
        position.terms[0][0]
        for position in store.index
        if len(position.terms) == 1 and position.terms[0][1] == 1
    ]


def _joined(makers: list[Nest], copy: Nest, context: NestContext) -> list[Stmt] | None:
    """Joins the largest maker in place: after the others, before the copies of what those made."""
    placed = [place for maker in makers if (place := _placed(maker, copy)) is not None]
    if len(placed) < len(makers) or sum(map(_points, makers)) != _points(copy):
        return None
    if not all(
        _store_apart(maker, earlier) for k, maker in enumerate(makers) for earlier in makers[:k]
    ):
        return None
    largest = max(range(len(makers)), key=lambda number: _points(makers[number]))
    values = [store.value for store in makers[largest].stores]
    over = frozenset(store.buf.root for store in copy.stores)
    nest = replace(makers[largest], stores=tuple(_writes(placed[largest], values)))
    nest = context.policy.overwriting(nest, over)
    if not context.policy.loads_ahead(collapse(nest, context.pool, context.aliases)):
        return None
    smaller = [k for k in range(len(makers)) if k != largest]
    copies = [
        replace(
            makers[other],
            stores=tuple(
                _writes(
                    placed[other], [_load(store, context.pool) for store in makers[other].stores]
                )
            ),
        )
        for other in smaller
    ]
    return [*(makers[other] for other in smaller), nest, *copies]


def _writes(places: list[tuple[Buf, Place]], values: list[Expr]) -> list[Store]:
    return [Store(buf, index, value) for (buf, index), value in zip(places, values)]


def _store_apart(nest: Nest, other: Nest) -> bool:
    by_buffer = {store.buf: store.index for store in other.stores}
    return all(
        apart(store.index, nest.dims, by_buffer[store.buf], other.dims) for store in nest.stores
    )


def _points(nest: Nest) -> int:
    return math.prod(nest.dims.values())


def _load(store: Store, pool: Pool) -> Expr:
    return pool.load(store.value.dtype, store.buf, store.index, False)


def _placed(maker: Nest, copy: Nest) -> list[tuple[Buf, Place]] | None:
    """Finds where a copy puts what each write of a maker stores; None if it is not known, or some of it is not copied."""
    by_buffer = {cast(Load, copy_write.value).buf: copy_write for copy_write in copy.stores}
    places: list[tuple[Buf, Place]] = []
    for store in maker.stores:
        copied = by_buffer[store.buf]
        place = _place(store, maker, copied, copy)
        if place is None:
            return None
        places.append((copied.buf, place))
    return places


def _place(written: Store, maker: Nest, store: Store, copy: Nest) -> Place | None:
    from_copy: dict[str, Affine] = {}
    for stored, read in zip(written.index, cast(Load, store.value).index):
        inner = [(dim, coeff) for dim, coeff in read.terms if dim in copy.dims]
        if len(inner) > 1 or any(coeff != 1 or dim in from_copy for dim, coeff in inner):
            return None
        rest = stored - Affine(tuple(term for term in read.terms if term not in inner), read.const)
        if not rest.symbols <= maker.dims.keys():
            return None
        low, high = rest.bounds(lambda dim: maker.dims[dim])
        if low < 0 or high >= (copy.dims[inner[0][0]] if inner else 1):
            return None
        from_copy |= {dim: rest for dim, _ in inner}
    if {dim for dim, size in copy.dims.items() if size > 1} - from_copy.keys():
        return None
    return tuple(
        position.substitute(lambda dim: from_copy.get(dim, 0 if dim in copy.dims else None))
        for position in store.index
    )
