"""Statements -> whether what they store at a place of an array does not depend on where the block starts.

    %a1[%h0 + i] = %a0[%h0 + i] * 2          the same, whichever block has the place %h0 + i
    %a1[%h0 + i] = %a0[%h0 + 9 - i]          turned around within the block: another block stores something else there
    %a1[%h0 + i] = where(i < 2, ...)         so it does here

Only then may blocks overlap (block_shift.py). Seen from a place p = %h0 + i of the array, i is p -
%h0: the start must vanish from all that a place is made of. Scratch may hold a part of the
dimension along one of its axes, and is then seen likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Expr,
    For,
    Gather,
    IndexValue,
    InRange,
    Let,
    Load,
    Nest,
    Sort,
    Stmt,
    Store,
    bodies,
)


def depend_on_places_alone(stmts: Sequence[Stmt], start: str) -> bool:
    """`start`: the symbol of the block's first element."""
    axes: dict[Buf, int | None] = {}
    while True:  # an axis is found once for each buffer
        before = dict(axes)
        if not _MovedAxes(start, axes).hold(stmts):
            return False
        if axes == before:
            return True


@dataclass
class _MovedAxes:
    """axes: scratch -> its axis along the moved dimension; None: it is the same in all blocks. As far as is known."""

    start: str
    axes: dict[Buf, int | None]
    counters: dict[str, int] = field(default_factory=dict)  # of loops around

    def hold(self, stmts: Sequence[Stmt]) -> bool:
        return all(map(self._holds, stmts))

    def _holds(self, stmt: Stmt) -> bool:
        match stmt:
            case Nest():
                return all(self._stores(store, stmt) for store in stmt.stores)
            case Let(value=v):
                return self._is_free(v, Nest({}), {}, {})
            case Sort(buffers=buffers):
                return all(map(self._sorts, buffers))
            case For(counter=c, trips=int(n), body=body):
                return _MovedAxes(self.start, self.axes, {**self.counters, c: n}).hold(body)
        return all(map(self.hold, bodies(stmt)))

    def _sorts(self, buf: Buf) -> bool:
        """Whether each line of a buffer has one place."""
        axis = self.axes.setdefault(buf.root, None)
        return axis is None or (
            buf.dtype == buf.root.dtype
            and math.prod(buf.root.shape[axis + 1 :]) % buf.shape[-1] == 0
        )

    def _stores(self, store: Store, nest: Nest) -> bool:
        """Whether a write suits its buffer; scratch that depends on the block is given the axis with which it does."""
        if not store.buf.arena:
            streamed = [
                k for k, position in enumerate(store.index) if self.start in position.symbols
            ]
            return len(streamed) <= 1 and self._suits(
                store, nest, streamed[0] if streamed else None
            )
        known = self.axes.get(store.buf.root)
        tried = [None, *range(len(store.buf.shape))] if known is None else [known]
        axis_moved = next((axis for axis in tried if self._suits(store, nest, axis)), -1)
        if axis_moved == -1:
            return False
        self.axes[store.buf.root] = axis_moved
        return True

    def _suits(self, store: Store, nest: Nest, axis: int | None) -> bool:
        """Whether each element is stored, and made, as seen from its place, which is counted along `axis`."""
        seen: dict[str, Affine] = {}
        if axis is not None:
            if not _is_axis_of_root(store.buf, axis):
                return False
            inside = (
                store.index[axis]
                if store.buf.arena
                else store.index[axis] - Affine.symbol(self.start)
            )
            whole = {
                **self.counters,
                **{dim: size for dim, size in nest.dims.items() if dim not in nest.rdims},
            }
            (counter,) = inside.symbols if len(inside.symbols) == 1 else (None,)
            if (
                counter not in whole
                or inside != Affine.symbol(counter)
                or (store.buf.arena and whole[counter] != store.buf.shape[axis])
            ):
                return False
            seen = {counter: inside - Affine.symbol(self.start)}
        memo: dict[Expr, bool] = {}
        places = all(
            self.start not in position.substitute(seen.get).symbols
            for k, position in enumerate(store.index)
            if k != axis
        )
        return places and all(
            self._is_free(expr, nest, seen, memo)
            for expr in (store.value, store.mask)
            if expr is not None
        )

    def _is_free(
        self, expr: Expr, nest: Nest, seen: dict[str, Affine], memo: dict[Expr, bool]
    ) -> bool:
        """Whether an expression does not depend on the start, with symbols as they are `seen` from a place."""
        if expr not in memo:
            inner = (
                nest.reductions[expr.number].args if isinstance(expr, Accumulator) else expr.args
            )
            memo[expr] = self._is_free_itself(expr, nest, seen) and all(
                self._is_free(arg, nest, seen, memo) for arg in inner
            )
        return memo[expr]

    def _is_free_itself(self, expr: Expr, nest: Nest, seen: dict[str, Affine]) -> bool:
        match expr:
            case IndexValue() | InRange():
                indices: list[Affine | None] = [expr.affine]
            case Load() | Gather():
                buf, indices = expr.buf, list(expr.index)
                axis = self.axes.setdefault(buf.root, None) if buf.root.arena else None
                if axis is not None:
                    if not _is_axis_of_root(buf, axis):
                        return False
                    index = indices[axis]
                    if index is None or not self._is_inside(index, buf.shape[axis], nest):
                        return False
                    indices[axis] = index + Affine.symbol(self.start)
            case _:
                return True
        return all(
            self.start not in place.substitute(seen.get).symbols
            for place in indices
            if place is not None
        )

    def _is_inside(self, index: Affine, extent: int, nest: Nest) -> bool:
        """Whether what is read is there in every block: nothing is cut off at its ends."""
        sizes = {**self.counters, **nest.dims}
        if not index.symbols <= sizes.keys():
            return False
        low, high = index.bounds(sizes.__getitem__)
        return low >= 0 and high < extent


def _is_axis_of_root(buf: Buf, axis: int) -> bool:
    """Whether an axis is that of the buffer whose bytes it reinterprets."""
    return buf is buf.root or (
        buf.dtype == buf.root.dtype and buf.shape[: axis + 1] == buf.root.shape[: axis + 1]
    )
