"""Products of tiles by matrix instructions, whose sums are in registers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.mlir.operation import places
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest
from pbkern.lower.nest.tiles.axes import Axis, tile_axes, tile_shape
from pbkern.lower.nest.tiles.layout import Layout
from pbkern.lower.nest.tiles.layout import steps as steps_of
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.targets.simt.schedule.copies import WIDEST_COPY_BYTES

from .threads import SHARED_POINTER, TileThreads

# Bytes of a register's word.
REGISTER_BYTES = 4
# Most matrices of one ldmatrix. Source: PTX ISA 8.7, section 9.7.14.5.15.
MOST_MATRICES = 4
# Unit of addresses and strides in a descriptor of a tile, in bytes.
# Source: PTX ISA 8.7, section 9.7.15.5.1.2.2, matrix descriptor.
UNIT_BYTES = 16
# Rows after which the pattern of a swizzle repeats. Source: as UNIT_BYTES, canonical layouts.
GROUP_PATTERN_ROWS = 8
# A descriptor's bits that say that rows of 128 bytes are swizzled. Source: as UNIT_BYTES.
SWIZZLE_128 = 1 << 62


@dataclass
class ProductsOfTiles:
    """Emits products of tiles in shared memory or in registers."""

    threads: TileThreads

    def __post_init__(self) -> None:
        self.text, self.nests = self.threads.text, self.threads.nests

    def one(self, block: Block, nest: Nest, by: Tiling) -> None:
        """Adds products of tiles in shared memory to sums in registers."""
        (reduction,), (store,) = nest.reductions, nest.stores
        rows, columns, depth = tile_axes(nest)
        shape = tile_shape((rows, columns, depth))
        down, across, steps = by.repeats(shape)
        sums = [
            self.threads.slot(block, store.buf, number).name
            for number in range(self.threads.slots(store.buf))
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
            self.threads.store_slot(block, store.buf, number, value)

    def group(self, block: Block, nests: Sequence[Nest]) -> None:
        """Begins one group of products by instructions that read tiles by themselves."""
        block.add("nvvm.wgmma.fence.aligned")
        for nest in nests:
            self._by_groups(block, nest)
        block.add("nvvm.wgmma.commit.group.sync.aligned")

    def _by_groups(self, block: Block, nest: Nest) -> None:
        (reduction,), (store,), by = nest.reductions, nest.stores, nest.by
        assert isinstance(by, Tiling)
        sums = [
            self.threads.slot(block, store.buf, number).name
            for number in range(self.threads.slots(store.buf))
        ]
        axes, put = tile_axes(nest), functools.partial(self.text.put, block)
        (down, across, steps), unit = by.repeats(tile_shape(axes)), by.instruction.shape
        bits = [
            steps_of(count * repeats * size, repeats * size, axis)
            for axis, (count, repeats, size) in enumerate(zip(by.warps, (down, across), unit))
        ]
        within = ((0, 0),) * (by.instruction.warps.bit_length() - 1)
        group = self.threads.places(Layout.of(warp=(*within, *bits[1], *bits[0])))
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
            self.threads.store_slot(block, store.buf, number, value)

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
        pointer = self.threads.once(
            "llvm.ptrtoint", (self.threads.arena_pointer(),), f"{SHARED_POINTER} to i64"
        )
        spread = self.text.affine(self.text.top, moving)[1]
        spread = self.threads.once("arith.index_cast", (spread,), "index to i64")
        begin = self.threads.once("arith.addi", (pointer, spread), "i64")
        shift = self.text.const(str(UNIT_BYTES.bit_length() - 1), "i64")
        begin = self.threads.once("arith.shrui", (begin, shift), "i64")
        begin = self.threads.once("arith.ori", (begin, self.text.const(str(facts), "i64")), "i64")
        stage, _ = self.nests.in_stage(buf, arg.index)
        at = put("arith.index_cast", (self.threads.stage(block, buf, stage),), "index to i64")
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
        if not self.threads.device.copies_tiles or parts > 1:
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
        (place,) = self.threads.places(sent)
        loaded: list[str] = []
        for group in range(1 << (len(words) - len(matrices))):
            register = group << (within + len(matrices))
            (number,) = flat.place(register=register, step=step)
            at = self.threads.shared(block, buf, stage, place, start + number)
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
        values = [self.threads.slot(block, arg.buf, register).name for register in registers[step]]
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
        (place,) = self.threads.places(flat.only("lane", "warp"))
        count = _neighbours(flat, WIDEST_COPY_BYTES // buf.dtype.itemsize)
        words = count * buf.dtype.itemsize // REGISTER_BYTES
        values = []
        for register in registers[:: count if words else 1]:
            (number,) = flat.place(register=register, step=step)
            at = self.threads.shared(block, buf, stage, place, start + number)
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
