"""Transposes of large arrays -> loops over tiles whose lines and pages stay near.

    for 16 columns of x at a time:               for each strip of rows of x:
        for all rows of x: a line of each   ->       for 16 columns of x at a time:
                                                         for the rows of the strip: a line of each

The next columns are in the same pages, and many begin in the same lines. All rows together have more pages than the processor
has translations of addresses at hand, and more lines than a near cache holds.
"""

from __future__ import annotations

import math

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import LINE_BYTES, PAGE_BYTES
from pbkern.core.passes import threshold
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Load, Nest, Stmt, with_nests
from pbkern.lower.passes.strips.strip_mining import Chain, NestRun, StripLimits, StripMinedLoop
from pbkern.targets.cpu.schedule.prefetch import is_far
from pbkern.targets.cpu.schedule.register_tiles.choice import choose


@dataclass(frozen=True)
class TileLimits(StripLimits):
    """Limits of tiles that transposes walk."""

    # 6001 x 4003 floats, two threads, Zen 4: 14.6 ms without tiles; with tiles that are a half of the cache 9.5, a quarter
    # 9.6, an eighth 10.3. 3072 x 2048: 2.1 without, 1.1 to 1.4 with.
    tile_share: int = threshold(2, "tiles of transposes that the private cache holds")
    tile_columns: int = threshold(
        512, "columns of the widest tile: rows of the result, each of which is in a page of its own"
    )


def in_tiles(nest: Nest, context: NestContext, limits: TileLimits) -> list[Stmt] | None:
    """A nest that transposes far rows as loops over tiles of them; None where all are near, or are walked once."""
    schedule = choose(nest, context.options.vectors)
    rows, columns = schedule.vector, schedule.transpose
    if rows is None or columns is None or rows in nest.rdims or nest.ordered:
        return None
    jam = schedule.jam.get(columns, 1)
    near_bytes = context.options.l2_bytes // limits.tile_share
    walked_bytes = nest.dims[rows] * min(_bytes_apart(nest, rows), PAGE_BYTES)
    if nest.dims[columns] <= jam or walked_bytes <= near_bytes:
        return None
    if nest.dims[columns] > limits.tile_columns:
        strips = _strips(nest, columns, limits.tile_columns // jam * jam, context, limits)
        return strips and with_nests(strips, lambda part: in_tiles(part, context, limits) or [part])
    step = schedule.lanes * schedule.unroll
    length = near_bytes // _part_bytes(nest, columns) // step * step
    return _strips(nest, rows, length, context, limits)


def _strips(
    nest: Nest, dim: str, length: int, context: NestContext, limits: TileLimits
) -> list[Stmt] | None:
    chain = Chain.find(NestRun([nest]), {0: dim})
    if chain is None or not 0 < length < nest.dims[dim]:
        return None
    return StripMinedLoop(chain, length, set(), context, limits.many_strips).statements()


def _bytes_apart(nest: Nest, rows: str) -> int:
    """Bytes between neighbouring rows of the far operand whose rows are furthest apart."""
    steps = (
        abs(flat_coefficient(load.buf, load.index, rows) or 0) * load.buf.dtype.itemsize
        for load in nest.loads()
        if isinstance(load, Load) and is_far(load.buf)
    )
    return max(steps, default=0)


def _part_bytes(nest: Nest, columns: str) -> int:
    """Bytes of whole lines that hold the columns of a row, of all operands."""
    sizes = (
        load.buf.dtype.itemsize * nest.dims[columns]
        for load in nest.loads()
        if isinstance(load, Load) and columns in load.symbols
    )
    return sum((math.ceil(size / LINE_BYTES) + 1) * LINE_BYTES for size in sizes)
