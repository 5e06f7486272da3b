"""Copies to tiles: begun by threads and made by the device, or made by threads, vector by vector."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.async_copies import copied, masked_load
from pbkern.lower.nest.conditions.index_tests import Folder
from pbkern.lower.nest.ir import Buf, InRange, Nest, Store
from pbkern.lower.nest.tiles.axes import tile_axes, tile_shape
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.targets.simt.emit.expressions import SimtWalk
from pbkern.targets.simt.emit.nests import THREAD
from pbkern.targets.simt.schedule.copies import copied_at_once

from .threads import SHARED_POINTER, TileThreads

# Type of pointers to arrays.
GLOBAL_POINTER = "!llvm.ptr<1>"
# Most copies of a thread that are written out one after the other, where they are no tile's. Source: not recorded.
MOST_WRITTEN_COPIES = 8


@dataclass
class TileCopies:
    """Emits copies of a tile's chunks."""

    threads: TileThreads

    def __post_init__(self) -> None:
        self.text, self.nests = self.threads.text, self.threads.nests

    def by_device(self, block: Block, nests: Sequence[Nest]) -> None:
        """Begins one group of copies."""
        for nest in nests:
            by, axes = Chunking(copied_at_once(nest), self.threads.count), tile_axes(nest)
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
            to = self.threads.shared(inner, store.buf, stage, place - place.const, place.const)
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
            to = self.threads.moved(inner, self.threads.arena_pointer(), far, SHARED_POINTER, "i32")
            self._copy(walk, inner, dims, by.count, to)

        def step(outer: Block, _: Any) -> list:
            inner = Block(outer)
            inner.values["%thread"] = THREAD
            place = Affine.symbol("%step", self.threads.count) + Affine.symbol("%thread")
            number = text.affine(inner, place)[1]
            facts = (number, text.index(chunks)), "index", " ult, %s, %s"
            some = [text.put(inner, "arith.cmpi", *facts)] if chunks % self.threads.count else []
            text.when_all(inner, some, lambda body: copy(body, number))
            outer.take(inner)
            return []

        steps = -(-chunks // self.threads.count)
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
            [self.threads.once("arith.cmpi", (THREAD, size), "index", " ult, %s, %s")]
            if layout.size("thread") < self.threads.count
            else []
        )
        self.text.when_all(block, some, emit_all)

    def _chunk_place(self, nest: Nest, by: Chunking, register: int) -> dict[str, Affine]:
        """Row and column of one of a thread's points."""
        return self.threads.tile_place(nest, by.held(tile_shape(tile_axes(nest))), register)

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
        start = self.threads.moved(block, self._array(load.buf), at, GLOBAL_POINTER, "i64")
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
        pointer = self.threads.pointer(base, kind, "!llvm.ptr")
        return self.threads.once("llvm.addrspacecast", (pointer,), f"!llvm.ptr to {GLOBAL_POINTER}")

    def by_threads(self, block: Block, nest: Nest, by: Chunking) -> None:
        """Points of a nest by chunks, each of which is loaded and stored by whole vectors."""
        inner = Block(block)
        walk = self.threads.walk(nest, by.held(tile_shape(tile_axes(nest))), inner)
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
            self.threads.point(nest, layout, first + number, {2: first + number})
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
                block.add("llvm.store", (vector, at), f"{kind}, {self.threads.private_pointer}")
                continue
            stage, place = self.nests.in_stage(store.buf, group[0].index)
            pointer = self.threads.shared(block, store.buf, stage, place - place.const, place.const)
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
            inner.add("llvm.store", (vector, at), f"{kind}, {self.threads.private_pointer}")

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
        start = self.threads.pointer(
            slots.name, self.nests.placement.memref(slots), self.threads.private_pointer
        )
        types = f"({self.threads.private_pointer}) -> {self.threads.private_pointer}, i8"
        number = first * slots.dtype.itemsize
        return self.text.put(block, "llvm.getelementptr", (start,), types, f" %s[{number}]")
