"""Prefetches: rows of large operands that prefetchers do not follow.

They recognise lines that follow each other. A block that is narrower than its array starts a new
page with every row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pbkern.core.machine import PAGE_BYTES
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Buf, Load, Nest, Reduction
from pbkern.targets.cpu.machines.machine import FAR_BYTES

from .nest_schedule import NestSchedule, prefetched_by, scheduled

# Bytes of the longest run of neighbouring rows whose successor is prefetched. Runs of 6,560 bytes gain (prefetch_rows);
# longer ones were not measured.
LONGEST_FETCHED_RUN = 2 * PAGE_BYTES

# Bytes of the smallest array whose rows are prefetched by a sum over them. Programs that go through many such arrays find
# none in their caches: 512 x 512 floats, two threads, Zen 4: a vector times such matrices in turn 75 to 90 us, with
# prefetches 50 to 60; times one of them 12.7, 14.6. At half of this, 256 x 512 in turn gains from 70 to 55 us, and
# 384 x 1024 alone loses from 18.6 to 25.
LEAST_FETCHED_BYTES = 1 << 20


def is_far(buf: Buf, least_bytes: int = FAR_BYTES) -> bool:
    """Whether a buffer comes from memory or the last-level cache."""
    return not buf.root.arena and buf.size * buf.dtype.itemsize >= least_bytes


def is_matrix_product(nest: Nest, reduction: Reduction) -> bool:
    """Whether both operands of a product have rows of their own, so that each element is used many times."""
    rows = [
        {
            dim
            for dim in arg.symbols & nest.dims.keys()
            if dim not in nest.rdims and nest.dims[dim] > 1
        }
        for arg in reduction.args
    ]
    return reduction.is_product and all(rows)


def rows_ahead(load: Load, row: str, rows: int, least_bytes: int = FAR_BYTES) -> dict[Buf, int]:
    """Distance that a nest prefetches for a load, by buffer: so many steps of `row`, which walks far rows; else {}.

    least_bytes: of the smallest buffer that is far.
    """
    buf, index = load.access
    step = flat_coefficient(buf, index, row)
    fetches = is_far(buf, least_bytes) and step and abs(step) > 1
    return {buf.root: rows * step} if fetches else {}


def prefetch_rows(
    nest: Nest,
    schedule: NestSchedule,
    rows: int,
    followed_bytes: int,
    cached_bytes: int,
    counters: Collection[str] = (),
) -> Nest:
    """The nest that prefetches what it reads so many rows later, where rows are short or read in parts by its schedule.

    Args:
      nest: the nest.
      schedule: how it walks.
      rows: how many.
      followed_bytes: of the shortest row that prefetchers follow beside others; 0: they follow none.
      cached_bytes: of the largest array of which runs of several rows stay in the last-level cache. Measured on Zen 4, two
        threads: sums of 50 MB over the first and last axis 2.5 ms, with prefetches 1.45; of 7 MB 0.060, 0.064.
      counters: of loops around the nest, each step of which may read a part of another row.
    """
    # Operands of matrix products are read from the caches, or packed.
    if prefetched_by(nest) or any(
        is_matrix_product(nest, reduction) for reduction in nest.reductions
    ):
        return nest
    if schedule.transpose:
        return scheduled(nest, prefetched=_next_columns(nest, schedule))
    vector = schedule.along
    ahead: dict[Buf, int] = {}
    for load in nest.loads() if vector else ():
        if not isinstance(load, Load) or flat_coefficient(load.buf, load.index, vector) != 1:
            continue
        walked = _walked_dims(nest, load, vector)
        if not walked:
            ahead |= _next_steps(load, nest.dims[vector], rows, counters)
            continue
        item_bytes = load.buf.dtype.itemsize
        is_cached = load.buf.root.size * item_bytes <= cached_bytes
        longest = LONGEST_FETCHED_RUN // item_bytes
        row, run = _far_row(nest, schedule, walked[:1] if is_cached else walked, longest)
        is_followed = 0 < followed_bytes <= run * item_bytes
        if row is not None and not (nest.dims[row] <= rows and is_followed):
            least_bytes = LEAST_FETCHED_BYTES if row in nest.rdims else FAR_BYTES
            ahead |= rows_ahead(load, row, rows, least_bytes)
    return scheduled(nest, prefetched=ahead)


def _walked_dims(nest: Nest, load: Load, vector: str) -> list[tuple[int, str]]:
    """(elements between steps, dimension) of what a nest walks besides its vectors, nearest first.

    The nearest may have one step, as where each program has a row: the next program walks on.
    """
    steps = (
        (abs(flat_coefficient(load.buf, load.index, dim) or 0), dim)
        for dim in nest.dims
        if dim != vector
    )
    apart = sorted(step for step in steps if step[0])
    return apart[:1] + [(step, dim) for step, dim in apart[1:] if nest.dims[dim] > 1]


def _far_row(
    nest: Nest, schedule: NestSchedule, walked: Sequence[tuple[int, str]], longest: int
) -> tuple[str | None, int]:
    """(the dimension whose steps leave a run of neighbours, elements of the run).

    None where all are neighbours, and behind a run of several rows with more than `longest` elements.
    """
    vector = schedule.along
    run = nest.dims[vector]
    for step, row in walked:
        # Columns of a sum over rows are a register tile wide: one row's part is read after the other's.
        is_tile = row in nest.rdims and vector not in nest.rdims
        if step > (schedule.lanes * schedule.unroll if is_tile else run):
            return row, run
        run = max(run, step * nest.dims[row])
        if run > longest:
            break
    return None, run


def _next_steps(load: Load, run: int, rows: int, counters: Collection[str]) -> dict[Buf, int]:
    """Distance that later steps of a loop read ahead, where each reads `run` elements of a row of its own.

    Measured on Zen 4, two threads, float32: a linear recurrence of 1,000 steps of 4,096 in programs of 128 takes 1.15 ms, with
    prefetches 0.60. Numbers that a whole vector shares gain nothing: a state space model of 256 channels takes 1.47 with both.
    """
    for counter in counters:
        step = flat_coefficient(load.buf, load.index, counter)
        if step and abs(step) > run:
            return rows_ahead(load, counter, rows)
    return {}


def _next_columns(nest: Nest, schedule: NestSchedule) -> dict[Buf, int]:
    """Distance of the columns that follow those of a square of rows, by buffer.

    A nest that transposes takes a vector of columns along all rows before the next columns: each line is of a page of its own.
    Measured on Zen 4, one thread, float32, a.T @ b of 32000 x 512 x 64: 27.3 ms, with prefetches 24.3.
    """
    return {
        load.buf.root: schedule.lanes
        for load in nest.loads()
        if isinstance(load, Load)
        and is_far(load.buf)
        and flat_coefficient(load.buf, load.index, schedule.transpose or "") == 1
        and abs(flat_coefficient(load.buf, load.index, schedule.along or "")) > schedule.lanes
    }
