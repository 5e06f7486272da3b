"""Nest + NestSchedule -> scf + vector text.

Every expression is placed in the shallowest block that knows its dimensions; a point of the
register tile is an offset per dimension, and values are shared between points through the addresses
they resolve to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pbkern.core.errors import InternalError
from pbkern.core.fallback import Declined
from pbkern.core.machine import LINE_BYTES
from pbkern.lower.mlir.element_types import compute_el
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import (
    Accumulator,
    Buf,
    Const,
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
from pbkern.lower.nest.reductions import width
from pbkern.lower.nest.rounding import may_cancel
from pbkern.targets.cpu.locality.in_place_stores import walks_ahead
from pbkern.targets.cpu.schedule.interleaved_access import places, runs_of_loads, runs_of_stores
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule, overwritten_by
from pbkern.targets.cpu.schedule.register_tiles import schedule_of, smallest_tile
from pbkern.targets.cpu.schedule.sliding_windows import (
    Chunk,
    Visits,
    chunks,
    key_of,
    moved_loads,
    parts,
)
from pbkern.targets.cpu.schedule.vector_dimension import is_long_point

from .addressing import NestWalk, Point, Tail, memref
from .epilogue_loops import Epilogues
from .interleaved_rows import InterleavedRows
from .loads import Loads
from .math_functions import MathFunctions

# Lines of one nest: a tile that needs more shrinks to one vector.
NEST_LINES = 60_000
# Long points that are added up in one loop, at most: their constants need registers as well.
LONG_POINTS = 4
# Types in which a product and a sum are one operation.
FUSED = (np.dtype(np.float32), np.dtype(np.float64))


class CpuNestEmitter(Loads, InterleavedRows, Epilogues):
    """Emits nests of one function into blocks of `text`."""

    def __init__(self, text: Text, vector_bits: int = 512, kernel: str = "kernel"):
        super().__init__(text, vector_bits)
        self.functions = MathFunctions(kernel)
        self.plain = False  # scalar loops, in the order of the nest's dimensions
        self.streamed: frozenset[Buf] = frozenset()  # too large for the caches: written past them
        self.streams = False  # whether some store went past the caches
        # which LLVM's optimiser still improves; vector code it leaves as it is
        self.has_scalar_loops = False

    def emit(self, block: Block, nest: Nest, sched: NestSchedule | None = None) -> NestSchedule:
        """Appends the nest to `block`."""
        if self.plain:
            sched = NestSchedule(order=tuple(nest.dims))
        sched = sched or schedule_of(nest, self.vector_bits, self.text.contract)
        if any(size == 0 for dim, size in nest.dims.items() if dim not in nest.rdims):
            return sched
        if any(
            nest.dims[rdim] == 0 for rdim in nest.rdims
        ):  # what a reduction starts with is stored
            sched = NestSchedule(order=tuple(nest.dims))
        self.has_scalar_loops |= sched.vector is None and math.prod(nest.dims.values()) > 1
        if overwritten_by(nest) and (self.kept is not None or not walks_ahead(nest, sched)):
            raise InternalError("a nest would store over elements that it still loads")
        small = sched if self.kept is not None else smallest_tile(nest, sched)
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
        if self.kept is None and not self.plain:  # registers hold vectors that start at one place
            nest = moved_loads(nest, sched)
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
        result = self._value(walk, inner, expr, {}, None)
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
                known = self._chunk(walk, block, points, chunk, known)

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

        def fill(inner: Block, handed: list[Ssa]) -> list[Ssa]:
            inner.memo |= {_memo_key(key, lanes): value for key, value in zip(keys, handed)}
            self._reduce(walk, inner, tile, tail)
            after = (
                [
                    (expr, {**place, vector: place[vector] + step})
                    for expr, place in carried.values()
                ]
                if tail is None
                else []
            )
            return [self._value(walk, inner, expr, place, None) for expr, place in after]

        start = self._made_before(
            walk, block, chunk.low, {key: carried[key] for key in keys}, known
        )
        return dict(
            zip(carried, self.text.loop(block, vector, chunk.low, chunk.high, step, fill, start))
        )

    def _made_before(
        self, walk: NestWalk, block: Block, low: int, carried: dict, known: dict[tuple, Ssa]
    ) -> list[Ssa]:
        """Values that the first step of a loop finds."""
        if not carried:
            return []
        before = Block(block)
        before.values[walk.sched.along] = low
        made = [
            known[key] if key in known else self._value(walk, before, expr, place, None)
            for key, (expr, place) in carried.items()
        ]
        block.take(before)
        return made

    def _reduce(self, walk: NestWalk, block: Block, points: list[Point], tail: Tail | None) -> None:
        """Accumulators per point in registers, loops over the reduced dimensions, then the final writes."""
        nest = walk.nest
        walk.runs = runs_of_loads(nest, walk.sched.vector, points)
        if not nest.rdims:
            self._writes(walk, block, points, tail, [], inner=True)
            return
        start = [
            identity for _ in points for identity in self._identities(walk, block, walk.sched.lanes)
        ]
        accs = self._loops(
            walk,
            block,
            nest.rdims,
            _terms(walk),
            lambda inner, carried: self._steps(walk, inner, points, tail, carried),
            start,
        )
        self._follow(walk, block, points, tail, accs)

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
                    walk.transposed_rows = step
                    return self._loops(walk, inner, dims[1:], terms, innermost, accs)

                accs = self._accumulate(
                    walk, block, (outer_dim, low, high, step), inside, fill, accs
                )
        return accs

    def _steps(
        self, walk: NestWalk, block: Block, points: list[Point], tail: Tail | None, accs: list[Ssa]
    ) -> list[Ssa]:
        """A step of the reduction, or one for each of the rows that are transposed together."""
        transposed = walk.sched.transpose
        if transposed not in walk.nest.rdims:
            return self._step(walk, block, points, tail, accs)
        for row in range(walk.transposed_rows):
            accs = self._step(
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
            len(self._per_accumulator(walk, bool)),
            max(chunk.vectors for chunk in chunks(nest, walk.sched)),
        )
        exact = self._is_exact(
            walk, -(-math.prod(nest.dims[rdim] for rdim in nest.rdims) // (lanes * vectors))
        )
        scalars: list[Ssa] = []
        for k in range(len(points)):
            parts = [
                accs[(k * vectors + vec) * width : (k * vectors + vec + 1) * width]
                for vec in range(vectors)
            ]
            scalars += self._fold(walk, block, parts, exact=exact)
        self._writes(
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
            len(self._per_accumulator(walk, bool)),
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
        self._writes(
            across, block, points[:1], tail, self._reduced_rows(walk, block, accs), inner=False
        )

    def _lane_sums(self, walk: NestWalk, block: Block, points: list[Point]) -> list[Ssa]:
        """Accumulators of points whose vectors run along a reduced dimension."""
        nest, vector, lanes = walk.nest, walk.sched.along, walk.sched.lanes
        others = tuple(rdim for rdim in nest.rdims if rdim != vector)
        cut = chunks(nest, walk.sched)
        vectors = max(chunk.vectors for chunk in cut)
        width = len(self._identities(walk, block, lanes))
        accs = [
            identity
            for _ in points
            for _ in range(vectors)
            for identity in self._identities(walk, block, lanes)
        ]

        def sweep(body: Block, accs: list[Ssa]) -> list[Ssa]:
            for low, high, count, live in cut:
                tail = None if live is None else Tail(live)
                tile = [{**point, vector: lanes * vec} for point in points for vec in range(count)]
                used = [k * vectors + vec for k in range(len(points)) for vec in range(count)]
                mine = [accs[t * width + j] for t in used for j in range(width)]
                walk.runs = runs_of_loads(nest, vector, tile)
                new = self._accumulate(
                    walk,
                    body,
                    (vector, low, high, count * lanes),
                    _terms(walk),
                    lambda inner, carried, tile=tile, tail=tail: self._steps(
                        walk, inner, tile, tail, carried
                    ),
                    mine,
                )
                accs = list(accs)
                for n, slot in enumerate(used):
                    accs[slot * width : (slot + 1) * width] = new[n * width : (n + 1) * width]
            return accs

        terms = _terms(walk) * -(-nest.dims[vector] // (lanes * vectors))
        return self._loops(walk, block, others, terms, sweep, accs)

    # ---------------------------------------------------------------- writes

    def _writes(
        self,
        walk: NestWalk,
        block: Block,
        points: list[Point],
        tail: Tail | None,
        accs: list[Ssa],
        *,
        inner: bool,
        scalar: bool = False,
    ) -> None:
        width = len(accs) // len(points) if accs else 0
        joint = {} if scalar else runs_of_stores(walk.nest, walk.sched.vector, points, inner)
        interleaved = self._interleaved_writes(walk, {n for n, _ in joint})
        rows: dict[tuple, dict[int, Ssa | Point]] = {}

        def point(number: int, coords: Point) -> None:
            bound = (
                None
                if inner and not walk.nest.ordered
                else self._bind_accumulators(walk, accs[number * width : (number + 1) * width])
            )
            for n, store in enumerate(walk.nest.stores):
                if (n, number) in joint:
                    _, flat, first = joint[n, number]
                    row = rows.setdefault(joint[n, number], {})
                    (place,) = places(flat_index(store.buf, store.index), [coords])
                    row[place - first] = (
                        coords
                        if n in interleaved
                        else self._stored(walk, block, store, coords, tail, bound, walk.sched.lanes)
                    )
                    if len(row) == flat.coefficient(walk.sched.vector):
                        self._store_row(
                            walk,
                            block,
                            store,
                            joint[n, number],
                            [row[place] for place in sorted(row)],
                            tail,
                        )
                elif store.inner == inner:
                    self._write(
                        walk,
                        block,
                        store,
                        coords,
                        tail and tail.of(coords, walk.sched.vector),
                        bound,
                        scalar,
                    )

        self._interleave_points(walk, block, points, point)

    def _stored(
        self,
        walk: NestWalk,
        block: Block,
        store: Store,
        point: Point,
        tail: Tail | None,
        accs: dict | None,
        lanes: int,
    ) -> Ssa:
        """Value that a write stores, in the buffer's element type."""
        b = self.text.builder(block, lanes)
        return b.to_storage(
            self._wide(b, self._value(walk, block, store.value, point, tail, accs), lanes),
            store.buf.dtype,
        )

    def _bind_accumulators(self, walk: NestWalk, accs: list[Ssa]) -> dict[int, Ssa]:
        """Accumulator number -> value (of argmax: the index)."""
        bound, at = {}, 0
        for n, reduction in enumerate(walk.nest.reductions if accs else []):
            count = width(reduction)
            bound[n] = accs[at + count - 1]
            at += count
        return bound

    def _write(
        self,
        walk: NestWalk,
        block: Block,
        store: Store,
        point: Point,
        tail: Tail | None,
        accs: dict | None,
        scalar: bool,
    ) -> None:
        vector = None if scalar else walk.sched.vector
        coefficient = flat_coefficient(store.buf, store.index, vector) if vector else 0
        moves = bool(vector) and any(vector in position.symbols for position in store.index)
        lanes = walk.sched.lanes if moves else 0
        b = self.text.builder(block, lanes)
        stored = self._stored(walk, block, store, point, tail, accs, lanes)
        if self._carry(block, store.buf, store.index, point, stored):
            return
        mask = (
            None if store.mask is None else self._value(walk, block, store.mask, point, tail, accs)
        )
        if not moves:
            self._store_scalar(walk, block, store, stored, mask, point)
            return
        live = self._tail_mask(tail, lanes) if tail else None
        if mask is not None:
            mask = self._wide(b, mask, lanes)
            live = mask if live is None else b.and_(live, mask)
        conditions: list[str] = []
        if store.guard:
            lane_masks, conditions = self._guard_masks(
                walk, block, store.buf, store.index, point, lanes
            )
            for lane_mask in lane_masks:
                live = lane_mask if live is None else b.and_(live, lane_mask)
        self.text.when_all(
            block,
            conditions,
            lambda inner: self._store_vector(walk, inner, store, stored, live, coefficient, point),
        )

    def _store_vector(
        self,
        walk: NestWalk,
        block: Block,
        store: Store,
        value: Ssa,
        live: Ssa | None,
        coefficient: int,
        point: Point,
    ) -> None:
        _, address = self._address(block, store.buf, store.index, point)
        memref_type, name = memref(store.buf), store.buf.root.name
        if coefficient == 1:
            past = store.buf.root in self.streamed and live is None
            if past and self._fills_lines(walk, store, value.lanes, point):
                self.streams = True
                block.add(
                    "vector.store",
                    (value.name, name, address),
                    f"{memref_type}, {value.type}",
                    f" %s, %s[%s] {{alignment = {LINE_BYTES} : i64, nontemporal = true}}",
                )
            else:
                self.text.store_vector(block, value, (name, address), memref_type, live)
        else:
            steps = [k * coefficient for k in range(value.lanes)]
            offsets = self.text.const(f"dense<{steps}>", f"vector<{value.lanes}xi32>")
            live = live or self._tail_mask(Tail(value.lanes), value.lanes)
            block.add(
                "vector.scatter",
                (name, address, offsets, live.name, value.name),
                f"{memref_type}, vector<{value.lanes}xi32>, {live.type}, {value.type}",
            )

    def _fills_lines(self, walk: NestWalk, store: Store, lanes: int, point: Point) -> bool:
        """Whether a vector is one whole cache line at its boundary, wherever the loops are."""
        size = store.buf.root.dtype.itemsize
        flat = flat_index(store.buf, store.index)
        start = flat.const + sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        steps = [
            coeff * lanes if symbol == walk.sched.vector else coeff for symbol, coeff in flat.terms
        ]
        return lanes * size == LINE_BYTES and all(
            step * size % LINE_BYTES == 0 for step in (start, *steps)
        )

    def _store_scalar(
        self, walk: NestWalk, block: Block, store: Store, value: Ssa, mask: Ssa | None, point: Point
    ) -> None:
        conditions = [] if mask is None else [mask.name]
        if store.guard:
            conditions += self._guard_masks(walk, block, store.buf, store.index, point, 0)[1]

        def fill(inner: Block) -> None:
            _, address = self._address(inner, store.buf, store.index, point)
            inner.add("memref.store", (value.name, store.buf.root.name, address), memref(store.buf))

        self.text.when_all(block, conditions, fill)

    # ---------------------------------------------------------------- expressions

    def _wide(self, b: Builder, value: Ssa, lanes: int) -> Ssa:
        return b.broadcast(value, lanes) if lanes and not value.lanes else value

    def _place(self, walk: NestWalk, block: Block, expr: Expr) -> Block:
        """The shallowest block of this nest that knows e's symbols.

        Reads of what the nest writes stay put.
        """
        if self._reads_written(walk, expr):
            return block
        depth = walk.top.depth
        for symbol in expr.symbols:
            depth = max(depth, block.lookup(symbol)[0].depth)
        return block.ancestor(depth)

    def _reads_written(self, walk: NestWalk, expr: Expr) -> bool:
        key = ("reads", id(expr))
        if key not in walk.memo:
            own = isinstance(expr, Load | Gather) and expr.buf.root in walk.written
            walk.memo[key] = (
                own
                or isinstance(expr, Accumulator)
                or any(self._reads_written(walk, arg) for arg in expr.args)
            )
        return walk.memo[key]

    def _value(
        self,
        walk: NestWalk,
        block: Block,
        expr: Expr,
        point: Point,
        tail: Tail | None,
        accs: dict | None = None,
    ) -> Ssa:
        if isinstance(expr, Accumulator):
            assert accs is not None, "only what follows a reduction reads its result"
            return accs[expr.number]
        scalar_epilogue = accs is not None and walk.sched.vector in walk.nest.rdims
        vector = None if scalar_epilogue else walk.sched.vector
        lanes = walk.sched.lanes if vector and vector in expr.symbols else 0
        where = self._place(walk, block, expr)
        key = _memo_key(key_of(expr, point), lanes, tail if lanes else None)
        if self._depends_on_acc(walk, expr):
            assert accs is not None
            key = (*key, *(acc.name for acc in accs.values()))
        if key not in where.memo:
            where.memo[key] = self._make(
                walk, where, expr, point, tail if lanes else None, lanes, accs
            )
        return where.memo[key]

    def _depends_on_acc(self, walk: NestWalk, expr: Expr) -> bool:
        key = ("acc", id(expr))
        if key not in walk.memo:
            walk.memo[key] = isinstance(expr, Accumulator) or any(
                self._depends_on_acc(walk, arg) for arg in expr.args
            )
        return walk.memo[key]

    def _make(
        self,
        walk: NestWalk,
        block: Block,
        expr: Expr,
        point: Point,
        tail: Tail | None,
        lanes: int,
        accs: dict | None,
    ) -> Ssa:
        b = self.text.builder(block, lanes)
        match expr:
            case Const():
                return b.c(expr.value, compute_el(expr.dtype))
            case IndexValue():
                return self._index(walk, block, expr.affine, point, lanes, compute_el(expr.dtype))
            case InRange():
                return self._range(walk, block, (expr.affine, expr.low, expr.high), point, lanes)
            case Load():
                return self._load(walk, block, expr, point, tail, lanes)
            case Gather():
                return self._gather(walk, block, expr, point, tail, lanes, accs)
            case Shifted():
                return self._moved(walk, block, expr, point, lanes)
        assert isinstance(expr, Op)
        live = (
            self._tail_mask(tail, lanes)
            if tail and lanes and expr.info.primitive == "in_range"
            else None
        )
        return self._operation(
            walk,
            block,
            expr,
            lanes,
            lambda arg: self._value(walk, block, arg, point, tail, accs),
            live,
        )

    def _operation(
        self,
        walk: NestWalk,
        block: Block,
        expr: Op,
        lanes: int,
        value: Callable[[Expr], Ssa],
        live: Ssa | None = None,
    ) -> Ssa:
        """An operation on the values of its operands. live: lanes of elements that exist, where that matters."""
        product = self._contracted(walk, expr)
        atoms = expr.args if product is None else (*expr.args[product].args, expr.args[1 - product])
        args = [value(atom) for atom in atoms]
        lanes = max([lanes, *(arg.lanes for arg in args)])
        b = self.text.builder(block, lanes)
        args = [self._wide(b, arg, lanes) for arg in args]
        if product is None:
            b = b.strict() if may_cancel(expr) else b
            b = b if live is None else b.of_lanes(live)
            return self.functions.emit(b, expr, args)
        x, y, z = args
        if expr.info.primitive == "sub":
            x, z = (b.neg(x), z) if product else (x, b.neg(z))
        return b.fma(x, y, z)

    def _contracted(self, walk: NestWalk, expr: Op) -> int | None:
        """Which operand of a sum or difference is a product that is rounded with it, if any.

        LLVM would decide by how often the product is used, which differs from row to row of a
        block; results must not. Products that other loops compute stay there.
        """
        sums = expr.info.primitive in ("add", "add_any", "sub") and not may_cancel(expr)
        if not self.text.contract or not sums or expr.dtype not in FUSED:
            return None
        for k, arg in enumerate(expr.args):
            if isinstance(arg, Op) and arg.info.primitive == "mul" and arg.dtype == expr.dtype:
                here = (
                    arg.symbols if walk.sched.vector is None else walk.sched.vector in arg.symbols
                )
                if here or any(
                    isinstance(factor, Accumulator) for factor in arg.args
                ):  # sums are multiplied where they end
                    return k
        return None

    def _moved(self, walk: NestWalk, block: Block, expr: Shifted, point: Point, lanes: int) -> Ssa:
        """The operand's value at another place, of the whole vectors around it."""
        places = parts(expr, point, walk.sched.vector, lanes)
        found = [self._value(walk, block, expr.args[0], place, None) for place in places]
        if len(found) == 1:
            return found[0]
        low, high = found
        lane = (point.get(walk.sched.along, 0) + dict(expr.moves).get(walk.sched.along, 0)) % lanes
        return self.text.builder(block, lanes).shuffle(low, high, range(lane, lane + lanes))


def _terms(walk: NestWalk) -> int:
    """Numbers that a step adds, one after the other, to an accumulator."""
    return walk.sched.lanes if walk.sched.transpose in walk.nest.rdims else 1


def _memo_key(key: tuple, lanes: int, tail: Tail | None = None) -> tuple:
    return (*key, tail.live if tail else None, lanes)
