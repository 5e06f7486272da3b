"""Loads of a nest: whole vectors, masked, strided, transposed in registers, made of aligned ones, gathered.

Gathers load whole vectors where the index along them is affine, and where the ends of a row tell,
when the program runs, that its elements are side by side (lower/values/dynamic_strides.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.lower.mlir.element_types import BITS, compute_el, mlir_type, storage_el
from pbkern.lower.mlir.ops import Builder
from pbkern.lower.mlir.ops import Value as Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Expr
from pbkern.lower.values.dynamic_strides import Steps, steps_along
from pbkern.targets.cpu.schedule.interleaved_access import is_strided
from pbkern.targets.cpu.schedule.register_transpose import is_transposed

from .addressing import Point, Tail, Walk, memref
from .interleaved_loads import InterleavedLoads
from .promoted_loops import Registers


class Loads(InterleavedLoads, Registers):
    """Emits loads.

    `_value` gives an expression at a point, `_wide` a vector of it, `_place` the block where it is
    computed.
    """

    _value: Callable[..., Ssa]
    _wide: Callable[..., Ssa]
    _place: Callable[..., Block]

    def _load(self, w: Walk, block: Block, e: Expr, p: Point, tail: Tail | None, lanes: int) -> Ssa:
        buf, index, guard = e.info
        b = self.text.builder(block, lanes)
        carried = self._carried(block, buf, index, p)
        if carried is not None:
            return b.from_storage(carried, buf.dtype)
        turn = w.sched.transpose
        if lanes and turn and buf.root not in w.written and is_transposed(e, w.sched.along, turn):
            return b.from_storage(
                self._load_transposed(w, block, buf, index, p, tail, lanes), buf.dtype
            )
        flat = flat_index(buf, index)
        if w.moves and w.first is not None and tail is None and lanes and not guard:
            live = w.live_lanes(e, p)
            if live <= 0:
                return b.broadcast(b.c(0, compute_el(buf.dtype)))
            tail = Tail(live) if live < lanes else None
        key = (
            "load",
            buf.root.name,
            storage_el(buf.dtype),
            flat.linear(),
            flat.const + sum(flat.coefficient(d) * o for d, o in p.items()),
            tail.live if tail else None,
            lanes,
            self._guard_key(index, p) if guard else None,
        )
        if key in block.memo and buf.root not in w.written:
            return block.memo[key]
        if lanes and not guard and is_strided(buf, index, w.sched.vector):
            v = self._load_strided(w, block, buf, flat, key[4], tail, lanes)
        else:
            v = self._load_storage(w, block, buf, index, p, tail, lanes, guard)
        v = b.from_storage(v, buf.dtype)
        block.memo[key] = v
        return v

    def _load_transposed(
        self, w: Walk, block: Block, buf: Buf, index, p: Point, tail, lanes: int
    ) -> Ssa:
        """One vector of a lanes x lanes square that is loaded row by row and transposed in registers, once per square.

        Butterfly: in step s, rows that differ in bit s exchange the elements whose index differs in
          that bit.
        """
        along, vector = w.sched.transpose, w.sched.along
        assert along is not None
        corner = {**p, along: 0}
        flat = flat_index(buf, index)
        key = (
            "square",
            buf.root.name,
            flat,
            tuple(sorted(corner.items())),
            tail.live if tail else None,
            w.transposed_rows,
        )
        if key not in block.memo:
            rows = [
                self._square_row(
                    w, block, buf, index, {**corner, vector: corner.get(vector, 0) + r}, lanes
                )
                for r in range(tail.live if tail else lanes)
            ]
            rows += [rows[-1]] * (lanes - len(rows))
            t, step = rows[0].type, 1
            while step < lanes:
                low = [k if not k & step else lanes + (k ^ step) for k in range(lanes)]
                high = [k | step if not k & step else lanes + k for k in range(lanes)]
                transposed = list(rows)
                for r in range(lanes):
                    if not r & step:
                        pair = f"{rows[r].name}, {rows[r | step].name}"
                        for place, order in ((r, low), (r | step, high)):
                            name = self.text.put(block, f"vector.shuffle {pair} {order} : {t}, {t}")
                            transposed[place] = rows[r]._replace(name=name)
                rows, step = transposed, step * 2
            block.memo[key] = rows
        return block.memo[key][p.get(along, 0)]

    def _square_row(self, w: Walk, block: Block, buf: Buf, index, p: Point, lanes: int) -> Ssa:
        el, m, name = storage_el(buf.dtype), memref(buf), buf.root.name
        step = flat_coefficient(buf, index, w.sched.transpose or "")
        if step > 1:
            return self._spread_row(w, block, buf, flat_index(buf, index), step, p, lanes)
        _, address = self._address(block, buf, index, p)
        t = mlir_type(el, lanes)
        if w.transposed_rows == lanes:
            return Ssa(self.text.put(block, f"vector.load {name}[{address}] : {m}, {t}"), el, lanes)
        live, zero = (
            self._tail_mask(Tail(w.transposed_rows), lanes),
            self.text.builder(block, lanes).c(0, el),
        )
        load = f"vector.maskedload {name}[{address}], {live.name}, {zero.name} : {m}, {live.type}, {t} into {t}"
        return Ssa(self.text.put(block, load), el, lanes)

    def _spread_row(
        self, w: Walk, block: Block, buf: Buf, flat: Affine, step: int, p: Point, lanes: int
    ) -> Ssa:
        """The elements at a point and every step behind it, of whole vectors that loads of the elements between share."""
        place = flat.const + sum(flat.coefficient(d) * o for d, o in p.items())
        near = [
            f.const - flat.const
            for f in (
                flat_index(e.info[0], e.info[1])
                for e in w.nest.loads()
                if e.kind == "load" and e.info[0].root is buf.root
            )
            if f.linear() == flat.linear()
        ]
        near = [n for n in near if (flat.const + n) // step == flat.const // step]
        low, count = place + min(near), (w.transposed_rows - 1) * step + max(near) - min(near) + 1
        wanted = [divmod(place - low + k * step, lanes) for k in range(w.transposed_rows)]
        vectors = {
            n: self._load_whole(
                w, block, buf, flat, low + n * lanes, min(lanes, count - n * lanes), lanes
            )
            for n in sorted({n for n, _ in wanted})
        }
        return self._picked(block, vectors, wanted, lanes)

    def _guard_key(self, index, p: Point):
        return tuple(
            (i, tuple((d, o) for d, o in sorted(p.items()) if d in i.symbols)) for i in index
        )

    def _load_storage(
        self, w: Walk, block: Block, buf: Buf, index, p: Point, tail, lanes: int, guard: bool
    ) -> Ssa:
        """The stored element(s); guarded axes are clamped, or masked along the vector dimension."""
        el, m, name = storage_el(buf.root.dtype), memref(buf), buf.root.name
        wanted = storage_el(buf.dtype)
        if BITS[el] < BITS[wanted]:
            return self._load_words(w, block, buf, index, p, tail, lanes, wanted)
        if el != wanted:  # the same bits under another type
            root = Buf(name, buf.shape, buf.root.dtype, buf.arena, storage=buf.root)
            stored = self._load_storage(w, block, root, index, p, tail, lanes, guard)
            return self.text.builder(block, lanes).bitcast(stored, wanted)
        vector = w.sched.along
        c = flat_coefficient(buf, index, vector) if lanes else 0
        masks: list[Ssa] = []
        if guard:
            address, masks = self._guarded_address(w, block, buf, index, p, lanes)
        else:
            where, address = self._address(block, buf, index, p)
            block = self._outside(block, where, buf.root) if c == 1 else block
        if not lanes or c == 0:
            v = Ssa(self.text.put(block, f"memref.load {name}[{address}] : {m}"), el, 0)
            return v if not lanes else self.text.builder(block, lanes).broadcast(v)
        b = self.text.builder(block, lanes)
        live = self._tail_mask(tail, lanes) if tail else None
        for mask in masks:
            live = mask if live is None else b.and_(live, mask)
        t = mlir_type(el, lanes)
        if c == 1 and buf.root in w.nest.fetch and self._leads(w, buf, index):
            self._fetch(w, block, buf, index, p)
        if c == 1 and live is None:
            return Ssa(self.text.put(block, f"vector.load {name}[{address}] : {m}, {t}"), el, lanes)
        zero = b.c(0, el).name
        if c == 1 and live is not None:
            load = f"vector.maskedload {name}[{address}], {live.name}, {zero} : {m}, {live.type}, {t} into {t}"
            return Ssa(self.text.put(block, load), el, lanes)
        if c == -1 and not masks:
            return self._load_backwards(
                block, address, name, m, tail.live if tail else lanes, b, el
            )
        offsets = self.text.const(
            f"arith.constant dense<{[k * c for k in range(lanes)]}> : vector<{lanes}xi32>"
        )
        live = live or self._tail_mask(Tail(lanes), lanes)
        return Ssa(
            self.text.put(
                block,
                f"vector.gather {name}[{address}] [{offsets}], {live.name}, {zero} : {m}, "
                f"vector<{lanes}xi32>, {live.type}, {t} into {t}",
            ),
            el,
            lanes,
        )

    def _load_backwards(
        self, block: Block, address: str, name: str, m: str, count: int, b: Builder, el: str
    ) -> Ssa:
        """The element at an address and so many before it."""
        lanes, t = b.lanes, mlir_type(el, b.lanes)
        low = self.text.put(block, f"arith.subi {address}, {self.text.index(count - 1)} : index")
        load = f"vector.load {name}[{low}] : {m}, {t}"
        if count < lanes:
            mask = self._tail_mask(Tail(count), lanes)
            load = f"vector.maskedload {name}[{low}], {mask.name}, {b.c(0, el).name} : {m}, {mask.type}, {t} into {t}"
        v, order = self.text.put(block, load), [*range(count - 1, -1, -1), *range(count, lanes)]
        return Ssa(self.text.put(block, f"vector.shuffle {v}, {v} {order} : {t}, {t}"), el, lanes)

    def _leads(self, w: Walk, buf: Buf, index) -> bool:
        """Whether no load of the nest is ahead of this one, so that each line is asked for once."""
        loads = [e.info for e in w.nest.loads() if e.kind == "load" and e.info[0].root is buf.root]
        return flat_index(buf, index).const == max(flat_index(b, i).const for b, i, _ in loads)

    def _fetch(self, w: Walk, block: Block, buf: Buf, index, p: Point) -> None:
        """Asks for the line that a later step loads; addresses behind the end do not fault."""
        flat = flat_index(buf, index)
        offset = sum(flat.coefficient(d) * o for d, o in p.items()) + w.nest.fetch[buf.root]
        _, address = self.text.affine(block, flat, offset)
        block.add(
            f"memref.prefetch {buf.root.name}[{address}], read, locality<2>, data : {memref(buf)}"
        )

    def _load_words(
        self, w: Walk, block: Block, buf: Buf, index, p: Point, tail, lanes: int, el: str
    ) -> Ssa:
        """Elements that span several of the buffer they reinterpret: one, or neighbours along the vectors."""
        small, name, m = storage_el(buf.root.dtype), buf.root.name, memref(buf)
        count = BITS[el] // BITS[small]
        flat = flat_index(buf, index) * count
        _, address = self.text.affine(
            block, flat, sum(flat.coefficient(d) * o for d, o in p.items())
        )
        wide = lanes if lanes and flat.coefficient(w.sched.vector) else 0
        if wide and flat.coefficient(w.sched.vector) != count:
            raise InternalError(
                "words that do not lie side by side in a vector",
                why=f"{buf}, {flat} along {w.sched.vector}",
            )
        t = mlir_type(small, count * max(wide, 1))
        load = f"vector.load {name}[{address}] : {m}, {t}"
        if wide and tail:
            mask = self._tail_mask(Tail(count * tail.live), count * wide)
            zero = self.text.builder(block, count * wide).c(0, small)
            load = f"vector.maskedload {name}[{address}], {mask.name}, {zero.name} : {m}, {mask.type}, {t} into {t}"
        words = mlir_type(el, max(wide, 1))
        word = self.text.put(block, f"vector.bitcast {self.text.put(block, load)} : {t} to {words}")
        if wide:
            return Ssa(word, el, wide)
        v = Ssa(
            self.text.put(block, f"vector.extract {word}[0] : {mlir_type(el)} from {words}"), el, 0
        )
        return self.text.builder(block, lanes).broadcast(v) if lanes else v

    def _guarded_address(
        self, w: Walk, block: Block, buf: Buf, index, p: Point, lanes: int
    ) -> tuple[str, list[Ssa]]:
        """Flat address with axes clamped into the buffer; axes along the vector dimension get lane masks instead."""
        vector, total = w.sched.along if lanes else "", None
        masks: list[Ssa] = []
        if any(n == 0 for n in buf.shape):
            return self.text.index(0), masks
        for i, extent, stride in zip(index, buf.shape, buf.strides):
            offset = sum(i.coefficient(d) * o for d, o in p.items())
            _, name = self.text.affine(block, i, offset)
            if not self._axis_is_safe(w, i, extent):
                if vector and i.coefficient(vector):
                    masks.append(self._range(w, block, (i, 0, extent), p, lanes))
                else:
                    name = self.text.put(block, f"arith.maxsi {name}, {self.text.index(0)} : index")
                    name = self.text.put(
                        block, f"arith.minsi {name}, {self.text.index(extent - 1)} : index"
                    )
            if stride != 1:
                name = self.text.put(block, f"arith.muli {name}, {self.text.index(stride)} : index")
            total = (
                name
                if total is None
                else self.text.put(block, f"arith.addi {total}, {name} : index")
            )
        return total or self.text.index(0), masks

    def _gather(
        self, w: Walk, block: Block, e: Expr, p: Point, tail: Tail | None, lanes: int, accs
    ) -> Ssa:
        """Axes given by index expressions (already clamped); the others are affine."""
        buf, index = e.info
        widths = [self._value(w, block, a, p, tail, accs).lanes for a in e.args]
        lanes = max([lanes, *widths])
        if lanes and not any(widths) and self._is_run(w, e):
            return self._gather_run(w, block, e, p, tail, lanes, accs)
        if lanes and accs is None and (steps := self._row_steps(w, e)) is not None:
            return self._gather_row(w, block, e, steps, p, tail, lanes)
        return self._gather_each(w, block, e, p, tail, lanes, accs)

    def _gather_each(
        self, w: Walk, block: Block, e: Expr, p: Point, tail: Tail | None, lanes: int, accs
    ) -> Ssa:
        """Each element by itself."""
        buf, index = e.info
        el, m, name = storage_el(buf.dtype), memref(buf), buf.root.name
        b, args, wide = self.text.builder(block, lanes), iter(e.args), compute_el(buf.index_dtype)
        total: Ssa | None = None
        for i, extent, stride in zip(index, buf.shape, buf.strides):
            if i is None:
                part = self._wide(b, self._value(w, block, next(args), p, tail, accs), lanes)
            else:
                part = self._index(w, block, i, p, lanes, wide)
                if not self._axis_is_safe(w, i, extent):
                    part = b.max(b.min(part, b.c(max(extent - 1, 0), wide)), b.c(0, wide))
            part = part if stride == 1 else b.mul(part, b.c(stride, wide))
            total = part if total is None else b.add(total, part)
        if total is None or math.prod(buf.shape) == 0:
            return b.c(0, compute_el(buf.dtype))
        if not lanes:
            address = self.text.put(block, f"arith.index_cast {total.name} : {wide} to index")
            return b.from_storage(
                Ssa(self.text.put(block, f"memref.load {name}[{address}] : {m}"), el, 0), buf.dtype
            )
        live = self._tail_mask(tail or Tail(lanes), lanes)
        t = mlir_type(el, lanes)
        start, zero = self.text.index(0), b.c(0, el).name
        v = self.text.put(
            block,
            f"vector.gather {name}[{start}] [{total.name}], {live.name}, {zero} : {m}, "
            f"{total.type}, {live.type}, {t} into {t}",
        )
        return b.from_storage(Ssa(v, el, lanes), buf.dtype)

    def _row_steps(self, w: Walk, e: Expr) -> Steps | None:
        """Steps of a gather whose place moves by one element along vectors, but for bends
        (lower/values/dynamic_strides.py); else None.
        """
        buf, index = e.info
        vector, args = w.sched.along, iter(e.args)
        parts = [
            steps_along(next(args), vector) if i is None else Steps(i.coefficient(vector))
            for i in index
        ]
        moving = [(p, s) for p, s in zip(parts, buf.strides) if p.step != 0]
        if buf.size == 0 or len(moving) != 1 or moving[0][0].step != 1 or moving[0][1] != 1:
            return None
        return moving[0][0]

    def _gather_row(
        self, w: Walk, block: Block, e: Expr, steps: Steps, p: Point, tail: Tail | None, lanes: int
    ) -> Ssa:
        """Whole vectors if the ends of the row tell that no bend shows in it; otherwise element by element."""
        buf, vector = e.info[0], w.sched.along
        first, test = self._row_start(
            w, block, e, steps, {d: o for d, o in p.items() if d != vector}
        )
        inner, other = Block(block), Block(block)
        _, along = self.text.affine(inner, Affine.symbol(vector), p.get(vector, 0))
        address = self.text.put(inner, f"arith.addi {first}, {along} : index")
        el, m, name = storage_el(buf.dtype), memref(buf), buf.root.name
        b, t = self.text.builder(inner, lanes), mlir_type(el, lanes)
        load = f"vector.load {name}[{address}] : {m}, {t}"
        if tail is not None:
            live, zero = self._tail_mask(tail, lanes), b.c(0, el)
            load = f"vector.maskedload {name}[{address}], {live.name}, {zero.name} : {m}, {live.type}, {t} into {t}"
        row = b.from_storage(Ssa(self.text.put(inner, load), el, lanes), buf.dtype)
        each = self._gather_each(w, other, e, p, tail, lanes, None)
        return row._replace(name=self.text.either(block, test, inner, row, other, each))

    def _row_start(self, w: Walk, block: Block, e: Expr, steps: Steps, p: Point) -> tuple[str, str]:
        """(where the row starts, whether it is one), in the shallowest block that knows."""
        vector, length = w.sched.along, w.nest.dims[w.sched.along]

        def ends(x: Expr) -> list[Expr]:
            return [self.pool.rename(x, {vector: Affine((), k)}) for k in (0, length - 1)]

        where = self._place(w, block, ends(e)[0])
        key = ("row", id(e), tuple(sorted((d, o) for d, o in p.items() if d in e.symbols)))
        if key not in where.memo:
            first, last = (self._scalar_place(w, where, x, p) for x in ends(e))
            distance = self.text.put(where, f"arith.subi {last}, {first} : index")
            test = self.text.put(
                where, f"arith.cmpi eq, {distance}, {self.text.index(length - 1)} : index"
            )
            for choice in steps.choices:
                low, high = (self._value(w, where, x, p, None).name for x in ends(choice))
                same = self.text.put(where, f"arith.cmpi eq, {low}, {high} : i1")
                test = self.text.put(where, f"arith.andi {test}, {same} : i1")
            where.memo[key] = first, test
        return where.memo[key]

    def _scalar_place(self, w: Walk, block: Block, e: Expr, p: Point) -> str:
        """The place in the buffer of a gather of one element."""
        buf, index = e.info
        args, place = iter(e.args), self.text.index(0)
        for i, extent, stride in zip(index, buf.shape, buf.strides):
            if i is None:
                number = self._value(w, block, next(args), p, None)
                part = self.text.put(
                    block, f"arith.index_cast {number.name} : {number.el} to index"
                )
            else:
                part = self._clamped_index(w, block, i, extent, p)
            part = self.text.put(block, f"arith.muli {part}, {self.text.index(stride)} : index")
            place = self.text.put(block, f"arith.addi {place}, {part} : index")
        return place

    def _clamped_index(self, w: Walk, block: Block, i: Affine, extent: int, p: Point) -> str:
        """An affine index, kept in [0, extent)."""
        _, name = self.text.affine(block, i, sum(i.coefficient(d) * o for d, o in p.items()))
        if self._axis_is_safe(w, i, extent):
            return name
        name = self.text.put(block, f"arith.maxsi {name}, {self.text.index(0)} : index")
        return self.text.put(block, f"arith.minsi {name}, {self.text.index(extent - 1)} : index")

    def _is_run(self, w: Walk, e: Expr) -> bool:
        """Whether a vector of a gather is contiguous: only affine axes move along it, by one element and inside the buffer.

        Symbols do not tell whether an accumulator moves along it: the values of all other axes have
          to be scalars.
        """
        buf, index = e.info
        vector = w.sched.along
        moving = [(i, n) for i, n in zip(index, buf.shape) if i is not None and vector in i.symbols]
        return (
            buf.size > 0
            and not any(vector in a.symbols for a in e.args)
            and flat_coefficient(buf, index, vector) == 1
            and all(self._axis_is_safe(w, i, n) for i, n in moving)
        )

    def _gather_run(
        self, w: Walk, block: Block, e: Expr, p: Point, tail: Tail | None, lanes: int, accs
    ) -> Ssa:
        """A row of a table: one address, contiguous elements."""
        buf, index = e.info
        el, m, args = storage_el(buf.dtype), memref(buf), iter(e.args)
        affine: Affine = Affine()
        address: str | None = None
        for i, extent, stride in zip(index, buf.shape, buf.strides):
            if i is None:
                number = self._value(w, block, next(args), p, tail, accs)
                part = self.text.put(
                    block, f"arith.index_cast {number.name} : {number.el} to index"
                )
            elif self._axis_is_safe(w, i, extent):
                affine = affine + i * stride
                continue
            else:
                part = self._clamped_index(w, block, i, extent, p)
            part = self.text.put(block, f"arith.muli {part}, {self.text.index(stride)} : index")
            address = (
                part
                if address is None
                else self.text.put(block, f"arith.addi {address}, {part} : index")
            )
        _, start = self.text.affine(
            block, affine, sum(affine.coefficient(d) * o for d, o in p.items())
        )
        address = self.text.put(block, f"arith.addi {address}, {start} : index")
        b, t = self.text.builder(block, lanes), mlir_type(el, lanes)
        if tail is None:
            v = self.text.put(block, f"vector.load {buf.root.name}[{address}] : {m}, {t}")
        else:
            live, zero = self._tail_mask(tail, lanes), b.c(0, el)
            v = self.text.put(
                block,
                f"vector.maskedload {buf.root.name}[{address}], {live.name}, {zero.name} : {m}, "
                f"{live.type}, {t} into {t}",
            )
        return b.from_storage(Ssa(v, el, lanes), buf.dtype)
