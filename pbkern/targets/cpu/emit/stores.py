"""Stores of a nest: of points, whole vectors, masked, guarded, scattered, past the caches."""

from __future__ import annotations

from collections.abc import Mapping

from pbkern.core.machine import LINE_BYTES
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Expr, Gather, Load, Nest, Store, nodes
from pbkern.lower.nest.reductions import width
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.schedule.interleaved_access import places, runs_of_stores

from .addressing import Addressing, NestWalk, Point, Tail, memref
from .expressions import ExpressionValues
from .interleave_chains import interleave_points
from .interleaved_rows import InterleavedRows
from .promoted_loops import PromotedLoops
from .streamed_rows import StreamedRows, store_past_caches

# Bits of the vectors from which on stores are masked by registers of their own. On Zen 3 a masked
# store of AVX takes tens of operations (Agner Fog's tables: VMASKMOVPS to memory). Measured on Zen 4: 3.4 ns of eight
# floats, 0.6 as two parts.
MASKED_BITS = 512
# Bits of the vectors from which on large results are stored past the caches, a line by neighbouring stores. Measured on Zen 4
# as x86-64-v3, 2 x + 1 of float32: of 16 MiB 21.2 GB/s through the caches and 38.7 past them, of 128 MiB 22.3 and 31.8.
# Narrower vectors were not measured.
STREAMED_BITS = 256
# Bytes of the shortest vector that x86 stores past the caches (MOVNTPS).
LEAST_STREAMED_BYTES = 16


class Stores:
    """Owns stores.

    Attributes:
      streamed: buffers that are too large for the caches, and are written past them.
      puts_lines_together: whether the processor makes lines of two vectors of a row that begins anywhere (AVX-512).
      divisors: symbol -> number of which all of its values are multiples.
      streams: whether some store went past the caches.
      lines: rows of the current steps whose lines are put together; None: there are none.
    """

    def __init__(
        self,
        places: Addressing,
        promoted: PromotedLoops,
        expressions: ExpressionValues,
        rows: InterleavedRows,
        vectors: Vectors,
    ):
        self.text, self.places, self.promoted = places.text, places, promoted
        self.expressions, self.rows, self.vectors = expressions, rows, vectors
        self.streamed: frozenset[Buf] = frozenset()
        self.puts_lines_together = False
        self.divisors: Mapping[str, int] = {}
        self.streams = False
        self.lines: StreamedRows | None = None

    def store_points(
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
        interleaved = self.rows.computed_as_stored(walk, {n for n, _ in joint})
        rows: dict[tuple, dict[int, Ssa | Point]] = {}

        # A point reads what it overwrites before it stores anything.
        stored = _stored_values(walk.nest) if inner and walk.rewrites else []
        reads_first = len(stored) > 1 and not walk.nest.ordered
        repeated = _repeated(walk, points) if inner and walk.nest.rdims else set()

        def point(number: int, coords: Point) -> None:
            bound = (
                None
                if inner and not walk.nest.ordered
                else self._bind_accumulators(walk, accs[number * width : (number + 1) * width])
            )
            if reads_first:
                live = tail and tail.of(coords, walk.sched.vector)
                for expr in stored:
                    self.expressions.value(walk, block, expr, coords, live)
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
                        self.rows.store(
                            walk,
                            block,
                            store,
                            joint[n, number],
                            [row[place] for place in sorted(row)],
                            tail,
                        )
                elif store.inner == inner and (n, number) not in repeated:
                    self._write(
                        walk,
                        block,
                        store,
                        coords,
                        tail and tail.of(coords, walk.sched.vector),
                        bound,
                        scalar,
                    )

        interleave_points(walk, block, points, point)

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
            b.broadcast(self.expressions.value(walk, block, store.value, point, tail, accs), lanes),
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
        if self.promoted.carry(block, store.buf, store.index, point, stored):
            return
        mask = (
            None
            if store.mask is None
            else self.expressions.value(walk, block, store.mask, point, tail, accs)
        )
        if not moves:
            self._store_scalar(walk, block, store, stored, mask, point)
            return
        if (
            vector
            and tail
            and not (mask or store.guard)
            and coefficient == 1
            and self.vectors.bits < MASKED_BITS
        ):
            self._store_parts(block, store, stored, tail.live, point, vector)
            return
        live = self.places.tail_mask(tail, lanes) if tail else None
        if mask is not None:
            mask = b.broadcast(mask, lanes)
            live = mask if live is None else b.and_(live, mask)
        conditions: list[str] = []
        if store.guard:
            lane_masks, conditions = self.places.guard_masks(
                walk, block, store.buf, store.index, point, lanes
            )
            for lane_mask in lane_masks:
                live = lane_mask if live is None else b.and_(live, lane_mask)
        self.text.when_all(
            block,
            conditions,
            lambda inner: self._store_vector(walk, inner, store, stored, live, coefficient, point),
        )

    def _store_parts(
        self, block: Block, store: Store, value: Ssa, live: int, point: Point, vector: str
    ) -> None:
        """Stores the first `live` lanes as vectors of a power of two: processors without AVX-512 take long to mask a store."""
        b = self.text.builder(block, value.lanes)
        first = 0
        while first < live:
            count = 1 << (live - first).bit_length() - 1
            part = b.shuffle(value, value, range(first, first + count))
            at = {**point, vector: point.get(vector, 0) + first}
            _, address = self.places.address(block, store.buf, store.index, at)
            self.text.store_vector(block, part, (store.buf.root.name, address), memref(store.buf))
            first += count

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
        if self.lines is not None and live is None and self.lines.holds(store, point):
            self.streams = True
            self.lines.write(block, store, value, point)
            return
        _, address = self.places.address(block, store.buf, store.index, point)
        for position, extent in zip(store.index, store.buf.shape) if store.guard else ():
            if position.coefficient(walk.sched.along):
                reached = self.places.reached(walk, block, position, extent, point, value.lanes)
                if reached is not None:
                    address = self.text.put(
                        block, "arith.select", (reached, address, self.text.index(0)), "index"
                    )
        memref_type, name = memref(store.buf), store.buf.root.name
        if coefficient == 1:
            past = store.buf.root in self.streamed and live is None
            if past and self.fills_lines(walk, store, value.lanes, point):
                self.streams = True
                store_past_caches(block, value, store.buf, address)
            else:
                self._store_near(block, value, (name, address), memref_type, live)
        else:
            steps = [k * coefficient for k in range(value.lanes)]
            offsets = self.text.const(f"dense<{steps}>", f"vector<{value.lanes}xi32>")
            live = live or self.places.tail_mask(Tail(value.lanes), value.lanes)
            block.add(
                "vector.scatter",
                (name, address, offsets, live.name, value.name),
                f"{memref_type}, vector<{value.lanes}xi32>, {live.type}, {value.type}",
            )

    def _store_near(
        self, block: Block, value: Ssa, place: tuple[str, str], kind: str, live: Ssa | None
    ) -> None:
        """Neighbouring elements; where masks are slow, those of which all lanes are live are stored without one."""
        if live is None or self.vectors.bits >= MASKED_BITS:
            self.text.store_vector(block, value, place, kind, live)
            return
        self.text.when(
            block,
            self.text.builder(block, value.lanes).all(live).name,
            lambda inner: self.text.store_vector(inner, value, place, kind),
            lambda inner: self.text.store_vector(inner, value, place, kind, live),
        )

    def fills_lines(self, walk: NestWalk, store: Store, lanes: int, point: Point) -> bool:
        """Whether a vector is a cache line, or a part of one that its neighbours fill, at its boundary wherever loops are."""
        size = store.buf.root.dtype.itemsize
        per_line = LINE_BYTES // (lanes * size)
        along = point.get(walk.sched.along, 0)
        if (
            self.vectors.bits < STREAMED_BITS
            or lanes * size < LEAST_STREAMED_BYTES
            or per_line * lanes * size != LINE_BYTES
            or walk.sched.unroll % per_line
            or along % lanes
        ):
            return False
        line = lanes * per_line
        flat = flat_index(store.buf, store.index)
        offsets = point | {walk.sched.along: along // line * line}
        start = flat.const + sum(flat.coefficient(dim) * offset for dim, offset in offsets.items())
        divisors = {**self.divisors, walk.sched.along: line}
        steps = [coeff * divisors.get(symbol, 1) for symbol, coeff in flat.terms]
        return all(step * size % LINE_BYTES == 0 for step in (start, *steps))

    def _store_scalar(
        self, walk: NestWalk, block: Block, store: Store, value: Ssa, mask: Ssa | None, point: Point
    ) -> None:
        conditions = [] if mask is None else [mask.name]
        if store.guard:
            conditions += self.places.guard_masks(walk, block, store.buf, store.index, point, 0)[1]

        def fill(inner: Block) -> None:
            _, address = self.places.address(inner, store.buf, store.index, point)
            inner.add("memref.store", (value.name, store.buf.root.name, address), memref(store.buf))

        self.text.when_all(block, conditions, fill)


def _stored_values(nest: Nest) -> list[Expr]:
    """Values and masks of what each point stores."""
    return [
        expr
        for store in nest.stores
        if store.inner
        for expr in (store.value, store.mask)
        if expr is not None
    ]


def _repeated(walk: NestWalk, points: list[Point]) -> set[tuple[int, int]]:
    """(store, point) for the stores of a step that an earlier point does alike: same value, same place."""
    out, seen = set(), set()
    for n, store in enumerate(walk.nest.stores):
        values = [store.value] if store.mask is None else [store.value, store.mask]
        if any(
            isinstance(node, Load | Gather) and node.buf.root in walk.written
            for node in nodes(values)
        ):
            continue
        symbols = frozenset[str]().union(
            *(value.symbols for value in values), *(position.symbols for position in store.index)
        )
        for number, point in enumerate(points):
            key = (n, *((dim, at) for dim, at in sorted(point.items()) if dim in symbols))
            if key in seen:
                out.add((n, number))
            seen.add(key)
    return out
