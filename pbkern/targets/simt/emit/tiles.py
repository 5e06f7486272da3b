"""Nests that are spread over threads by layouts -> code: products, what is made of their sums, copies to swizzled tiles.

Let x be what the bits of a thread's number add to a place, c what registers and steps add. Both are linear over bits, so that
swizzle(x + c) = swizzle(x) ^ swizzle(c): the first is computed once, before all loops, the second is a constant.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.mlir.operation import places
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest import reductions
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.async_copies import copied, masked_load
from pbkern.lower.nest.conditions.index_tests import Folder
from pbkern.lower.nest.ir import Buf, Expr, InRange, Load, Nest, Store
from pbkern.lower.nest.tiles.axes import Axis, tile_axes, tile_shape
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.lower.nest.tiles.layout import Layout, Swizzle, bits_of_symbol
from pbkern.lower.nest.tiles.layout import steps as steps_of
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.targets.simt.device import VendorCode
from pbkern.targets.simt.schedule.copies import WIDEST_COPY_BYTES, copied_at_once

from .expressions import SimtWalk
from .nests import THREAD, SimtNestEmitter

# Type of pointers to shared memory.
SHARED_POINTER = "!llvm.ptr<3>"
# Type of pointers to arrays.
GLOBAL_POINTER = "!llvm.ptr<1>"
# Bytes of a register's word.
REGISTER_BYTES = 4
# Most matrices of one ldmatrix. Source: PTX ISA 8.7, section 9.7.14.5.15.
MOST_MATRICES = 4
# Most copies of a thread that are written out one after the other, where they are no tile's. Source: not recorded.
MOST_WRITTEN_COPIES = 8
# Sums of a row that a lane stores together: neighbours in the fragments of accumulators.
SUMS_BESIDE = 2
# Unit of addresses and strides in a descriptor of a tile, in bytes.
# Source: PTX ISA 8.7, section 9.7.15.5.1.2.2, matrix descriptor.
UNIT_BYTES = 16
# Rows after which the pattern of a swizzle repeats. Source: as UNIT_BYTES, canonical layouts.
GROUP_PATTERN_ROWS = 8
# A descriptor's bits that say that rows of 128 bytes are swizzled. Source: as UNIT_BYTES.
SWIZZLE_128 = 1 << 62


def _unfolded(nest: Nest, layout: Layout) -> Layout:
    """The layout of a nest's tile with an axis for each of the nest's dimensions."""
    return layout.unfolded([tuple(axis.values()) for axis in tile_axes(nest)][: layout.axes])


@dataclass
class TileEmitter:
    """Emits by the emitter of other nests.

    arena: name of the block's shared memory.
    """

    nests: SimtNestEmitter
    threads: int
    device: VendorCode
    arena: str

    def __post_init__(self) -> None:
        self.text = self.nests.text
        self.put_top = functools.partial(self.text.put, self.text.top)
        self.known: dict[tuple, str] = {}

    @property
    def private_pointer(self) -> str:
        """Type of pointers to a thread's own memory."""
        private = self.nests.placement.private
        return f"!llvm.ptr<{private}>" if private else "!llvm.ptr"

    # ---------------------------------------------------------------- places of threads

    def _once(
        self, name: str, operands: tuple[str, ...], types: str, syntax: str | None = None
    ) -> str:
        """An operation before all others of the function, written once."""
        key = name, operands, types, syntax
        if key not in self.known:
            self.known[key] = self.put_top(name, operands, types, syntax)
        return self.known[key]

    def _bits(self, symbol: str) -> None:
        """Defines the symbol of some bits of a thread's number, its lane or its warp."""
        if symbol in self.text.top.values:
            return
        name, low, high = bits_of_symbol(symbol)
        shift = low + (self.device.warp.bit_length() - 1 if name == "warp" else 0)
        value, index = THREAD, self.text.index
        if shift:
            value = self._once("arith.shrui", (value, index(shift)), "index")
        if self.threads >> shift > 1 << high - low:
            value = self._once("arith.andi", (value, index((1 << high - low) - 1)), "index")
        self.text.top.values[symbol] = value

    def _places(self, layout: Layout, **numbers: int) -> tuple[Affine, ...]:
        """A layout's places as sums of symbols that are defined."""
        places = layout.affine(**numbers)
        for symbol in sorted(symbol for place in places for symbol in place.symbols):
            self._bits(symbol)
        return places

    # ---------------------------------------------------------------- shared memory

    def _shared(self, block: Block, buf: Buf, stage: Affine, place: Affine, number: int = 0) -> str:
        """Pointer to an element of a tile: `place` by threads, `number` a constant that shares no bit with it."""
        size = buf.dtype.itemsize
        bytes_of, moved = self._swizzled(buf, place), number
        if isinstance(buf.layout, Swizzle):
            moved = buf.layout(number)
            near = moved & (buf.layout.window - 1)
            if near:
                bytes_of = self._once(
                    "arith.xori", (bytes_of, self.text.index(near * size)), "index"
                )
            moved -= near
        at = self.text.put(block, "arith.addi", (self._stage(block, buf, stage), bytes_of), "index")
        pointer = self._moved(block, self._arena(), at, SHARED_POINTER, "i32")
        if not moved:
            return pointer
        types = f"({SHARED_POINTER}) -> {SHARED_POINTER}, i8"
        return self.text.put(block, "llvm.getelementptr", (pointer,), types, f" %s[{moved * size}]")

    def _swizzled(self, buf: Buf, place: Affine) -> str:
        """Bytes from a tile's first element to a place, before all loops."""
        index = self.text.index
        _, at = self.text.affine(self.text.top, place)
        if isinstance(buf.layout, Swizzle):
            at = self.nests.swizzled(self._once, buf.layout, at)
        return self._once("arith.muli", (at, index(buf.dtype.itemsize)), "index")

    def _stage(self, block: Block, buf: Buf, stage: Affine) -> str:
        """First byte of a stage of a tile in shared memory."""
        stages = buf.shape[0] if buf.circular else 1
        nbytes = buf.size // stages * buf.dtype.itemsize
        start = self.nests.placement.offsets[buf]
        if stage.is_const:
            return self.text.index(start + stage.const % stages * nbytes)
        key = ("stage", buf, stage)
        if key not in block.memo:
            put = functools.partial(self.text.put, block)
            number = self.nests.turn(block, stage, stages)
            far = put("arith.muli", (number, self.text.index(nbytes)), "index")
            block.memo[key] = put("arith.addi", (far, self.text.index(start)), "index")
        return block.memo[key]

    def _arena(self) -> str:
        kind = f"memref<{self.nests.placement.shared_bytes}xi8, 3>"
        return self._pointer(self.arena, kind, SHARED_POINTER)

    def _pointer(self, memref: str, kind: str, pointer: str) -> str:
        """A memref's pointer, from its descriptor: as an index of 32 bits it would be cut."""
        number = f"i{self.nests.index_bits}"
        whole = f"!llvm.struct<({pointer}, {pointer}, {number}, array<1 x {number}>, array<1 x {number}>)>"
        cast = self._once("builtin.unrealized_conversion_cast", (memref,), f"{kind} to {whole}")
        return self._once("llvm.extractvalue", (cast,), whole, " %s[1]")

    def _moved(self, block: Block, base: str, at: str, kind: str, width: str) -> str:
        """A pointer so many bytes on."""
        number = self.text.put(block, "arith.index_cast", (at,), f"index to {width}")
        types = f"({kind}, {width}) -> {kind}, i8"
        return self.text.put(block, "llvm.getelementptr", (base, number), types, " %s[%s]")

    # ---------------------------------------------------------------- copies by the device

    def copies(self, block: Block, nests: Sequence[Nest]) -> None:
        """Begins one group of copies."""
        for nest in nests:
            by, axes = Chunking(copied_at_once(nest), self.threads), tile_axes(nest)
            is_tile = {dim for axis in axes for dim in axis} == nest.dims.keys()
            emit = self._copies if is_tile and by.fits(tile_shape(axes)) else self._copies_in_turn
            emit(block, nest, by)
        block.add("nvvm.cp.async.commit.group")

    def _copies(self, block: Block, nest: Nest, by: Chunking) -> None:
        walk = SimtWalk(nest, block, frozenset())
        (store,) = nest.stores

        def copy(inner: Block, first: int) -> None:
            dims = self._chunk_place(nest, by, first)
            stage, place = self.nests.in_stage(store.buf, self._at(store, dims).index)
            to = self._shared(inner, store.buf, stage, place - place.const, place.const)
            self._copy(walk, inner, dims, by.count, to)

        self._each_chunk(block, nest, by, copy)

    def _copies_in_turn(self, block: Block, nest: Nest, by: Chunking) -> None:
        """Chunk `thread + threads * step` of a block of any sizes in each step."""
        text, (store,) = self.text, nest.stores
        sizes = dict(nest.dims)
        along = list(sizes)[-1]
        sizes[along] //= by.count
        chunks, dims = math.prod(sizes.values()), {along: Affine.symbol(along, by.count)}

        def copy(inner: Block, number: str) -> None:
            walk = SimtWalk(nest, inner, frozenset())
            self.nests.split(inner, list(sizes.items()), number)
            at = self.nests.element(inner, store.buf, self._at(store, dims).index)
            size, start = store.buf.dtype.itemsize, self.nests.placement.offsets[store.buf]
            far = text.put(inner, "arith.muli", (at, text.index(size)), "index")
            far = text.put(inner, "arith.addi", (far, text.index(start)), "index")
            to = self._moved(inner, self._arena(), far, SHARED_POINTER, "i32")
            self._copy(walk, inner, dims, by.count, to)

        def step(outer: Block, _: Any) -> list:
            inner = Block(outer)
            inner.values["%thread"] = THREAD
            place = Affine.symbol("%step", self.threads) + Affine.symbol("%thread")
            number = text.affine(inner, place)[1]
            facts = (number, text.index(chunks)), "index", " ult, %s, %s"
            some = [text.put(inner, "arith.cmpi", *facts)] if chunks % self.threads else []
            text.when_all(inner, some, lambda body: copy(body, number))
            outer.take(inner)
            return []

        steps = -(-chunks // self.threads)
        if steps > MOST_WRITTEN_COPIES:
            text.loop(block, "%step", 0, steps, 1, step)
        else:
            text.unrolled(block, "%step", 0, steps, 1, step, [])

    def _each_chunk(
        self, block: Block, nest: Nest, by: Chunking, emit_chunk: Callable[[Block, int], None]
    ) -> None:
        """Emits each of a thread's chunks, by its first register, where the thread has any."""
        layout = by.held(tile_shape(tile_axes(nest)))

        def emit_all(inner: Block) -> None:
            for first in range(0, layout.size("register"), by.count):
                emit_chunk(inner, first)

        size = self.text.index(layout.size("thread"))
        some = (
            [self._once("arith.cmpi", (THREAD, size), "index", " ult, %s, %s")]
            if layout.size("thread") < self.threads
            else []
        )
        self.text.when_all(block, some, emit_all)

    def _chunk_place(self, nest: Nest, by: Chunking, register: int) -> dict[str, Affine]:
        """Row and column of one of a thread's points."""
        return self._tile_place(nest, by.held(tile_shape(tile_axes(nest))), register)

    def _tile_place(self, nest: Nest, layout: Layout, register: int) -> dict[str, Affine]:
        """The nest's dimensions at one of a thread's points of its tile."""
        dims = [dim for axis in tile_axes(nest) for dim in axis]
        return dict(zip(dims, self._places(_unfolded(nest, layout), register=register)))

    def _copy(
        self, walk: SimtWalk, block: Block, dims: dict[str, Affine], count: int, to: str
    ) -> None:
        """A thread's chunk, which goes to a pointer, or zeros where a test fails."""
        (store,), put = walk.nest.stores, functools.partial(self.text.put, block)
        source = copied(replace(walk.nest, stores=(self._at(store, dims),)))
        assert source is not None, "verified"
        (load, tests), nbytes = source, count * store.buf.dtype.itemsize
        far = self.text.affine(block, flat_index(load.buf, load.index))[1]
        at = put("arith.muli", (far, self.text.index(load.dtype.itemsize)), "index")
        start = self._moved(block, self._array(load.buf), at, GLOBAL_POINTER, "i64")
        whole = self.text.const(str(nbytes), "i32")
        size = whole
        test = self._all(block, [self.nests.value(walk, block, test).name for test in tests])
        if test is not None:
            none = self.text.const("0", "i32")
            size = put("arith.select", (test, whole, none), "i32")
        cache = "cg" if nbytes == 16 else "ca"  # the first level is passed by whole lines only
        block.add(
            "nvvm.cp.async.shared.global",
            (to, start, size),
            f"{SHARED_POINTER}, {GLOBAL_POINTER}, i32",
            f" %s, %s, {nbytes}, cache = {cache}, %s",
        )

    def _at(self, store: Store, dims: dict[str, Affine]) -> Store:
        return store.moved(dims, self.nests.context.pool.renamer(dims))

    def _all(self, block: Block, tests: Sequence[str]) -> str | None:
        """Whether all tests hold; None without any."""
        test = tests[0] if tests else None
        for other in tests[1:]:
            test = self.text.put(block, "arith.andi", (str(test), other), "i1")
        return test

    def _array(self, buf: Buf) -> str:
        base, _, kind = self.nests.bases[buf.root]
        pointer = self._pointer(base, kind, "!llvm.ptr")
        return self._once("llvm.addrspacecast", (pointer,), f"!llvm.ptr to {GLOBAL_POINTER}")

    # ---------------------------------------------------------------- copies by threads

    def chunks(self, block: Block, nest: Nest, by: Chunking) -> None:
        """Points of a nest by chunks, each of which is loaded and stored by whole vectors."""
        inner = Block(block)
        walk = self._walk(nest, by.held(tile_shape(tile_axes(nest))), inner)
        column = self._chunk_place(nest, by, 0)[list(nest.dims)[-1]]
        walk.beside, walk.along = by.count, min(column.symbols, default="")
        self._each_chunk(
            inner, nest, by, lambda body, first: self._chunk(walk, body, nest, by, first)
        )
        block.take(inner)

    def _chunk(self, walk: SimtWalk, block: Block, nest: Nest, by: Chunking, first: int) -> None:
        count, b, slots = by.count, self.nests.builder(block), self.nests.placement.slots
        layout = by.held(tile_shape(tile_axes(nest)))
        points = [
            self._point(nest, layout, first + number, {2: first + number})
            for number in range(count)
        ]
        for store in nest.stores:
            group = [point(store) for point in points]
            source = masked_load(group[0].value)
            tests = source[1] if source else []
            is_held = store.buf.space == "registers"
            is_whole = all(
                walk.along not in test.symbols or self.nests.is_same_beside(walk, test)
                for test in tests
            )
            if is_held and tests and is_whole:
                self._masked_chunk(walk, block, group, tests, slots[store.buf], first)
                continue
            kind = mlir_type(storage_el(store.buf.dtype), count)
            values = [
                b.to_storage(self.nests.value(walk, block, one.value), store.buf.dtype)
                for one in group
            ]
            names = tuple(value.name for value in values)
            vector = self.text.put(block, "vector.from_elements", names, kind)
            if store.buf.space == "registers":
                at = self._held_chunk(block, slots[store.buf], first)
                block.add("llvm.store", (vector, at), f"{kind}, {self.private_pointer}")
                continue
            stage, place = self.nests.in_stage(store.buf, group[0].index)
            pointer = self._shared(block, store.buf, stage, place - place.const, place.const)
            block.add("llvm.store", (vector, pointer), f"{kind}, {SHARED_POINTER}")

    def _masked_chunk(
        self,
        walk: SimtWalk,
        block: Block,
        group: Sequence[Store],
        tests: Sequence[InRange],
        slots: Buf,
        first: int,
    ) -> None:
        """Loads a whole vector to registers where tests hold, and nothing elsewhere."""
        fold = Folder(self.nests.context.pool, self.nests.context.bounds)
        for test in tests:
            fold.assume(test)
        kind = mlir_type(storage_el(slots.dtype), len(group))
        conditions = [self.nests.value(walk, block, test).name for test in tests]
        zero = self.nests.builder(block).c(0, storage_el(slots.dtype)).name

        def store(inner: Block, names: Sequence[str]) -> None:
            vector = self.text.put(inner, "vector.from_elements", tuple(names), kind)
            at = self._held_chunk(inner, slots, first)
            inner.add("llvm.store", (vector, at), f"{kind}, {self.private_pointer}")

        def load(inner: Block) -> None:
            b = self.nests.builder(inner)
            sources = [masked_load(one.value) for one in group]
            values = [
                self.nests.value(walk, inner, fold(source[0])) for source in sources if source
            ]
            store(inner, [b.to_storage(value, slots.dtype).name for value in values])

        every = self._all(block, conditions)
        self.text.when(block, str(every), load, lambda inner: store(inner, [zero] * len(group)))

    def _held_chunk(self, block: Block, slots: Buf, first: int) -> str:
        """Pointer to elements that a thread holds, from the first one of a chunk on."""
        start = self._pointer(slots.name, self.nests.placement.memref(slots), self.private_pointer)
        types = f"({self.private_pointer}) -> {self.private_pointer}, i8"
        number = first * slots.dtype.itemsize
        return self.text.put(block, "llvm.getelementptr", (start,), types, f" %s[{number}]")

    # ---------------------------------------------------------------- products

    def product(self, block: Block, nest: Nest, by: Tiling) -> None:
        """Adds products of tiles in shared memory to sums in registers."""
        (reduction,), (store,) = nest.reductions, nest.stores
        rows, columns, depth = tile_axes(nest)
        shape = tile_shape((rows, columns, depth))
        down, across, steps = by.repeats(shape)
        sums = [
            self._slot(block, store.buf, number).name for number in range(self._slots(store.buf))
        ]
        each = by.instruction.layouts[2].size("register")
        put = functools.partial(self.text.put, block)
        layouts = by.first(shape[0], shape[2]), by.second(shape[2], shape[1])
        dims = (rows, depth), (depth, columns)

        def words(operand: int, step: int, part: int = 0, parts: int = 1) -> list[str]:
            arg = reduction.args[operand]
            if isinstance(arg, Load) and arg.buf.space == "registers":
                return self._held_operand(block, by, shape, arg, step)
            return self._operand(block, layouts[operand], dims[operand], arg, step, part, parts)

        for step in range(steps):
            second = words(1, step)
            wide = len(second) // across
            # What lanes multiply by themselves, a row at a time, needs no registers before.
            in_parts = by.instruction.is_of_lanes
            first = [] if in_parts else words(0, step)
            for row in range(down):
                tall = len(first) // down
                mine = first[row * tall : (row + 1) * tall] or words(0, step, row, down)
                for column in range(across):
                    at = (row * across + column) * each
                    sums[at : at + each] = by.instruction.emit(
                        put,
                        sums[at : at + each],
                        mine,
                        second[column * wide : (column + 1) * wide],
                    )
        for number, value in enumerate(sums):
            self._keep(block, store.buf, number, value)

    def products(self, block: Block, nests: Sequence[Nest]) -> None:
        """Begins one group of products by instructions that read tiles by themselves."""
        block.add("nvvm.wgmma.fence.aligned")
        for nest in nests:
            self._by_groups(block, nest)
        block.add("nvvm.wgmma.commit.group.sync.aligned")

    def _by_groups(self, block: Block, nest: Nest) -> None:
        (reduction,), (store,), by = nest.reductions, nest.stores, nest.by
        assert isinstance(by, Tiling)
        sums = [
            self._slot(block, store.buf, number).name for number in range(self._slots(store.buf))
        ]
        axes, put = tile_axes(nest), functools.partial(self.text.put, block)
        (down, across, steps), unit = by.repeats(tile_shape(axes)), by.instruction.shape
        bits = [
            steps_of(count * repeats * size, repeats * size, axis)
            for axis, (count, repeats, size) in enumerate(zip(by.warps, (down, across), unit))
        ]
        within = ((0, 0),) * (by.instruction.warps.bit_length() - 1)
        group = self._places(Layout.of(warp=(*within, *bits[1], *bits[0])))
        each = len(sums) // (down * across)
        for step in range(steps):
            for row in range(down):
                for column in range(across):
                    words = [
                        self._descriptor(
                            block, by, arg, axes[2], start + number * size, step * unit[-1]
                        )
                        for arg, start, number, size in zip(
                            reduction.args, group, (row, column), unit
                        )
                    ]
                    at = (row * across + column) * each
                    sums[at : at + each] = by.instruction.emit(put, sums[at : at + each], *words)
        for number, value in enumerate(sums):
            self._keep(block, store.buf, number, value)

    def _descriptor(
        self, block: Block, by: Tiling, arg: Expr, depth: Axis, first: Affine, deep: int
    ) -> tuple[str, bool]:
        """Descriptor of the tile of a group's operand, and whether its rows run along the depth.

        first: its first row, or column of the second operand. deep: its first place along the depth. Source of the fields: PTX
        ISA 8.7, section 9.7.15.5.1.2.2, matrix descriptor, and its canonical layouts.
        """
        assert isinstance(arg, Load), "operands are staged"
        buf, last = arg.buf, arg.index[-1]
        along = last.symbols <= depth.keys()
        size, row_bytes = buf.dtype.itemsize, by.instruction.row_bytes
        panel = row_bytes // size  # elements of a row
        rows = buf.shape[-2]
        start = first * panel if along else _in_panels(first, panel, rows * panel)
        if along:  # steps along the depth go from panel to panel
            start += deep % panel + deep // panel * (rows * panel)
        else:
            start += deep * panel
        start *= size
        fixed, moving = start.const, start - start.const
        far = GROUP_PATTERN_ROWS * row_bytes  # bytes from a pattern of the swizzle to the next
        facts = SWIZZLE_128 | far // UNIT_BYTES << 32
        facts |= (1 if along else rows * row_bytes // UNIT_BYTES) << 16
        put = functools.partial(self.text.put, block)
        pointer = self._once("llvm.ptrtoint", (self._arena(),), f"{SHARED_POINTER} to i64")
        spread = self.text.affine(self.text.top, moving)[1]
        spread = self._once("arith.index_cast", (spread,), "index to i64")
        begin = self._once("arith.addi", (pointer, spread), "i64")
        shift = self.text.const(str(UNIT_BYTES.bit_length() - 1), "i64")
        begin = self._once("arith.shrui", (begin, shift), "i64")
        begin = self._once("arith.ori", (begin, self.text.const(str(facts), "i64")), "i64")
        stage, _ = self.nests.in_stage(buf, arg.index)
        at = put("arith.index_cast", (self._stage(block, buf, stage),), "index to i64")
        at = put("arith.shrui", (at, shift), "i64")
        at = put("arith.addi", (at, begin), "i64")
        more = self.text.const(str(fixed // UNIT_BYTES), "i64")
        return put("arith.addi", (at, more), "i64"), along

    def _operand(
        self,
        block: Block,
        layout: Layout,
        dims: tuple[Axis, Axis],
        arg: Expr,
        step: int,
        part: int = 0,
        parts: int = 1,
    ) -> list[str]:
        """Words of an operand's registers, or of one of equal parts of them, for one step along the depth."""
        assert isinstance(arg, Load), "operands are staged"
        buf = arg.buf
        index = arg.index[1:] if buf.circular else arg.index
        stage, _ = self.nests.in_stage(buf, arg.index)
        axes = [int(position.symbols <= dims[1].keys()) for position in index]
        strides = tuple(buf.strides[-2:][axes.index(axis)] for axis in range(2))
        flat, size = layout.flat(strides), buf.dtype.itemsize
        start = sum(position.const * stride for position, stride in zip(index, buf.strides[-2:]))
        within = (REGISTER_BYTES // size).bit_length() - 1  # bits of a word's elements
        registers = [vector for (vector,) in flat.vectors("register")]
        lanes = [vector for (vector,) in flat.vectors("lane")]
        each = REGISTER_BYTES // size
        some = flat.size("register") // parts
        mine = range(part * some, (part + 1) * some)
        if not self.device.copies_tiles or parts > 1:
            return self._by_elements(block, flat, buf, stage, start, step, mine)
        in_order = registers[:within] == [1 << bit for bit in range(within)]
        if in_order and lanes[:2] == [each, 2 * each]:
            rows, turned = lanes[2:], False
        elif size == 2 and lanes[2:] == [1, 2, 4]:
            rows, turned = [registers[0], *lanes[:2]], True
        else:
            return self._by_elements(block, flat, buf, stage, start, step, mine)
        words = registers[within:]
        matrices = words[: MOST_MATRICES.bit_length() - 1]
        sent = Layout.of(
            1,
            lane=[(vector,) for vector in (*rows, *matrices)],
            warp=flat.vectors("warp"),
        )
        (place,) = self._places(sent)
        loaded: list[str] = []
        for group in range(1 << (len(words) - len(matrices))):
            register = group << (within + len(matrices))
            (number,) = flat.place(register=register, step=step)
            at = self._shared(block, buf, stage, place, start + number)
            loaded += self._matrices(block, at, 1 << len(matrices), turned)
        return loaded

    def _matrices(self, block: Block, at: str, count: int, turned: bool) -> list[str]:
        """Words of matrices of 8 rows of 16 bytes, by ldmatrix."""
        struct = "i32" if count == 1 else f"!llvm.struct<({places(count).replace('%s', 'i32')})>"
        layout = "col" if turned else "row"
        facts = (
            f" %s {{layout = #nvvm.mma_layout<{layout}>, num = {count} : i32, "
            "shape = #nvvm.ld_st_matrix_shape<m = 8, n = 8>, eltType = #nvvm.ld_st_matrix_elt_type<b16>}"
        )
        held = self.text.put(
            block, "nvvm.ldmatrix", (at,), f"({SHARED_POINTER}) -> {struct}", facts
        )
        if count == 1:
            return [held]
        return [
            self.text.put(block, "llvm.extractvalue", (held,), struct, f" %s[{number}]")
            for number in range(count)
        ]

    def _held_operand(
        self, block: Block, by: Tiling, shape: tuple[int, ...], arg: Load, step: int
    ) -> list[str]:
        """Words of the first operand, which another nest has left in registers."""
        registers = by.held_first(shape[0], shape[2])
        assert registers is not None, "verified"
        values = [self._slot(block, arg.buf, register).name for register in registers[step]]
        return self._words(block, values, arg.buf)

    def _words(self, block: Block, values: Sequence[str], buf: Buf) -> list[str]:
        """Elements as words of registers."""
        each, put = REGISTER_BYTES // buf.dtype.itemsize, functools.partial(self.text.put, block)
        kind = mlir_type(storage_el(buf.dtype), each)
        return [
            put(
                "llvm.bitcast",
                (put("vector.from_elements", tuple(values[first : first + each]), kind),),
                f"{kind} to i32",
            )
            for first in range(0, len(values), each)
        ]

    def _by_elements(
        self,
        block: Block,
        flat: Layout,
        buf: Buf,
        stage: Affine,
        start: int,
        step: int,
        registers: range,
    ) -> list[str]:
        """Words of some registers' elements, loaded by whole vectors where they follow one another, else each by itself."""
        put, el = functools.partial(self.text.put, block), mlir_type(storage_el(buf.dtype))
        (place,) = self._places(flat.only("lane", "warp"))
        count = _neighbours(flat, WIDEST_COPY_BYTES // buf.dtype.itemsize)
        words = count * buf.dtype.itemsize // REGISTER_BYTES
        values = []
        for register in registers[:: count if words else 1]:
            (number,) = flat.place(register=register, step=step)
            at = self._shared(block, buf, stage, place, start + number)
            kind = el if not words else "i32" if words == 1 else f"vector<{words}xi32>"
            loaded = put("llvm.load", (at,), f"{SHARED_POINTER} -> {kind}")
            values += (
                [
                    put("vector.extract", (loaded,), f"i32 from {kind}", f" %s[{word}]")
                    for word in range(words)
                ]
                if words > 1
                else [loaded]
            )
        return values if words else self._words(block, values, buf)

    # ---------------------------------------------------------------- registers

    def _slots(self, buf: Buf) -> int:
        return self.nests.placement.slots[buf].size

    def _slot(self, block: Block, buf: Buf, number: int) -> Ssa:
        slots = self.nests.placement.slots[buf]
        place = (slots.name, self.text.index(number))
        value = self.text.put(block, "memref.load", place, self.nests.placement.memref(slots))
        return Ssa(value, storage_el(buf.dtype), 0)

    def _keep(self, block: Block, buf: Buf, number: int, value: str) -> None:
        slots = self.nests.placement.slots[buf]
        place = (value, slots.name, self.text.index(number))
        block.add("memref.store", place, self.nests.placement.memref(slots))

    def elementwise(self, block: Block, nest: Nest, by: Tiling) -> None:
        """Points of a nest by the threads that hold their elements."""
        if nest.rdims or len(nest.dims) == 1:
            self._by_rows(block, nest, by)
            return
        shape = tile_shape(tile_axes(nest))
        layout, rows = by.sums(*shape), shape[0]
        inner = Block(
            block
        )  # what registers hold now, other nests have changed when they ask again
        walk = self._walk(nest, layout, inner)
        self._begin(inner, walk)
        for first in range(0, layout.size("register"), SUMS_BESIDE):
            points = []
            for register in range(first, first + SUMS_BESIDE):
                slots = {1: self._row_of(by, layout, rows, register), 2: register}
                point = self._point(nest, layout, register, slots)
                points.append([point(store) for store in nest.stores])
            for group in zip(*points):
                if self._are_beside(walk.nest, group):
                    self._store_beside(walk, inner, group)
                else:
                    for store in group:
                        self.nests.write(walk, inner, store)
        block.take(inner)

    def _begin(self, block: Block, walk: SimtWalk) -> None:
        """Lets a nest that asks which elements are masked compute all places by itself.

        Tests of each element, and what rows load, would be kept in registers from one nest to the next, behind a product.
        """
        if any(isinstance(node, InRange) for node in walk.nest.nodes()):
            put = functools.partial(self.text.put, block)
            for symbol in walk.nest.dims:
                self._bits(symbol)
                block.values[symbol] = self.device.other(put, str(self.text.top.values[symbol]))

    def _by_rows(self, block: Block, nest: Nest, by: Tiling) -> None:
        """Reductions along rows, and what rows have once: by the lanes that hold a row together."""
        rows, *columns = nest.dims.values()
        held = by.held((rows,))
        layout = by.sums(rows, *columns) if columns else held
        shared = [not any(vector) for vector in held.vectors("lane")]
        team = 1 << sum(shared)
        assert all(shared[: sum(shared)]), "neighbouring lanes share a row"
        for row in range(held.size("register")):
            inner, walk = Block(block), self._walk(nest, layout, block)
            walk.top, b = inner, self.nests.builder(inner)
            accs = [
                acc for reduction in nest.reductions for acc in reductions.identity(b, reduction)
            ]
            registers = [
                register
                for register in range(layout.size("register"))
                if self._row_of(by, layout, rows, register) == row
            ]
            for register in registers if nest.rdims else ():
                point = self._point(nest, layout, register, {1: row, 2: register})
                total: list[Ssa] = []
                for number, reduction in enumerate(nest.reductions):
                    args = [self.nests.value(walk, inner, point(arg)) for arg in reduction.args]
                    total += reductions.add(b, reduction, accs[number : number + 1], args)
                accs = total
                for store in nest.stores:
                    if store.inner:
                        self.nests.write(walk, inner, point(store))
            if nest.rdims:
                accs = self.nests.team.joined(inner, nest.reductions, accs, team)
            walk.accs = dict(enumerate(accs))
            point = self._point(nest, layout, registers[0], {1: row, 2: registers[0]})
            for store in nest.stores:
                if not (store.inner and nest.rdims):
                    is_own = store.buf.space == "registers"
                    also = None if is_own else self._is_first(team)
                    self.nests.write(walk, inner, point(store), also)
            block.take(inner)

    def _is_first(self, team: int) -> str:
        """Whether a thread is the first of the lanes that share a row."""
        index = self.text.index
        lane = self._once("arith.andi", (THREAD, index(team - 1)), "index")
        return self._once("arith.cmpi", (lane, index(0)), "index", " eq, %s, %s")

    @staticmethod
    def _row_of(by: Tiling, layout: Layout, rows: int, register: int) -> int:
        """The register of an array of rows that belongs to one of a tile's registers."""
        held = by.held((rows,))
        (row, *_) = layout.place(register=register)
        places = [held.place(register=number)[0] for number in range(held.size("register"))]
        return places.index(row)

    def _walk(self, nest: Nest, layout: Layout, block: Block) -> SimtWalk:
        """State of the nest of one thread's points, whose dimensions are bits of its number."""
        spread = _unfolded(nest, layout).only("lane", "warp", "thread").affine()
        dims = {}
        for symbol in sorted({symbol for place in spread for symbol in place.symbols}):
            _, low, high = bits_of_symbol(symbol)
            dims[symbol] = 1 << high - low
        slots = self.nests.placement.slots
        written = frozenset(slots.get(store.buf, store.buf).root for store in nest.stores)
        return SimtWalk(replace(nest, dims=dims), block, written)

    def _point(
        self, nest: Nest, layout: Layout, register: int, slots: Mapping[int, int]
    ) -> Callable[[Any], Any]:
        """Takes stores and expressions of a nest to one register's point, with registers in place of elements.

        slots: axes of an array -> which of the thread's registers belongs to the point.
        """
        pool, registers = self.nests.context.pool, self.nests.placement.slots
        dims = self._tile_place(nest, layout, register)
        renamed = pool.renamer(dims)

        def place(buf: Buf) -> tuple[Affine, ...]:
            return (Affine((), slots[len(buf.shape)]),)

        def held(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or node.buf.space != "registers":
                return None
            return pool.load(node.dtype, registers[node.buf], place(node.buf))

        change = pool.rewriter(held)

        def point(part: Store | Expr) -> Store | Expr:
            if isinstance(part, Expr):
                return change(renamed(part))
            moved = part.moved(dims, renamed).mapped(change)
            if part.buf.space != "registers":
                return moved
            return replace(moved, buf=registers[part.buf], index=place(part.buf))

        return point

    def _are_beside(self, nest: Nest, group: Sequence[Store]) -> bool:
        """Whether stores go to neighbours, at a multiple of their number, of which all are inside or none is."""
        first, *rest = group
        flat, count = flat_index(first.buf, first.index), len(group)
        follow = all(
            flat_index(store.buf, store.index) == flat + number
            for number, store in enumerate(rest, 1)
        )
        whole = [flat.const, *(factor for _, factor in flat.terms), first.buf.shape[-1]]
        is_private = self.nests.placement.is_private(first.buf)
        return (
            follow and not is_private and first.mask is None and not any(x % count for x in whole)
        )

    def _store_beside(self, walk: SimtWalk, block: Block, group: Sequence[Store]) -> None:
        first = group[0]
        conditions = self.nests.guards(walk, block, first.buf, first.index) if first.guard else []
        self.text.when_all(
            block, conditions, lambda inner: self.nests.write_beside(walk, inner, group)
        )


def _in_panels(place: Affine, width: int, far: int) -> Affine:
    """The place of a column at a multiple of a panel's width, if panels are `far` elements apart."""
    assert not any(number % width for number in (place.const, *(x for _, x in place.terms)))
    return Affine(
        tuple((symbol, factor // width * far) for symbol, factor in place.terms),
        place.const // width * far,
    )


def _neighbours(flat: Layout, most: int) -> int:
    """Elements of consecutive registers that follow one another, at a multiple of their number."""
    registers = [vector for (vector,) in flat.vectors("register")]
    bits = 0
    while 1 << bits < most and registers[bits : bits + 1] == [1 << bits]:
        bits += 1
    apart = [
        vector
        for (vector,) in (*flat.vectors("lane"), *flat.vectors("warp"), *flat.vectors("step"))
    ]
    apart += registers[bits:]
    while any(vector % (1 << bits) for vector in apart):
        bits -= 1
    return 1 << bits
