"""Thresholds of packing, which its files read several calls deep."""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold


@dataclass(frozen=True)
class PackLimits:
    """When an operand is copied, a product cut into runs, or vectors moved to another dimension."""

    # Panels (panels/panels.py)
    panel_reuse: int = threshold(
        8,
        "points that share an element before a panel of it pays. Measured on Zen 3, float32, 12 x 1000 x 517: 0.23 ms with "
        "panels, 0.30 without; 8 x 1000 x 517: 0.19 and 0.20",
    )
    far_panel_reuse: int = threshold(
        20,
        "such points where far rows are taken a few at a time otherwise. Measured on Zen 3, float32, 12 x 4096 x 4096: 13 ms "
        "with panels, 9.4 so; 20 x 4096 x 4096: 15 and 18",
    )
    multiplied_rows: int = threshold(
        32,
        "far rows that are taken at a time where more than `waiting_rows` rows share them: multiply-adds take longer than the "
        "far rows, and each run of them adds to sums in memory. Measured on Zen 4, one thread, float32, ms with 8, 16 and 32 "
        "far rows: 8 x 4096 x 4096 3.91, 3.55, 3.48; 12 x 4096 x 4096 5.71, 5.61, 5.14; 8 x 1024 x 32000 8.34, 8.44, 8.45",
    )
    waiting_rows: int = threshold(
        4,
        "rows that wait for far ones, of which ROWS_AT_ONCE are taken at a time. Measured the same way: 4 x 4096 x 4096 3.83, "
        "3.98, 4.13",
    )
    row_reuse: int = threshold(
        16, "points that share an element before a row of a panel pays. Source: not recorded"
    )
    most_panels: int = threshold(8, "panels that are packed at once")
    block_share: int = threshold(
        2,
        "parts of the second cache, of which one holds the rows that panels of a group are multiplied with in turn, where rows "
        "are halves of longer ones, or less, and far too many for it. Measured on Zen 3, 512 x 8192 x 512, one thread and two: "
        "58.7 and 33.5 ms so, 68.5 and 41.0 with all rows at once; of rows that follow one another, 1024 x 1024 x 1024 and "
        "1001 x 777 x 1003 take up to 5 % longer, of parts that fill the cache twice, 256 x 3072 x 768, 2 %",
    )
    fewest_block_tiles: int = threshold(4, "tiles of rows that are worth a block")
    fewest_columns: int = threshold(8, "columns that fill enough of a vector for a register tile")
    rows_ahead: int = threshold(
        8, "rows between a load and what it asks for. 4 to 16 measure the same"
    )
    most_filling_rows: int = threshold(
        256,
        "rows up to which the first ones fill panels of a far operand while they are multiplied: the product has two texts "
        "then. Measured on Zen 4, one thread, float32, ms so and with copies: 64 x 512 x 4096 2.63 and 2.93, 256 x 8192 x 1024 "
        "40.0 and 40.9, 512 x 768 x 3072 22.6 and 22.6",
    )
    filling_rows_ahead: int = threshold(
        16,
        "rows between a load of those and what it asks for. Measured on Zen 4, 64 x 512 x 4096: 8 to 32 take the same time, 64 "
        "take 7 % longer, without prefetches 10 %",
    )
    # Strips of rows (panels/row_strips.py)
    strip_share: int = threshold(
        4,
        "parts of the second cache, of which one holds a strip of rows. Measured on Zen 3, one thread, float32, 9000 x 300 x "
        "64, ms in strips and in one: a.T @ b 5.6 and 6.6, a.T @ b.T 5.2 and 9.2",
    )
    fewest_strip_rows: int = threshold(24, "rows of a strip, at least. Not measured")
    fewest_stripped_rows: int = threshold(
        96, "rows of a product that is made in strips: panels are copied for them. Not measured"
    )
    near_panel: int = threshold(
        75,
        "percent of the first cache that a panel of strips, or a group whose results go far, fills at most, beside rows. Not "
        "measured",
    )
    most_block_columns: int = threshold(
        256,
        "columns that are transposed a block of rows at a time: a line of each in the first cache. Measured on Zen 3, float32, "
        "a.T @ a of 5000 x 100, whose 100 columns are transposed in ten parts: 1.6 ms so, 1.9 a vector of columns at a time",
    )
    # Runs of deep products (panels/depth_runs.py)
    panel_share: int = threshold(
        2,
        "parts of the second cache, of which one holds a panel that is read once for each tile of rows, beside those rows",
    )
    staged_panel_share: int = threshold(
        4,
        "such parts where rows of a copy are as long as the panel, so that the copy leaves the caches",
    )
    run_share: int = threshold(
        8,
        "such parts for panels of runs, whose tiles add to sums in memory. Measured on Zen 3, 512 KB, float32, a.T @ b of "
        "1024 x 8192 x 256: 52 ms in runs of 512 or 1024, 60 of 4096, 73 of 256",
    )
    fewest_near_rows: int = threshold(
        32,
        "rows of a run that the first cache holds, at least: each run adds to sums in memory. Measured on Zen 3, one thread, "
        "float32, a.T @ a, ms with such runs and without: 5000 x 100 in runs of 50 rows 1.25 and 1.54, 4000 x 192 in runs of "
        "31 4.1 and 4.4, 4000 x 250 in runs of 24 7.1 and 6.9",
    )
    most_runs: int = threshold(512, "additions of a few rows at a time to one sum")
    fewest_panel_rows: int = threshold(
        4, "rows that a panel is made for, of what is not contiguous along it. Source: not recorded"
    )
    fewest_word_rows: int = threshold(
        2,
        "rows that a panel of words of narrow integers is made for. Measured on one core of Zen 4, 2048 x 2048 bytes by "
        "two rows: 0.24 ms with panels, 1.92 without; of Zen 3, 1024 x 1024 by three rows: 0.17 and 0.29",
    )
    # Products of few columns or rows (few_columns.py)
    few_columns: int = threshold(
        15,
        "columns up to which broadcasts of a register tile cost more than they bring: rows of the other operand are not "
        "copied for so few, and often fall into one cache set",
    )
    depth_vectors: int = threshold(
        8,
        "vectors along a reduction that are worth the sums across lanes at its end. Source: not recorded",
    )
    deep_row_vectors: int = threshold(
        32,
        "such vectors where panels of the large operand, transposed in registers, would do. Source: not recorded",
    )
    side_by_side_rows: int = threshold(
        6,
        "rows of a register tile whose vectors run along the reduction, with 32 registers. Measured on one core: with 3 rows "
        "and 8 columns, whose copy fills two L1 caches, x[8192, 2048] @ w[2048, 8] took 4.2 ms, with 6 and 4 3.2",
    )
    side_by_side_rows_of_16: int = threshold(
        2,
        "rows of such a tile with 16 registers, so that sums of four columns are a whole vector of 8 lanes. Measured on one "
        "core of Zen 4 with AVX2, ms with 2, 3 and 6 rows, whose sums do not fit the registers: 512 x 512 x 12 0.079, 0.138, "
        "0.100; 3000 x 3000 x 8 2.64, 3.25, 2.41",
    )
    side_by_side_columns: int = threshold(4, "columns of such a tile")
    one_column_stream_bytes: int = threshold(
        8 << 20,
        "bytes from which on the operand of a product of one column comes from memory: then a vector of each of eight rows in "
        "a step and prefetches, else two of each of four. Measured on one core of Zen 4, us of the latter and the former: "
        "float32 1000 x 1024 56 and 73, with AVX2 57 and 92, float64 114 and 143; 2000 x 3000 526 and 517, with AVX2 1026 "
        "and 474",
    )
    # Copies of operands that are broadcast (operand_copies.py)
    short_row_bytes: int = threshold(
        256,
        "bytes of the shortest row that is copied: shorter rows take few lines of each set. Source: not recorded",
    )
    spread_row_reuse: int = threshold(
        128,
        "points that share a row whose elements are apart before copying it pays: its lines are read more often than those of "
        "other rows, which register tiles read from the second cache where they must. Source: not recorded",
    )
    fewest_conflicting_rows: int = threshold(4, "rows that fall into one set")
    # Words of narrow integers (pair_products.py)
    shallowest_words: int = threshold(
        4, "words of a product that takes elements left over for itself. Source: not recorded"
    )
    # Vectors along the other operand (swap_operands.py)
    copy_cycles: float = threshold(
        1.5, "cycles per element that is copied from between others, one by one"
    )
    shortest_swapped_run: int = threshold(8, "neighbours that are worth turning in registers")
    fewest_element_bytes: int = threshold(
        2, "bytes of elements that panels are made of; bytes are packed in words"
    )
    swapped_time: float = threshold(0.95, "part of the time that is left by turning, at most")
    # Products of tiles (tile_products.py)
    tile_rows: int = threshold(
        16, "rows of a product from which packing its other operand for tiles pays. Not measured"
    )
    used_tiles: int = threshold(
        40,
        "percent of the elements of tiles that are those of operands, at least: a product of tiles takes the time of a "
        "twelfth as many multiply-adds in float32. Source: rates of both on a Xeon (Granite Rapids), 3,575 and 241 GFLOP/s",
    )
    tile_columns_share: int = threshold(
        2, "parts of the second cache, of which one holds packed columns"
    )
    tile_run_columns: int = threshold(
        512,
        "columns that share a packed row: deep products run in parts of which so many columns fit. Not measured",
    )
    tile_rows_share: int = threshold(8, "such parts, of which one holds packed rows")
    half_tile_step: float = threshold(
        0.75,
        "time of a step with one tile of rows, in that of a step with two: it loads as much of the other operand. Source: a "
        "tile takes 2.3 ns from the first cache and 5.6 from the second, a product 4.6, on a Xeon (Granite Rapids)",
    )
    # Short rows (row_tiling.py)
    most_row_vectors: int = threshold(
        4, "vectors of a row that is tiled: longer ones lose little in their last one"
    )
    fewest_row_reads: int = threshold(8, "times that copies of what rows share are read")
