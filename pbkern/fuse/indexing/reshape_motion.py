"""Arithmetic between an array whose last axis is split into groups and a value per group -> arithmetic on the array itself.

    reshape(x, (n, g, c)) - mean[n, g, 1]   ->   reshape(x - row, (n, g, c)),  row[n, g * c] = mean of each element's group

A group of few elements is a short row, which vectors do not fit; the array as it is has long ones. The value per group is
expanded once, where that is little beside the array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.extend import core as jex

from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace


@dataclass(frozen=True)
class MoveReshapes:
    """Moves reshapes that split an axis into groups behind such arithmetic."""

    times_smaller: int = threshold(
        16, "elements of the array for each of an expanded value, at least. Source: not recorded"
    )

    most_members: int = threshold(
        12,
        "elements of a group: longer ones are rows of their own. With 10 a group norm gained "
        "a quarter of its time, with 16 nothing: AMD EPYC (family 25, model 1), 2026-11-26",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        splits = any(
            eqn.primitive.name == "reshape" and _splits(eqn, self.most_members)
            for eqn in equations(closed.jaxpr)
        )
        if not splits:
            return closed
        motion = _Motion(self)
        rules = dict.fromkeys(ELEMENTWISE, motion.arithmetic)
        return retrace(
            closed, rules | {"reshape": motion.reshape, "broadcast_in_dim": motion.broadcast}
        )


class _Motion:
    """Values of a jaxpr that is traced anew: which of them reshape or spread others.

    Attributes:
      sources: a reshape that splits the last axis -> the array before it.
      moved: reshapes that stand behind arithmetic now.
      narrow: a broadcast that keeps all axes -> its operand.
    """

    def __init__(self, limits: MoveReshapes) -> None:
        self.limits = limits
        self.sources: dict[jex.Var, jax.Array] = {}
        self.moved: set[jex.Var] = set()
        self.narrow: dict[jex.Var, jax.Array] = {}

    def reshape(self, eqn, operands: Sequence) -> list | None:
        (var,), (operand,) = eqn.invars, operands
        if isinstance(var, jex.Literal):  # one number has nothing to split
            return None
        if _splits(eqn, self.limits.most_members):
            self.sources[eqn.outvars[0]] = operand
        joined = var in self.moved and self.sources[var].shape == tuple(eqn.params["new_sizes"])
        return [self.sources[var]] if joined else None

    def broadcast(self, eqn, operands: Sequence) -> None:
        shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
        narrow = [1] * len(shape)
        for dim, size in zip(dims, array_aval(eqn.invars[0]).shape):
            narrow[dim] = size
        self.narrow[eqn.outvars[0]] = lax.reshape(operands[0], narrow)

    def arithmetic(self, eqn, operands: Sequence) -> list | None:
        """The equation on the arrays before they were split, if an operand is one value per group."""
        variables = [None if isinstance(var, jex.Literal) else var for var in eqn.invars]
        split = [var for var in variables if var in self.sources]
        if not split or len(eqn.outvars) != 1:
            return None
        result, shape = eqn.outvars[0], self.sources[split[0]].shape
        before, per_group = [], not self.moved.isdisjoint(split)
        for var, operand in zip(variables, operands):
            value = operand
            if var in self.sources and self.sources[var].shape == shape:
                value = self.sources[var]
            elif jax.numpy.ndim(operand):
                narrow = operand if var is None else self.narrow.get(var, operand)
                per_group |= narrow.shape[-2] > 1 and narrow.shape[-1] == 1
                row = _joined(narrow, array_aval(result).shape)
                if row.size * self.limits.times_smaller > math.prod(shape):
                    return None
                value = lax.broadcast_in_dim(row, shape, range(len(shape)))
            before.append(value)
        if eqn.primitive.name == "convert_element_type":  # what follows it may be per group
            self.sources[result] = eqn.primitive.bind(*before, **eqn.params)
        if not per_group:
            return None
        value = eqn.primitive.bind(*before, **eqn.params)
        self.sources[result] = value
        self.moved.add(result)
        return [lax.reshape(value, array_aval(result).shape)]


def _splits(eqn, most_members: int) -> bool:
    """Whether a reshape splits the last axis into groups of few elements."""
    before, after = array_aval(eqn.invars[0]).shape, tuple(eqn.params["new_sizes"])
    return (
        eqn.params["dimensions"] is None
        and len(after) == len(before) + 1 > 1
        and before[:-1] == after[:-2]
        and after[-2] > 1
        and 1 < after[-1] <= most_members
    )


def _joined(value: jax.Array, shape: Sequence[int]) -> jax.Array:
    """A value of groups with one element for each of their members; axes of size 1 stay."""
    *outer, groups, members = value.shape
    last = (1, 1) if groups == members == 1 else tuple(shape[-2:])
    wide = lax.broadcast_in_dim(value, (*outer, *last), range(value.ndim))
    return lax.reshape(wide, (*outer, math.prod(last)))
