"""Costs of a run on a GPU: instructions, traffic, conflicts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pbkern.core.lazy_dataclass import dataclass

# Bytes that memory moves at once. Source: CUDA C++ Best Practices Guide, coalesced access.
SECTOR_BYTES = 32
# Banks of shared memory. Source: CUDA C++ Programming Guide, shared memory.
BANKS = 32
# Bytes of a word of a bank. Source: CUDA C++ Programming Guide, shared memory.
BANK_BYTES = 4
# Threads of a warp. Source: CUDA C++ Programming Guide, SIMT architecture.
WARP_THREADS = 32


@dataclass
class Counts:
    """Counts of one launch or of several.

    Attributes:
      instructions: of warps. barriers: that blocks have passed.
      global_bytes: that lanes loaded and stored. sectors: of 32 bytes that warps asked for at a
        time; fewest_sectors: those that so many different bytes take.
      shared_accesses: of warps, in passes of 32 banks. bank_conflicts: passes beyond the fewest.
    """

    instructions: int = 0
    barriers: int = 0
    global_bytes: int = 0
    sectors: int = 0
    fewest_sectors: int = 0
    shared_accesses: int = 0
    bank_conflicts: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )

    def add_global(
        self, addresses: np.ndarray, mask: np.ndarray | None, size: int, repeats: int, memo: Memo
    ) -> None:
        """One access of `size` bytes per lane at int64 addresses [rows, lanes], `repeats` times.

        `memo`: of the instruction.
        """
        lanes, sectors, different = memo.get(
            addresses, mask, SECTOR_BYTES, lambda: _traffic(addresses, mask, size)
        )
        self.global_bytes += lanes * size * repeats
        self.sectors += sectors * repeats
        self.fewest_sectors += different * repeats

    def add_shared(
        self, offsets: np.ndarray, mask: np.ndarray | None, size: int, memo: Memo
    ) -> None:
        """One access of `size` bytes per lane at offsets in a block's memory [rows, lanes]."""
        passes, fewest = memo.get(
            offsets, mask, BANKS * BANK_BYTES, lambda: _passes(offsets, mask, size)
        )
        self.shared_accesses += fewest
        self.bank_conflicts += passes - fewest


class Memo:
    """Costs of one instruction before, by the distances between its lanes' addresses and the first one's place in a period."""

    def __init__(self) -> None:
        self.known: dict[int, tuple] = {}

    def get(
        self,
        addresses: np.ndarray,
        mask: np.ndarray | None,
        period: int,
        count: Callable[[], tuple],
    ) -> tuple:
        taking = addresses if mask is None else addresses[mask]
        first = int(taking.flat[0])
        distances = taking - first
        before = self.known.get(first % period)
        if (
            before is not None
            and before[0].shape == distances.shape
            and (before[0] == distances).all()
        ) and (
            before[1] is mask
            or (before[1] is not None and mask is not None and np.array_equal(before[1], mask))
        ):
            return before[2]
        costs = count()
        self.known[first % period] = distances, mask, costs
        return costs


def _traffic(addresses: np.ndarray, mask: np.ndarray | None, size: int) -> tuple[int, int, int]:
    """(lanes, sectors that they touch, those that as many different bytes would take)."""
    return addresses.size if mask is None else int(np.count_nonzero(mask)), *_distinct(
        addresses, mask, size
    )


def _warps(values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """[warps, 32]; lanes that do not take part repeat the first that does; warps without any are left out."""
    rows, lanes = values.shape
    if lanes % WARP_THREADS:
        values = np.concatenate([values, np.repeat(values[:, -1:], -lanes % WARP_THREADS, 1)], 1)
        mask = (
            None
            if mask is None
            else np.concatenate([mask, np.zeros((rows, -lanes % WARP_THREADS), bool)], 1)
        )
    values = np.ascontiguousarray(values).reshape(-1, WARP_THREADS)
    if mask is None:
        return values
    mask = np.ascontiguousarray(np.broadcast_to(mask, (rows, mask.shape[1]))).reshape(
        -1, WARP_THREADS
    )
    some = mask.any(1)
    values, mask = values[some], mask[some]
    first = values[np.arange(len(values)), mask.argmax(1)]
    return np.where(mask, values, first[:, None])


def _distinct(addresses: np.ndarray, mask: np.ndarray | None, size: int) -> tuple[int, int]:
    """(sectors that warps touch, those that as many different bytes would take)."""
    by_warp = _warps(addresses, mask)
    if (by_warp[:, 1:] < by_warp[:, :-1]).any():
        by_warp = np.sort(by_warp, 1)
    step = by_warp[:, 1:] != by_warp[:, :-1]
    unique = 1 + np.count_nonzero(step, 1)
    first, last = by_warp // SECTOR_BYTES, (by_warp + size - 1) // SECTOR_BYTES
    touched = np.count_nonzero(first[:, 1:] != last[:, :-1], 1) + 1 + (last - first).sum(1)
    return int(touched.sum()), int((-(-unique * size // SECTOR_BYTES)).sum())


def _passes(offsets: np.ndarray, mask: np.ndarray | None, size: int) -> tuple[int, int]:
    """(passes that warps take, the fewest for so many different words).

    Lanes of 8 (16) bytes come in halves (quarters).
    """
    by_warp = _warps(offsets, mask)
    share = max(size // BANK_BYTES, 1)
    words = np.sort(
        (by_warp // BANK_BYTES if share == 1 else by_warp // size).reshape(
            -1, WARP_THREADS // min(share, WARP_THREADS)
        ),
        1,
    )
    fresh = np.concatenate([np.ones((len(words), 1), bool), words[:, 1:] != words[:, :-1]], 1)
    banks = words % (BANKS // min(share, BANKS))
    rows = np.repeat(np.arange(len(words)), words.shape[1]).reshape(words.shape)
    tally = np.bincount((rows * BANKS + banks)[fresh], minlength=len(words) * BANKS).reshape(
        -1, BANKS
    )
    return int(tally.max(1).sum()), len(words)
