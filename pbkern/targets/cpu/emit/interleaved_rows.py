"""Vectors of short rows as they are stored: of several rows each.

All lanes belong to one write (targets/cpu/schedule/interleaved_access.py).

    out[i, c] = in[9 - i, c] * scale[c]        rows of 3, vectors of 4:
    out[0, 0..2], out[1, 0]                    in[9, 0..2], in[8, 0]   times   scale[0..2], scale[0]

Operands are whole vectors that are shuffled once, instead of one vector per c before the arithmetic
and again behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pbkern.core.affine import Affine
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import Buf, Expr, Load, Op, Store
from pbkern.targets.cpu.schedule.interleaved_access import is_interleaved_row, joint_stores

from .addressing import NestWalk, Point, Tail
from .expressions import ExpressionValues
from .interleave_chains import interleave_points
from .loads.strided import StridedAccesses
from .promoted_loops import PromotedLoops


class Rows:
    """So many rows side by side; `points` are the elements of each."""

    def __init__(self, points: list[Point], count: int):
        self.points, self.count, self.size = points, count, count * len(points)
        self._key = (count, *(tuple(sorted(point.items())) for point in points))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self._key == other._key


class InterleavedRows:
    """Owns joint stores, and what is computed for them in the order of memory."""

    def __init__(
        self, promoted: PromotedLoops, strided: StridedAccesses, expressions: ExpressionValues
    ):
        self.text, self.promoted = strided.text, promoted
        self.strided, self.expressions = strided, expressions

    def computed_as_stored(self, walk: NestWalk, joint: set[int]) -> set[int]:
        """Numbers of those joint writes whose vectors are computed as they are stored; registers keep other ones."""
        if not joint or self.promoted.buffers is not None:
            return set()
        vector, steps = (
            walk.sched.along,
            joint_stores(walk.nest, walk.sched.along)[1],
        )  # other dimensions may be jammed as well
        return {
            number
            for number in joint
            if is_interleaved_row(walk.nest, walk.nest.stores[number], vector, steps)
        }

    def store(
        self,
        walk: NestWalk,
        block: Block,
        store: Store,
        run: tuple[Buf, Affine, int],
        parts: Sequence[Ssa | Point],
        tail: Tail | None,
    ) -> None:
        """Stores as many rows as a vector has lanes, from a place on.

        Of a row: one vector per element, or their points.
        """
        buf, flat, place = run
        rows = tail.live if tail else walk.sched.lanes
        points, vectors = (
            [part for part in parts if isinstance(part, dict)],
            [part for part in parts if isinstance(part, Ssa)],
        )
        if points:
            whole = self._interleaved_rows(walk, block, store, Rows(points, rows))
        else:
            whole = self.strided.interlaced(block, vectors, rows * len(parts))
        self.strided.store(block, buf, flat, place, whole, rows * len(parts))

    def _interleaved_rows(
        self, walk: NestWalk, block: Block, store: Store, rows: Rows
    ) -> list[Ssa]:
        lanes, interleaved = walk.sched.lanes, []
        b = self.text.builder(block, lanes)

        def vector(number: int, _: Point) -> None:
            value = self._woven(walk, block, store.value, rows, number * lanes)
            interleaved.append(
                b.to_storage(value if value.lanes else b.broadcast(value), store.buf.dtype)
            )

        interleave_points(walk, block, [{}] * -(-rows.size // lanes), vector)
        return interleaved

    def _woven(self, walk: NestWalk, block: Block, expr: Expr, rows: Rows, first: int) -> Ssa:
        """One vector of an expression, from an element on that is counted through all rows."""
        if walk.sched.vector not in expr.symbols and all(
            expr.symbols.isdisjoint(point) for point in rows.points
        ):
            return self.expressions.value(walk, block, expr, rows.points[0], None)
        where = walk.place(block, expr)
        key = ("interleaved", id(expr), rows, first)
        if key not in where.memo:
            if isinstance(expr, Load):
                where.memo[key] = self._load_interleaved(walk, where, expr, rows, first)
            else:
                where.memo[key] = self.expressions.operation(
                    walk,
                    where,
                    cast(Op, expr),
                    walk.sched.lanes,
                    lambda arg: self._woven(walk, where, arg, rows, first),
                )
        return where.memo[key]

    def _load_interleaved(
        self, walk: NestWalk, block: Block, expr: Load, rows: Rows, first: int
    ) -> Ssa:
        """All vectors of the rows share the whole vectors around their elements."""
        buf, index = expr.access
        flat, lanes = flat_index(buf, index), walk.sched.lanes
        row = [
            flat.const + sum(flat.coefficient(dim) * offset for dim, offset in point.items())
            for point in rows.points
        ]
        step = flat.coefficient(walk.sched.vector)
        every = [k * step + place for k in range(rows.count) for place in row]
        run, wanted = (min(every), max(every)), every[first : first + lanes]
        stored = self.strided.load_places(walk, block, buf, flat, run, wanted, lanes)
        return self.text.builder(block, lanes).from_storage(stored, buf.dtype)
