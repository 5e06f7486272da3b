"""Kinds of equations that prices and choices tell apart, and sizes of values."""

from __future__ import annotations

import math

import numpy as np
from jax.extend import core as jex

from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.scatter import SCATTERS
from pbkern.core.ops.views import SHAPE_VIEWS
from pbkern.fuse.access.blocks import Step, volume

from .model import CostModel

# Equations that only rename elements: they emit no code, or very little.
DATA_MOVEMENT = frozenset(
    "broadcast_in_dim reshape squeeze slice roll transpose rev iota concatenate continued pad copy stop_gradient".split()
)
CONTRACTIONS = frozenset(("dot_general", "conv_general_dilated"))
ALIASES = frozenset(SHAPE_VIEWS)
# Equations that read few elements of their first operand, at places that are data.
LOOKUPS = frozenset(("gather", "dynamic_slice"))
# Reductions that take each element once, in any order.
SINGLE_PASS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor partial_reduce".split()
)
# Views whose elements are read where they are needed.
RENAMED = frozenset((*SHAPE_VIEWS, "iota"))
# A value that costs this many operations per element is heavy: not computed again beyond the limit
# of the target's costs.
HEAVY_OPERATIONS = 128


def is_of_index_tests(primitive: str) -> bool:
    """Whether comparisons of indices, and combinations of those, consist of such operations."""
    if primitive in DATA_MOVEMENT:
        return True
    row = ELEMENTWISE.get(primitive)
    return row is not None and row.in_index_tests


def is_alias(eqn) -> bool:
    """Whether the equation only gives an array another shape."""
    if eqn.primitive.name not in ALIASES:
        return False
    var, view = eqn.invars[0], eqn.outvars[0]
    if isinstance(var, jex.Literal) or math.prod(var.aval.shape) != math.prod(view.aval.shape):
        return False
    return eqn.params.get("dimensions") is None or eqn.primitive.name == "squeeze"


def nbytes(aval) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def itemsize(var) -> int:
    return np.dtype(var.aval.dtype).itemsize


def contracted_size(eqn) -> int:
    """Multiply-adds per output element of a contraction."""
    lhs, rhs = (var.aval.shape for var in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (lc, _), _ = eqn.params["dimension_numbers"]
        return math.prod(lhs[dim] for dim in lc)
    return math.prod(rhs) // max(rhs[eqn.params["dimension_numbers"].rhs_spec[0]], 1)


def is_heavy(eqn, costs: CostModel) -> bool:
    """Whether one element is so expensive that computing it twice is worse than storing it."""
    name = eqn.primitive.name
    if name in SCATTERS:
        return True
    return (
        name in CONTRACTIONS or name.startswith("reduce_") or name in ("sort", "first_sorted")
    ) and (costs.operations(eqn) >= HEAVY_OPERATIONS)


def recompute_of(step: Step, programs: int) -> float:
    full = math.prod(step.eqn.outvars[0].aval.shape)
    return programs * volume(step.out) / max(full, 1)
