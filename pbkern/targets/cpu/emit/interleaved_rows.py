"""Vectors of short rows as they are stored: of several rows each; all lanes belong to one write
(targets/cpu/schedule/interleaved_access.py).

    out[i, c] = in[9 - i, c] * scale[c]        rows of 3, vectors of 4:
    out[0, 0..2], out[1, 0]                    in[9, 0..2], in[8, 0]   times   scale[0..2], scale[0]

Operands are whole vectors that are shuffled once, instead of one vector per c before the arithmetic
and again behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pbkern.core.affine import Affine
from pbkern.lower.mlir.ops import Value as Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import Buf, Expr, Write
from pbkern.targets.cpu.schedule.interleaved_access import is_interleaved_row, joint_stores

from .addressing import Point, Tail, Walk
from .interleaved_loads import InterleavedLoads
from .promoted_loops import Registers


class Rows:
    """So many rows side by side; `points` are the elements of each."""

    def __init__(self, points: list[Point], count: int):
        self.points, self.count, self.size = points, count, count * len(points)
        self._key = (count, *(tuple(sorted(p.items())) for p in points))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self._key == other._key


class InterleavedRows(InterleavedLoads, Registers):
    """Emits joint stores.

    `_value` gives an expression that is the same in all rows, `_operation` one of others.
    """

    _value: Callable[..., Ssa]
    _operation: Callable[..., Ssa]
    _interleave_points: Callable[..., None]
    _place: Callable[..., Block]

    def _interleaved_writes(self, w: Walk, joint: set[int]) -> set[int]:
        """Numbers of those joint writes whose vectors are computed as they are stored; registers keep other ones."""
        if not joint or self.kept is not None:
            return set()
        vector, steps = (
            w.sched.along,
            joint_stores(w.nest, w.sched.along)[1],
        )  # other dimensions may be jammed as well
        return {n for n in joint if is_interleaved_row(w.nest, w.nest.writes[n], vector, steps)}

    def _store_row(
        self,
        w: Walk,
        block: Block,
        write: Write,
        run: tuple[Buf, Affine, int],
        parts: Sequence[Ssa | Point],
        tail: Tail | None,
    ) -> None:
        """Stores as many rows as a vector has lanes, from a place on.

        Of a row: one vector per element, or their points.
        """
        buf, flat, place = run
        rows = tail.live if tail else w.sched.lanes
        points, vectors = (
            [p for p in parts if isinstance(p, dict)],
            [v for v in parts if isinstance(v, Ssa)],
        )
        if points:
            whole = self._interleaved_rows(w, block, write, Rows(points, rows))
        else:
            whole = self._interlaced(block, vectors, rows * len(parts))
        self._store_run(block, buf, flat, place, whole, rows * len(parts))

    def _interleaved_rows(self, w: Walk, block: Block, write: Write, rows: Rows) -> list[Ssa]:
        lanes, found = w.sched.lanes, []
        b = self.text.builder(block, lanes)

        def vector(k: int, _: Point) -> None:
            v = self._woven(w, block, write.value, rows, k * lanes)
            found.append(b.to_storage(v if v.lanes else b.broadcast(v), write.buf.dtype))

        self._interleave_points(w, block, [{}] * -(-rows.size // lanes), vector)
        return found

    def _woven(self, w: Walk, block: Block, e: Expr, rows: Rows, first: int) -> Ssa:
        """One vector of an expression, from an element on that is counted through all rows."""
        if w.sched.vector not in e.symbols and all(e.symbols.isdisjoint(p) for p in rows.points):
            return self._value(w, block, e, rows.points[0], None)
        where = self._place(w, block, e)
        key = ("interleaved", id(e), rows, first)
        if key not in where.memo:
            if e.kind == "load":
                where.memo[key] = self._load_interleaved(w, where, e, rows, first)
            else:
                where.memo[key] = self._operation(
                    w, where, e, w.sched.lanes, lambda a: self._woven(w, where, a, rows, first)
                )
        return where.memo[key]

    def _load_interleaved(self, w: Walk, block: Block, e: Expr, rows: Rows, first: int) -> Ssa:
        """All vectors of the rows share the whole vectors around their elements."""
        buf, index, _ = e.info
        flat, lanes = flat_index(buf, index), w.sched.lanes
        row = [flat.const + sum(flat.coefficient(d) * o for d, o in p.items()) for p in rows.points]
        step = flat.coefficient(w.sched.vector)
        every = [k * step + place for k in range(rows.count) for place in row]
        run, wanted = (min(every), max(every)), every[first : first + lanes]
        stored = self._load_places(w, block, buf, flat, run, wanted, lanes)
        return self.text.builder(block, lanes).from_storage(stored, buf.dtype)
