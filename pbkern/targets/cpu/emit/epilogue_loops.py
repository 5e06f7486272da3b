"""Epilogue of a register tile's sums: a loop over its rows, where that is long.

    sums of 7 x 4 vectors; 28 times exp, ..., store
    ->  sums of 7 x 4 vectors, kept on the stack; for each of 7 rows: 4 times exp, ..., store

A tile has as many vectors as there are registers, and each would have its own copy of what follows:
four fifths of the code of a product with gelu, which is slow to compile and to fetch. The loop
costs a store and a load of each vector.
"""

from __future__ import annotations

from itertools import groupby

from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Accumulator, Nest, Op, nodes
from pbkern.targets.cpu.math.op_cycles import COST
from pbkern.targets.cpu.schedule.interleaved_access import runs_of_stores

from .addressing import NestWalk, Point, Tail
from .interleave_chains import MOST_INTERLEAVED
from .promoted_loops import PromotedLoops
from .stores import Stores

# Cost (vector operations, targets/cpu/math/op_cycles.py) of what follows a sum, from which it is long. On Zen 4, products
# of 64, 256 and 1024 columns with tanh, silu or roots: as fast in a loop, with half of the time to compile. On Zen 3, whose 16
# registers hold the sums alone, constants of the function took some of them through the whole product: 2048 x 512 x 512 with
# tanh 20 ms, in a loop 13; with exp 21 and 15.
LONG_EPILOGUE = 4.0


class Epilogue:
    """Owns what follows reductions."""

    def __init__(self, text: Text, promoted: PromotedLoops, stores: Stores):
        self.text, self.promoted, self.stores = text, promoted, stores

    def emit(
        self, walk: NestWalk, block: Block, points: list[Point], tail: Tail | None, accs: list[Ssa]
    ) -> None:
        """The writes of a tile's points; `accs` are their sums."""
        dim, rows = self._rows(walk, points) if len({acc.type for acc in accs}) == 1 else (None, 0)
        at_once = -(-MOST_INTERLEAVED * max(rows, 1) // len(points))
        looped = rows // at_once * at_once
        if dim is None or looped <= at_once:
            self.stores.store_points(walk, block, points, tail, accs, inner=False)
            return
        count, each = len(points) // rows, len(accs) // rows
        self._row_by_row(
            walk, block, dim, each, points[: at_once * count], tail, accs[: looped * each]
        )
        if looped < rows:
            self.stores.store_points(
                walk, block, points[looped * count :], tail, accs[looped * each :], inner=False
            )

    def _row_by_row(
        self,
        walk: NestWalk,
        block: Block,
        dim: str,
        each: int,
        points: list[Point],
        tail: Tail | None,
        accs: list[Ssa],
    ) -> None:
        """A loop over rows along `dim`, with `each` of the sums in `accs`; `points` are those of the first trip."""
        kind = f"memref<{len(accs)}x{accs[0].type}>"
        sums = self.text.local(kind)
        for k, acc in enumerate(accs):
            block.add("memref.store", (acc.name, sums, self.text.index(k)), kind)
        _, first = block.lookup(dim)
        at_once = 1 + max(point[dim] for point in points)

        def fill(inner: Block, _) -> list[Ssa]:
            row = inner.values[f"{dim}'"]
            inner.values[dim] = self.text.add_indices(inner, first, row)
            start = self.text.put(
                inner, "arith.muli", (self.text.named(row), self.text.index(each)), "index"
            )
            mine = []
            for k, partial in enumerate(accs[: each * at_once]):
                place = self.text.named(self.text.add_indices(inner, start, k))
                mine.append(
                    partial._replace(name=self.text.put(inner, "memref.load", (sums, place), kind))
                )
            self.stores.store_points(walk, inner, points, tail, mine, inner=False)
            return []

        self.text.loop(block, f"{dim}'", 0, len(accs) // each, at_once, fill)

    def _rows(self, walk: NestWalk, points: list[Point]) -> tuple[str | None, int]:
        """(dimension, number) of the tile's equal rows, which the epilogue takes one by one; (None, 0): all at once."""
        dim = next(iter(points[0]), None)
        plain = (
            self.promoted.buffers is None
            and not walk.moves
            and not walk.rewrites
            and walk.sched.vector not in (None, dim)
        )
        if dim is None or not plain or dim == walk.sched.transpose:
            return None, 0
        if _cost_of_point(walk.nest, {dim, walk.sched.along}) < LONG_EPILOGUE:
            return None, 0
        rows = [
            [{axis: offset for axis, offset in place.items() if axis != dim} for place in row]
            for _, row in groupby(points, lambda place: place[dim])
        ]
        even = all(row == rows[0] for row in rows) and [
            point[dim] for point in points[:: len(rows[0])]
        ] == list(range(len(rows)))
        if not even or runs_of_stores(walk.nest, walk.sched.vector, points, inner=False):
            return None, 0
        return dim, len(rows)


def _cost_of_point(nest: Nest, apart: set[str]) -> float:
    """Cost of what is computed for each sum by itself: of it, or of values that differ along all dimensions of `apart`."""
    behind = nodes(
        root
        for store in nest.stores
        if not store.inner
        for root in (store.value, store.mask)
        if root is not None
    )
    is_behind: dict[int, bool] = {}
    for expr in behind:
        is_behind[id(expr)] = (
            isinstance(expr, Accumulator)
            or apart <= expr.symbols
            or any(is_behind[id(arg)] for arg in expr.args)
        )
    return sum(
        COST[node.info.primitive] for node in behind if isinstance(node, Op) and is_behind[id(node)]
    )
