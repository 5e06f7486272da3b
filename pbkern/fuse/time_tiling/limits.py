"""Thresholds of time tiling, which its files read several calls deep."""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold


@dataclass(frozen=True)
class TimeTilingLimits:
    """When several steps of a loop share a kernel."""

    steps_gain: float = threshold(
        0.96,
        "modelled time of more steps, relative to fewer, with which trying goes on, at most. Source: not recorded",
    )
    most_step_equations: int = threshold(
        220,
        "equations of a kernel's steps together: bounds code size and compile time. Source: not recorded",
    )
    most_recompute: float = threshold(
        1.25, "operations done, relative to those needed: halos repeat work. Source: not recorded"
    )
    thinnest: int = threshold(
        16,
        "times more elements than a slice has, at least, of a value that is computed again for it. Source: not recorded",
    )
    most_thin_equations: int = threshold(
        60, "equations that are computed again for a slice: bounds code size. Source: not recorded"
    )
    most_slices: int = threshold(
        16,
        "elements of a window (sum over dimensions), and of a depthwise convolution in all, that become slices. Source: not "
        "recorded",
    )
