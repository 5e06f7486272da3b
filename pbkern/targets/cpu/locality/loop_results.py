"""Results of loops: scratch that is only copied afterwards is stored where the copy goes.

    for %i < n:  t[%i] = ...                        for %i < n:  y[%i] = ...
    for d < n:   y[d] = t[d]            ->

A scan's values of each step are such scratch: they are made of the loop before it is known where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.lower.nest import effects
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import Buf, Let, Load, Nest, Stmt, Store, bodies, every
from pbkern.lower.passes.strips.strip_mining import inside

# Index in scratch -> index where it is copied to.
Place = Callable[[tuple[Affine, ...]], tuple[Affine, ...]]


def store_loop_results(stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
    """Statements with fewer copies behind loops, inner ones too."""
    return _stored(stmts, context, {buf.root for buf in context.persistent})


def _stored(stmts: Sequence[Stmt], context: NestContext, live: set[Buf]) -> list[Stmt]:
    """Statements with fewer copies. `live`: root buffers that others touch."""
    out = inside(stmts, live, lambda body, elsewhere: _stored(body, context, elsewhere))
    at = 0
    while at < len(out):
        copy = out[at]
        for store in copy.stores if isinstance(copy, Nest) else ():
            assert isinstance(copy, Nest)
            place = _place(copy, store)
            maker = None if place is None else _maker(out, at, copy, store, live)
            if place is None or maker is None:
                continue
            assert isinstance(store.value, Load)
            out[maker : maker + 1] = _relocated(
                out[maker], store.value.buf, store.buf, place, context
            )
            copy = replace(copy, stores=tuple(each for each in copy.stores if each is not store))
            out[at] = copy
        if isinstance(copy, Nest) and not copy.stores:
            del out[at]
        else:
            at += 1
    return out


def _relocated(
    maker: Stmt, scratch: Buf, target: Buf, place: Place, context: NestContext
) -> list[Stmt]:
    return relocated(
        [maker],
        lambda buf: target if buf is scratch else None,
        context.pool,
        lambda _, index: place(index),
    )


def _place(copy: Nest, store: Store) -> Place | None:
    """Finds where a store puts all of the scratch that it copies, in the same order of axes; None if it is no such copy."""
    load = store.value
    if (
        copy.rdims
        or not isinstance(load, Load)
        or not load.buf.arena
        or load.buf.storage is not None
        or load.guard
        or store.guard
        or store.mask is not None
        or load.dtype != store.buf.dtype
    ):
        return None
    axes: dict[str, int] = {}
    for axis, (position, size) in enumerate(zip(load.index, load.buf.shape)):
        if size == 1 and position == Affine():
            continue
        dim = _lone_symbol(position)
        if dim is None or dim in axes or copy.dims.get(dim) != size:
            return None
        axes[dim] = axis
    terms = [
        (dim, coefficient)
        for position in store.index
        for dim, coefficient in position.terms
        if copy.dims.get(dim, 1) > 1
    ]
    if terms != [(dim, 1) for dim in axes if copy.dims[dim] > 1]:
        return None
    if any(size > 1 and dim not in axes for dim, size in copy.dims.items()):
        return None

    def place(index: tuple[Affine, ...]) -> tuple[Affine, ...]:
        def there(dim: str) -> Affine | int | None:
            if dim in axes:
                return index[axes[dim]]
            return 0 if dim in copy.dims else None

        return tuple(position.substitute(there) for position in store.index)

    return place


def _lone_symbol(position: Affine) -> str | None:
    """The symbol that a position consists of."""
    symbol = position.terms[0][0] if position.terms else None
    return symbol if symbol is not None and position == Affine.symbol(symbol) else None


def _maker(stmts: Sequence[Stmt], at: int, copy: Nest, store: Store, live: set[Buf]) -> int | None:
    """Position of the loop before a copy that alone stores what it copies, and that may store it elsewhere at once."""
    assert isinstance(store.value, Load)
    scratch, target = store.value.buf, store.buf.root
    if scratch in live or target is scratch:
        return None
    rest = replace(copy, stores=tuple(each for each in copy.stores if each is not store))
    touching = [
        k
        for k, stmt in enumerate(stmts)
        if scratch in effects.touched([rest if stmt is copy else stmt])
    ]
    if len(touching) != 1 or touching[0] > at:
        return None
    (maker,) = touching
    between = [*stmts[maker:at], rest]
    if target in effects.touched(between) or not _only_stores(stmts[maker], scratch):
        return None
    later = {stmt.name for stmt in between if isinstance(stmt, Let)}
    return None if any(later & position.symbols for position in store.index) else maker


def _only_stores(maker: Stmt, scratch: Buf) -> bool:
    """Whether a statement is control flow whose nests store to scratch, as it is, and nothing reads it."""
    if not bodies(maker) or scratch in effects.read([maker]):
        return False
    stores = [store for stmt in every([maker]) if isinstance(stmt, Nest) for store in stmt.stores]
    return all(store.buf is scratch for store in stores if store.buf.root is scratch)
