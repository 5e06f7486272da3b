"""Wide copies of narrow integers that contractions read -> the narrow ones, widened where they are read.

    t[i] = int32(x[i]);  acc += t[m, k] * u[k, n]     ->     acc += int32(x[m, k]) * int32(w[k, n])

The products then find operands of 8 or 16 bits (pair_products.py, quad_products.py), and scratch
takes a quarter or half of the bytes. Scratch that is more than a copy, such as padded rows of a
convolution or activations that are quantised on the way, stays, but narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.inline import stored_at
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import (
    Buf,
    Expr,
    Gather,
    Load,
    Nest,
    Op,
    Stmt,
    Store,
    bodies,
    every,
    nodes,
)
from pbkern.lower.passes.strips.strip_mining import inside

from .pair_products import NARROW, depth_dim, is_narrow_integer

INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class SinkWideningCasts:
    """Products of converted integers read narrow ones, where they come from if they are copies."""

    fewest_word_products: int = threshold(
        16, "products of one sum that are worth words. Source: not recorded"
    )
    fewest_word_readers: int = threshold(
        2, "points that share an element whose word is worth making"
    )
    shortest_row_in_place: int = threshold(
        512,
        "elements of rows along the reduction whose words are read where they are (words_in_place.py), for fewer readers: "
        "eight vectors of words of four, as for products of few rows",
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        live = set(context.persistent)
        narrow = self._narrow_scratch(stmts, live)
        if not narrow:
            return list(stmts)
        stored = _stored_narrow(stmts, narrow, context)
        return self._without_copies(stored, context, live)

    def _narrow_scratch(self, stmts: Sequence[Stmt], live: set[Buf]) -> dict[Buf, np.dtype]:
        """Scratch that only holds widened integers of one type, where that makes both operands of some product narrow."""
        nests = [stmt for stmt in every(stmts) if isinstance(stmt, Nest)]
        names_of: dict[Buf, set[str]] = {}
        for store in (store for nest in nests for store in nest.stores):
            if (
                store.buf.root.arena
                and store.buf.root.dtype == INT32
                and store.buf.root not in live
            ):
                names_of.setdefault(store.buf.root, set()).add(_narrow_type(store))
        types = {
            buf: np.dtype(next(iter(names)))
            for buf, names in names_of.items()
            if len(names) == 1 and names <= set(NARROW)
        }
        views = {
            access.root for nest in nests for access in _other_accesses(nest)
        } | _touched_by_others(stmts)
        types = {buf: type_ for buf, type_ in types.items() if buf not in views}
        read = set().union(*(_operands(nest) for nest in nests if self._suits(nest, types)))
        return {buf: type_ for buf, type_ in types.items() if buf in read}

    def _suits(self, nest: Nest, narrow: dict[Buf, np.dtype]) -> bool:
        """Whether a nest is a product of enough narrow integers, once `narrow` scratch is."""
        if (
            len(nest.reductions) != 1
            or not nest.reductions[0].is_plain_product
            or nest.reductions[0].dtype != INT32
        ):
            return False
        args = nest.reductions[0].args
        if not all(
            is_narrow_integer(arg) or (isinstance(arg, Load) and arg.buf.root in narrow)
            for arg in args
        ):
            return False
        inner = [
            rdim for rdim in nest.rdims if nest.dims[rdim] > 1
        ]  # one alone need not be divided (pairs.in_whole_words)
        along = (
            inner if len(inner) == 1 else [depth_dim(nest, arg, 2) for arg in args]
        )  # either may be the broadcast one
        depths = [nest.dims[dim] for dim in along if dim is not None]
        if not any(depth >= self.fewest_word_products for depth in depths):
            return False
        return all(nest.reuse(arg) >= self.fewest_word_readers for arg in args) or (
            len(inner) == 1
            and nest.dims[inner[0]] >= self.shortest_row_in_place
            and all(flat_coefficient(*load.access, inner[0]) == 1 for load in _plain_loads(args))
        )

    def _without_copies(self, stmts: Sequence[Stmt], context, live: set[Buf]) -> list[Stmt]:
        """Products read narrow integers where they come from, not copies of them."""
        stmts = inside(
            stmts, live, lambda body, elsewhere: self._without_copies(body, context, elsewhere)
        )
        stmts = [part for stmt in stmts for part in _apart(stmt)]
        copies = {
            store.buf: store
            for stmt in stmts
            if (store := _copy(stmt)) is not None and store.buf not in live
        }
        written = effects.written(stmts)
        copies = {
            buf: copy
            for buf, copy in copies.items()
            if cast(Load, copy.value).buf.root not in written and _writers(stmts, buf) == 1
        }
        out = [self._from_source(stmt, copies, context) for stmt in stmts]
        read = [
            out_stmt
            for out_stmt in out
            if (store := _copy(out_stmt)) is None or store.buf not in copies
        ]
        unread = copies.keys() - effects.touched(read)
        return [
            out_stmt
            for out_stmt in out
            if (store := _copy(out_stmt)) is None or store.buf not in unread
        ]

    def _from_source(self, stmt: Stmt, copies: dict[Buf, Store], context) -> Stmt:
        if not isinstance(stmt, Nest) or not self._suits(stmt, {}):
            return stmt

        def source(expr: Expr) -> Expr | None:
            if not isinstance(expr, Load) or expr.buf not in copies or expr.guard:
                return None
            return stored_at(copies[expr.buf], expr.index, context.pool)

        args = tuple(context.pool.rewrite(arg, source) for arg in stmt.reductions[0].args)
        return replace(stmt, reductions=(replace(stmt.reductions[0], args=args),))


# ---------------------------------------------------------------- scratch of narrow integers


def _narrow_type(store: Store) -> str:
    """The type that a written value is widened from."""
    widened = isinstance(store.value, Op) and store.value.info.primitive == "convert_element_type"
    return store.value.args[0].dtype.name if widened else ""


def _other_accesses(nest: Nest) -> list[Buf]:
    """Buffers that are accessed other than by loads and stores of 32-bit integers."""
    loads = [
        load.buf for load in nest.loads() if isinstance(load, Gather) or load.buf.dtype != INT32
    ]
    return loads + [store.buf for store in nest.stores if store.buf.dtype != INT32]


def _touched_by_others(stmts: Sequence[Stmt]) -> set[Buf]:
    """Root buffers that statements other than nests touch."""
    return effects.touched(
        [stmt for stmt in every(stmts) if not isinstance(stmt, Nest) and not bodies(stmt)]
    )


def _plain_loads(exprs: Sequence[Expr]) -> list[Load]:
    return [node for node in nodes(exprs) if isinstance(node, Load)]


def _operands(nest: Nest) -> set[Buf]:
    return {
        arg.buf.root
        for reduction in nest.reductions
        for arg in reduction.args
        if isinstance(arg, Load)
    }


def _stored_narrow(stmts: Sequence[Stmt], types: dict[Buf, np.dtype], context) -> list[Stmt]:
    """The statements over narrow buffers in place of wide ones, and of views of them."""
    narrow: dict[Buf, Buf] = {}

    def other(buf: Buf) -> Buf | None:
        if buf.root in types and buf not in narrow:
            narrow[buf] = (
                context.new_buffer(buf.shape, types[buf])
                if buf.storage is None
                else replace(buf, dtype=types[buf.root], storage=other(buf.storage))
            )
        return narrow.get(buf)

    def widened(load: Expr) -> Expr:
        return context.op("convert_element_type", INT32, load, params={"new_dtype": INT32})

    return relocated(stmts, other, context.pool, loaded=widened, stored=lambda value: value.args[0])


# ---------------------------------------------------------------- copies


def _apart(stmt: Stmt) -> list[Stmt]:
    """Copies of one nest as a nest each: those of operands of one shape have been merged."""
    parts: list[Stmt] = (
        [replace(stmt, stores=(store,)) for store in stmt.stores] if isinstance(stmt, Nest) else []
    )
    return parts if len(parts) > 1 and all(_copy(part) is not None for part in parts) else [stmt]


def _writers(stmts: Sequence[Stmt], buf: Buf) -> int:
    return sum(buf in effects.written([stmt]) for stmt in stmts)


def _copy(stmt: Stmt) -> Store | None:
    """The only effect of a nest: a scratch buffer with elements of another buffer, at plain places."""
    if not isinstance(stmt, Nest) or stmt.reductions or len(stmt.stores) != 1:
        return None
    (store,) = stmt.stores
    plain = (
        not store.guard
        and store.mask is None
        and store.buf.arena
        and store.buf.storage is None
        and isinstance(store.value, Load)
    )
    if not plain or store.value.dtype.name not in NARROW:
        return None
    axes = {position: size for position, size in zip(store.index, store.buf.shape) if size > 1}
    whole = axes == {Affine.symbol(dim): size for dim, size in stmt.dims.items() if size > 1}
    known = store.value.symbols & stmt.dims.keys() <= frozenset().union(
        *(position.symbols for position in store.index)
    )
    return store if whole and known else None
