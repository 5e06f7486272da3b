"""Thresholds of splitting, which its files read several calls deep."""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold


@dataclass(frozen=True)
class SplitLimits:
    """When a reduction, a contraction or a scatter has a second stage, and how its operands are cut."""

    # Reductions (reductions.py)
    run_elements: int = threshold(
        1 << 16, "elements of one program of the first stage, preferred. Source: not recorded"
    )
    fewest_elements: int = threshold(
        1 << 12, "elements of one program of the first stage, at least. Source: not recorded"
    )
    beginnings: int = threshold(
        8,
        "parts of a chunk, of which the mean of the first stands for the chunk's mean: finding it brings that part into the "
        "nearest cache, and the rest is read once. An outlier in it adds up to this many times the rounding of its own square",
    )
    shortest_beginning: int = threshold(
        16, "elements of that first part, at least. Source: not recorded"
    )
    # Contractions (two_stage.py)
    depth_per_width: float = threshold(
        8,
        "times as deep as its result is wide a contraction is that is split, at least. Source: not recorded",
    )
    row_run_bytes: int = threshold(
        8192,
        "bytes of a row along the depth that one run of a contraction takes: parts of few lines are fetched one by one. "
        "Measured on Zen 3, one thread, float32, ms with parts of 400, 1000, 2000, 4000 and 10000 bytes: 300 x 20000 x 8 5.5, "
        "4.2, 3.8, 2.8, 2.6; 300 x 20000 x 16 5.0, 4.5, 4.3, 4.0, 3.8; 40 x 100000 x 8 3.6, 3.8, 3.8, 2.4, 2.1",
    )
