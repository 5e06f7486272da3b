"""Elements of tiles, computed and stored by the threads that hold them: what is made of products' sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest import reductions
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import InRange, Nest, Store
from pbkern.lower.nest.tiles.axes import tile_axes, tile_shape
from pbkern.lower.nest.tiles.layout import Layout
from pbkern.lower.nest.tiles.tiling import Tiling
from pbkern.targets.simt.emit.expressions import SimtWalk
from pbkern.targets.simt.emit.nests import THREAD

from .threads import TileThreads

# Sums of a row that a lane stores together: neighbours in the fragments of accumulators.
SUMS_BESIDE = 2


@dataclass
class TilePoints:
    """Emits a nest of a tile's elements, and reductions along its rows."""

    threads: TileThreads

    def __post_init__(self) -> None:
        self.text, self.nests = self.threads.text, self.threads.nests

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
        walk = self.threads.walk(nest, layout, inner)
        self._begin(inner, walk)
        for first in range(0, layout.size("register"), SUMS_BESIDE):
            points = []
            for register in range(first, first + SUMS_BESIDE):
                slots = {1: self._row_of(by, layout, rows, register), 2: register}
                point = self.threads.point(nest, layout, register, slots)
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
                self.threads.define_bits(symbol)
                block.values[symbol] = self.threads.device.other(
                    put, str(self.text.top.values[symbol])
                )

    def _by_rows(self, block: Block, nest: Nest, by: Tiling) -> None:
        """Reductions along rows, and what rows have once: by the lanes that hold a row together."""
        rows, *columns = nest.dims.values()
        held = by.held((rows,))
        layout = by.sums(rows, *columns) if columns else held
        shared = [not any(vector) for vector in held.vectors("lane")]
        team = 1 << sum(shared)
        assert all(shared[: sum(shared)]), "neighbouring lanes share a row"
        for row in range(held.size("register")):
            inner, walk = Block(block), self.threads.walk(nest, layout, block)
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
                point = self.threads.point(nest, layout, register, {1: row, 2: register})
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
            point = self.threads.point(nest, layout, registers[0], {1: row, 2: registers[0]})
            for store in nest.stores:
                if not (store.inner and nest.rdims):
                    is_own = store.buf.space == "registers"
                    also = None if is_own else self._is_first(team)
                    self.nests.write(walk, inner, point(store), also)
            block.take(inner)

    def _is_first(self, team: int) -> str:
        """Whether a thread is the first of the lanes that share a row."""
        index = self.text.index
        lane = self.threads.once("arith.andi", (THREAD, index(team - 1)), "index")
        return self.threads.once("arith.cmpi", (lane, index(0)), "index", " eq, %s, %s")

    @staticmethod
    def _row_of(by: Tiling, layout: Layout, rows: int, register: int) -> int:
        """The register of an array of rows that belongs to one of a tile's registers."""
        held = by.held((rows,))
        (row, *_) = layout.place(register=register)
        places = [held.place(register=number)[0] for number in range(held.size("register"))]
        return places.index(row)

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
