"""Rows of a large result that begin anywhere in a cache line, written past the caches line by line.

    values of a row     |v0 v1 v2 v3|v4 v5 v6 v7|v8 ..     a vector of results at a time
    cache lines     .. v0|v1 v2 v3 v4|v5 v6 v7 v8|..       the end of one vector and the start of the next one

A row's number decides where it begins, so that lanes move by a distance that is known when the row is: an instruction takes
them from two vectors by a register of indices. The first elements of a row and its last ones, which share lines with what
other threads write, are stored through the caches, each by a masked store of its line alone: a masked store asks for every line
that it spans, and waits where a neighbouring line goes past the caches (docs/decisions/009-cache-blocking.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import LINE_BYTES, STREAMED_RUN_BYTES
from pbkern.lower.mlir.element_types import compute_el, mlir_type, storage_el
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Store
from pbkern.targets.cpu.math.avx512 import lanes_of_two
from pbkern.targets.cpu.schedule.sliding_windows import Chunk

from .addressing import Addressing, NestWalk, Point, memref

# Bytes of elements that an instruction of AVX-512F takes from two registers.
ELEMENT_BYTES = (4, 8)

RowKey = tuple


@dataclass
class StreamedRow:
    """One row of a result in the steps along it.

    Attributes:
      phase: name of the number of elements between the start of a cache line and the row's first element.
      lanes: indices of the lanes of two vectors that make a line.
      first: mask of the lanes of the row's first line that are the row's; last: of its last line.
      before: the vector before the next one; None: there is none yet.
    """

    store: Store
    point: Point
    phase: str
    lanes: Ssa
    first: Ssa
    last: Ssa
    before: Ssa | None = None


@dataclass
class StreamedRows:
    """Rows that a chunk of steps writes, by store and by place beside the vector dimension."""

    walk: NestWalk
    places: Addressing
    rows: dict[RowKey, StreamedRow] = field(default_factory=dict)

    @property
    def handed(self) -> list[Ssa]:
        """The vectors that a step hands to the next one."""
        return [row.before for row in self.rows.values() if row.before is not None]

    def take(self, handed: Sequence[Ssa]) -> None:
        """Sets the vectors before the next step."""
        for row, before in zip(self.rows.values(), handed):
            row.before = before

    def holds(self, store: Store, point: Point) -> bool:
        return row_key(store, point, self.walk) in self.rows

    def write(self, block: Block, store: Store, value: Ssa, point: Point) -> None:
        """Stores what the vector completes: a line, or the elements before the first one."""
        row, text = self.rows[row_key(store, point, self.walk)], self.places.text
        line = self._line(block, row, value)
        where, address = self.places.address(block, store.buf, store.index, point)
        place = text.once(where, "subi", address, row.phase)
        if row.before is None:
            text.store_vector(
                block, line, (store.buf.root.name, place), memref(store.buf), row.first
            )
        else:
            store_past_caches(block, line, store.buf, place)
        row.before = value

    def _line(self, block: Block, row: StreamedRow, value: Ssa) -> Ssa:
        """The line that ends in a vector; its first elements are from the vector before, whatever they are if there is none."""
        b = self.places.text.builder(block, value.lanes)
        return lanes_of_two(b, row.before or value, value, row.lanes)

    def finish(self, block: Block, end: int) -> None:
        """Stores the elements after the last line of rows that end before `end` along the vector dimension."""
        text, inner = self.places.text, Block(block)
        inner.values[self.walk.sched.along] = end
        for row in self.rows.values():
            assert row.before is not None
            buf = row.store.buf
            line = self._line(inner, row, row.before)
            where, address = self.places.address(inner, buf, row.store.index, row.point)
            place = buf.root.name, text.once(where, "subi", address, row.phase)
            text.store_vector(inner, line, place, memref(buf), row.last)
        block.take(inner)


def row_key(store: Store, point: Point, walk: NestWalk) -> RowKey:
    offsets = ((dim, at) for dim, at in sorted(point.items()) if dim != walk.sched.along)
    return id(store), *offsets


def may_stream(store: Store, chunk: Chunk, walk: NestWalk) -> bool:
    """Whether a store's rows are long runs of neighbours, a cache line in each vector."""
    buf, sched = store.buf, walk.sched
    run = chunk.high - chunk.low
    return (
        chunk.tail is None
        and run * buf.dtype.itemsize >= STREAMED_RUN_BYTES
        and run > chunk.vectors * sched.lanes  # the first step is written out before the loop
        and not walk.nest.rdims
        and not walk.nest.ordered
        and buf.dtype.itemsize in ELEMENT_BYTES
        and buf.dtype.itemsize * sched.lanes == LINE_BYTES
        and storage_el(buf.dtype) == compute_el(buf.dtype) == storage_el(buf.root.dtype)
        and store.mask is None
        and not store.guard
        and sched.along in frozenset[str]().union(*(place.symbols for place in store.index))
        and flat_coefficient(buf, store.index, sched.along) == 1
    )


def streamed_rows(
    walk: NestWalk,
    places: Addressing,
    block: Block,
    stores: Sequence[Store],
    points: Sequence[Point],
    start: int,
) -> StreamedRows:
    """Rows of stores whose first element is at `start` along the vector dimension; `points`: of the steps, without that."""
    before = Block(block)
    before.values[walk.sched.along] = start
    rows = StreamedRows(walk, places)
    for store in stores:
        for point in points:
            rows.rows[row_key(store, point, walk)] = _row(walk, places, before, store, point)
    block.take(before)
    return rows


def _row(
    walk: NestWalk, places: Addressing, block: Block, store: Store, point: Point
) -> StreamedRow:
    text, lanes, bits = places.text, walk.sched.lanes, 8 * store.buf.dtype.itemsize
    flat = flat_index(store.buf, store.index)
    offset = sum(flat.coefficient(dim) * at for dim, at in point.items())
    where, address = text.affine(block, flat, offset)
    phase = text.once(where, "andi", address, lanes - 1)
    before = text.put(where, "arith.subi", (text.index(lanes), phase), "index")
    el = f"i{bits}"
    b = text.builder(where, lanes)
    numbers = Ssa(text.const(f"dense<{list(range(lanes))}>", mlir_type(el, lanes)), el, lanes)

    def in_lanes(number: str) -> Ssa:
        scalar = Ssa(text.put(where, "arith.index_cast", (number,), f"index to {el}"), el, 0)
        return b.broadcast(scalar)

    of_row = in_lanes(phase)
    first, last = b.cmp("ge", numbers, of_row), b.cmp("lt", numbers, of_row)
    return StreamedRow(store, point, phase, b.add(numbers, in_lanes(before)), first, last)


def store_past_caches(block: Block, value: Ssa, buf: Buf, address: str) -> None:
    """Stores a vector at a multiple of its size, past the caches."""
    alignment = value.lanes * buf.root.dtype.itemsize
    block.add(
        "vector.store",
        (value.name, buf.root.name, address),
        f"{memref(buf)}, {value.type}",
        f" %s, %s[%s] {{alignment = {alignment} : i64, nontemporal = true}}",
    )
