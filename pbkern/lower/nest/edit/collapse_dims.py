"""Nest -> nest with neighbouring dimensions joined where every access walks them as one.

rows x pixels x 3 channels becomes rows x (3 pixels): vectors run over the joined dimension and need no tail per pixel.
Before -> after:  out[i, j, c] = in[i, j + 1, c]   ->   out'[i, d] = in'[i, d + 3],   d = 3 j + c
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import (
    Buf,
    Expr,
    Gather,
    IndexValue,
    InRange,
    Load,
    Nest,
    Pool,
    Shifted,
    Store,
)

Access = tuple[Buf, tuple, bool]


class Aliases:
    """Buffers seen with a run of axes joined; one alias per buffer and run."""

    def __init__(self) -> None:
        self._made: dict = {}

    def joined(self, buf: Buf, low: int, high: int) -> Buf:
        key = (id(buf), low, high)
        if key not in self._made:
            shape = (*buf.shape[:low], math.prod(buf.shape[low : high + 1]), *buf.shape[high + 1 :])
            self._made[key] = Buf(
                f"{buf.name}.j{low}{high}", shape, buf.dtype, buf.arena, storage=buf
            )
        return self._made[key]


def collapse(nest: Nest, pool: Pool, aliases: Aliases) -> Nest:
    """Joins as many neighbouring dimensions as possible."""
    changed = True
    while changed:
        changed = False
        for outer, inner in _pairs(nest):
            if _joinable(nest, outer, inner):
                nest, changed = _join(nest, outer, inner, pool, aliases), True
                break
    return nest


def _pairs(nest: Nest) -> Iterator[tuple[str, str]]:
    """Pairs (outer, inner) that may walk as one: neighbours, and those that a transposed result has the other way round.

    Other pairs have been set apart, as panels are.
    """
    yield from itertools.pairwise(nest.dims)
    if not nest.stores:
        return
    store = nest.stores[0]
    steps = flat_index(store.buf, store.index)
    moving = [
        dim
        for dim, size in nest.dims.items()
        if size > 1 and dim not in nest.rdims and steps.coefficient(dim)
    ]
    for inner, outer in itertools.combinations(moving, 2):
        if _counts_as_one(steps, outer, inner, nest.dims[inner]):
            yield outer, inner


def _joinable(nest: Nest, outer: str, inner: str) -> bool:
    if (
        (outer in nest.rdims) != (inner in nest.rdims)
        or nest.ordered
        or nest.dims[outer] == 1
        or nest.dims[inner] == 1
    ):
        return False
    if 0 in nest.dims.values():  # strides tell nothing
        return False
    size = nest.dims[inner]
    for node in nest.nodes():
        if isinstance(node, IndexValue | InRange) and not _counts_as_one(
            node.affine, outer, inner, size
        ):
            return False
        if isinstance(node, Shifted) and any(dim == inner for dim, _ in node.moves):
            return False
        if isinstance(node, Gather) and not _gathers_as_one(nest, node, outer, inner, size):
            return False
        if isinstance(node, Load) and not _walks_as_one(
            nest, (node.buf, node.index, node.guard), outer, inner, size
        ):
            return False
    return all(
        _walks_as_one(nest, (store.buf, store.index, store.guard), outer, inner, size)
        for store in nest.stores
    )


def _counts_as_one(affine: Affine, outer: str, inner: str, size: int) -> bool:
    return affine.coefficient(outer) == affine.coefficient(inner) * size


def _walks_as_one(nest: Nest, access: Access, outer: str, inner: str, size: int) -> bool:
    buf, index, guard = access
    if not _counts_as_one(flat_index(buf, index), outer, inner, size):
        return False
    axes = [k for k, position in enumerate(index) if position.symbols & {outer, inner}]
    if not axes:
        return True
    run = index[axes[0] : axes[-1] + 1]
    extents = buf.shape[axes[0] : axes[-1] + 1]
    # Joined axes lose their separate bounds: each must be inside whatever happens (or be the only
    # one, unguarded).
    return (
        (not guard and len(run) == 1)
        or all(_inside(nest, i, extent) for i, extent in zip(run, extents))
        or not guard
    )


def _gathers_as_one(nest: Nest, gather: Gather, outer: str, inner: str, size: int) -> bool:
    """Whether the affine axes of a gather walk as one. What is outside of an axis is clamped, so none may be."""
    axes = [k for k, i in enumerate(gather.index) if i is not None and i.symbols & {outer, inner}]
    if not axes:
        return True
    run = [i for i in gather.index[axes[0] : axes[-1] + 1] if i is not None]
    extents = gather.buf.shape[axes[0] : axes[-1] + 1]
    if len(run) < len(extents):
        return False
    flat: Affine[str] = Affine()
    for position, extent in zip(run, extents):
        flat = flat * extent + position
    return _counts_as_one(flat, outer, inner, size) and all(
        _inside(nest, position, extent) for position, extent in zip(run, extents)
    )


def _inside(nest: Nest, affine: Affine, extent: int) -> bool:
    if not affine.symbols <= nest.dims.keys():
        return False
    low, high = affine.bounds(nest.dims.__getitem__)
    return low >= 0 and high < extent


def _join(nest: Nest, outer: str, inner: str, pool: Pool, aliases: Aliases) -> Nest:
    """Replaces a and inner by one dimension, named inner, of size |a| * |b|."""
    size = nest.dims[inner]

    def access(buf: Buf, index: tuple) -> tuple[Buf, tuple]:
        axes = [k for k, i in enumerate(index) if i is not None and i.symbols & {outer, inner}]
        if not axes:
            return buf, index
        low, high = axes[0], axes[-1]
        if high > low:
            flat: Affine[str] = Affine()
            for position, extent in zip(index[low : high + 1], buf.shape[low : high + 1]):
                flat = flat * extent + position
            buf, index = aliases.joined(buf, low, high), (*index[:low], flat, *index[high + 1 :])
        joined = index[low]
        coefficient = joined.coefficient(inner)
        rest = Affine.make(
            {symbol: weight for symbol, weight in joined.terms if symbol not in (outer, inner)},
            joined.const,
        )
        assert joined.coefficient(outer) == coefficient * size
        return buf, (*index[:low], rest + Affine.symbol(inner, coefficient), *index[low + 1 :])

    def replace(expr: Expr) -> Expr | None:
        if isinstance(expr, Shifted):
            steps = tuple(
                (inner, distance * size) if dim == outer else (dim, distance)
                for dim, distance in expr.moves
            )
            return pool.shifted(expr.dtype, steps, expr.args)
        if isinstance(expr, IndexValue | InRange):
            return pool.with_places(expr, lambda affine: affine.substitute({outer: Affine()}.get))
        if not isinstance(expr, Load | Gather):
            return None
        buf, index = access(*expr.access)
        if isinstance(expr, Gather):
            return pool.gather(expr.dtype, buf, index, expr.args)
        return pool.load(expr.dtype, buf, index, expr.guard)

    rewrite = pool.rewriter(replace)

    def renamed_store(store: Store) -> Store:
        buf, index = access(store.buf, store.index)
        return store.mapped(rewrite, buf=buf, index=index)

    later = max(outer, inner, key=list(nest.dims).index)
    dims = {
        inner if dim == later else dim: extent if dim != later else size * nest.dims[outer]
        for dim, extent in nest.dims.items()
        if dim == later or dim not in (outer, inner)
    }
    return dataclasses.replace(
        nest,
        dims=dims,
        rdims=tuple(rdim for rdim in nest.rdims if rdim != outer),
        reductions=tuple(reduction.mapped(rewrite) for reduction in nest.reductions),
        stores=tuple(renamed_store(store) for store in nest.stores),
    )
