"""Sizes by which the fuser chooses, for all targets so far."""

from __future__ import annotations

from pbkern.core.machine import LINE_BYTES
from pbkern.fuse.cost.sizes import Sizes

# Keys of attention that are left out together where a mask hides them. A power of two: strip
# numbers are shifts.
MASK_STRIP = 64

# Rows in multiples of a register tile's, columns of whole vectors. Bytes were measured on Zen 5 and
# Zen 4: of far rows, parts of 512 bytes came at 14 GB/s, of a page at 22 of 25.
SIZES = Sizes(
    line_bytes=LINE_BYTES,
    mask_strip=MASK_STRIP,
    tile_rows=(6, 12, 24, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    tile_columns=(64, 128, 256, 512, 1024),
    # Its sums fit the first cache. 1 x 4096 x 4096 on Zen 3, ms: one thread 6.4 with parts of 1024, 4.5 with one of 4096; two
    # threads 4.8 and, with 2048 each, 3.8. 28 November 2026.
    longest_row_part=4096,
    matrix_types=frozenset(),
    matrix_tiles=(),
    matrix_columns=(),
    held_words=0,
    held_bytes=0,
    stage_bytes=1 << 18,
    far_row_bytes=1 << 12,
    short_row_bytes=1 << 14,
    split_result_bytes=1 << 17,
    split_operand_bytes=1 << 20,
    scatter_cycles=200_000,  # Source: not recorded.
    updates_per_result=4,  # Source: not recorded.
    busy_programs=2,
    fewest_chunks=8,
    shortest_chunk=32,
    turned_side=0,
    leaves_out_hidden=True,
    cuts_planes=False,
    # From 64 elements on a step took as long in a kernel as with a launch for each (Zen 4, five bodies, 27 November 2026).
    loop_elements=256,
    # 300 lines of 8 states: programs of 256 elements 0.81 ms, 512 0.77, 2048 0.40, 8192 0.41. Zen 4, 29 November 2026.
    shared_loop_elements=2048,
    # With fewer, instructions of a step wait for each other, and two programs take as long as one: Lorenz's equations, 4000
    # steps of 128, one program 79 us, two 41; a linear recurrence of 64 42 us, two 42; Kalman's filter of 64 series 45, two 62.
    # Zen 4, 29 November 2026.
    independent_elements=64,
    square_side=256,  # Source: not recorded.
    line_parts=(64, 256, 512, 1024, 2048),
    even_part=1,
    # 100 planes of 100 x 100 as blocks of 16 x 40 rows 0.089 ms, of 20 x 50 0.070. Zen 4, 28 November 2026.
    equal_parts=True,
)
