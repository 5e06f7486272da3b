"""Expressions of a nest at one point, as scalars in the registers of one thread.

A value is placed in the shallowest block of its nest that knows its symbols; what reads an array
that the nest writes stays where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import partial

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.math import elementwise
from pbkern.lower.mlir.element_types import compute_el, mlir_type, storage_el
from pbkern.lower.mlir.operation import Emit
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.context import INT32_MAX, NestContext
from pbkern.lower.nest.ir import (
    BOOL,
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
    Reduction,
    Store,
    nodes,
)
from pbkern.lower.nest.rounding import may_cancel
from pbkern.lower.nest.tiles.layout import Swizzle
from pbkern.targets.simt.device import SHARED_SPACE
from pbkern.targets.simt.schedule.memory import Placement


@dataclass
class SimtWalk:
    """State while one nest is emitted.

    Attributes:
      top: the block behind which its points begin.
      written: root buffers that it stores to.
      accs: accumulators once they are complete, by number.
      beside: points of a thread that lie side by side, whose loads and stores are whole vectors;
        along: their dimension.
      terms: reductions at each of a thread's neighbours; empty: those of the nest.
      term_stores: stores at each of these, one after the other.
    """

    nest: Nest
    top: Block
    written: frozenset[Buf]
    accs: dict[int, Ssa] = field(default_factory=dict)
    beside: int = 1
    along: str = ""
    terms: list[Sequence[Reduction]] = field(default_factory=list)
    term_stores: list[Store] = field(default_factory=list)
    memo: dict[tuple, bool] = field(default_factory=dict)


class Expressions:
    """Emits values, loads and stores into blocks of `text`."""

    def __init__(self, text: Text, placement: Placement, context: NestContext, index_bits: int):
        self.text, self.placement, self.context, self.index_bits = (
            text,
            placement,
            context,
            index_bits,
        )
        self.bases: dict[
            Buf, tuple[str, str, str]
        ] = {}  # root buffer -> bytes that hold it, its first one, type of the bytes
        self.wholes: dict[tuple[Buf, int], str] = {}

    def builder(self, block: Block) -> Builder:
        return self.text.builder(block, 0)

    def scalar(self, block: Block, expr: Expr) -> Ssa:
        """A value outside of any nest, loaded anew: statements since an equal one may have stored there."""
        inner = Block(block)
        value = self.value(SimtWalk(Nest({}), inner, frozenset()), inner, expr)
        block.take(inner)
        return value

    def value(self, walk: SimtWalk, block: Block, expr: Expr) -> Ssa:
        if isinstance(expr, Accumulator):
            return walk.accs[expr.number]
        where = self._place(walk, block, expr)
        key: tuple = ("value", id(expr))
        if self._has(walk, expr, "acc"):
            key = (*key, *(acc.name for acc in walk.accs.values()))
        if key not in where.memo:
            where.memo[key] = self._make(walk, where, expr)
        return where.memo[key]

    def _place(self, walk: SimtWalk, block: Block, expr: Expr) -> Block:
        if self._has(walk, expr, "written") or self._has(walk, expr, "acc"):
            return block
        depth = max((block.lookup(symbol)[0].depth for symbol in expr.symbols), default=0)
        return block.ancestor(max(depth, walk.top.depth))

    def _has(self, walk: SimtWalk, expr: Expr, what: str) -> bool:
        """Whether a value comes from an accumulator, or of what the nest writes."""
        key = (what, id(expr))
        if key not in walk.memo:
            here = (
                isinstance(expr, Accumulator)
                if what == "acc"
                else isinstance(expr, Load | Gather) and expr.buf.root in walk.written
            )
            walk.memo[key] = here or any(self._has(walk, arg, what) for arg in expr.args)
        return walk.memo[key]

    def _make(self, walk: SimtWalk, block: Block, expr: Expr) -> Ssa:
        b = self.builder(block)
        match expr:
            case Const():
                return b.c(expr.value, compute_el(expr.dtype))
            case IndexValue():
                return self._cast(
                    block, self.text.affine(block, expr.affine)[1], compute_el(expr.dtype)
                )
            case InRange():
                i, low, high = expr.affine, expr.low, expr.high
                if self.is_same_beside(walk, expr):
                    i += -(i.const % walk.beside)
                return Ssa(
                    self._within(block, self.text.affine(block, i)[1], low, high)
                    or b.c(True, "i1").name,
                    "i1",
                    0,
                )
            case Load():
                buf, index, guard = expr.buf, expr.index, expr.guard
                if walk.beside > 1 and walk.along in expr.symbols:
                    return b.from_storage(self._load_beside(walk, block, expr), buf.dtype)
                if buf.circular or buf.layout is not None:
                    inside = self._inside(walk, block, buf, index) if guard else index
                    return self._load(block, buf, self.element(block, buf, inside))
                flat = self._clamped(walk, block, buf, index) if guard else flat_index(buf, index)
                return self._load(block, buf, flat)
            case Gather():
                return self._gather(walk, block, expr)
        assert isinstance(expr, Op)
        args = [self.value(walk, block, arg) for arg in expr.args]
        b = b.strict() if may_cancel(expr) else b
        return elementwise.RULES.lookup(expr.info.primitive)(b, expr.info, *args)

    # ---------------------------------------------------------------- indices

    def _cast(self, block: Block, index: str, el: str) -> Ssa:
        return Ssa(self.text.put(block, "arith.index_cast", (index,), f"index to {el}"), el, 0)

    def _within(self, block: Block, index: str, low: int, high: int) -> str | None:
        """i1: whether low <= index < high, of which one beyond 32 bits tells nothing; None if that is known to be so."""
        tests = [("sge", low)] if low > -INT32_MAX else []
        tests += [("slt", high)] if high < INT32_MAX else []
        names = [
            self.text.put(
                block,
                "arith.cmpi",
                (index, self.text.index(bound)),
                "index",
                f" {predicate}, %s, %s",
            )
            for predicate, bound in tests
        ]
        return (
            names[0]
            if len(names) == 1
            else self.text.put(block, "arith.andi", (names[0], names[1]), "i1")
            if names
            else None
        )

    def is_safe(self, walk: SimtWalk, affine: Affine, extent: int) -> bool:
        """Whether an index lies in [0, extent) at every point of the nest."""
        if not affine.symbols <= walk.nest.dims.keys():
            return False
        low, high = affine.bounds(lambda dim: walk.nest.dims[dim])
        return low >= 0 and high < extent and not walk.nest.moves()

    def guards(self, walk: SimtWalk, block: Block, buf: Buf, index) -> list[str]:
        """Conditions under which an element lies in its buffer."""
        tests = [
            self._within(block, self.text.affine(block, position)[1], 0, size)
            for position, size in zip(index, buf.shape)
            if not self.is_safe(walk, position, size)
        ]
        return [test for test in tests if test is not None]

    def _clamped(self, walk: SimtWalk, block: Block, buf: Buf, index) -> str | Affine:
        """Place of an element of which each index is kept in its axis."""
        if buf.size == 0:
            return Affine()
        rest: Affine = Affine()
        place = None
        for position, size, stride in zip(index, buf.shape, buf.strides):
            if self.is_safe(walk, position, size):
                rest = rest + position * stride
                continue
            part = self._scaled(
                block, self._kept(block, self.text.affine(block, position)[1], size), stride
            )
            place = part if place is None else self._sum(block, place, part)
        if place is None:
            return rest
        return (
            place if rest == Affine() else self._sum(block, place, self.text.affine(block, rest)[1])
        )

    def _inside(
        self, walk: SimtWalk, block: Block, buf: Buf, index: Sequence[Affine]
    ) -> tuple[Affine, ...]:
        """An index of a tile of which each place but the stage is kept in its axis, as symbols."""
        inside = list(index)
        for axis, (position, size) in enumerate(zip(index, buf.shape)):
            if not (buf.circular and axis == 0) and not self.is_safe(walk, position, size):
                symbol = f"{position} in {size}"
                at = self.text.affine(block, position)[1]
                block.values[symbol] = self._kept(block, at, size)
                inside[axis] = Affine.symbol(symbol)
        return tuple(inside)

    def _kept(self, block: Block, index: str, extent: int) -> str:
        at_least = self.text.put(block, "arith.maxsi", (index, self.text.index(0)), "index")
        return self.text.put(
            block, "arith.minsi", (at_least, self.text.index(max(extent - 1, 0))), "index"
        )

    def _scaled(self, block: Block, index: str, stride: int) -> str:
        return (
            index
            if stride == 1
            else self.text.put(block, "arith.muli", (index, self.text.index(stride)), "index")
        )

    def _sum(self, block: Block, x: str, y: str) -> str:
        return self.text.put(block, "arith.addi", (x, y), "index")

    def to_index(self, block: Block, v: Ssa, unsigned: bool) -> str:
        """An integer as an index.

        One that 32 bits do not hold lies outside of every array: it becomes the nearest that they
        do.
        """
        if v.el == "i64" and self.index_bits == 32:
            b = self.builder(block)
            low, high = b.c(-INT32_MAX - 1, "i64"), b.c(INT32_MAX, "i64")
            v = b.min(v, high, unsigned=True) if unsigned else b.min(b.max(v, low), high)
        cast = "index_castui" if unsigned or v.el == "i1" else "index_cast"
        return self.text.put(block, f"arith.{cast}", (v.name,), f"{v.el} to index")

    # ---------------------------------------------------------------- memory

    def address(self, block: Block, flat: Affine | str) -> str:
        return flat if isinstance(flat, str) else self.text.affine(block, flat)[1]

    def element(self, block: Block, buf: Buf, index: Sequence[Affine]) -> str:
        """The number of an element in its buffer's memory: in a tile's stage, and where a swizzle puts it."""
        if not buf.circular and buf.layout is None:
            return self.text.affine(block, flat_index(buf, index))[1]
        put = partial(self.text.put, block)
        stage, inner = self.in_stage(buf, index)
        at = self.text.affine(block, inner)[1]
        if isinstance(buf.layout, Swizzle):
            at = self.swizzled(put, buf.layout, at)
        return self._sum(block, at, self._first(block, buf, stage)) if buf.circular else at

    def _first(self, block: Block, buf: Buf, stage: Affine) -> str:
        """The number of the first element of a stage."""
        stages = buf.shape[0]
        return self._scaled(block, self.turn(block, stage, stages), buf.size // stages)

    def turn(self, block: Block, stage: Affine, stages: int) -> str:
        """The number of a step's stage: its remainder by `stages`.

        A remainder by three is nine instructions: those of steps ahead follow from that of a loop's own step, by a comparison.
        """
        ahead = stage.const % stages
        where, _ = self.text.affine(block, stage - stage.const)
        key = "turn", stage, stages
        if key in where.memo:
            return where.memo[key]
        put, number = partial(self.text.put, where), self.text.index
        is_mask = stages & (stages - 1) == 0
        if is_mask or not ahead or stage.is_const:
            at = self.text.affine(block, stage)[1]
            where.memo[key] = put("arith.remui", (at, number(stages)), "index")
            return where.memo[key]
        mine = self.turn(block, stage - stage.const, stages)
        is_next = put("arith.cmpi", (mine, number(stages - ahead)), "index", " uge, %s, %s")
        later = put("arith.addi", (mine, number(ahead)), "index")
        wrapped = put("arith.subi", (mine, number(stages - ahead)), "index")
        where.memo[key] = put("arith.select", (is_next, wrapped, later), "index")
        return where.memo[key]

    def swizzled(self, put: Emit, layout: Swizzle, at: str) -> str:
        """The place at which a layout puts an element of a tile, as a number of elements."""
        number = self.text.index

        def bits(place: str, first: int, count: int, to: int) -> str:
            part = put("arith.shrui", (place, number(first)), "index") if first else place
            part = put("arith.andi", (part, number((1 << count) - 1)), "index")
            return put("arith.shli", (part, number(to)), "index") if to else part

        if layout.panels:
            rows, columns, width = (
                x.bit_length() - 1
                for x in (layout.panels.rows, layout.panels.columns, layout.panels.width)
            )
            panel = bits(at, width, columns - width, rows + width)
            row = bits(at, columns, rows, width)
            at = put("arith.ori", (bits(at, 0, width, 0), row), "index")
            at = put("arith.ori", (at, panel), "index")
        high = put("arith.shrui", (at, number(layout.shift)), "index")
        chunk = put("arith.andi", (high, number(layout.mask)), "index")
        return put("arith.xori", (at, chunk), "index")

    @staticmethod
    def in_stage(buf: Buf, index: Sequence[Affine]) -> tuple[Affine, Affine]:
        """(stage of a tile, place in it as a number of elements, before it is swizzled)."""
        if not buf.circular:
            return Affine(), flat_index(buf, index)
        tile = Buf(buf.name, buf.shape[1:], buf.dtype)
        return index[0], flat_index(tile, index[1:])

    def _load(self, block: Block, buf: Buf, flat: Affine | str) -> Ssa:
        """Register value of one element."""
        return self.builder(block).from_storage(self.load_stored(block, buf, flat), buf.dtype)

    def load_stored(self, block: Block, buf: Buf, flat: Affine | str) -> Ssa:
        """One element as it is stored."""
        el = storage_el(buf.dtype)
        assert el == storage_el(buf.root.dtype), (
            "only the CPU's passes reinterpret bytes under another type"
        )
        if buf.root.size == 0:
            return self.builder(block).c(0, el)
        place = (buf.root.name, self.address(block, flat))
        return Ssa(self.text.put(block, "memref.load", place, self.placement.memref(buf)), el, 0)

    def _whole(self, buf: Buf, count: int, flat: Affine) -> tuple[str, Affine, str]:
        """(view of a buffer as vectors, the vector's number, type of the view)."""
        root, space = buf.root, f", {SHARED_SPACE}" if self.placement.is_shared(buf) else ""
        vectors = f"memref<{max(root.size // count, 1)}x{mlir_type(storage_el(root.dtype), count)}{space}>"
        if (root, count) not in self.wholes:
            base, at, kind = self.bases[root]
            self.wholes[root, count] = self.text.put(
                self.text.top, "memref.view", (base, at), f"{kind} to {vectors}"
            )
        return (
            self.wholes[root, count],
            Affine(
                tuple((symbol, coeff // count) for symbol, coeff in flat.terms), flat.const // count
            ),
            vectors,
        )

    def is_same_beside(self, walk: SimtWalk, test: InRange) -> bool:
        """Whether a test is the same for all neighbours of a whole vector."""
        numbers = [test.low, test.high]
        numbers += [factor for symbol, factor in test.affine.terms if symbol != walk.along]
        return walk.along in test.symbols and not any(n % walk.beside for n in numbers)

    def _load_beside(self, walk: SimtWalk, block: Block, load: Load) -> Ssa:
        """An element of a whole vector, which is loaded once; of one outside, the nearest inside."""
        buf = load.buf
        flat = flat_index(buf, load.index)
        lane = flat.const % walk.beside
        # Two places outside of an axis, which are kept inside, may have one flat index.
        first = tuple(at - lane if walk.along in at.symbols else at for at in load.index)
        key, el = ("whole", buf, first if load.guard else flat - lane), storage_el(buf.dtype)
        if key not in block.memo:
            name, number, kind = self._whole(buf, walk.beside, flat - lane)
            place: str | Affine = number
            if buf.circular or buf.layout is not None:
                inside = self._inside(walk, block, buf, first) if load.guard else first
                operands = self.element(block, buf, inside), self.text.index(walk.beside)
                place = self.text.put(block, "arith.divui", operands, "index")
            elif load.guard:
                place = self._clamped(walk, block, buf, first)
                count = self.text.index(walk.beside)
                operands = self.address(block, place), count
                place = self.text.put(block, "arith.divui", operands, "index")
            block.memo[key] = self.text.put(
                block, "memref.load", (name, self.address(block, place)), kind
            )
        vector, kind = block.memo[key], mlir_type(el, walk.beside)
        return Ssa(
            self.text.put(
                block, "vector.extract", (vector,), f"{mlir_type(el)} from {kind}", f" %s[{lane}]"
            ),
            el,
            0,
        )

    def write_beside(self, walk: SimtWalk, block: Block, stores: Sequence[Store]) -> None:
        """Stores a whole vector."""
        b, buf = self.builder(block), stores[0].buf
        values = [b.to_storage(self.value(walk, block, x.value), buf.dtype) for x in stores]
        kind = mlir_type(values[0].el, len(values))
        vector = self.text.put(block, "vector.from_elements", tuple(x.name for x in values), kind)
        name, number, view = self._whole(buf, len(values), flat_index(buf, stores[0].index))
        place = self.address(block, number)
        if buf.space:  # chunks of a tile stay whole
            count = self.text.index(len(values))
            at = self.element(block, buf, stores[0].index)
            place = self.text.put(block, "arith.divui", (at, count), "index")
        block.add("memref.store", (vector, name, place), view)

    def _gather(self, walk: SimtWalk, block: Block, expr: Gather) -> Ssa:
        """Axes given by index expressions, which lie inside; the others are affine."""
        buf, index = expr.access
        if buf.size == 0:
            return self.builder(block).c(0, compute_el(buf.dtype))
        args, place = iter(expr.args), None
        for axis, (position, extent, stride) in enumerate(zip(index, buf.shape, buf.strides)):
            if buf.circular and axis == 0:
                assert position is not None, "a stage is known"
                place = self._first(block, buf, position)
                continue
            if position is None:
                arg = next(args)
                part = self.to_index(block, self.value(walk, block, arg), arg.dtype.kind in "ub")
            else:
                part = self.text.affine(block, position)[1]
                part = (
                    part
                    if self.is_safe(walk, position, extent)
                    else self._kept(block, part, extent)
                )
            part = self._scaled(block, part, stride)
            place = part if place is None else self._sum(block, place, part)
        return self._load(block, buf, place or Affine())

    def write(self, walk: SimtWalk, block: Block, store: Store, also: str | None = None) -> None:
        """Stores at the point, where its mask, its guard and `also` hold.

        Where `also` does not, nothing is read for it.
        """
        if store.buf.root.size == 0:
            return
        if also is not None:
            self.text.when(block, also, lambda inner: self.write(walk, inner, store))
            return
        if self._reads_what_others_store(store):
            tests, mask = _index_tests(store.mask, self.context)
            conditions = [self.value(walk, block, test).name for test in tests]
            conditions += self.guards(walk, block, store.buf, store.index) if store.guard else []
            inside = replace(store, mask=mask, guard=False)
            if conditions:
                self.text.when_all(block, conditions, lambda inner: self.write(walk, inner, inside))
                return
        stored = self.builder(block).to_storage(
            self.value(walk, block, store.value), store.buf.dtype
        )
        conditions = [] if store.mask is None else [self.value(walk, block, store.mask).name]
        conditions += self.guards(walk, block, store.buf, store.index) if store.guard else []

        def fill(inner: Block) -> None:
            self.store_stored(inner, store.buf, self.element(inner, store.buf, store.index), stored)

        self.text.when_all(block, conditions, fill)

    def _reads_what_others_store(self, store: Store) -> bool:
        """Whether a point outside of an array would read the nearest one inside, which another thread stores over."""
        if self.placement.is_private(store.buf):
            return False
        read = nodes([store.value, *([] if store.mask is None else [store.mask])])
        return any(
            isinstance(node, Load) and node.guard and node.buf.root is store.buf.root
            for node in read
        )

    def store_stored(self, block: Block, buf: Buf, address: str, v: Ssa) -> None:
        block.add("memref.store", (v.name, buf.root.name, address), self.placement.memref(buf))


def _index_tests(mask: Expr | None, context: NestContext) -> tuple[list[InRange], Expr | None]:
    """(tests of indices that must all hold, what else must; None: nothing) for a mask to hold."""
    if mask is None or isinstance(mask, InRange):
        return [] if mask is None else [mask], None
    if not (isinstance(mask, Op) and mask.info.primitive == "and"):
        return [], mask
    (left, one), (right, other) = (_index_tests(arg, context) for arg in mask.args)
    both = one if other is None else other if one is None else context.op("and", BOOL, one, other)
    return [*left, *right], both
