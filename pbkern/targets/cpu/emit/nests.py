"""Nest + NestSchedule -> scf and vector operations: the loops of a nest, around steps that parts of the emitter write.

A point of the register tile is an offset per dimension.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pbkern.core.errors import InternalError
from pbkern.core.process.fallback import Declined
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import (
    Expr,
    Nest,
)
from pbkern.lower.nest.reductions import identities, per_accumulator
from pbkern.targets.cpu.locality.walk_order import walks_ahead
from pbkern.targets.cpu.machines.machine import WIDE_VECTORS, Vectors
from pbkern.targets.cpu.schedule.interleaved_access import runs_of_loads
from pbkern.targets.cpu.schedule.nest_schedule import (
    NestSchedule,
    final_schedule,
    overwritten_by,
)
from pbkern.targets.cpu.schedule.register_tiles.choice import smallest_tile
from pbkern.targets.cpu.schedule.sliding_windows import (
    Chunk,
    Visits,
    chunks,
    moved_loads,
)
from pbkern.targets.cpu.schedule.vector_dimension import is_long_point

from .addressing import Addressing, NestWalk, Point, Tail
from .epilogue_loops import Epilogue
from .expressions import ExpressionValues, memo_key
from .interleaved_rows import InterleavedRows
from .loads.strided import StridedAccesses
from .promoted_loops import PromotedLoops
from .reductions.accumulators import Reducer
from .reductions.halves import takes_halves
from .reductions.horizontal import HorizontalReductions
from .stores import Stores
from .streamed_rows import StreamedRows, may_stream, streamed_rows
from .tile_products import TileProducts, is_tile_product

# Lines of one nest: a tile that needs more shrinks to one vector.
NEST_LINES = 60_000
# Long points that are added up in one loop, at most: their constants need registers as well.
LONG_POINTS = 4


class CpuNestEmitter:
    """Emits nests of one function into blocks of `text`: the loops, in which its parts write steps.

    Attributes:
      expressions, stores, reducer, horizontal, epilogue, promoted: its parts, each of which owns
        one kind of operation.
      plain: scalar loops, in the order of the nest's dimensions.
      programs: that run the nests.
      has_scalar_loops: which LLVM's optimiser still improves; vector code it leaves as it is.
    """

    def __init__(self, text: Text, vectors: Vectors = WIDE_VECTORS, kernel: str = "kernel"):
        self.text, self.vectors = text, vectors
        places = Addressing(text)
        self.promoted = PromotedLoops(places, vectors)
        strided = StridedAccesses(places, vectors)
        self.expressions = ExpressionValues(places, self.promoted, strided, kernel)
        rows = InterleavedRows(self.promoted, strided, self.expressions)
        self.stores = Stores(places, self.promoted, self.expressions, rows, vectors)
        self.reducer = Reducer(places, self.promoted, self.expressions, self.stores)
        self.horizontal = HorizontalReductions(text)
        self.epilogue = Epilogue(text, self.promoted, self.stores)
        self.tiles = TileProducts(text)
        self.plain = False
        self.programs = 1
        self.has_scalar_loops = False

    def emit(self, block: Block, nest: Nest, sched: NestSchedule | None = None) -> NestSchedule:
        """Appends the nest to `block`."""
        if self.plain:
            sched = NestSchedule(order=tuple(nest.dims))
        sched = sched or final_schedule(nest)
        self.expressions.functions.points = self.programs * math.prod(nest.dims.values())
        if is_tile_product(nest):
            self.tiles.emit(block, nest, sched)
            return sched
        if any(size == 0 for dim, size in nest.dims.items() if dim not in nest.rdims):
            return sched
        if any(
            nest.dims[rdim] == 0 for rdim in nest.rdims
        ):  # what a reduction starts with is stored
            sched = NestSchedule(order=tuple(nest.dims))
        self.has_scalar_loops |= sched.vector is None and math.prod(nest.dims.values()) > 1
        if overwritten_by(nest) and (
            self.promoted.buffers is not None or not walks_ahead(nest, sched, self.vectors)
        ):
            raise InternalError("a nest would store over elements that it still loads")
        small = sched if self.promoted.buffers is not None else smallest_tile(nest, sched)
        try:
            with self.text.budget.at_most(math.inf if small is sched else NEST_LINES):
                block.take(self._scheduled(block, nest, sched))
        except Declined:
            if small is sched or self.text.budget.is_spent:
                raise
            block.take(self._scheduled(block, nest, small))
            return small
        return sched

    def _scheduled(self, block: Block, nest: Nest, sched: NestSchedule) -> Block:
        """The nest by this schedule, in a block below `block`."""
        top = Block(block)
        if (
            self.promoted.buffers is None and not self.plain
        ):  # registers hold vectors that start at one place
            nest = moved_loads(nest, sched, self.vectors)
        walk = NestWalk(
            nest, sched, top, {store.buf.root for store in nest.stores}, reaches=nest.reaches()
        )
        outer = [dim for dim in sched.order if dim not in nest.rdims]
        self._outer(walk, top, outer, [{}])
        return top

    def scalar(self, block: Block, expr: Expr, nest: Nest) -> Ssa:
        """A scalar expression outside any nest, evaluated in `block`."""
        inner = Block(block)
        walk = NestWalk(nest, NestSchedule(), inner, set())
        result = self.expressions.value(walk, inner, expr, {}, None)
        block.take(inner)
        return result

    # ---------------------------------------------------------------- loops

    def _outer(self, walk: NestWalk, block: Block, dims: list[str], points: list[Point]) -> None:
        if not dims:
            self._vector(walk, block, points)
            return
        dim, rest = dims[0], dims[1:]
        size, jam = walk.nest.dims[dim], walk.sched.jam.get(dim, 1)
        full = size // jam * jam
        for low, high, step in ((0, full, jam), (full, size, size - full)):
            if high > low:

                def fill(inner: Block, _, step=step):
                    if dim == walk.sched.transpose:
                        walk.transposed_rows = step
                    self._outer(
                        walk,
                        inner,
                        rest,
                        [{**point, dim: offset} for point in points for offset in range(step)]
                        if jam > 1
                        else points,
                    )
                    return []

                self.text.loop(block, dim, low, high, step, fill)

    def _vector(self, walk: NestWalk, block: Block, points: list[Point]) -> None:
        vector = walk.sched.vector
        if vector is None:
            self._reduce(walk, block, points, None)
        elif vector in walk.nest.rdims:
            self._horizontal(walk, block, points)
        else:
            known: dict[tuple, Ssa] = {}
            for chunk in chunks(walk.nest, walk.sched):
                lines = self._lines(walk, block, points, chunk)
                if lines is None:
                    known = self._chunk(walk, block, points, chunk, known)
                    continue
                # The first step has no vector before it.
                start = chunk.low + chunk.vectors * walk.sched.lanes
                self.stores.lines = lines
                known = self._chunk(walk, block, points, chunk._replace(high=start), known)
                known = self._chunk(walk, block, points, chunk._replace(low=start), known)
                self.stores.lines = None
                lines.finish(block, chunk.high)

    def _lines(
        self, walk: NestWalk, block: Block, points: list[Point], chunk: Chunk
    ) -> StreamedRows | None:
        """Rows of large results that a chunk writes line by line, wherever they begin; None if there are none."""
        if not self.stores.puts_lines_together or self.promoted.buffers is not None:
            return None
        stores = [
            store
            for store in walk.nest.stores
            if store.buf.root in self.stores.streamed
            and may_stream(store, chunk, walk)
            and not self.stores.fills_lines(
                walk, store, walk.sched.lanes, {walk.sched.along: chunk.low}
            )
        ]
        places = self.stores.places
        return streamed_rows(walk, places, block, stores, points, chunk.low) if stores else None

    def _chunk(
        self,
        walk: NestWalk,
        block: Block,
        points: list[Point],
        chunk: Chunk,
        known: dict[tuple, Ssa],
    ) -> dict[tuple, Ssa]:
        """Steps along the vector dimension.

        `known` before, and the result after it: values that steps hand on.
        """
        vector, lanes = walk.sched.along, walk.sched.lanes
        step, tail = (
            chunk.vectors * lanes,
            None if chunk.tail is None else Tail(chunk.tail, (chunk.vectors - 1) * lanes),
        )
        tile = [{**point, vector: lanes * vec} for point in points for vec in range(chunk.vectors)]
        carried = Visits(walk.nest, walk.sched, chunk.vectors).carried if walk.moves else {}
        walk.first = chunk.low if chunk.is_one_step(walk.sched) else None
        keys = list(carried) if walk.first is None else [key for key in carried if key in known]
        lines = self.stores.lines

        def fill(inner: Block, handed: list[Ssa]) -> list[Ssa]:
            if lines is not None:
                lines.take(handed[len(keys) :])
            inner.memo |= {memo_key(key, lanes): value for key, value in zip(keys, handed)}
            self._reduce(walk, inner, tile, tail)
            after = (
                [
                    (expr, {**place, vector: place[vector] + step})
                    for expr, place in carried.values()
                ]
                if tail is None
                else []
            )
            values = [
                self.expressions.value(walk, inner, expr, place, None) for expr, place in after
            ]
            return values + (lines.handed if lines is not None else [])

        start = self._made_before(
            walk, block, chunk.low, {key: carried[key] for key in keys}, known
        )
        start += lines.handed if lines is not None else []
        results = self.text.loop(block, vector, chunk.low, chunk.high, step, fill, start)
        if lines is not None:
            lines.take(results[len(carried) :])
        return dict(zip(carried, results))

    def _made_before(
        self, walk: NestWalk, block: Block, low: int, carried: dict, known: dict[tuple, Ssa]
    ) -> list[Ssa]:
        """Values that the first step of a loop finds."""
        if not carried:
            return []
        before = Block(block)
        before.values[walk.sched.along] = low
        values = [
            known[key] if key in known else self.expressions.value(walk, before, expr, place, None)
            for key, (expr, place) in carried.items()
        ]
        block.take(before)
        return values

    def _reduce(self, walk: NestWalk, block: Block, points: list[Point], tail: Tail | None) -> None:
        """Accumulators per point in registers, loops over the reduced dimensions, then the final writes."""
        nest = walk.nest
        walk.runs = runs_of_loads(nest, walk.sched.vector, points)
        if not nest.rdims:
            self.stores.store_points(walk, block, points, tail, [], inner=True)
            return
        start = [
            identity
            for _ in points
            for identity in identities(
                self.text.builder(block, walk.sched.lanes), walk.nest.reductions
            )
        ]
        accs = self._loops(
            walk,
            block,
            nest.rdims,
            walk.terms,
            lambda inner, carried: self._steps(walk, inner, points, tail, carried),
            start,
        )
        self.epilogue.emit(walk, block, points, tail, accs)

    def _loops(
        self,
        walk: NestWalk,
        block: Block,
        dims: tuple[str, ...],
        terms: int,
        innermost,
        accs: list[Ssa],
    ) -> list[Ssa]:
        """Loops over reduced dimensions around `innermost`, which adds `terms` numbers in a row to each accumulator."""
        if not dims:
            return innermost(block, accs)
        at_once = {walk.sched.transpose: walk.sched.lanes}
        inside = terms * math.prod(
            -(-walk.nest.dims[dim] // at_once.get(dim, 1)) for dim in dims[1:]
        )
        outer_dim, size, rows = dims[0], walk.nest.dims[dims[0]], at_once.get(dims[0], 1)
        for low, high, step in (
            (0, size // rows * rows, rows),
            (size // rows * rows, size, size % rows),
        ):
            if high > low:

                def fill(inner: Block, accs: list[Ssa], step=step) -> list[Ssa]:
                    if outer_dim == walk.sched.transpose:
                        walk.transposed_rows = step
                    return self._loops(walk, inner, dims[1:], terms, innermost, accs)

                accs = self.reducer.accumulate(
                    walk, block, (outer_dim, low, high, step), inside, fill, accs
                )
        return accs

    def _steps(
        self, walk: NestWalk, block: Block, points: list[Point], tail: Tail | None, accs: list[Ssa]
    ) -> list[Ssa]:
        """A step of the reduction, or one for each of the rows that are transposed together."""
        transposed = walk.sched.transpose
        if transposed not in walk.nest.rdims:
            return self.reducer.step(walk, block, points, tail, accs)
        for row in range(walk.transposed_rows):
            accs = self.reducer.step(
                walk, block, [{**point, transposed: row} for point in points], tail, accs
            )
        return accs

    def _horizontal(self, walk: NestWalk, block: Block, points: list[Point]) -> None:
        """Vectors along a reduced dimension; lanes are combined at the end."""
        if walk.sched.batched_rows:
            self._horizontal_batch(walk, block, points)
            return
        nest, vector, lanes = walk.nest, walk.sched.along, walk.sched.lanes
        accs = self._lane_sums(walk, block, points)
        width, vectors = (
            len(per_accumulator(walk.nest.reductions, bool)),
            max(chunk.vectors for chunk in chunks(nest, walk.sched)),
        )
        exact = self.reducer.is_exact(
            walk, -(-math.prod(nest.dims[rdim] for rdim in nest.rdims) // (lanes * vectors))
        )
        scalars: list[Ssa] = []
        for k in range(len(points)):
            parts = [
                accs[(k * vectors + vec) * width : (k * vectors + vec + 1) * width]
                for vec in range(vectors)
            ]
            scalars += self.horizontal.fold(walk, block, parts, exact=exact)
        self.stores.store_points(
            walk,
            block,
            [{**point, vector: 0} for point in points],
            None,
            scalars,
            inner=False,
            scalar=True,
        )

    def _horizontal_batch(self, walk: NestWalk, block: Block, points: list[Point]) -> None:
        """Reduces a row in every lane of what is stored; a few rows at a time are added up in registers."""
        width, lanes, rows = (
            len(per_accumulator(walk.nest.reductions, bool)),
            walk.sched.lanes,
            walk.sched.batched_rows,
        )
        at_once = max((LONG_POINTS if is_long_point(walk.nest) else lanes) // width, 1)
        accs: list[list[Ssa]] = []
        for at in range(0, len(points), at_once):
            mine = self._lane_sums(walk, block, points[at : at + at_once])
            accs += [mine[k : k + width] for k in range(0, len(mine), width)]
        across = replace(walk, sched=NestSchedule(lanes, rows, order=walk.sched.order))
        across.runs = runs_of_loads(walk.nest, rows, points[:1])
        tail = Tail(len(points)) if len(points) < lanes else None
        self.stores.store_points(
            across,
            block,
            points[:1],
            tail,
            self.horizontal.reduced_rows(walk, block, accs),
            inner=False,
        )

    def _lane_sums(self, walk: NestWalk, block: Block, points: list[Point]) -> list[Ssa]:
        """Accumulators of points whose vectors run along a reduced dimension."""
        nest, vector, lanes = walk.nest, walk.sched.along, walk.sched.lanes
        scalar_rdims = tuple(rdim for rdim in nest.rdims if rdim != vector)
        cut = chunks(nest, walk.sched)
        vectors = max(chunk.vectors for chunk in cut)
        width = len(identities(self.text.builder(block, lanes), walk.nest.reductions))
        accs = [
            identity
            for _ in points
            for _ in range(vectors)
            for identity in identities(self.text.builder(block, lanes), walk.nest.reductions)
        ]

        def sweep(body: Block, accs: list[Ssa]) -> list[Ssa]:
            for low, high, count, live in cut:
                tail = None if live is None else Tail(live)
                tile = [{**point, vector: lanes * vec} for point in points for vec in range(count)]
                used = [k * vectors + vec for k in range(len(points)) for vec in range(count)]
                mine = [accs[t * width + j] for t in used for j in range(width)]
                walk.runs = runs_of_loads(nest, vector, tile)
                walk.halves = count if by_turns and tail is None else 0
                new = self.reducer.accumulate(
                    walk,
                    body,
                    (vector, low, high, count * lanes),
                    walk.terms,
                    lambda inner, carried, tile=tile, tail=tail: self._steps(
                        walk, inner, tile, tail, carried
                    ),
                    mine,
                )
                accs = list(accs)
                for n, slot in enumerate(used):
                    accs[slot * width : (slot + 1) * width] = new[n * width : (n + 1) * width]
            walk.halves = 0
            return accs

        by_turns = (
            self.promoted.buffers is None
            and walk.sched.transpose is None
            and takes_halves(nest, vector)
        )
        terms = walk.terms * -(-nest.dims[vector] // (lanes * vectors))
        return self._loops(walk, block, scalar_rdims, terms, sweep, accs)
