"""A nest that stores what another one reads -> the reader alone, which computes it where it reads it."""

from __future__ import annotations

from collections.abc import Mapping

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Pool, Store


def inlined(maker: Nest, reader: Nest, pool: Pool) -> Nest | None:
    """The reader with the maker's values, at a distance where it reads neighbouring points; None where it may not be.

        nest [i<10]
          t[i] = a[i] + b[i]                nest [i<8]
        nest [i<8]                  ->        o[i] = (a[i] + b[i]) * ((a[i] + b[i]) at i + 2)
          o[i] = t[i] * t[i + 2]

    Legal where the maker stores once at each of its points, reads nothing of what it stores, and reductions of the reader
    take no value at a distance; where the reader walks in step with it, at distances of 0 and more; and where nobody else
    reads what is stored, nor stores between the two to what the maker reads.
    """
    if maker.rdims or maker.ordered or reader.ordered:
        return None
    if not all(_stores_all(maker, store) for store in maker.stores):
        return None
    stores = {store.buf: store for store in maker.stores}
    dims = _same_dims(stores, reader, maker)
    if dims is None:
        return None
    single: dict[str, Affine] = {dim: Affine() for dim, size in maker.dims.items() if size == 1}
    rename = pool.renamer({mine: Affine.symbol(dim) for dim, mine in dims.items()} | single)
    values = {buf: rename(store.value) for buf, store in stores.items()}

    def replaced(expr: Expr) -> Expr | None:
        if not isinstance(expr, Load) or expr.buf not in values:
            return None
        value = values[expr.buf]
        moves = tuple(
            (affine.terms[0][0], affine.const)
            for affine in expr.index
            if affine.terms and affine.const and affine.terms[0][0] in value.symbols
        )
        return pool.shifted(expr.dtype, moves, (value,)) if moves else value

    return reader.mapped(pool.rewriter(replaced))


def recomputed(maker: Nest, reader: Nest, pool: Pool) -> Nest | None:
    """The reader with the maker's values computed anew at each place where it reads them; None where it may not be.

        nest [i<8, k<9]                            nest [i<8, j<4, k<9*]
          t[i, k] = f(a[i, k])                       acc0 dot= f(a[i, k]), b[k, j]
        nest [i<8, j<4, k<9*]              ->        y[i, j] = acc0  (after)
          acc0 dot= t[i, k], b[k, j]
          y[i, j] = acc0  (after)

    Legal where the maker stores once at each of its points, all elements of the buffer, and reads nothing of what it stores;
    where nobody else reads that, nor stores between the two to it or to what the maker reads.
    """
    if maker.rdims or maker.ordered or maker.moves():
        return None
    if not all(_stores_all(maker, store) and fills(maker, store) for store in maker.stores):
        return None
    stores = {store.buf: store for store in maker.stores}
    loads = [load for load in reader.loads() if load.buf.root in stores]
    values = {
        load: stored_at(stores[load.buf], load.index, pool)
        for load in loads
        if isinstance(load, Load) and load.buf in stores and not load.guard
    }
    if len(values) < len(loads) or not all(values.values()):
        return None
    return reader.mapped(
        pool.rewriter(lambda node: values.get(node) if isinstance(node, Load) else None)
    )


def _stores_all(maker: Nest, store: Store) -> bool:
    """Whether a store runs once at every point, and is the only access to its buffer."""
    if not store.inner or store.guard or store.mask is not None or store.buf.storage is not None:
        return False
    live = {dim for dim, size in maker.dims.items() if size > 1}
    touched = [load.buf.root for load in maker.loads()] + [
        other.buf.root for other in maker.stores if other is not store
    ]
    return (
        live <= {symbol for position in store.index for symbol in position.symbols}
        and store.buf not in touched
    )


def fills(maker: Nest, store: Store) -> bool:
    """Whether a store reaches every element of its buffer: each axis by a dimension of its own."""
    places = [position for position in store.index if not position.is_const]
    symbols = [symbol for position in places for symbol, _ in position.terms]
    return len(set(symbols)) == len(symbols) == len(places) and all(
        position == Affine.symbol(*position.symbols) and maker.dims.get(*position.symbols) == size
        if position.symbols
        else size == 1
        for position, size in zip(store.index, store.buf.shape)
    )


def _same_dims(stores: Mapping[Buf, Store], reader: Nest, maker: Nest) -> dict[str, str] | None:
    """The reader's dimension -> the maker's, if all loads of what is stored walk it in step, at distances of 0 and more."""
    dims: dict[str, str] = {}
    for load in reader.loads():
        store = stores.get(load.buf.root)
        if store is None:
            continue
        if not isinstance(load, Load) or load.buf is not store.buf or load.guard:
            return None
        for theirs, mine in zip(store.index, load.index):
            if theirs.is_const and mine == theirs:
                continue
            if theirs.const or len(theirs.terms) != 1 or len(mine.terms) != 1 or mine.const < 0:
                return None
            (reader_dim, reader_step), (maker_dim, maker_step) = mine.terms[0], theirs.terms[0]
            if (
                (reader_step, maker_step) != (1, 1)
                or reader_dim not in reader.dims
                or dims.setdefault(reader_dim, maker_dim) != maker_dim
            ):
                return None
    live = {dim for dim, size in reader.dims.items() if size > 1}
    maker_live = {dim for dim, size in maker.dims.items() if size > 1}
    return (
        dims
        if dims.keys() >= live
        and maker_live <= set(dims.values())
        and len(set(dims.values())) == len(dims)
        else None
    )


def stored_at(store: Store, index: tuple[Affine, ...], pool: Pool) -> Expr | None:
    """The value that a store puts at an index; None where its own index does not tell the point from the place.

    t[i, 0, j] = x[i] + y[j],  t[k + 1, 0, 2]    ->    x[k + 1] + y[2]
    """
    places: dict[str, Affine] = {}
    for mine, theirs in zip(store.index, index):
        if mine.terms:
            dim = mine.terms[0][0]
            if mine != Affine.symbol(dim):
                return None
            places[dim] = theirs
    return pool.rename(store.value, places)
