"""Rows of operands in caches: which evict or delay one another, and when copies of them pay."""

from __future__ import annotations

import math
from typing import Protocol

from pbkern.core.machine import LINE_BYTES

# Rows of operands this many bytes apart, or a multiple, share few cache sets. Source: 64 sets of
# 64-byte lines.
CONFLICT_BYTES = 2048
# Points that must share such rows before copying them apart pays. Source: not recorded.
ROW_REUSE = 256
# Columns for which a copy pays of rows whose elements are in lines apart, more lines than the
# nearest cache holds.
SCATTERED_REUSE = 48
# Cycles of transposing one element of a contraction in registers, between caches.
TRANSPOSE_CYCLES = 0.5
# A load waits for an earlier store whose address is the same modulo this many bytes (4K aliasing).
# Measured on AMD Zen 4, Jacobi 2048^2: 24 ms with rows 8256 bytes apart, 20 with 8320.
ALIAS_BYTES = 4096
# Bytes between two such addresses below which they count as the same. Measured the same way.
ALIAS_NEAR_BYTES = 576
# Last rows whose stores a load may wait for. Measured the same way.
ALIAS_ROWS = 5
# Pages that the nearest tables do not hold (64 entries on Zen 3 and Golden Cove), rows of two in
# each.
MANY_PAGES = 128
# Rows up to which the second cache gives what the nearest one does not hold as soon as multiply-adds take it. Measured on
# Zen 4, one thread, float32, 2048 x depth x 2048, ms with copies and without: depth 16 1.87 and 1.43, 32 2.98 and 2.63, 64 5.43
# and 5.21, 124 10.1 and 9.8; 512 x 100 x 4096 4.20 and 4.36.
FEW_CONFLICTING_ROWS = 64
# Such rows where vectors are parts of a line, and a tile takes one line of each. Measured the same way with AVX2: 2048 x depth
# x 2048, depth 16 1.68 and 1.71, 24 2.38 and 3.13, 32 3.17 and 4.04, 48 4.36 and 4.82; 64 x 32 x 4096 0.173 and 0.236.
FEW_ROWS_OF_PARTS = 16


def rows_alias(stride: int) -> bool:
    """Whether loads of a row wait for stores to neighbouring rows, `stride` bytes apart."""
    apart = (k * stride % ALIAS_BYTES for k in range(1, ALIAS_ROWS + 1))
    return any(min(distance, ALIAS_BYTES - distance) < ALIAS_NEAR_BYTES for distance in apart)


class Caches(Protocol):
    """Caches of a core, as a machine or options of lowering describe them: bytes, and lines of one set."""

    @property
    def l1_bytes(self) -> int: ...

    @property
    def l1_ways(self) -> int: ...


class BothCaches(Caches, Protocol):
    """The second cache as well, and vectors, in bits."""

    @property
    def l2_bytes(self) -> int: ...

    @property
    def vector_bits(self) -> int: ...


def fit(rows: int, apart: int, caches: Caches) -> bool:
    """Whether lines of so many rows, `apart` bytes from one another, stay in the first cache; 0 bytes: that is not known."""
    if not apart:
        return True
    way_bytes = caches.l1_bytes // caches.l1_ways
    sets = way_bytes // math.gcd(apart, way_bytes)
    return rows <= caches.l1_ways * min(sets, way_bytes // LINE_BYTES)


def are_apart(rows: int, step: int, span: int, caches: BothCaches) -> bool:
    """Whether a few columns of so many rows, `step` bytes from one another, `span` in all, are better read from a copy.

    Rows far apart need an entry of the page tables each, and may evict one another from the first
    cache; near ones are worth a copy only where all of them leave the second cache.
    """
    if step >= CONFLICT_BYTES:
        is_line = caches.vector_bits >= 8 * LINE_BYTES
        few = FEW_CONFLICTING_ROWS if is_line else FEW_ROWS_OF_PARTS
        return rows >= MANY_PAGES or (rows > few and not fit(rows, step, caches))
    return span > caches.l2_bytes // 2
