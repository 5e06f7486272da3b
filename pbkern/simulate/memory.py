"""Memory of a launch: arrays at addresses far apart, shared and local memory of blocks, and who has touched what.

Each cell of memory that a kernel writes to has two marks: who wrote it last, and who has read it
since. A mark is block, number of barriers that the block had passed, thread. Two accesses, of which
one is a store, race if different threads of one block make them with no barrier between, or
different blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Bits of an address below its array's number, so that arrays are far apart. Source: not recorded.
ARRAY_BITS = 40
# The address at which an array begins, in bytes: in the middle, so that places before it are seen.
ARRAY_BEGIN = 1 << (ARRAY_BITS - 1)
# The generic address at which local memory begins, in bytes.
LOCAL_BEGIN = 1 << (ARRAY_BITS - 2)
# Bits of a mark for the thread: a block has at most 1024 threads.
THREAD_BITS = 12
# Bits of a mark for the number of barriers that the block has passed.
EPOCH_BITS = 28
# Bits of a mark below the number of the block.
BLOCK_SHIFT = THREAD_BITS + EPOCH_BITS
# In place of a mark's thread: several threads have read the cell.
MANY_THREADS = (1 << THREAD_BITS) - 1
# In place of a mark: several blocks have read the cell.
MANY_BLOCKS = np.int64(1 << 62)


OF_BLOCKS = "blocks wait for no others: let each store elements of its own, or run programs in order (dimension_semantics)"


class Fault(Exception):
    """Fault of an access: `kind` of errors.SimulationError, a sentence, what to try, if that is not the kind's."""

    def __init__(self, kind: str, what: str, hint: str = ""):
        super().__init__(what)
        self.kind, self.what, self.hint = kind, what, hint


class Shadow:
    """Marks of cells of `size` bytes."""

    def __init__(self, cells: int, size: int):
        self.size = size
        self.written, self.read = np.zeros(cells, np.int64), np.zeros(cells, np.int64)

    def store(self, cells: np.ndarray, base: np.ndarray, marks: np.ndarray) -> None:
        """Raises Fault if another has touched a cell.

        `base`: marks of thread 0 of the lanes' blocks at this time.
        """
        for before, deed in ((self.written[cells], "wrote"), (self.read[cells], "read")):
            _check(before, base, marks, f"stores what another {deed}")
        self.written[cells] = marks
        lost = self.written[cells] != marks
        if lost.any():
            first = int(np.argmax(lost))
            mine, other = marks.ravel()[first], self.written[cells].ravel()[first]
            apart = mine >> BLOCK_SHIFT != other >> BLOCK_SHIFT
            raise Fault(
                "race",
                f"threads {_thread(mine)} and {_thread(other)} store to one element at the same time",
                OF_BLOCKS if apart else "",
            )

    def load(self, cells: np.ndarray, base: np.ndarray, marks: np.ndarray) -> None:
        """Raises Fault if another has written a cell."""
        _check(self.written[cells], base, marks, "loads what another wrote")
        before = self.read[cells]
        fresh = before < base  # of an earlier time, or of another block
        other = (before >> BLOCK_SHIFT != marks >> BLOCK_SHIFT) & (before != 0)
        new = np.where(fresh | (before == marks), marks, base + MANY_THREADS)
        new = np.where(other, MANY_BLOCKS, new)
        self.read[cells] = new
        lost = self.read[cells] != new  # several lanes, one cell
        if lost.any():
            both = np.where(
                (self.read[cells] >> BLOCK_SHIFT) != (new >> BLOCK_SHIFT),
                MANY_BLOCKS,
                base + MANY_THREADS,
            )
            self.read[cells[lost]] = both[lost]


def _check(before: np.ndarray, base: np.ndarray, marks: np.ndarray, deed: str) -> None:
    block = before >> BLOCK_SHIFT != marks >> BLOCK_SHIFT
    bad = (before != 0) & (before != marks) & (block | (before >= base))
    if bad.any():
        first = int(np.argmax(bad))
        what = f"thread {_thread(marks[first])} {deed}"
        if block[first]:
            raise Fault("race", f"{what}: a thread of another block", OF_BLOCKS)
        raise Fault("race", f"{what}: another thread of its block, with no barrier between")


def _thread(mark: np.int64) -> str:
    return f"{int(mark) & MANY_THREADS} of block {(int(mark) >> BLOCK_SHIFT) - 1}"


class Arrays:
    """Global memory: NumPy arrays, by numbers from 0.

    Args:
      written: those to which the kernel may store. smallest: bytes of its smallest access.
    """

    def __init__(self, arrays: Sequence[np.ndarray], written: set[int], check: bool, smallest: int):
        self.flat = [array.reshape(-1).view(np.uint8) for array in arrays]
        self.views: dict[tuple[int, np.dtype, int], np.ndarray] = {}
        cells = {
            k: max(min(array.itemsize, smallest), 1)
            for k, array in enumerate(arrays)
            if check and k in written
        }
        self.shadows = {k: Shadow(arrays[k].nbytes // size + 1, size) for k, size in cells.items()}

    @staticmethod
    def address(number: int) -> int:
        """Address where an array begins."""
        return ((number + 1) << ARRAY_BITS) + ARRAY_BEGIN

    @staticmethod
    def number(address: Any) -> Any:
        """The array that an address is of, or near; below 0 and beyond the last: of none."""
        return (address >> ARRAY_BITS) - 1

    def find(self, addresses: np.ndarray, size: int) -> tuple[int, np.ndarray]:
        """(number of the array that all of the addresses are in, their offsets in bytes).

        Raises Fault.
        """
        low, high = int(addresses.min()), int(addresses.max())
        number = self.number(low)
        if not 0 <= number < len(self.flat):
            raise Fault("bounds", f"address {low:#x} is in no array")
        start = self.address(number)
        if low < start or high + size > start + len(self.flat[number]):
            at = low - start if low < start else high - start
            raise Fault(
                "bounds", f"byte {at} of array {number}, which has {len(self.flat[number])}"
            )
        offsets = addresses - start
        _check_alignment(offsets, size)
        return number, offsets

    def view(self, number: int, dtype: np.dtype, count: int) -> np.ndarray:
        """The array as elements, or as rows of `count` of them."""
        key = (number, dtype, count)
        if key not in self.views:
            flat, whole = self.flat[number], dtype.itemsize * count
            flat = flat[: len(flat) // whole * whole].view(dtype)
            self.views[key] = flat.reshape(-1, count) if count > 1 else flat
        return self.views[key]


def _check_alignment(offsets: np.ndarray, size: int) -> None:
    if size > 1 and int(np.bitwise_or.reduce(offsets, axis=None)) & (size - 1):
        raise Fault("bounds", f"an access of {size} bytes is not at a multiple of {size}")


class BlockMemory:
    """Memory of which every row, a block or a thread, has its own `size` bytes."""

    def __init__(self, what: str, rows: int, size: int, cell: int, check: bool):
        self.what, self.size = what, size
        self.stride = -(-max(size, 1) // 16) * 16
        self.flat = np.zeros(rows * self.stride, np.uint8)
        self.shadow = Shadow(len(self.flat) // cell, cell) if check else None
        self.under_way: np.ndarray | None = None  # bytes to which copies are made
        # Of each byte, where products read memory by themselves: 1 + the thread whose store no fence has followed, 0 for none.
        self.unfenced: np.ndarray | None = None
        # Of each byte: products under way that read it.
        self.readers: np.ndarray | None = None

    def watch_products(self) -> None:
        """From here on stores and products that read memory by themselves are checked against each other."""
        self.unfenced = np.zeros(len(self.flat), np.int16)
        self.readers = np.zeros(len(self.flat), np.int16)

    def stored(self, places: np.ndarray, size: int, threads: np.ndarray) -> None:
        """Notes who stores to `size` bytes from places on. Raises Fault where a product under way reads them."""
        if self.unfenced is None or self.readers is None:
            return
        for byte in range(size):
            if self.readers[places + byte].any():
                raise Fault(
                    "race",
                    f"a product that is under way reads these bytes of {self.what} memory",
                    "wait for the product's group, then let all threads of the block wait for each other",
                )
            self.unfenced[places + byte] = threads + 1

    def fence(self, lanes: np.ndarray) -> None:
        """Makes what these threads, [rows, threads], have stored visible to products."""
        if self.unfenced is None:
            return
        writers = self.unfenced.reshape(len(lanes), -1)
        rows, bytes_ = np.nonzero(writers)
        done = lanes[rows, writers[rows, bytes_] - 1]
        writers[rows[done], bytes_[done]] = 0

    def read_by_products(self, places: np.ndarray) -> None:
        """Raises Fault where stores are not fenced."""
        assert self.unfenced is not None
        assert self.readers is not None
        if self.unfenced[places].any():
            raise Fault(
                "race",
                f"a product reads bytes of {self.what} memory whose store no fence has followed",
                "fence.proxy.async by the thread that stores, before threads wait for each other",
            )
        np.add.at(self.readers, places.reshape(-1), 1)

    def left_by_products(self, places: np.ndarray) -> None:
        """Products that read these bytes have ended."""
        assert self.readers is not None
        np.subtract.at(self.readers, places.reshape(-1), 1)

    def begin(self, places: np.ndarray) -> None:
        """Marks bytes that a copy will store."""
        if self.under_way is None:
            self.under_way = np.zeros(len(self.flat), bool)
        self.under_way[places] = True

    def end(self, places: np.ndarray) -> None:
        """Takes marks of copies off."""
        assert self.under_way is not None
        self.under_way[places] = False

    def _check_ended(self, places: np.ndarray, size: int) -> None:
        """Raises Fault where copies to bytes are under way."""
        if self.under_way is None:
            return
        for byte in range(size):
            if self.under_way[places + byte].any():
                raise Fault(
                    "race",
                    f"a copy to these bytes of {self.what} memory is under way",
                    "wait for the copy's group, then let all threads of the block wait for each other",
                )

    def find(self, offsets: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
        """Places in bytes. Raises Fault."""
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high + size > self.size:
            raise Fault(
                "bounds",
                f"byte {low if low < 0 else high} of {self.what} memory, which has {self.size}",
            )
        _check_alignment(offsets, size)
        places = offsets + rows * self.stride
        self._check_ended(places, size)
        return places

    def part(self, blocks: np.ndarray) -> BlockMemory:
        """A copy of the memory of some blocks, given as a mask."""
        part = BlockMemory(self.what, 0, self.size, 1, False)
        part.flat = self.flat.reshape(len(blocks), -1)[blocks].reshape(-1)
        if self.unfenced is not None and self.readers is not None:
            part.unfenced = self.unfenced.reshape(len(blocks), -1)[blocks].reshape(-1)
            part.readers = self.readers.reshape(len(blocks), -1)[blocks].reshape(-1)
        if self.shadow is not None:
            part.shadow = Shadow(0, self.shadow.size)
            part.shadow.written = self.shadow.written.reshape(len(blocks), -1)[blocks].reshape(-1)
            part.shadow.read = self.shadow.read.reshape(len(blocks), -1)[blocks].reshape(-1)
        return part

    def view(self, dtype: np.dtype, count: int) -> np.ndarray:
        flat = (
            self.flat.view(dtype)
            if len(self.flat) % dtype.itemsize == 0
            else self.flat[:0].view(dtype)
        )
        return flat.reshape(-1, count) if count > 1 else flat

    def check_written(self, cells: np.ndarray) -> None:
        """Raises Fault for cells that nobody has written."""
        assert self.shadow is not None
        if (self.shadow.written[cells] == 0).any():
            raise Fault(
                "uninitialised", f"{self.what} memory is read before anything is stored there"
            )
