"""ATen operator and arguments -> JAX arrays: a table of one function per operator, a file per family."""

from . import attention, convolutions, creation, elementwise, indexing, linear, pools, randomness, reductions, shapes
from .table import TABLE, names, rule_of

__all__ = [
    "TABLE", "attention", "convolutions", "creation", "elementwise", "indexing", "linear", "names", "pools", "randomness",
    "reductions", "rule_of", "shapes",
]  # fmt: skip
