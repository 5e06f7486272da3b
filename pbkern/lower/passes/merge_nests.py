"""Statements -> statements: nests over equal spaces become one, operands of contractions are packed.

Merging keeps meaning because the later nest reads what the earlier one writes only at the very
point it is written, and depends on nothing in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.fuse import are_independent, fused
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.effects import Effects
from pbkern.lower.nest.ir import (
    MAX_HEIGHT,
    Buf,
    Nest,
    Pool,
    Stmt,
    Store,
    with_bodies,
)

SINGLE = "one"


def without_unread(stmts: Sequence[Stmt], live: set[Buf]) -> list[Stmt]:
    """Without stores to scratch that nothing reads."""
    while True:
        dead = {buf for buf in effects.written(stmts) if buf.arena} - live - effects.read(stmts)
        if not dead:
            return list(stmts)
        stmts = _without_writes(stmts, dead)


def _without_writes(stmts: Sequence[Stmt], dead: set[Buf]) -> list[Stmt]:
    out = []
    for stmt in stmts:
        stmt = with_bodies(stmt, lambda inner: _without_writes(inner, dead))
        if isinstance(stmt, Nest) and any(store.buf.root in dead for store in stmt.stores):
            stmt = replace(
                stmt, stores=tuple(store for store in stmt.stores if store.buf.root not in dead)
            )
            if not stmt.stores:
                continue
        out.append(stmt)
    return out


@dataclass(frozen=True)
class MergeNests:
    """Nests over equal spaces become one, inner ones too."""

    # Keeps the time for long bodies in proportion to their length. More operations fill no
    # processor's window anyway.
    most_nodes: int = threshold(1500, "operations of a merged nest")
    # Keeps that time in proportion as well.
    most_distance: int = threshold(64, "statements between two nests that are merged")
    most_permuted: int = threshold(
        4, "dimensions of one nest that are paired in any order with those of another"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        inside = (with_bodies(stmt, lambda inner: self(inner, context)) for stmt in stmts)
        return self.merged(inside, context.pool)

    def merged(self, stmts: Iterable[Stmt], pool: Pool, may_overwrite: bool = False) -> list[Stmt]:
        """Statements one after the other with fewer nests; `may_overwrite`: as `are_independent` has it."""
        out: list[Stmt] = []
        before: list[Effects] = []  # of each of `out`
        for stmt in stmts:
            if isinstance(stmt, Nest):
                if any(size == 0 for dim, size in stmt.dims.items() if dim not in stmt.rdims):
                    continue
                joined = _joined_before(out, before, stmt, pool, self, may_overwrite)
                if joined is not None:
                    at, out[at] = joined
                    before[at] = Effects.of(out[at])
                    continue
            out.append(stmt)
            before.append(Effects.of(stmt))
        return out


def _joined_before(
    before: Sequence[Stmt],
    effects_before: list[Effects],
    nest: Nest,
    pool: Pool,
    limits: MergeNests,
    may_overwrite: bool,
) -> tuple[int, Nest] | None:
    """(position, merged nest) of the last nest before that this one joins, past others that do not depend on it."""
    mine = Effects.of(nest)
    for at in range(len(before) - 1, max(len(before) - limits.most_distance, 0) - 1, -1):
        other = before[at]
        if not isinstance(other, Nest):
            return None
        merged = merge(other, nest, pool, limits, may_overwrite)
        if merged is not None:
            return at, merged
        if not mine.commute(effects_before[at]):
            return None
    return None


def merge(
    first: Nest, second: Nest, pool: Pool, limits: MergeNests, may_overwrite: bool = False
) -> Nest | None:
    """One nest that does both, or None; `may_overwrite`: as `are_independent` has it."""
    if (
        first.ordered
        or second.ordered
        or any(store.buf.space for store in first.stores + second.stores)
        or any(reduction.is_product for reduction in first.reductions + second.reductions)
    ):
        return None
    live = _matched(first, second, limits.most_permuted)
    if live is None or max(len(nest.nodes()) for nest in (first, second)) > limits.most_nodes:
        return None
    rename = {theirs: Affine.symbol(mine) for mine, theirs in live}
    rename |= {dim: Affine() for dim, size in second.dims.items() if size == 1}
    constants: dict[str, Affine] = {dim: Affine() for dim, size in first.dims.items() if size == 1}
    rdims = {rdim for rdim in first.rdims if first.dims[rdim] > 1}
    theirs = {rename[rdim].terms[0][0] for rdim in second.rdims if second.dims[rdim] > 1}
    if first.reductions and (
        rdims != theirs if second.reductions else first.moves() or second.moves()
    ):
        return None
    if may_overwrite and not all(map(_goes_along_rows, second.stores)):
        return None
    second = _renamed(second, rename, pool)
    first = _renamed(first, constants, pool)
    if not are_independent(first, second, may_overwrite) or _vector_conflict(first, second):
        return None
    merged = _joined(first, second, pool)
    if may_overwrite:
        merged = replace(merged, stores=_by_values(merged.stores))
    if len(merged.nodes()) > limits.most_nodes or _rereads(merged):  # what both compute counts once
        return None
    return (
        merged
        if max((expr.height for expr in merged.expressions()), default=0) <= MAX_HEIGHT
        else None
    )


def _matched(first: Nest, second: Nest, most_permuted: int) -> list[tuple[str, str]] | None:
    """Pairs of dimensions of one size.

    Where several orders are possible, that in which both read the same elements; in another order
    than their own they share a walk only for that: else one of them would go across its rows. A
    reduction over several dimensions keeps its order.
    """
    mine, theirs = (
        {dim: size for dim, size in nest.dims.items() if size > 1} for nest in (first, second)
    )
    if sorted(mine.values()) != sorted(theirs.values()):
        return None
    if list(mine.values()) == list(theirs.values()) and len(set(mine.values())) == len(mine):
        return list(zip(mine, theirs))
    fixed = any(sum(nest.dims[rdim] > 1 for rdim in nest.rdims) > 1 for nest in (first, second))
    orders = (
        [tuple(theirs)] if fixed or len(mine) > most_permuted else itertools.permutations(theirs)
    )
    matches = [
        list(zip(mine, order))
        for order in orders
        if [theirs[dim] for dim in order] == list(mine.values())
    ]
    if not matches:
        return None
    shared = [_shared(first, second, pairs) for pairs in matches]
    best = matches[shared.index(max(shared))]
    return best if any(shared) or best == list(zip(mine, theirs)) else None


def _shared(first: Nest, second: Nest, pairs: list[tuple[str, str]]) -> int:
    """Counts loads of the second nest that are of what the first one loads or stores at the same point."""
    units: dict[str, Affine] = {
        dim: Affine() for nest in (first, second) for dim, size in nest.dims.items() if size == 1
    }
    renamed = units | {theirs: Affine.symbol(mine) for mine, theirs in pairs}

    def place(buf: Buf, index: tuple, names: dict[str, Affine]) -> tuple:
        return (
            buf,
            *(
                position if position is None else position.substitute(names.get)
                for position in index
            ),
        )

    theirs = {load.buf for load in second.loads()}
    mine = {
        place(access.buf, access.index, units)
        for access in (*first.loads(), *first.stores)
        if access.buf in theirs
    }
    both = {buf for buf, *_ in mine}
    return len(
        mine & {place(load.buf, load.index, renamed) for load in second.loads() if load.buf in both}
    )


def _renamed(nest: Nest, places: Mapping[str, Affine], pool: Pool) -> Nest:
    """The nest with dimensions under other names; a dimension whose place is constant goes."""
    names = {dim: place.terms[0][0] if place.terms else "" for dim, place in places.items()}
    dims = {names.get(dim, dim): size for dim, size in nest.dims.items() if names.get(dim, dim)}
    rdims = tuple(names.get(rdim, rdim) for rdim in nest.rdims if names.get(rdim, rdim))
    return replace(renamed(nest, places, dims, pool), rdims=rdims) if places else nest


def _rereads(nest: Nest) -> bool:
    """Whether writes behind the reductions compute anew, of a single element, what a write before them has overwritten."""
    before = {store.buf.root for store in nest.stores if store.inner}
    return any(
        load.buf.root in before
        for load in Nest(
            {}, stores=tuple(store for store in nest.stores if not store.inner)
        ).loads()
    )


def _goes_along_rows(store: Store) -> bool:
    """Whether a store is of one number, or of neighbours along some dimension."""
    flat = flat_index(store.buf, store.index)
    return not flat.terms or any(abs(coefficient) == 1 for _, coefficient in flat.terms)


def _by_values(stores: Sequence[Store]) -> tuple[Store, ...]:
    """Stores of equal values one after the other: if one goes later, its value is computed where it was."""
    order = {store.value: place for place, store in reversed(list(enumerate(stores)))}
    return tuple(sorted(stores, key=lambda store: order[store.value]))


def _vector_conflict(first: Nest, second: Nest) -> bool:
    """Writes whose contiguous dimensions differ would make one of them a scatter."""

    def last(nest: Nest) -> set:
        return {
            store.index[-1].terms[-1][0]
            for store in nest.stores
            if store.inner and store.index and store.index[-1].terms
        }

    first_dims, second_dims = last(first), last(second)
    return bool(first_dims and second_dims and first_dims != second_dims)


def _joined(first: Nest, second: Nest, pool: Pool) -> Nest:
    """Both nests as one; reductions over single elements, whose dimensions renaming has dropped, keep one."""
    nest = fused(first, second, pool)
    if not nest.reductions or nest.rdims:
        return nest
    return replace(nest, dims={**nest.dims, SINGLE: 1}, rdims=(SINGLE,))
