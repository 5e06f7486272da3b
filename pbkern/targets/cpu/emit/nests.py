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
from pbkern.lower.mlir.element_types import compute_el
from pbkern.lower.mlir.ops import Builder
from pbkern.lower.mlir.ops import Value as Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Expr, Nest, Write
from pbkern.lower.nest.rounding import may_cancel
from pbkern.targets.cpu.locality.in_place_stores import walks_ahead
from pbkern.targets.cpu.machine import LINE_BYTES
from pbkern.targets.cpu.schedule.interleaved_access import places, runs_of_loads, runs_of_stores
from pbkern.targets.cpu.schedule.register_tiles import NestSchedule, schedule_of, smallest_tile
from pbkern.targets.cpu.schedule.sliding_windows import (
    Chunk,
    Visits,
    chunks,
    key_of,
    moved_loads,
    parts,
)
from pbkern.targets.cpu.schedule.vector_dimension import is_long_point

from .addressing import Point, Tail, Walk, memref
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


class NestEmitter(Loads, InterleavedRows, Epilogues):
    """Emits nests of one function into blocks of `text`."""

    def __init__(self, text: Text, vector_bits: int = 512, kernel: str = "kernel"):
        super().__init__(text, vector_bits)
        self.functions = MathFunctions(kernel)
        self.plain = False  # scalar loops, in the order of the nest's dimensions
        self.streamed: frozenset[Buf] = frozenset()  # too large for the caches: written past them
        self.streams = False  # whether some store went past the caches
        self.has_scalar_loops = (
            False  # which LLVM's optimiser still improves; vector code it leaves as it is
        )

    def emit(self, block: Block, nest: Nest, sched: NestSchedule | None = None) -> NestSchedule:
        """Appends the nest to `block`."""
        if self.plain:
            sched = NestSchedule(order=tuple(nest.dims))
        sched = sched or schedule_of(nest, self.vector_bits, self.text.contract)
        if any(n == 0 for d, n in nest.dims.items() if d not in nest.rdims):
            return sched
        if any(nest.dims[d] == 0 for d in nest.rdims):  # what a reduction starts with is stored
            sched = NestSchedule(order=tuple(nest.dims))
        self.has_scalar_loops |= sched.vector is None and math.prod(nest.dims.values()) > 1
        if nest.over and (self.kept is not None or not walks_ahead(nest, sched)):
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
        walk = Walk(nest, sched, top, {w.buf.root for w in nest.writes}, reaches=nest.reaches())
        outer = [d for d in sched.order if d not in nest.rdims]
        self._outer(walk, top, outer, [{}])
        return top

    def scalar(self, block: Block, e: Expr, nest: Nest) -> Ssa:
        """A scalar expression outside any nest, evaluated in `block`."""
        inner = Block(block)
        walk = Walk(nest, NestSchedule(), inner, set())
        v = self._value(walk, inner, e, {}, None)
        block.take(inner)
        return v

    # ---------------------------------------------------------------- loops

    def _outer(self, w: Walk, block: Block, dims: list[str], points: list[Point]) -> None:
        if not dims:
            self._vector(w, block, points)
            return
        d, rest = dims[0], dims[1:]
        size, jam = w.nest.dims[d], w.sched.jam.get(d, 1)
        full = size // jam * jam
        for low, high, step in ((0, full, jam), (full, size, size - full)):
            if high > low:

                def fill(inner: Block, _, step=step):
                    if d == w.sched.transpose:
                        w.transposed_rows = step
                    self._outer(
                        w,
                        inner,
                        rest,
                        [{**p, d: o} for p in points for o in range(step)] if jam > 1 else points,
                    )
                    return []

                self.text.loop(block, d, low, high, step, fill)

    def _vector(self, w: Walk, block: Block, points: list[Point]) -> None:
        vector = w.sched.vector
        if vector is None:
            self._reduce(w, block, points, None)
        elif vector in w.nest.rdims:
            self._horizontal(w, block, points)
        else:
            known: dict[tuple, Ssa] = {}
            for chunk in chunks(w.nest, w.sched):
                known = self._chunk(w, block, points, chunk, known)

    def _chunk(
        self, w: Walk, block: Block, points: list[Point], chunk: Chunk, known: dict[tuple, Ssa]
    ) -> dict[tuple, Ssa]:
        """Steps along the vector dimension.

        `known` before, and the result after it: values that steps hand on.
        """
        vector, lanes = w.sched.along, w.sched.lanes
        step, tail = (
            chunk.vectors * lanes,
            None if chunk.tail is None else Tail(chunk.tail, (chunk.vectors - 1) * lanes),
        )
        tile = [{**p, vector: lanes * u} for p in points for u in range(chunk.vectors)]
        carried = Visits(w.nest, w.sched, chunk.vectors).carried if w.moves else {}
        w.first = chunk.low if chunk.is_one_step(w.sched) else None
        keys = list(carried) if w.first is None else [key for key in carried if key in known]

        def fill(inner: Block, handed: list[Ssa]) -> list[Ssa]:
            inner.memo |= {_memo_key(key, lanes): v for key, v in zip(keys, handed)}
            self._reduce(w, inner, tile, tail)
            after = (
                [(e, {**p, vector: p[vector] + step}) for e, p in carried.values()]
                if tail is None
                else []
            )
            return [self._value(w, inner, e, p, None) for e, p in after]

        start = self._made_before(w, block, chunk.low, {key: carried[key] for key in keys}, known)
        return dict(
            zip(carried, self.text.loop(block, vector, chunk.low, chunk.high, step, fill, start))
        )

    def _made_before(
        self, w: Walk, block: Block, low: int, carried: dict, known: dict[tuple, Ssa]
    ) -> list[Ssa]:
        """Values that the first step of a loop finds."""
        if not carried:
            return []
        before = Block(block)
        before.values[w.sched.along] = low
        made = [
            known[key] if key in known else self._value(w, before, e, p, None)
            for key, (e, p) in carried.items()
        ]
        block.take(before)
        return made

    def _reduce(self, w: Walk, block: Block, points: list[Point], tail: Tail | None) -> None:
        """Accumulators per point in registers, loops over the reduced dimensions, then the final writes."""
        nest = w.nest
        w.runs = runs_of_loads(nest, w.sched.vector, points)
        if not nest.rdims:
            self._writes(w, block, points, tail, [], inner=True)
            return
        start = [a for _ in points for a in self._identities(w, block, w.sched.lanes)]
        accs = self._loops(
            w, block, nest.rdims, _terms(w), lambda b, c: self._steps(w, b, points, tail, c), start
        )
        self._follow(w, block, points, tail, accs)

    def _loops(
        self, w: Walk, block: Block, dims: tuple[str, ...], terms: int, innermost, accs: list[Ssa]
    ) -> list[Ssa]:
        """Loops over reduced dimensions around `innermost`, which adds `terms` numbers in a row to each accumulator."""
        if not dims:
            return innermost(block, accs)
        at_once = {w.sched.transpose: w.sched.lanes}
        inside = terms * math.prod(-(-w.nest.dims[x] // at_once.get(x, 1)) for x in dims[1:])
        d, size, rows = dims[0], w.nest.dims[dims[0]], at_once.get(dims[0], 1)
        for low, high, step in (
            (0, size // rows * rows, rows),
            (size // rows * rows, size, size % rows),
        ):
            if high > low:

                def fill(inner: Block, accs: list[Ssa], step=step) -> list[Ssa]:
                    w.transposed_rows = step
                    return self._loops(w, inner, dims[1:], terms, innermost, accs)

                accs = self._accumulate(w, block, (d, low, high, step), inside, fill, accs)
        return accs

    def _steps(
        self, w: Walk, block: Block, points: list[Point], tail: Tail | None, accs: list[Ssa]
    ) -> list[Ssa]:
        """A step of the reduction, or one for each of the rows that are transposed together."""
        transposed = w.sched.transpose
        if transposed not in w.nest.rdims:
            return self._step(w, block, points, tail, accs)
        for row in range(w.transposed_rows):
            accs = self._step(w, block, [{**p, transposed: row} for p in points], tail, accs)
        return accs

    def _horizontal(self, w: Walk, block: Block, points: list[Point]) -> None:
        """Vectors along a reduced dimension; lanes are combined at the end."""
        if w.sched.batched_rows:
            self._horizontal_batch(w, block, points)
            return
        nest, vector, lanes = w.nest, w.sched.along, w.sched.lanes
        accs = self._lane_sums(w, block, points)
        width, vectors = (
            len(self._per_accumulator(w, bool)),
            max(c.vectors for c in chunks(nest, w.sched)),
        )
        exact = self._is_exact(
            w, -(-math.prod(nest.dims[d] for d in nest.rdims) // (lanes * vectors))
        )
        scalars: list[Ssa] = []
        for k in range(len(points)):
            parts = [
                accs[(k * vectors + u) * width : (k * vectors + u + 1) * width]
                for u in range(vectors)
            ]
            scalars += self._fold(w, block, parts, exact=exact)
        self._writes(
            w, block, [{**p, vector: 0} for p in points], None, scalars, inner=False, scalar=True
        )

    def _horizontal_batch(self, w: Walk, block: Block, points: list[Point]) -> None:
        """Reduces a row in every lane of what is stored; a few rows at a time are added up in registers."""
        width, lanes, rows = (
            len(self._per_accumulator(w, bool)),
            w.sched.lanes,
            w.sched.batched_rows,
        )
        at_once = max((LONG_POINTS if is_long_point(w.nest) else lanes) // width, 1)
        accs: list[list[Ssa]] = []
        for at in range(0, len(points), at_once):
            mine = self._lane_sums(w, block, points[at : at + at_once])
            accs += [mine[k : k + width] for k in range(0, len(mine), width)]
        across = replace(w, sched=NestSchedule(lanes, rows, order=w.sched.order))
        across.runs = runs_of_loads(w.nest, rows, points[:1])
        tail = Tail(len(points)) if len(points) < lanes else None
        self._writes(
            across, block, points[:1], tail, self._reduced_rows(w, block, accs), inner=False
        )

    def _lane_sums(self, w: Walk, block: Block, points: list[Point]) -> list[Ssa]:
        """Accumulators of points whose vectors run along a reduced dimension."""
        nest, vector, lanes = w.nest, w.sched.along, w.sched.lanes
        others = tuple(d for d in nest.rdims if d != vector)
        cut = chunks(nest, w.sched)
        vectors = max(c.vectors for c in cut)
        width = len(self._identities(w, block, lanes))
        accs = [
            a for _ in points for _ in range(vectors) for a in self._identities(w, block, lanes)
        ]

        def sweep(b: Block, accs: list[Ssa]) -> list[Ssa]:
            for low, high, count, live in cut:
                tail = None if live is None else Tail(live)
                tile = [{**p, vector: lanes * u} for p in points for u in range(count)]
                used = [k * vectors + u for k in range(len(points)) for u in range(count)]
                mine = [accs[t * width + j] for t in used for j in range(width)]
                w.runs = runs_of_loads(nest, vector, tile)
                new = self._accumulate(
                    w,
                    b,
                    (vector, low, high, count * lanes),
                    _terms(w),
                    lambda inner, c, tile=tile, tail=tail: self._steps(w, inner, tile, tail, c),
                    mine,
                )
                accs = list(accs)
                for n, t in enumerate(used):
                    accs[t * width : (t + 1) * width] = new[n * width : (n + 1) * width]
            return accs

        terms = _terms(w) * -(-nest.dims[vector] // (lanes * vectors))
        return self._loops(w, block, others, terms, sweep, accs)

    # ---------------------------------------------------------------- writes

    def _writes(
        self,
        w: Walk,
        block: Block,
        points: list[Point],
        tail: Tail | None,
        accs: list[Ssa],
        *,
        inner: bool,
        scalar: bool = False,
    ) -> None:
        width = len(accs) // len(points) if accs else 0
        joint = {} if scalar else runs_of_stores(w.nest, w.sched.vector, points, inner)
        interleaved = self._interleaved_writes(w, {n for n, _ in joint})
        rows: dict[tuple, dict[int, Ssa | Point]] = {}

        def point(k: int, p: Point) -> None:
            bound = (
                None
                if inner and not w.nest.ordered
                else self._bind_accumulators(w, accs[k * width : (k + 1) * width])
            )
            for n, write in enumerate(w.nest.writes):
                if (n, k) in joint:
                    _, flat, first = joint[n, k]
                    row = rows.setdefault(joint[n, k], {})
                    (place,) = places(flat_index(write.buf, write.index), [p])
                    row[place - first] = (
                        p
                        if n in interleaved
                        else self._stored(w, block, write, p, tail, bound, w.sched.lanes)
                    )
                    if len(row) == flat.coefficient(w.sched.vector):
                        self._store_row(
                            w,
                            block,
                            write,
                            joint[n, k],
                            [row[place] for place in sorted(row)],
                            tail,
                        )
                elif write.inner == inner:
                    self._write(
                        w, block, write, p, tail and tail.of(p, w.sched.vector), bound, scalar
                    )

        self._interleave_points(w, block, points, point)

    def _stored(
        self,
        w: Walk,
        block: Block,
        write: Write,
        p: Point,
        tail: Tail | None,
        accs: dict | None,
        lanes: int,
    ) -> Ssa:
        """Value that a write stores, in the buffer's element type."""
        b = self.text.builder(block, lanes)
        return b.to_storage(
            self._wide(b, self._value(w, block, write.value, p, tail, accs), lanes), write.buf.dtype
        )

    def _bind_accumulators(self, w: Walk, accs: list[Ssa]) -> dict[int, Ssa]:
        """Accumulator number -> value (of argmax: the index)."""
        bound, at = {}, 0
        for n, r in enumerate(w.nest.reductions if accs else []):
            count = 2 if r.op in ("argmax", "argmin") else 1
            bound[n] = accs[at + count - 1]
            at += count
        return bound

    def _write(
        self,
        w: Walk,
        block: Block,
        write: Write,
        p: Point,
        tail: Tail | None,
        accs: dict | None,
        scalar: bool,
    ) -> None:
        vector = None if scalar else w.sched.vector
        coefficient = flat_coefficient(write.buf, write.index, vector) if vector else 0
        moves = bool(vector) and any(vector in i.symbols for i in write.index)
        lanes = w.sched.lanes if moves else 0
        b = self.text.builder(block, lanes)
        stored = self._stored(w, block, write, p, tail, accs, lanes)
        if self._carry(block, write.buf, write.index, p, stored):
            return
        mask = None if write.mask is None else self._value(w, block, write.mask, p, tail, accs)
        if not moves:
            self._store_scalar(w, block, write, stored, mask, p)
            return
        live = self._tail_mask(tail, lanes) if tail else None
        if mask is not None:
            mask = self._wide(b, mask, lanes)
            live = mask if live is None else b.and_(live, mask)
        conditions: list[str] = []
        if write.guard:
            lane_masks, conditions = self._guard_masks(w, block, write.buf, write.index, p, lanes)
            for m in lane_masks:
                live = m if live is None else b.and_(live, m)
        self.text.when_all(
            block,
            conditions,
            lambda inner: self._store_vector(w, inner, write, stored, live, coefficient, p),
        )

    def _store_vector(
        self,
        w: Walk,
        block: Block,
        write: Write,
        v: Ssa,
        live: Ssa | None,
        coefficient: int,
        p: Point,
    ) -> None:
        _, address = self._address(block, write.buf, write.index, p)
        m, name = memref(write.buf), write.buf.root.name
        if coefficient == 1 and live is None:
            past = ""
            if write.buf.root in self.streamed and self._fills_lines(w, write, v.lanes, p):
                past, self.streams = (
                    f" {{alignment = {LINE_BYTES} : i64, nontemporal = true}}",
                    True,
                )
            block.add(f"vector.store {v.name}, {name}[{address}]{past} : {m}, {v.type}")
        elif coefficient == 1 and live is not None:
            block.add(
                f"vector.maskedstore {name}[{address}], {live.name}, {v.name} : {m}, {live.type}, {v.type}"
            )
        else:
            steps = [k * coefficient for k in range(v.lanes)]
            offsets = self.text.const(f"arith.constant dense<{steps}> : vector<{v.lanes}xi32>")
            live = live or self._tail_mask(Tail(v.lanes), v.lanes)
            block.add(
                f"vector.scatter {name}[{address}] [{offsets}], {live.name}, {v.name} : {m}, "
                f"vector<{v.lanes}xi32>, {live.type}, {v.type}"
            )

    def _fills_lines(self, w: Walk, write: Write, lanes: int, p: Point) -> bool:
        """Whether a vector is one whole cache line at its boundary, wherever the loops are."""
        size = write.buf.root.dtype.itemsize
        flat = flat_index(write.buf, write.index)
        start = flat.const + sum(flat.coefficient(d) * o for d, o in p.items())
        steps = [c * lanes if s == w.sched.vector else c for s, c in flat.terms]
        return lanes * size == LINE_BYTES and all(
            n * size % LINE_BYTES == 0 for n in (start, *steps)
        )

    def _store_scalar(
        self, w: Walk, block: Block, write: Write, v: Ssa, mask: Ssa | None, p: Point
    ) -> None:
        conditions = [] if mask is None else [mask.name]
        if write.guard:
            conditions += self._guard_masks(w, block, write.buf, write.index, p, 0)[1]

        def fill(inner: Block) -> None:
            _, address = self._address(inner, write.buf, write.index, p)
            inner.add(
                f"memref.store {v.name}, {write.buf.root.name}[{address}] : {memref(write.buf)}"
            )

        self.text.when_all(block, conditions, fill)

    # ---------------------------------------------------------------- expressions

    def _wide(self, b: Builder, v: Ssa, lanes: int) -> Ssa:
        return b.broadcast(v, lanes) if lanes and not v.lanes else v

    def _place(self, w: Walk, block: Block, e: Expr) -> Block:
        """The shallowest block of this nest that knows e's symbols.

        Reads of what the nest writes stay put.
        """
        if self._reads_written(w, e):
            return block
        depth = w.top.depth
        for s in e.symbols:
            depth = max(depth, block.lookup(s)[0].depth)
        return block.ancestor(depth)

    def _reads_written(self, w: Walk, e: Expr) -> bool:
        key = ("reads", id(e))
        if key not in w.memo:
            own = e.kind in ("load", "gather") and e.info[0].root in w.written
            w.memo[key] = own or e.kind == "acc" or any(self._reads_written(w, a) for a in e.args)
        return w.memo[key]

    def _value(
        self, w: Walk, block: Block, e: Expr, p: Point, tail: Tail | None, accs: dict | None = None
    ) -> Ssa:
        if e.kind == "acc":
            assert accs is not None, "only what follows a reduction reads its result"
            return accs[e.info]
        scalar_epilogue = accs is not None and w.sched.vector in w.nest.rdims
        vector = None if scalar_epilogue else w.sched.vector
        lanes = w.sched.lanes if vector and vector in e.symbols else 0
        where = self._place(w, block, e)
        key = _memo_key(key_of(e, p), lanes, tail if lanes else None)
        if self._depends_on_acc(w, e):
            assert accs is not None
            key = (*key, *(a.name for a in accs.values()))
        if key not in where.memo:
            where.memo[key] = self._make(w, where, e, p, tail if lanes else None, lanes, accs)
        return where.memo[key]

    def _depends_on_acc(self, w: Walk, e: Expr) -> bool:
        key = ("acc", id(e))
        if key not in w.memo:
            w.memo[key] = e.kind == "acc" or any(self._depends_on_acc(w, a) for a in e.args)
        return w.memo[key]

    def _make(
        self,
        w: Walk,
        block: Block,
        e: Expr,
        p: Point,
        tail: Tail | None,
        lanes: int,
        accs: dict | None,
    ) -> Ssa:
        b = self.text.builder(block, lanes)
        match e.kind:
            case "const":
                return b.c(e.info, compute_el(e.dtype))
            case "index":
                return self._index(w, block, e.info, p, lanes, compute_el(e.dtype))
            case "range":
                return self._range(w, block, e.info, p, lanes)
            case "load":
                return self._load(w, block, e, p, tail, lanes)
            case "gather":
                return self._gather(w, block, e, p, tail, lanes, accs)
            case "moved":
                return self._moved(w, block, e, p, lanes)
        live = (
            self._tail_mask(tail, lanes)
            if tail and lanes and e.info.primitive == "in_range"
            else None
        )
        return self._operation(
            w, block, e, lanes, lambda a: self._value(w, block, a, p, tail, accs), live
        )

    def _operation(
        self,
        w: Walk,
        block: Block,
        e: Expr,
        lanes: int,
        value: Callable[[Expr], Ssa],
        live: Ssa | None = None,
    ) -> Ssa:
        """An operation on the values of its operands. live: lanes of elements that exist, where that matters."""
        product = self._contracted(w, e)
        atoms = e.args if product is None else (*e.args[product].args, e.args[1 - product])
        args = [value(a) for a in atoms]
        lanes = max([lanes, *(a.lanes for a in args)])
        b = self.text.builder(block, lanes)
        args = [self._wide(b, a, lanes) for a in args]
        if product is None:
            b = b.strict() if may_cancel(e) else b
            b = b if live is None else b.of_lanes(live)
            return self.functions.emit(b, e, args)
        x, y, z = args
        if e.info.primitive == "sub":
            x, z = (b.neg(x), z) if product else (x, b.neg(z))
        return b.fma(x, y, z)

    def _contracted(self, w: Walk, e: Expr) -> int | None:
        """Which operand of a sum or difference is a product that is rounded with it, if any.

        LLVM would decide by how often the product is used, which differs from row to row of a
        block; results must not. Products that other loops compute stay there.
        """
        sums = e.info.primitive in ("add", "add_any", "sub") and not may_cancel(e)
        if not self.text.contract or not sums or e.dtype not in FUSED:
            return None
        for k, a in enumerate(e.args):
            if a.kind == "op" and a.info.primitive == "mul" and a.dtype == e.dtype:
                here = a.symbols if w.sched.vector is None else w.sched.vector in a.symbols
                if here or any(
                    factor.kind == "acc" for factor in a.args
                ):  # sums are multiplied where they end
                    return k
        return None

    def _moved(self, w: Walk, block: Block, e: Expr, p: Point, lanes: int) -> Ssa:
        """The operand's value at another place, of the whole vectors around it."""
        places = parts(e, p, w.sched.vector, lanes)
        found = [self._value(w, block, e.args[0], q, None) for q in places]
        if len(found) == 1:
            return found[0]
        low, high = found
        lane = (p.get(w.sched.along, 0) + dict(e.info).get(w.sched.along, 0)) % lanes
        order = list(range(lane, lane + lanes))
        both = f"{low.name}, {high.name} {order} : {low.type}, {high.type}"
        return low._replace(name=self.text.put(block, f"vector.shuffle {both}"))


def _terms(w: Walk) -> int:
    """Numbers that a step adds, one after the other, to an accumulator."""
    return w.sched.lanes if w.sched.transpose in w.nest.rdims else 1


def _memo_key(key: tuple, lanes: int, tail: Tail | None = None) -> tuple:
    return (*key, tail.live if tail else None, lanes)
