"""A nest that an instruction on tiles multiplies -> loads of tiles, products, stores of results.

Accumulators stay in tile registers through the loop over the depth. The innermost points of the nest, its schedule's
`instruction_dims`, are those of one instruction.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.mlir.operation import TILE
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.addresses import flat_coefficient, flat_index
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Op
from pbkern.targets.cpu.schedule.instructions import (
    POINTER,
    tile_call,
    tile_operands,
)
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule

from .addressing import Point, memref

# LLVM's intrinsics. The streamed operand is read once for each pair of rows of tiles, and kept out of the first cache.
ZERO = "tilezero"
LOAD = "tileloadd64"
STREAMED_LOAD = "tileloaddt164"
STORE = "tilestored64"


def is_tile_product(nest: Nest) -> bool:
    """Whether an instruction on tiles multiplies the nest."""
    return any(
        reduction.by is not None and reduction.by.is_of_tiles for reduction in nest.reductions
    )


class TileProducts:
    """Emits such nests into blocks of `text`."""

    def __init__(self, text: Text):
        self.text = text

    def emit(self, block: Block, nest: Nest, sched: NestSchedule) -> None:
        """Appends the nest: loops in the schedule's order, inside of which the points of `jam` are one step."""
        top = Block(block)
        top.values |= dict.fromkeys((*sched.instruction_dims, *sched.jam), 0)
        loads = [arg for reduction in nest.reductions for arg in reduction.args]
        buffers = [
            *(load.buf for load in loads if isinstance(load, Load)),
            *(store.buf for store in nest.stores),
        ]
        starts = {buf: self._start(top, buf) for buf in buffers}
        self._loops(_TileStep(self.text, nest, sched, starts), top, sched.order)
        block.take(top)

    def _start(self, block: Block, buf: Buf) -> str:
        """The address of a buffer."""
        types = f"{memref(buf)} -> index"
        start = self.text.put(
            block, "memref.extract_aligned_pointer_as_index", (buf.root.name,), types
        )
        number = self.text.put(block, "arith.index_cast", (start,), "index to i64")
        return self.text.put(block, "llvm.inttoptr", (number,), f"i64 to {POINTER}")

    def _loops(self, step: _TileStep, block: Block, order: Sequence[str]) -> None:
        if not order:
            step.emit(block)
            return

        def fill(inner: Block, _: list[Ssa]) -> list[Ssa]:
            self._loops(step, inner, order[1:])
            return []

        self.text.loop(block, order[0], 0, step.nest.dims[order[0]], 1, fill)


@dataclass(frozen=True)
class _TileStep:
    """Tiles that registers hold together. starts: addresses of buffers."""

    text: Text
    nest: Nest
    sched: NestSchedule
    starts: Mapping[Buf, str]

    def emit(self, block: Block) -> None:
        """Accumulators, the loop over the depth, stores."""
        (reduction,), (store,) = self.nest.reductions, self.nest.stores
        assert reduction.by is not None
        multiply, jam = reduction.by.emit, self.sched.jam
        row, _, word = self.sched.instruction_dims
        (depth,) = (rdim for rdim in self.nest.rdims if rdim != word)
        offsets = itertools.product(*(range(count) for count in jam.values()))
        points: list[Point] = [dict(zip(jam, offset)) for offset in offsets]

        def multiplied(inner: Block, accumulators: list[Ssa]) -> list[Ssa]:
            first, second = reduction.args
            rows = self._tiles(inner, first, points, row, LOAD)
            columns = self._tiles(inner, second, points, word, STREAMED_LOAD)
            b = self.text.builder(inner, 0)
            return [multiply(b, acc, pair) for acc, *pair in zip(accumulators, rows, columns)]

        adds = isinstance(store.value, Op)  # to what is there
        accumulators = [
            self._loaded(block, store.buf, store.index, point, row, LOAD)
            if adds
            else self._tile(block, ZERO)
            for point in points
        ]
        accumulators = self.text.loop(
            block, depth, 0, self.nest.dims[depth], 1, multiplied, accumulators
        )
        for point, accumulator in zip(points, accumulators):
            place = self._place(block, store.buf, store.index, point, row)
            operands, types = (*place, accumulator.name), (POINTER, "i64", TILE)
            b = self.text.builder(block, 0)
            block.add("llvm.call_intrinsic", *tile_operands(b, STORE, operands, types, "()"))

    def _tiles(
        self, block: Block, operand: Expr, points: Sequence[Point], along: str, name: str
    ) -> list[Ssa]:
        """An operand's tile for each point; points that share one load it once."""
        assert isinstance(operand, Load)
        tiles: dict[tuple[int, ...], Ssa] = {}
        keys = [
            tuple(offset for dim, offset in point.items() if dim in operand.symbols)
            for point in points
        ]
        for key, point in zip(keys, points):
            if key not in tiles:
                tiles[key] = self._loaded(block, operand.buf, operand.index, point, along, name)
        return [tiles[key] for key in keys]

    def _loaded(
        self, block: Block, buf: Buf, index: Sequence[Affine], point: Point, along: str, name: str
    ) -> Ssa:
        place = self._place(block, buf, index, point, along)
        return self._tile(block, name, place, (POINTER, "i64"))

    def _tile(
        self, block: Block, name: str, operands: Sequence[str] = (), types: Sequence[str] = ()
    ) -> Ssa:
        return Ssa(tile_call(self.text.builder(block, 0), name, operands, types), TILE, 0)

    def _place(
        self, block: Block, buf: Buf, index: Sequence[Affine], point: Point, along: str
    ) -> tuple[str, str]:
        """(address of a tile's first row, bytes between its rows, which follow one another along a dimension)."""
        flat = flat_index(buf, index)
        extra = sum(flat.coefficient(dim) * offset for dim, offset in point.items())
        _, element = self.text.affine(block, flat, extra)
        number = self.text.put(block, "arith.index_cast", (element,), "index to i64")
        types = f"({POINTER}, i64) -> {POINTER}, {mlir_type(storage_el(buf.dtype))}"
        address = self.text.put(
            block, "llvm.getelementptr", (self.starts[buf], number), types, " %s[%s]"
        )
        step = flat_coefficient(buf, index, along) * buf.dtype.itemsize
        return address, self.text.const(str(step), "i64")
