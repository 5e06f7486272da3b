"""Gathers: elements whose places are computed.

They load whole vectors where the index along them is affine, and where the ends of a row tell, when the program runs, that
its elements are side by side (lower/values/dynamic_strides.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import cast

from pbkern.core.affine import Affine
from pbkern.lower.mlir.element_types import compute_el, mlir_type, storage_el
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Buf, Expr, Gather, Load, Op, Pool
from pbkern.lower.values.dynamic_strides import Steps, steps_along
from pbkern.targets.cpu.emit.addressing import Addressing, NestWalk, Point, Tail, memref
from pbkern.targets.cpu.machines.machine import Vectors

# Bytes of the narrowest elements that an instruction gathers. Source: AVX2 and AVX-512.
NARROWEST_GATHERED = 4


class GatherLoads:
    """Owns gathers.

    pool: of the expressions that are made here.
    value: gives an expression at a point, of which indices are made.
    """

    def __init__(self, places: Addressing, vectors: Vectors, pool: Pool, value: Callable[..., Ssa]):
        self.text, self.places = places.text, places
        self.vectors, self.pool, self.value = vectors, pool, value

    def load(
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
        if math.prod(buf.shape) == 0:
            return b.c(0, compute_el(buf.dtype))
        if not lanes:
            place = (name, self._place(walk, block, expr, point, tail, accs))
            element = Ssa(self.text.put(block, "memref.load", place, mem_type), el, 0)
            return b.from_storage(element, buf.dtype)
        parts = []
        for position, extent, stride in zip(index, buf.shape, buf.strides):
            if position is None:
                part = b.broadcast(self.value(walk, block, next(args), point, tail, accs), lanes)
            else:
                part = self.places.index(walk, block, position, point, lanes, index_el)
                if not self.places.axis_is_safe(walk, position, extent):
                    part = b.max(b.min(part, b.c(max(extent - 1, 0), index_el)), b.c(0, index_el))
            parts.append(part if stride == 1 else b.mul(part, b.c(stride, index_el)))
        total = functools.reduce(b.add, parts)
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
            place = self._place(walk, block, one, rest)
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
        vectors, size = self.vectors, buf.dtype.itemsize
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
            first, last = (self._place(walk, where, cast(Gather, end), point) for end in ends(expr))
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

    def _place(
        self,
        walk: NestWalk,
        block: Block,
        expr: Gather,
        point: Point,
        tail: Tail | None = None,
        accs: dict | None = None,
    ) -> str:
        """The place in the buffer of a gather's element at a point, of which loops around compute what they know."""
        buf, index = expr.access
        args, parts = iter(expr.args), list[tuple[Block, str]]()
        inside: Affine[str] = Affine()
        for position, extent, stride in zip(index, buf.shape, buf.strides):
            if position is None:
                number = self.value(walk, block, next(args), point, tail, accs)
                cast = f"{number.el} to index"
                at, part = block, self.text.put(block, "arith.index_cast", (number.name,), cast)
            elif self.places.axis_is_safe(walk, position, extent):
                inside = inside + position * stride
                continue
            else:
                at, part = self._affine(block, position, point)
                part = self.text.once(at, "maxsi", part, 0)
                part = self.text.once(at, "minsi", part, extent - 1)
            parts.append((at, self.text.scaled_index(at, part, stride)))
        _, place = self.text.sum_of_indices([*parts, self._affine(block, inside, point)])
        return place

    def _affine(self, block: Block, affine: Affine, point: Point) -> tuple[Block, str]:
        """An affine index at a point, and the shallowest block that holds it."""
        offset = sum(affine.coefficient(dim) * shift for dim, shift in point.items())
        return self.text.affine(block, affine, offset)

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
        buf = expr.buf
        address = self._place(walk, block, expr, point, tail, accs)
        live = None if tail is None else self.places.tail_mask(tail, lanes)
        loaded = self.text.load_vector(
            block, (buf.root.name, address), memref(buf), storage_el(buf.dtype), lanes, live
        )
        return self.text.builder(block, lanes).from_storage(loaded, buf.dtype)
