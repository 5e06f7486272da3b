"""Operation of StableHLO or CHLO and its operands -> JAX arrays: a table of one rule per operation, a file per family."""

from . import (
    contractions,
    control_flow,
    elementwise,
    indexing,
    libraries,
    random_bits,
    reductions,
    shapes,
    sorting,
)

__all__ = [
    "contractions",
    "control_flow",
    "elementwise",
    "indexing",
    "libraries",
    "random_bits",
    "reductions",
    "shapes",
    "sorting",
]
