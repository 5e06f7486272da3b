"""Elementwise nest over short rows -> the same over many rows at once, beside copies of what all rows share.

out[i, c] = in[i, c] * scale[c] for pixels of three channels does not fill vectors row by row, and
cannot be walked as one line because of `scale`. Of as many rows as a vector has lanes, whole
vectors see the same parts of `scale`:

    scales[l, c] = scale[c]                                  for l < 16: three vectors
    out[16 i + l, c] = in[16 i + l, c] * scales[l, c]        (l, c) walked as one (lower/nest/edit/collapse_dims.py)
"""

from __future__ import annotations

from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.ir import (
    Buf,
    Expr,
    Gather,
    IndexValue,
    InRange,
    Load,
    Nest,
    Op,
    Shifted,
    Store,
)
from pbkern.targets.cpu.schedule.nest_schedule import schedule_so_far
from pbkern.targets.cpu.schedule.vector_dimension import register_bits

from .limits import PackLimits


def tile_rows(nest: Nest, context, limits: PackLimits) -> list[Nest]:
    """[copies, whole groups of rows, rows that are left] in place of a nest, or the nest itself."""
    dims = list(nest.dims)
    if (
        nest.rdims
        or nest.ordered
        or schedule_so_far(nest) is not None
        or len(dims) < 2
        or 0 in nest.dims.values()
    ):
        return [nest]
    row, column = dims[-2:]
    lanes = max(context.options.vectors.bits // register_bits(nest), 2)
    size, rows = nest.dims[column], nest.dims[row]
    if size < 2 or size % lanes == 0:
        return [nest]
    if size > limits.most_row_vectors * lanes or rows < limits.fewest_row_reads * lanes:
        return [nest]
    shared = _SharedByRows(nest, row, column, lanes, context)
    if not shared.values or not shared.rest_is_contiguous():
        return [nest]
    return [*shared.copies(), *shared.nests()]


class _SharedByRows:
    """`values`: the largest expressions that are the same in all rows, and the buffer of the copies of each."""

    def __init__(self, nest: Nest, row: str, column: str, lanes: int, context):
        self.nest, self.row, self.column, self.lanes, self.context = (
            nest,
            row,
            column,
            lanes,
            context,
        )
        self.values: dict[Expr, Buf] = {}
        self._memo: dict[Expr, Expr] = {}
        self.stores = [store.mapped(self._without) for store in nest.stores]
        self.step = context.names("d")

    def _without(self, expr: Expr) -> Expr:
        """The expression with loads from the copies."""
        if expr not in self._memo:
            streamed = expr.symbols & self.nest.dims.keys()
            if streamed == {self.column} and isinstance(
                expr, Load | Gather | Op | IndexValue | InRange
            ):
                buf = self.values[expr] = self.context.new_buffer(
                    (self.lanes, self.nest.dims[self.column]), expr.dtype
                )
                index = (
                    Affine.symbol(self.row),
                    Affine.symbol(self.column),
                )  # of a row: its place in the group
                self._memo[expr] = self.context.pool.load(expr.dtype, buf, index, False)
            else:
                args = tuple(map(self._without, expr.args))
                same = all(arg is old for arg, old in zip(args, expr.args))
                self._memo[expr] = expr if same else expr.with_args(args, self.context.pool)
        return self._memo[expr]

    def rest_is_contiguous(self) -> bool:
        """Whether all else walks memory from row to row, or stays where it is."""
        size, streamed = self.nest.dims[self.column], {self.row, self.column}

        def walks(buf: Buf, index) -> bool:
            steps = (
                flat_coefficient(buf, index, self.row),
                flat_coefficient(buf, index, self.column),
            )
            return steps == (size, 1) or not any(position.symbols & streamed for position in index)

        for node in Nest({}, stores=tuple(self.stores)).nodes():
            if (
                isinstance(node, IndexValue | InRange | Shifted | Gather)
                and node.symbols & streamed
            ):
                return False
            if (
                isinstance(node, Load)
                and node.buf not in self.values.values()
                and (node.guard or not walks(*node.access))
            ):
                return False
        return all(not store.guard and walks(store.buf, store.index) for store in self.stores)

    def copies(self) -> list[Nest]:
        index = (Affine.symbol(self.step), Affine.symbol(self.column))
        dims = {self.step: self.lanes, self.column: self.nest.dims[self.column]}
        return [
            Nest(dims, stores=(Store(buf, index, expr),), at=self.nest.at)
            for expr, buf in self.values.items()
        ]

    def nests(self) -> list[Nest]:
        groups, left = divmod(self.nest.dims[self.row], self.lanes)
        group = self.context.names("d")
        outer = {
            dim: size for dim, size in self.nest.dims.items() if dim not in (self.row, self.column)
        }
        inner = {self.row: self.lanes, self.column: self.nest.dims[self.column]}
        whole = self._moved(outer | {group: groups} | inner, Affine.symbol(group, self.lanes))
        return (
            [whole, self._moved(outer | inner | {self.row: left}, Affine((), groups * self.lanes))]
            if left
            else [whole]
        )

    def _moved(self, dims: dict[str, int], start: Affine) -> Nest:
        """The nest over other rows, from `start` on. Copies are read where they are."""
        place = {self.row: start + Affine.symbol(self.row)}
        nest = renamed(self.nest, place, dims, self.context.pool)
        return replace(nest, stores=tuple(store.mapped(self._without) for store in nest.stores))
