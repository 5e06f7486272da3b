"""Arrays of indices that count, such as `program_id * block + arange(block)` -> slices.

Kernels in the style of Triton address all memory so. An array that is a scalar plus the position
along one of its dimensions names each element once, in the order of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from pbkern import _jax
from pbkern.core.jax_types import array_aval
from pbkern.core.jaxprs import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.primitives.ref_access import (
    GatheredIndex,
    Index,
    Point,
    Range,
    RefAccess,
    value_axes,
)

# Equations that pass a value on.
SAME = ("convert_element_type", "copy", "stop_gradient")


@dataclass
class CountedIndices:
    """The equations of a body, by the variables that they define."""

    makers: dict[jex.Var, jex.JaxprEqn]

    @classmethod
    def of(cls, jaxpr: jex.Jaxpr) -> CountedIndices:
        return cls({var: eqn for eqn in equations(jaxpr) for var in eqn.outvars})

    def as_slices(self, eqn: jex.JaxprEqn, access: RefAccess) -> RefAccess:
        """An access with slices in the place of its arrays of indices; the same one where an array does not count.

        Args:
          eqn: its equation, in the body.
          access: the same on values, while the body is traced again.

        Only accesses with masks: without, negative positions count from the end, and those outside
        are moved inside one by one.
        """
        if access.mask is None:
            return access
        numbers = [n for n, i in enumerate(access.indices) if isinstance(i, GatheredIndex)]
        atoms = list(self._index_atoms(eqn))
        if not numbers or len(atoms) != len(access.indices):
            return access
        axes: dict[int, int] = {}
        for n in numbers:
            axis = self.counted_axis(atoms[n])
            if axis is None:
                return access
            axes[n] = axis
        indices = list(access.indices)
        for n, axis in axes.items():
            at = jnp.asarray(_array(indices[n]))
            if not at.size:
                return access
            last = at[
                (-1,) * at.ndim
            ]  # which is inside if any of them is, and not counted from the end
            count = at.shape[axis] if axis != UNIFORM else 1
            first = last - np.asarray(count - 1, at.dtype)
            indices[n] = Point(last) if axis == UNIFORM else Range(first, count, 1)
        if not _keeps_order(access.indices, indices, axes):
            return access
        return replace(access, indices=tuple(indices))

    @staticmethod
    def _index_atoms(eqn: jex.JaxprEqn) -> Iterator:
        """The atoms of an equation's only indexer, one per dimension; nothing for chained ones."""
        number = _jax.REF_OPERANDS[eqn.primitive.name]
        indexers = _jax.unflatten_indexers(eqn.params["tree"], list(eqn.invars[number:]))
        if len(indexers) == 1:
            yield from indexers[0]

    def counted_axis(self, atom) -> int | None:
        """The dimension along which an array is a scalar plus the position; UNIFORM if it is a scalar everywhere, else None."""
        shape = array_aval(atom).shape
        if all(size == 1 for size in shape) or isinstance(atom, jex.Literal):
            return UNIFORM
        eqn = self.makers.get(atom)
        if eqn is None:
            return None
        name, given = eqn.primitive.name, eqn.invars
        if name == "iota":
            return eqn.params["dimension"]
        if name in SAME:
            return self.counted_axis(given[0])
        if name == "select_n" and self._counts_from_the_end(given):
            return self.counted_axis(given[1])
        if name in ("add", "sub"):
            left, right = map(self.counted_axis, given)
            if right == UNIFORM:
                return left
            return right if left == UNIFORM and name == "add" else None
        if name == "mul":
            return UNIFORM if set(map(self.counted_axis, given)) == {UNIFORM} else None
        if name in ("broadcast_in_dim", "reshape"):
            axis = self.counted_axis(given[0])
            if axis is None or axis == UNIFORM:
                return axis
            return self._moved(eqn, axis)
        return None

    def _counts_from_the_end(self, given: Sequence) -> bool:
        """Whether operands of select_n are those of `where(at < 0, at + size, at)`, which JAX writes for each index."""
        test, other = (self.makers.get(atom) for atom in (given[0], given[2]))
        if test is None or other is None or len(given) != 3:
            return False
        names = (test.primitive.name, other.primitive.name)
        return names == ("lt", "add") and test.invars[0] is other.invars[0] is given[1]

    @staticmethod
    def _moved(eqn: jex.JaxprEqn, axis: int) -> int | None:
        """The dimension of the result that is dimension `axis` of the operand."""
        before, after = array_aval(eqn.invars[0]).shape, array_aval(eqn.outvars[0]).shape
        if eqn.primitive.name == "broadcast_in_dim":
            moved = eqn.params["broadcast_dimensions"][axis]
            return moved if after[moved] == before[axis] else None
        long = [n for n, size in enumerate(after) if size > 1]
        alone = [n for n, size in enumerate(before) if size > 1] == [axis]
        return long[0] if alone and len(long) == 1 else None


# The place of a dimension, of arrays that are the same everywhere.
UNIFORM = -1


def _array(index: Index) -> jax.Array:
    assert isinstance(index, GatheredIndex)
    return index.at


def _keeps_order(before: Sequence[Index], after: Sequence[Index], axes: Mapping[int, int]) -> bool:
    """Whether slices have the dimensions of a value in the order that arrays of indices give them, and all of these."""
    old, new = value_axes(before), value_axes(after)
    for n, places in enumerate(old):
        axis = axes.get(n)
        expected = places if axis is None else () if axis == UNIFORM else (places[axis],)
        if new[n] != expected:
            return False
    return {p for places in old for p in places} == {p for places in new for p in places}
