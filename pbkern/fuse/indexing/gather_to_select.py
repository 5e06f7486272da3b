"""ClosedJaxpr -> the same with selects in place of gathers from stacks of few values: the stack is not stored.

    stack([a, b, c])[i, arange(n)]   ->   select(i >= 2, c, select(i >= 1, b, a))

jnp.choose and take_along_axis of stacked arrays are such gathers. They look up one of a few pieces
of size one along a dimension, and walk all other dimensions in step with the result. The same
values bit by bit.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import equations, inner_jaxprs, primitive_names
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.gather import batch_dims, fill_value, fills, result_dims
from pbkern.core.passes import threshold
from pbkern.fuse.access.dimension_map import MOVING, moved
from pbkern.fuse.simplify.driver import retrace


@dataclass(frozen=True)
class GathersToSelects:
    """Rewrites gathers from concatenations of few pieces of size one along the concatenated dimension."""

    most_pieces: int = threshold(
        12,
        "pieces, all of which selects read, and a gather one. On Zen 4 a gather from 12 numbers is as fast as 11 selects, from "
        "16 faster; from arrays, which would have to be stacked, selects are faster for more pieces",
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        names = primitive_names(closed)
        if "concatenate" not in names or names.isdisjoint(("gather", "dynamic_slice")):
            return closed
        seen = _Stacks(_times_read(closed), self)
        rules = dict.fromkeys(MOVING, seen.moved)
        for name in "iota convert_element_type max min clamp lt select_n concatenate gather dynamic_slice".split():
            rules[name] = getattr(seen, name)
        return retrace(closed, rules)


def _times_read(closed: jex.ClosedJaxpr) -> Counter:
    """Counts how often equations and results read each value, at any depth."""
    read = Counter(
        var
        for eqn in equations(closed.jaxpr)
        for var in eqn.invars
        if not isinstance(var, jex.Literal)
    )
    bodies = [closed, *(inner for eqn in equations(closed.jaxpr) for inner in inner_jaxprs(eqn))]
    return read + Counter(
        var for body in bodies for var in body.jaxpr.outvars if not isinstance(var, jex.Literal)
    )


class _Stacks:
    """Remembers, by value: pieces of stacks; the dimension along which it counts; whether it is never negative or never true.

    jax.numpy adds the size of a dimension to negative indices. For an iota that adds nothing, but
    hides it.
    """

    def __init__(self, times_read: Counter, limits: GathersToSelects) -> None:
        self.notes, self.times_read, self.limits = Notes(), times_read, limits

    def _bound(self, eqn, operands):
        return eqn.primitive.bind(*operands, **eqn.params)

    def iota(self, eqn, operands):
        """Notes an iota as counting: per dimension of its result, 0 for the one along which it counts, None for the others."""
        dim, shape, out = eqn.params["dimension"], eqn.params["shape"], eqn.outvars[0].aval
        if out.dtype.kind not in "iu" or shape[dim] - 1 > np.iinfo(out.dtype).max:
            return None
        places = tuple(0 if axis == dim else None for axis in range(len(shape)))
        return self.notes.note("counts", self._bound(eqn, operands), places)

    def moved(self, eqn, operands):
        if len(operands) > 1:  # of a size known only when the program runs
            return None
        (x,) = operands
        counts, stack = self.notes.find("counts", x), self.notes.find("stack", x)
        if counts is None and (stack is None or eqn.primitive.name != "transpose"):
            return None
        value = self._bound(eqn, operands)
        if counts is not None and (places := moved(eqn, counts[0])) is not None:
            self.notes.note("counts", value, places)
        if stack is not None and eqn.primitive.name == "transpose":
            dim, pieces = stack
            transposed = [lax.transpose(piece, eqn.params["permutation"]) for piece in pieces]
            self.notes.note("stack", value, eqn.params["permutation"].index(dim), transposed)
        return [value]

    def convert_element_type(self, eqn, operands):
        counts, to = self.notes.find("counts", operands[0]), np.dtype(eqn.params["new_dtype"])
        if counts is None or to.kind not in "iu" or max(operands[0].shape) - 1 > np.iinfo(to).max:
            return None
        return self.notes.note("counts", self._bound(eqn, operands), *counts)

    def _is_natural(self, x) -> bool:
        if isinstance(x, (np.ndarray, np.generic)):
            return np.ndim(x) == 0 and bool(np.greater_equal(x, 0))
        return any(self.notes.find(kind, x) is not None for kind in ("counts", "natural"))

    def _noted_natural(self, eqn, operands, natural: bool):
        if not natural or eqn.outvars[0].aval.dtype.kind not in "iu":
            return None
        return self.notes.note("natural", self._bound(eqn, operands))

    def max(self, eqn, operands):
        return self._noted_natural(eqn, operands, any(map(self._is_natural, operands)))

    def min(self, eqn, operands):
        return self._noted_natural(eqn, operands, all(map(self._is_natural, operands)))

    def clamp(self, eqn, operands):
        low, _, high = operands
        return self._noted_natural(eqn, operands, self._is_natural(low) and self._is_natural(high))

    def lt(self, eqn, operands):
        x, y = operands
        zero = isinstance(y, (np.ndarray, np.generic)) and np.ndim(y) == 0 and bool(y == 0)
        if not zero or not self._is_natural(x):
            return None
        return self.notes.note("never", self._bound(eqn, operands))

    def select_n(self, eqn, operands):
        return [operands[1]] if self.notes.find("never", operands[0]) is not None else None

    def concatenate(self, eqn, operands):
        dim = eqn.params["dimension"]
        if len(operands) > self.limits.most_pieces or any(
            operand.shape[dim] != 1 for operand in operands
        ):
            return None
        return self.notes.note("stack", self._bound(eqn, operands), dim, operands)

    def gather(self, eqn, operands):
        """Before -> after: gather(stack([a, b]), i) -> select(i >= 1, b, a)."""
        x, indices = operands
        stack = self.notes.find("stack", x)
        if stack is None or 0 in eqn.outvars[0].aval.shape:
            return None
        dim, pieces = stack
        looked_up = list(eqn.params["dimension_numbers"].start_index_map)
        walked, out = self._walked(eqn, x, indices, dim), eqn.outvars[0].aval.shape
        if (
            walked is None
            or dim not in looked_up
            or eqn.params["slice_sizes"][dim] != 1
            or _copies_rows(eqn, walked)
        ):
            return None
        column = self._column(indices, looked_up.index(dim))
        which = lax.broadcast_in_dim(lax.squeeze(column, (column.ndim - 1,)), out, batch_dims(eqn))
        return [_selected(eqn, which, [_walk(piece, walked, out) for piece in pieces])]

    def dynamic_slice(self, eqn, operands):
        """One piece of a stack that nothing else reads; otherwise a slice of the stack reads less."""
        (x, *starts), sizes = operands, eqn.params["slice_sizes"]
        dim, pieces = self.notes.find("stack", x) or (None, ())
        moving = [axis for axis, size in enumerate(x.shape) if sizes[axis] != size]
        if moving != [dim] or sizes[dim] != 1 or self.times_read[eqn.invars[0]] > 1:
            return None
        return [_one_of(pieces, starts[dim])]

    def _column(self, indices, entry: int):
        """Entry `entry` of every index vector, as one value if the vectors were concatenated from such values."""
        last = indices.ndim - 1
        dim, pieces = self.notes.find("stack", indices) or (None, ())
        return (
            pieces[entry] if dim == last else lax.slice_in_dim(indices, entry, entry + 1, axis=last)
        )

    def _walked(self, eqn, x, indices, dim: int) -> dict[int, int] | None:
        """The result's dimension that walks each dimension of the stack except `dim`; None if one is not walked in step."""
        dn, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        looked_up, batch, dims = list(dn.start_index_map), batch_dims(eqn), result_dims(eqn)
        walked: dict[int, int] = {}
        for axis, size in enumerate(x.shape):
            if axis == dim:
                continue
            if (
                axis in looked_up
                and (place := self._counted(indices, looked_up.index(axis), size)) is not None
            ):
                if sizes[axis] != 1:
                    return None
                walked[axis] = batch[place]
            elif axis in dn.operand_batching_dims or (
                sizes[axis] == size and not (axis in looked_up and fills(eqn))
            ):
                walked |= {axis: int(dims[axis])} if axis in dims else {}
            else:
                return None
        return walked if len({*walked.values()}) == len(walked) else None

    def _counted(self, indices, entry: int, extent: int) -> int | None:
        """The dimension of the indices, of size extent, along which entry `entry` of the index vectors counts."""
        counts = self.notes.find("counts", self._column(indices, entry))
        if counts is None or 0 not in counts[0]:
            return None
        index = counts[0].index(0)
        return index if index < indices.ndim - 1 and indices.shape[index] == extent else None


def _copies_rows(eqn, walked: dict[int, int]) -> bool:
    """Whether the gather repeats rows: it then copies them from a stack that is small beside the result, each read once."""
    out, sizes = eqn.outvars[0].aval.shape, eqn.params["slice_sizes"]
    return max(sizes) > 1 and any(
        extent > 1 and axis not in walked.values() for axis, extent in enumerate(out)
    )


def _walk(piece, walked: dict[int, int], out):
    """A piece in the result's dimensions.

    It repeats along dimensions that it lacks, and along those of size one.
    """
    dims = sorted((dim for dim in walked if piece.shape[dim] > 1), key=walked.__getitem__)
    dropped = [axis for axis in range(piece.ndim) if axis not in dims]
    order = sorted(dims)
    transposed = lax.transpose(lax.squeeze(piece, dropped), [order.index(dim) for dim in dims])
    return lax.broadcast_in_dim(transposed, out, [walked[dim] for dim in dims])


def _one_of(pieces, which):
    """Selects by comparisons, which clamp places out of bounds."""
    chosen = pieces[0]
    for k, piece in enumerate(pieces[1:], 1):
        chosen = lax.select(lax.ge(which, which.dtype.type(k)), piece, chosen)
    return chosen


def _selected(eqn, which, pieces):
    """Places out of bounds give the fill value if the gather has one."""
    chosen = _one_of(pieces, which)
    if not fills(eqn):
        return chosen
    inside = lax.lt(which, which.dtype.type(len(pieces)))
    if which.dtype.kind == "i":
        inside = lax.bitwise_and(inside, lax.ge(which, which.dtype.type(0)))
    return lax.select(inside, chosen, lax.full(chosen.shape, fill_value(eqn), chosen.dtype))
