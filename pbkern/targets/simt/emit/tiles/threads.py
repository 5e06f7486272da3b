"""Places and registers of a thread in tiles: the code that all nests of tiles share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Store
from pbkern.lower.nest.tiles.axes import tile_axes
from pbkern.lower.nest.tiles.layout import Layout, Swizzle, bits_of_symbol
from pbkern.targets.simt.device import VendorCode
from pbkern.targets.simt.emit.expressions import SimtWalk
from pbkern.targets.simt.emit.nests import THREAD, SimtNestEmitter

# Type of pointers to shared memory.
SHARED_POINTER = "!llvm.ptr<3>"


def _unfolded(nest: Nest, layout: Layout) -> Layout:
    """The layout of a nest's tile with an axis for each of the nest's dimensions."""
    return layout.unfolded([tuple(axis.values()) for axis in tile_axes(nest)][: layout.axes])


@dataclass
class TileThreads:
    """Emits, by the emitter of other nests, where a thread's elements of a tile are.

    count: threads of a block. arena: name of the block's shared memory.
    """

    nests: SimtNestEmitter
    count: int
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

    def once(
        self, name: str, operands: tuple[str, ...], types: str, syntax: str | None = None
    ) -> str:
        """An operation before all others of the function, written once."""
        key = name, operands, types, syntax
        if key not in self.known:
            self.known[key] = self.put_top(name, operands, types, syntax)
        return self.known[key]

    def define_bits(self, symbol: str) -> None:
        """Defines the symbol of some bits of a thread's number, its lane or its warp."""
        if symbol in self.text.top.values:
            return
        name, low, high = bits_of_symbol(symbol)
        shift = low + (self.device.warp.bit_length() - 1 if name == "warp" else 0)
        value, index = THREAD, self.text.index
        if shift:
            value = self.once("arith.shrui", (value, index(shift)), "index")
        if self.count >> shift > 1 << high - low:
            value = self.once("arith.andi", (value, index((1 << high - low) - 1)), "index")
        self.text.top.values[symbol] = value

    def places(self, layout: Layout, **numbers: int) -> tuple[Affine, ...]:
        """A layout's places as sums of symbols that are defined."""
        places = layout.affine(**numbers)
        for symbol in sorted(symbol for place in places for symbol in place.symbols):
            self.define_bits(symbol)
        return places

    def shared(self, block: Block, buf: Buf, stage: Affine, place: Affine, number: int = 0) -> str:
        """Pointer to an element of a tile: `place` by threads, `number` a constant that shares no bit with it."""
        size = buf.dtype.itemsize
        bytes_of, moved = self._swizzled(buf, place), number
        if isinstance(buf.layout, Swizzle):
            moved = buf.layout(number)
            near = moved & (buf.layout.window - 1)
            if near:
                bytes_of = self.once(
                    "arith.xori", (bytes_of, self.text.index(near * size)), "index"
                )
            moved -= near
        at = self.text.put(block, "arith.addi", (self.stage(block, buf, stage), bytes_of), "index")
        pointer = self.moved(block, self.arena_pointer(), at, SHARED_POINTER, "i32")
        if not moved:
            return pointer
        types = f"({SHARED_POINTER}) -> {SHARED_POINTER}, i8"
        return self.text.put(block, "llvm.getelementptr", (pointer,), types, f" %s[{moved * size}]")

    def _swizzled(self, buf: Buf, place: Affine) -> str:
        """Bytes from a tile's first element to a place, before all loops."""
        index = self.text.index
        _, at = self.text.affine(self.text.top, place)
        if isinstance(buf.layout, Swizzle):
            at = self.nests.swizzled(self.once, buf.layout, at)
        return self.once("arith.muli", (at, index(buf.dtype.itemsize)), "index")

    def stage(self, block: Block, buf: Buf, stage: Affine) -> str:
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

    def arena_pointer(self) -> str:
        kind = f"memref<{self.nests.placement.shared_bytes}xi8, 3>"
        return self.pointer(self.arena, kind, SHARED_POINTER)

    def pointer(self, memref: str, kind: str, pointer: str) -> str:
        """A memref's pointer, from its descriptor: as an index of 32 bits it would be cut."""
        number = f"i{self.nests.index_bits}"
        whole = f"!llvm.struct<({pointer}, {pointer}, {number}, array<1 x {number}>, array<1 x {number}>)>"
        cast = self.once("builtin.unrealized_conversion_cast", (memref,), f"{kind} to {whole}")
        return self.once("llvm.extractvalue", (cast,), whole, " %s[1]")

    def moved(self, block: Block, base: str, at: str, kind: str, width: str) -> str:
        """A pointer so many bytes on."""
        number = self.text.put(block, "arith.index_cast", (at,), f"index to {width}")
        types = f"({kind}, {width}) -> {kind}, i8"
        return self.text.put(block, "llvm.getelementptr", (base, number), types, " %s[%s]")

    def tile_place(self, nest: Nest, layout: Layout, register: int) -> dict[str, Affine]:
        """The nest's dimensions at one of a thread's points of its tile."""
        dims = [dim for axis in tile_axes(nest) for dim in axis]
        return dict(zip(dims, self.places(_unfolded(nest, layout), register=register)))

    def slots(self, buf: Buf) -> int:
        return self.nests.placement.slots[buf].size

    def slot(self, block: Block, buf: Buf, number: int) -> Ssa:
        slots = self.nests.placement.slots[buf]
        place = (slots.name, self.text.index(number))
        value = self.text.put(block, "memref.load", place, self.nests.placement.memref(slots))
        return Ssa(value, storage_el(buf.dtype), 0)

    def store_slot(self, block: Block, buf: Buf, number: int, value: str) -> None:
        slots = self.nests.placement.slots[buf]
        place = (value, slots.name, self.text.index(number))
        block.add("memref.store", place, self.nests.placement.memref(slots))

    def walk(self, nest: Nest, layout: Layout, block: Block) -> SimtWalk:
        """State of the nest of one thread's points, whose dimensions are bits of its number."""
        spread = _unfolded(nest, layout).only("lane", "warp", "thread").affine()
        dims = {}
        for symbol in sorted({symbol for place in spread for symbol in place.symbols}):
            _, low, high = bits_of_symbol(symbol)
            dims[symbol] = 1 << high - low
        slots = self.nests.placement.slots
        written = frozenset(slots.get(store.buf, store.buf).root for store in nest.stores)
        return SimtWalk(replace(nest, dims=dims), block, written)

    def point(
        self, nest: Nest, layout: Layout, register: int, slots: Mapping[int, int]
    ) -> Callable[[Any], Any]:
        """Takes stores and expressions of a nest to one register's point, with registers in place of elements.

        slots: axes of an array -> which of the thread's registers belongs to the point.
        """
        pool, registers = self.nests.context.pool, self.nests.placement.slots
        dims = self.tile_place(nest, layout, register)
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
