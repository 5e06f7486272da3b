"""Statements -> place of every scratch buffer in a task's arena. Buffers that are never alive together share bytes.

A buffer lives from the first to the last top-level statement that touches it; what a loop touches
lives through the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from . import effects
from .ir import Buf, Stmt
from .tiles.layout import Swizzle

# Bytes: buffers of scratch memory and arrays of programs start at multiples of a cache line.
BUFFER_ALIGNMENT = 64


def padded_bytes(buf: Buf) -> int:
    """Bytes of a buffer in the arena."""
    size = max(buf.size, 1) * max(buf.dtype.itemsize, 1)
    return -(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


def alignment(buf: Buf) -> int:
    """Bytes of which a buffer's first place is a multiple: instructions that read swizzled tiles swizzle addresses."""
    pattern = buf.layout.window * buf.dtype.itemsize if isinstance(buf.layout, Swizzle) else 0
    return max(pattern, BUFFER_ALIGNMENT)


def place(
    stmts: Sequence[Stmt], start: int, fixed: Iterable[Buf] = ()
) -> tuple[dict[Buf, int], int]:
    """(byte offset of each arena buffer that `stmts` touch, end of the last), from byte `start` on.

    `fixed` buffers have their place already.
    """
    lives: dict[Buf, tuple[int, int]] = {}
    for at, stmt in enumerate(stmts):
        for buf in effects.touched([stmt]):
            if buf.arena and buf not in fixed:
                lives[buf] = (lives.get(buf, (at, at))[0], at)
    placed: dict[Buf, int] = {}
    end = start
    taken = np.zeros(
        (len(lives), 4), np.int64
    )  # of buffers that have their place: first and last statement, bytes
    # By name at last: sets of buffers have no order that another process would repeat.
    for k, buf in enumerate(
        sorted(lives, key=lambda live: (-padded_bytes(live), lives[live], live.name))
    ):
        (first, last), size, at = lives[buf], padded_bytes(buf), start
        step = alignment(buf)
        at = -(-at // step) * step
        beside = taken[:k][(taken[:k, 0] <= last) & (first <= taken[:k, 1]), 2:]
        for low, high in sorted(beside.tolist()):
            if at + size <= low:
                break
            at = max(at, -(-high // step) * step)
        placed[buf], taken[k] = at, (first, last, at, at + size)
        end = max(end, at + size)
    return placed, end
