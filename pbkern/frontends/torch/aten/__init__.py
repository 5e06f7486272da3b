"""ATen operator and arguments -> JAX arrays: a table of one function per operator, a file per family."""

from . import convolutions, creation, elementwise, indexing, linear, normalisation, pools, randomness, reductions, shapes
from .table import TABLE, names, rule_of

__all__ = [
    "TABLE", "convolutions", "creation", "elementwise", "indexing", "linear", "names", "normalisation", "pools", "randomness",
    "reductions", "rule_of", "shapes",
]  # fmt: skip
