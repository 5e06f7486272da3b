"""Loads of a nest: whole vectors, masked, strided, transposed in registers, made of aligned ones, gathered.

Gathers load whole vectors where the index along them is affine, and where the ends of a row tell,
when the program runs, that its elements are side by side (lower/values/dynamic_strides.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from pbkern.core.affine import Affine
from pbkern.core.machine import LINE_BYTES
from pbkern.lower.mlir.element_types import BITS, compute_el, mlir_type, storage_el
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Expr, Gather, Load, Op, Pool
from pbkern.lower.values.dynamic_strides import Steps, steps_along
from pbkern.targets.cpu.schedule.interleaved_access import is_strided
from pbkern.targets.cpu.schedule.nest_schedule import prefetched_by
from pbkern.targets.cpu.schedule.register_transpose import is_transposed

from .addressing import Addressing, NestWalk, Point, Tail, memref
from .interleaved_loads import StridedAccesses
from .promoted_loops import PromotedLoops

# Bytes of the narrowest elements that an instruction gathers. Source: AVX2 and AVX-512.
NARROWEST_GATHERED = 4


class Loader:
    """Owns loads.

    value: gives an expression at a point, of which the indices of gathers are made.
    """

    def __init__(
        self,
        places: Addressing,
        promoted: PromotedLoops,
        strided: StridedAccesses,
        value: Callable[..., Ssa],
    ):
        self.text, self.places, self.promoted = places.text, places, promoted
        self.strided, self.value = strided, value
        self.pool = Pool()  # of expressions made here

    def load(
        self, walk: NestWalk, block: Block, expr: Load, point: Point, tail: Tail | None, lanes: int
    ) -> Ssa:
        buf, index, guard = expr.buf, expr.index, expr.guard
        b = self.text.builder(block, lanes)
        carried = self.promoted.carried(block, buf, index, point)
        if carried is not None:
            return b.from_storage(carried, buf.dtype)
        turn = walk.sched.transpose
        if (
            lanes
            and turn
            and buf.root not in walk.written
            and is_transposed(expr, walk.sched.along, turn)
        ):
            return b.from_storage(
                self._load_transposed(walk, block, buf, index, point, tail, lanes), buf.dtype
            )
        flat = flat_index(buf, index)
        if walk.moves and walk.first is not None and tail is None and lanes and not guard:
            live = walk.live_lanes(expr, point)
            if live <= 0:
                return b.broadcast(b.c(0, compute_el(buf.dtype)))
            tail = Tail(live) if live < lanes else None
        key = (
            "load",
            buf.root.name,
            storage_el(buf.dtype),
            flat.linear(),
            flat.const + sum(flat.coefficient(dim) * offset for dim, offset in point.items()),
            tail.live if tail else None,
            lanes,
            self._guard_key(index, point) if guard else None,
        )
        if key in block.memo and buf.root not in walk.written:
            return block.memo[key]
        if self._is_half(walk, expr, point, lanes):
            loaded = self._load_half(walk, block, expr, point, lanes)
            block.memo[key] = loaded
            return loaded
        if lanes and not guard and is_strided(buf, index, walk.sched.vector):
            loaded = self.strided.load(walk, block, buf, flat, key[4], tail, lanes)
        else:
            loaded = self._load_storage(walk, block, buf, index, point, tail, lanes, guard)
        loaded = b.from_storage(loaded, buf.dtype)
        block.memo[key] = loaded
        return loaded

    def _is_half(self, walk: NestWalk, expr: Load, point: Point, lanes: int) -> bool:
        """Whether the vector shares words with the next or the last one of its step."""
        vector = walk.sched.along
        if not lanes or not walk.halves or vector not in expr.symbols:
            return False
        return point[vector] // lanes ^ 1 < walk.halves

    def _load_half(self, walk: NestWalk, block: Block, expr: Load, point: Point, lanes: int) -> Ssa:
        """Every other element of two vectors of bfloat16, from the first or the second on, as float32."""
        buf, index, vector = expr.buf, expr.index, walk.sched.along
        number = point[vector] // lanes
        first = {**point, vector: (number & ~1) * lanes}
        _, address = self.places.address(block, buf, index, first)
        key = ("words", buf.root.name, address, lanes)
        b = self.text.builder(block, lanes)
        if key not in block.memo:
            if buf.root in prefetched_by(walk.nest) and self._leads(walk, buf, index):
                self._fetch(walk, block, buf, index, first)
            whole = self.text.load_vector(
                block, (buf.root.name, address), memref(buf), "bf16", 2 * lanes, None
            )
            types = f"{whole.type} to {mlir_type('i32', lanes)}"
            words = self.text.put(block, "vector.bitcast", (whole.name,), types)
            block.memo[key] = Ssa(words, "i32", lanes)
        words = block.memo[key]
        high = b.and_(words, b.c(-(1 << 16), "i32")) if number & 1 else b.shl(words, b.c(16, "i32"))
        return b.bitcast(high, "f32")

    def _load_transposed(
        self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, tail, lanes: int
    ) -> Ssa:
        """One vector of a lanes x lanes square that is loaded row by row and transposed in registers, once per square.

        Butterfly: in step s, rows that differ in bit s exchange the elements whose index differs in
        that bit.
        """
        along, vector = walk.sched.transpose, walk.sched.along
        assert along is not None
        corner = {**point, along: 0}
        flat = flat_index(buf, index)
        key = (
            "square",
            buf.root.name,
            storage_el(buf.dtype),
            flat,
            tuple(sorted(corner.items())),
            tail.live if tail else None,
            walk.transposed_rows,
        )
        if key not in block.memo:
            rows = [
                self._square_row(
                    walk, block, buf, index, {**corner, vector: corner.get(vector, 0) + r}, lanes
                )
                for r in range(tail.live if tail else lanes)
            ]
            rows += [rows[-1]] * (lanes - len(rows))
            b, step = self.text.builder(block, lanes), 1
            while step < lanes:
                low = [k if not k & step else lanes + (k ^ step) for k in range(lanes)]
                high = [k | step if not k & step else lanes + k for k in range(lanes)]
                transposed = list(rows)
                for row in range(lanes):
                    if not row & step:
                        for place, order in ((row, low), (row | step, high)):
                            transposed[place] = b.shuffle(rows[row], rows[row | step], order)
                rows, step = transposed, step * 2
            block.memo[key] = rows
        return block.memo[key][point.get(along, 0)]

    def _square_row(
        self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, lanes: int
    ) -> Ssa:
        el, mem_type, name = storage_el(buf.dtype), memref(buf), buf.root.name
        step = flat_coefficient(buf, index, walk.sched.transpose or "")
        if step > 1:
            return self._spread_row(walk, block, buf, flat_index(buf, index), step, point, lanes)
        if BITS[storage_el(buf.root.dtype)] < BITS[el]:
            tail = Tail(walk.transposed_rows) if walk.transposed_rows < lanes else None
            return self._words(block, buf, index, point, lanes, tail, el)
        _, address = self.places.address(block, buf, index, point)
        vec_type = mlir_type(el, lanes)
        if buf.root in prefetched_by(walk.nest):
            self._fetch(walk, block, buf, index, point)
        if walk.transposed_rows == lanes:
            return Ssa(
                self.text.put(block, "vector.load", (name, address), f"{mem_type}, {vec_type}"),
                el,
                lanes,
            )
        live = self.places.tail_mask(Tail(walk.transposed_rows), lanes)
        return self.text.load_vector(block, (name, address), mem_type, el, lanes, live)

    def _spread_row(
        self,
        walk: NestWalk,
        block: Block,
        buf: Buf,
        flat: Affine,
        step: int,
        point: Point,
        lanes: int,
    ) -> Ssa:
        """The elements at a point and every step behind it, of whole vectors that loads of the elements between share."""
        place = flat.const + sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        near = [
            other.const - flat.const
            for other in (
                flat_index(load.buf, load.index)
                for load in walk.nest.loads()
                if isinstance(load, Load) and load.buf.root is buf.root
            )
            if other.linear() == flat.linear()
        ]
        near = [
            distance for distance in near if (flat.const + distance) // step == flat.const // step
        ]
        low, count = (
            place + min(near),
            (walk.transposed_rows - 1) * step + max(near) - min(near) + 1,
        )
        wanted = [divmod(place - low + k * step, lanes) for k in range(walk.transposed_rows)]
        vectors = {
            n: self.strided.load_whole(
                walk, block, buf, flat, low + n * lanes, min(lanes, count - n * lanes), lanes
            )
            for n in sorted({n for n, _ in wanted})
        }
        return self.strided.picked(block, vectors, wanted, lanes)

    def _guard_key(self, index, point: Point):
        return tuple(
            (
                position,
                tuple(
                    (dim, offset)
                    for dim, offset in sorted(point.items())
                    if dim in position.symbols
                ),
            )
            for position in index
        )

    def _load_storage(
        self,
        walk: NestWalk,
        block: Block,
        buf: Buf,
        index,
        point: Point,
        tail,
        lanes: int,
        guard: bool,
    ) -> Ssa:
        """The stored element(s); guarded axes are clamped, or masked along the vector dimension."""
        el, mem_type, name = storage_el(buf.root.dtype), memref(buf), buf.root.name
        wanted = storage_el(buf.dtype)
        if BITS[el] < BITS[wanted]:
            return self._load_words(walk, block, buf, index, point, tail, lanes, wanted)
        if el != wanted:  # the same bits under another type
            root = Buf(name, buf.shape, buf.root.dtype, buf.arena, storage=buf.root)
            stored = self._load_storage(walk, block, root, index, point, tail, lanes, guard)
            return self.text.builder(block, lanes).bitcast(stored, wanted)
        vector = walk.sched.along
        coeff = flat_coefficient(buf, index, vector) if lanes else 0
        masks: list[Ssa] = []
        if guard:
            address, masks = self._guarded_address(walk, block, buf, index, point, lanes)
        else:
            where, address = self.places.address(block, buf, index, point)
            block = self.promoted.outside(block, where, buf.root) if coeff == 1 else block
        if not lanes or coeff == 0:
            ssa = Ssa(self.text.put(block, "memref.load", (name, address), mem_type), el, 0)
            return ssa if not lanes else self.text.builder(block, lanes).broadcast(ssa)
        b = self.text.builder(block, lanes)
        live = self.places.tail_mask(tail, lanes) if tail else None
        for mask in masks:
            live = mask if live is None else b.and_(live, mask)
        vec_type = mlir_type(el, lanes)
        if (
            coeff == 1
            and buf.root in prefetched_by(walk.nest)
            and self._leads(walk, buf, index)
            and point.get(walk.sched.along, 0) * buf.dtype.itemsize % LINE_BYTES == 0
        ):
            self._fetch(walk, block, buf, index, point)
        if coeff == 1 and live is None:
            return Ssa(
                self.text.put(block, "vector.load", (name, address), f"{mem_type}, {vec_type}"),
                el,
                lanes,
            )
        if coeff == 1 and live is not None:
            return self.text.load_vector(block, (name, address), mem_type, el, lanes, live)
        if coeff == -1 and not masks:
            return self._load_backwards(
                block, address, name, mem_type, tail.live if tail else lanes, b, el
            )
        return self._load_strided(block, (name, address), mem_type, coeff, live, b, el)

    def _load_strided(
        self,
        block: Block,
        place: tuple[str, str],
        mem_type: str,
        stride: int,
        live: Ssa | None,
        b: Builder,
        el: str,
    ) -> Ssa:
        """Elements at a distance from each other, from place = (buffer, index) on; zeros where a mask is not set."""
        zero, lanes, vector = b.c(0, el).name, b.lanes, mlir_type(el, b.lanes)
        kind = f"vector<{lanes}xi32>"
        offsets = self.text.const(f"dense<{[k * stride for k in range(lanes)]}>", kind)
        live = live or self.places.tail_mask(Tail(lanes), lanes)
        operands = (*place, offsets, live.name, zero)
        types = f"{mem_type}, {kind}, {live.type}, {vector} into {vector}"
        return Ssa(self.text.put(block, "vector.gather", operands, types), el, lanes)

    def _load_backwards(
        self, block: Block, address: str, name: str, mem_type: str, count: int, b: Builder, el: str
    ) -> Ssa:
        """The element at an address and so many before it."""
        lanes = b.lanes
        low = self.text.put(block, "arith.subi", (address, self.text.index(count - 1)), "index")
        mask = self.places.tail_mask(Tail(count), lanes) if count < lanes else None
        loaded = self.text.load_vector(block, (name, low), mem_type, el, lanes, mask)
        return b.shuffle(loaded, loaded, [*range(count - 1, -1, -1), *range(count, lanes)])

    def _leads(self, walk: NestWalk, buf: Buf, index) -> bool:
        """Whether no load of the nest is ahead of this one, whose line that one would ask for."""
        loads = [
            load.access
            for load in walk.nest.loads()
            if isinstance(load, Load) and load.buf.root is buf.root
        ]
        return flat_index(buf, index).const == max(flat_index(other, i).const for other, i in loads)

    def _fetch(self, walk: NestWalk, block: Block, buf: Buf, index, point: Point) -> None:
        """Asks for the line that a later step loads; addresses behind the end do not fault."""
        flat = flat_index(buf, index)
        offset = (
            sum(flat.coefficient(dim) * shift for dim, shift in point.items())
            + prefetched_by(walk.nest)[buf.root]
        )
        _, address = self.text.affine(block, flat, offset)
        block.add(
            "memref.prefetch",
            (buf.root.name, address),
            memref(buf),
            " %s[%s], read, locality<2>, data",
        )

    def _load_words(
        self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, tail, lanes: int, el: str
    ) -> Ssa:
        """Elements that span several of the buffer they reinterpret: one, or several along the vectors."""
        vector = walk.sched.along
        apart = flat_coefficient(buf, index, vector) if lanes else 0
        if not apart:
            word = self._words(block, buf, index, point, 0, None, el)
            return self.text.builder(block, lanes).broadcast(word) if lanes else word
        if apart == 1:
            return self._words(block, buf, index, point, lanes, tail, el)
        b = self.text.builder(block, lanes)
        live = tail.live if tail else lanes
        points = [{**point, vector: point.get(vector, 0) + lane} for lane in range(live)]
        words = [self._words(block, buf, index, place, 0, None, el).name for place in points]
        words += [b.with_lanes(0).c(0, el).name] * (lanes - live)
        vectors = mlir_type(el, lanes)
        return Ssa(self.text.put(block, "vector.from_elements", tuple(words), vectors), el, lanes)

    def _words(
        self, block: Block, buf: Buf, index, point: Point, wide: int, tail: Tail | None, el: str
    ) -> Ssa:
        """An element that spans several of the buffer it reinterprets, or `wide` neighbours."""
        small, name, mem_type = storage_el(buf.root.dtype), buf.root.name, memref(buf)
        count = BITS[el] // BITS[small]
        flat = flat_index(buf, index) * count
        _, address = self.text.affine(
            block, flat, sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        )
        parts = count * max(wide, 1)
        mask = self.places.tail_mask(Tail(count * tail.live), parts) if wide and tail else None
        loaded = self.text.load_vector(block, (name, address), mem_type, small, parts, mask)
        words = mlir_type(el, max(wide, 1))
        word = self.text.put(block, "vector.bitcast", (loaded.name,), f"{loaded.type} to {words}")
        if wide:
            return Ssa(word, el, wide)
        types = f"{mlir_type(el)} from {words}"
        return Ssa(self.text.put(block, "vector.extract", (word,), types, " %s[0]"), el, 0)

    def _guarded_address(
        self, walk: NestWalk, block: Block, buf: Buf, index, point: Point, lanes: int
    ) -> tuple[str, list[Ssa]]:
        """Flat address with axes clamped into the buffer; axes along the vector dimension get lane masks instead."""
        vector, total = walk.sched.along if lanes else "", None
        masks: list[Ssa] = []
        if any(size == 0 for size in buf.shape):
            return self.text.index(0), masks
        for position, extent, stride in zip(index, buf.shape, buf.strides):
            offset = sum(position.coefficient(dim) * shift for dim, shift in point.items())
            _, name = self.text.affine(block, position, offset)
            if not self.places.axis_is_safe(walk, position, extent):
                if vector and position.coefficient(vector):
                    masks.append(
                        self.places.in_range(walk, block, (position, 0, extent), point, lanes)
                    )
                    reached = self.places.reached(walk, block, position, extent, point, lanes)
                    if reached is not None:
                        name = self.text.put(
                            block, "arith.select", (reached, name, self.text.index(0)), "index"
                        )
                else:
                    name = self.text.put(block, "arith.maxsi", (name, self.text.index(0)), "index")
                    name = self.text.put(
                        block, "arith.minsi", (name, self.text.index(extent - 1)), "index"
                    )
            if stride != 1:
                name = self.text.put(block, "arith.muli", (name, self.text.index(stride)), "index")
            total = (
                name
                if total is None
                else self.text.put(block, "arith.addi", (total, name), "index")
            )
        return total or self.text.index(0), masks

    def gather(
        self,
        walk: NestWalk,
        block: Block,
        expr: Gather,
        point: Point,
        tail: Tail | None,
        lanes: int,
        accs,
    ) -> Ssa:
        """Axes given by index expressions (already clamped); the others are affine."""
        _buf, _index = expr.access
        widths = [self.value(walk, block, arg, point, tail, accs).lanes for arg in expr.args]
        lanes = max([lanes, *widths])
        if lanes and not any(widths) and self._is_run(walk, expr):
            return self._gather_run(walk, block, expr, point, tail, lanes, accs)
        if lanes and accs is None and (steps := self._row_steps(walk, expr)) is not None:
            return self._gather_row(walk, block, expr, steps, point, tail, lanes)
        if lanes and tail is None and self._has_places_in_memory(walk, expr):
            return self._gather_narrow(walk, block, expr, point, lanes)
        return self._gather_each(walk, block, expr, point, tail, lanes, accs)

    def _gather_each(
        self,
        walk: NestWalk,
        block: Block,
        expr: Gather,
        point: Point,
        tail: Tail | None,
        lanes: int,
        accs,
    ) -> Ssa:
        """Each element by itself."""
        buf, index = expr.access
        el, mem_type, name = storage_el(buf.dtype), memref(buf), buf.root.name
        b, args, index_el = (
            self.text.builder(block, lanes),
            iter(expr.args),
            compute_el(buf.index_dtype),
        )
        total: Ssa | None = None
        for position, extent, stride in zip(index, buf.shape, buf.strides):
            if position is None:
                part = b.broadcast(self.value(walk, block, next(args), point, tail, accs), lanes)
            else:
                part = self.places.index(walk, block, position, point, lanes, index_el)
                if not self.places.axis_is_safe(walk, position, extent):
                    part = b.max(b.min(part, b.c(max(extent - 1, 0), index_el)), b.c(0, index_el))
            part = part if stride == 1 else b.mul(part, b.c(stride, index_el))
            total = part if total is None else b.add(total, part)
        if total is None or math.prod(buf.shape) == 0:
            return b.c(0, compute_el(buf.dtype))
        if not lanes:
            address = self.text.put(
                block, "arith.index_cast", (total.name,), f"{index_el} to index"
            )
            return b.from_storage(
                Ssa(self.text.put(block, "memref.load", (name, address), mem_type), el, 0),
                buf.dtype,
            )
        if self._is_by_lanes(buf, index, index_el):
            return b.from_storage(self._lane_by_lane(block, buf, total, tail), buf.dtype)
        live = self.places.tail_mask(tail or Tail(lanes), lanes)
        vec_type = mlir_type(el, lanes)
        start, zero = self.text.index(0), b.c(0, el).name
        gathered = self.text.put(
            block,
            "vector.gather",
            (name, start, total.name, live.name, zero),
            f"{mem_type}, {total.type}, {live.type}, {vec_type} into {vec_type}",
        )
        return b.from_storage(Ssa(gathered, el, lanes), buf.dtype)

    def _has_places_in_memory(self, walk: NestWalk, expr: Gather) -> bool:
        """Whether elements without an instruction that gathers them lie at places that are read from memory."""

        def is_read(arg: Expr) -> bool:
            while isinstance(arg, Op) and arg.info.primitive == "convert_element_type":
                (arg,) = arg.args
            return isinstance(arg, Load) and not arg.guard

        return (
            expr.buf.dtype.itemsize < NARROWEST_GATHERED
            and walk.sched.transpose is None
            and walk.sched.along in expr.symbols
            and all(map(is_read, expr.args))
        )

    def _gather_narrow(
        self, walk: NestWalk, block: Block, expr: Gather, point: Point, lanes: int
    ) -> Ssa:
        """Element by element, with places that are loaded as scalars: LLVM would take them out of vectors of addresses."""
        vector, put = walk.sched.along, self.text.put
        lane, rest = f"{vector}'lane", {dim: at for dim, at in point.items() if dim != vector}
        where, first = block.lookup(vector)
        where.values[lane] = first
        start = Affine.symbol(lane) + point.get(vector, 0)
        el, elements = storage_el(expr.buf.dtype), []
        for k in range(lanes):
            one = cast(Gather, self.pool.rename(expr, {vector: start + k}))
            place = self._scalar_place(walk, block, one, rest)
            elements.append(
                put(block, "memref.load", (expr.buf.root.name, place), memref(expr.buf))
            )
        gathered = put(block, "vector.from_elements", tuple(elements), mlir_type(el, lanes))
        return self.text.builder(block, lanes).from_storage(
            Ssa(gathered, el, lanes), expr.buf.dtype
        )

    def _is_by_lanes(self, buf: Buf, index, index_el: str) -> bool:
        """Whether loads of one element each are quicker than an instruction that gathers, or what LLVM makes in its place.

        Elements that come from afar are quicker by the instruction, of whose loads more are under way.
        """
        vectors, size = self.strided.vectors, buf.dtype.itemsize
        reach = sum(
            (extent - 1) * stride
            for position, extent, stride in zip(index, buf.shape, buf.strides)
            if position is None
        )
        is_near = reach * size <= vectors.l1_bytes
        is_quicker = size < NARROWEST_GATHERED or (vectors.gathers_by_lanes and is_near)
        return is_quicker and size <= 8 and index_el == "i32"

    def _lane_by_lane(self, block: Block, buf: Buf, places: Ssa, tail: Tail | None) -> Ssa:
        """Loads the elements at `places`, which are 32 bits wide, one by one; those behind the tail are zeros.

        Two places leave a vector as one word of 64 bits: it takes as long to take out a half. An empty assembly statement
        hides from LLVM's optimiser that the words are those of a vector, of which it would make an instruction again.
        """
        lanes, el, put = places.lanes, storage_el(buf.dtype), self.text.put
        b = self.text.builder(block, lanes)
        if tail is not None:  # the places of what is behind it may be any
            last = b.c(math.prod(buf.shape) - 1, places.el)
            places = b.min(places, last, unsigned=True)
        pairs = f"vector<{lanes // 2}xi64>"
        words = put(block, "vector.bitcast", (places.name,), f"{places.type} to {pairs}")
        one = self.text.builder(block, 0)
        half, low = one.c(32, "i64"), one.c((1 << 32) - 1, "i64")
        elements = []
        for lane in range(0, lanes, 2):
            word = put(block, "vector.extract", (words,), f"i64 from {pairs}", f" %s[{lane // 2}]")
            hidden = put(block, "llvm.inline_asm", (word,), "(i64) -> i64", ' "", "=r,0" %s')
            pair = Ssa(hidden, "i64", 0)
            for place in (one.and_(pair, low), one.shr(pair, half)):
                address = put(block, "arith.index_cast", (place.name,), "i64 to index")
                elements.append(put(block, "memref.load", (buf.root.name, address), memref(buf)))
        vec_type = mlir_type(el, lanes)
        gathered = Ssa(put(block, "vector.from_elements", tuple(elements), vec_type), el, lanes)
        return (
            gathered
            if tail is None
            else b.select(self.places.tail_mask(tail, lanes), gathered, b.c(0, el))
        )

    def _row_steps(self, walk: NestWalk, expr: Gather) -> Steps | None:
        """Steps of a gather whose place moves by one element along vectors; else None.

        Bends are the exception (lower/values/dynamic_strides.py).
        """
        buf, index = expr.access
        vector, args = walk.sched.along, iter(expr.args)
        parts = [
            steps_along(next(args), vector)
            if position is None
            else Steps(position.coefficient(vector))
            for position in index
        ]
        streamed = [(part, stride) for part, stride in zip(parts, buf.strides) if part.step != 0]
        if buf.size == 0 or len(streamed) != 1 or streamed[0][0].step != 1 or streamed[0][1] != 1:
            return None
        return streamed[0][0]

    def _gather_row(
        self,
        walk: NestWalk,
        block: Block,
        expr: Gather,
        steps: Steps,
        point: Point,
        tail: Tail | None,
        lanes: int,
    ) -> Ssa:
        """Whole vectors if the ends of the row tell that no bend shows in it; otherwise element by element."""
        buf, vector = expr.buf, walk.sched.along
        first, test = self._row_start(
            walk,
            block,
            expr,
            steps,
            {dim: offset for dim, offset in point.items() if dim != vector},
        )
        inner, other = Block(block), Block(block)
        _, along = self.text.affine(inner, Affine.symbol(vector), point.get(vector, 0))
        address = self.text.put(inner, "arith.addi", (first, along), "index")
        el, mem_type, name = storage_el(buf.dtype), memref(buf), buf.root.name
        live = None if tail is None else self.places.tail_mask(tail, lanes)
        loaded = self.text.load_vector(inner, (name, address), mem_type, el, lanes, live)
        row = self.text.builder(inner, lanes).from_storage(loaded, buf.dtype)
        each = self._gather_each(walk, other, expr, point, tail, lanes, None)
        return row._replace(name=self.text.either(block, test, inner, row, other, each))

    def _row_start(
        self, walk: NestWalk, block: Block, expr: Expr, steps: Steps, point: Point
    ) -> tuple[str, str]:
        """(where the row starts, whether it is one), in the shallowest block that knows."""
        vector, length = walk.sched.along, walk.nest.dims[walk.sched.along]

        def ends(x: Expr) -> list[Expr]:
            return [
                self.pool.rename(x, {vector: Affine((), position)}) for position in (0, length - 1)
            ]

        where = walk.place(block, ends(expr)[0])
        key = (
            "row",
            id(expr),
            tuple(sorted((dim, offset) for dim, offset in point.items() if dim in expr.symbols)),
        )
        if key not in where.memo:
            first, last = (
                self._scalar_place(walk, where, cast(Gather, end), point) for end in ends(expr)
            )
            distance = self.text.put(where, "arith.subi", (last, first), "index")
            test = self.text.put(
                where, "arith.cmpi", (distance, self.text.index(length - 1)), "index", " eq, %s, %s"
            )
            for choice in steps.choices:
                low, high = (self.value(walk, where, end, point, None).name for end in ends(choice))
                same = self.text.put(where, "arith.cmpi", (low, high), "i1", " eq, %s, %s")
                test = self.text.put(where, "arith.andi", (test, same), "i1")
            where.memo[key] = first, test
        return where.memo[key]

    def _scalar_place(self, walk: NestWalk, block: Block, expr: Gather, point: Point) -> str:
        """The place in the buffer of a gather of one element."""
        buf, index = expr.access
        args, place = iter(expr.args), self.text.index(0)
        for position, extent, stride in zip(index, buf.shape, buf.strides):
            if position is None:
                number = self.value(walk, block, next(args), point, None)
                part = self.text.put(
                    block, "arith.index_cast", (number.name,), f"{number.el} to index"
                )
            else:
                part = self._clamped_index(walk, block, position, extent, point)
            part = self.text.put(block, "arith.muli", (part, self.text.index(stride)), "index")
            place = self.text.put(block, "arith.addi", (place, part), "index")
        return place

    def _clamped_index(
        self, walk: NestWalk, block: Block, affine: Affine, extent: int, point: Point
    ) -> str:
        """An affine index, kept in [0, extent)."""
        _, name = self.text.affine(
            block, affine, sum(affine.coefficient(dim) * offset for dim, offset in point.items())
        )
        if self.places.axis_is_safe(walk, affine, extent):
            return name
        name = self.text.put(block, "arith.maxsi", (name, self.text.index(0)), "index")
        return self.text.put(block, "arith.minsi", (name, self.text.index(extent - 1)), "index")

    def _is_run(self, walk: NestWalk, expr: Gather) -> bool:
        """Whether a vector of a gather is contiguous: only affine axes move along it, by one element and inside the buffer.

        Symbols do not tell whether an accumulator moves along it: the values of all other axes have
        to be scalars.
        """
        buf, index = expr.access
        vector = walk.sched.along
        streamed = [
            (position, size)
            for position, size in zip(index, buf.shape)
            if position is not None and vector in position.symbols
        ]
        return (
            buf.size > 0
            and not any(vector in arg.symbols for arg in expr.args)
            and flat_coefficient(buf, index, vector) == 1
            and all(self.places.axis_is_safe(walk, i, extent) for i, extent in streamed)
        )

    def _gather_run(
        self,
        walk: NestWalk,
        block: Block,
        expr: Gather,
        point: Point,
        tail: Tail | None,
        lanes: int,
        accs,
    ) -> Ssa:
        """A row of a table: one address, contiguous elements."""
        buf, index = expr.access
        el, mem_type, args = storage_el(buf.dtype), memref(buf), iter(expr.args)
        affine: Affine = Affine()
        address = ""
        for position, extent, stride in zip(index, buf.shape, buf.strides):
            if position is None:
                number = self.value(walk, block, next(args), point, tail, accs)
                part = self.text.put(
                    block, "arith.index_cast", (number.name,), f"{number.el} to index"
                )
            elif self.places.axis_is_safe(walk, position, extent):
                affine = affine + position * stride
                continue
            else:
                part = self._clamped_index(walk, block, position, extent, point)
            part = self.text.put(block, "arith.muli", (part, self.text.index(stride)), "index")
            address = (
                self.text.put(block, "arith.addi", (address, part), "index") if address else part
            )
        _, start = self.text.affine(
            block, affine, sum(affine.coefficient(dim) * offset for dim, offset in point.items())
        )
        address = self.text.put(block, "arith.addi", (address, start), "index")
        live = None if tail is None else self.places.tail_mask(tail, lanes)
        place = (buf.root.name, address)
        loaded = self.text.load_vector(block, place, mem_type, el, lanes, live)
        return self.text.builder(block, lanes).from_storage(loaded, buf.dtype)
