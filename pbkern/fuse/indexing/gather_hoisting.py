"""ClosedJaxpr -> the same with gathers before arithmetic and other gathers, which then compute picked elements only.

    log_p = x - m - log(l);  log_p[labels]   ->   x[labels] - m - log(l)        m, l: one number per row
    rows = x[i];             rows[:, j]      ->   x[i, j]

The same values bit by bit. What has other readers stays in front of the gather.
"""

from __future__ import annotations

import math

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import inner_of
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.core.ops.gather import batch_dims, fill_value, fills, result_dims
from pbkern.core.passes import threshold
from pbkern.fuse.simplify.driver import retrace


@dataclass(frozen=True)
class HoistGathers:
    """Rewrites jaxprs in which only gathers read results of arithmetic, or of other gathers."""

    largest_part: float = threshold(
        0.5,
        "part of an array's elements that is picked before the arithmetic, at most: picking more is no less work than all of "
        "the arithmetic. Source: not recorded",
    )
    most_arrays: int = threshold(
        4, "arrays from which elements are picked before the arithmetic. Source: not recorded"
    )

    def __call__(self, closed: jex.ClosedJaxpr, options: object) -> jex.ClosedJaxpr:
        wanted = set(_only_picked(closed))
        if not wanted:
            return closed
        lookups = _Lookups(wanted, self)
        noted = dict.fromkeys((*ELEMENTWISE, "broadcast_in_dim"), lookups.note)
        return retrace(retrace(closed, noted | {"gather": lookups.gather}), {})


def _only_picked(closed: jex.ClosedJaxpr):
    """Results of arithmetic and gathers that only gathers read, as their operand."""
    jaxpr = closed.jaxpr
    results = {
        var
        for maker in jaxpr.eqns
        if maker.primitive.name in (*ELEMENTWISE, "gather")
        for var in maker.outvars
    }
    picked = (
        {gather.invars[0] for gather in jaxpr.eqns if gather.primitive.name == "gather"} & results
        if results
        else set()
    )
    if picked:
        other_reads = {
            var
            for reader in jaxpr.eqns
            for k, var in enumerate(reader.invars)
            if not isinstance(var, jex.Literal)
            and not (reader.primitive.name == "gather" and k == 0)
        }
        yield from (
            picked
            - other_reads
            - {var for var in jaxpr.outvars if not isinstance(var, jex.Literal)}
        )
    for inner in inner_of(jaxpr):
        yield from _only_picked(inner)


class _Lookups:
    """Remembers, by value, the equation that made it and its operands."""

    def __init__(self, wanted: set, limits: HoistGathers) -> None:
        self.wanted, self.limits = wanted, limits
        self.notes = Notes()

    def note(self, eqn, operands):
        if eqn.primitive.multiple_results or not eqn.outvars[0].aval.shape:
            return None
        return self.notes.bound("maker", eqn, operands, eqn, operands)

    def gather(self, eqn, operands):
        """Before -> after: gather(f(x, broadcast(m), 2), i) -> f(gather(x, i), broadcast(m), 2)."""
        x, indices = operands
        maker, first = self.notes.find("maker", x) or (None, ())
        if eqn.invars[0] not in self.wanted:
            return self.note(eqn, operands)
        if maker is not None and maker.primitive.name == "gather":
            both = at_once(maker, eqn, *first, indices)
            return self.note(eqn, operands) if both is None else [both]
        if eqn.outvars[0].aval.size > self.limits.largest_part * x.size:
            return None
        pick = _Pick(eqn, indices, self.notes)
        if pick.count(x) > self.limits.most_arrays:
            return None
        return [pick.inside(pick(x))]


def at_once(first, second, x, i, j):
    """A gather of a gather as one: x[i][:, j] -> x[i, j]. None if both look up the same dimension."""
    first_dims, second_dims = (eqn.params["dimension_numbers"] for eqn in (first, second))
    taken, dims, again = list(first_dims.start_index_map), result_dims(first), result_dims(second)
    back = {size: dim for dim, size in dims.items()}
    if any(
        not _picks_elements(eqn) or eqn.params["mode"] != first.params["mode"]
        for eqn in (first, second)
    ):
        return None
    if fills(first) and not _same(fill_value(first), fill_value(second)):
        return None
    if i.dtype.kind != j.dtype.kind or any(dim not in back for dim in second_dims.start_index_map):
        return None
    of_i, of_j = [again[dim] for dim in batch_dims(first)], batch_dims(second)
    taken += [back[dim] for dim in second_dims.start_index_map]
    rest = [again[dims[k]] for k in range(x.ndim) if k not in taken]
    if of_i != sorted(of_i) or rest != sorted(rest):
        return None
    at = sorted([*of_i, *of_j])
    out = second.outvars[0].aval.shape
    indices = [
        lax.broadcast_in_dim(
            lax.convert_element_type(vectors, np.promote_types(i.dtype, j.dtype)),
            [*(out[dim] for dim in at), vectors.shape[-1]],
            [*(at.index(dim) for dim in dims), len(at)],
        )
        for vectors, dims in ((i, of_i), (j, of_j))
    ]
    numbers = lax.GatherDimensionNumbers(tuple(rest), tuple(sorted(taken)), tuple(taken))
    sizes = tuple(1 if k in taken else size for k, size in enumerate(x.shape))
    params = {**second.params, "indices_are_sorted": False, "unique_indices": False}
    indices = lax.concatenate(indices, len(at))
    return second.primitive.bind(
        x, indices, **params | {"dimension_numbers": numbers, "slice_sizes": sizes}
    )


def _picks_elements(eqn) -> bool:
    """Whether a gather looks up single places, and takes all other dimensions whole."""
    dn, sizes, shape = (
        eqn.params["dimension_numbers"],
        eqn.params["slice_sizes"],
        eqn.invars[0].aval.shape,
    )
    if dn.operand_batching_dims or sorted(dn.start_index_map) != sorted(dn.collapsed_slice_dims):
        return False
    return all(sizes[k] == (1 if k in dn.start_index_map else size) for k, size in enumerate(shape))


def _same(x, y) -> bool:
    return bool(x == y or (x != x and y != y))


class _Pick:
    """One gather, applied to the arrays that its operand is computed from."""

    def __init__(self, eqn, indices, notes: Notes) -> None:
        self.eqn, self.indices, self.notes, self.dims = eqn, indices, notes, result_dims(eqn)
        self.source: tuple[int, ...] = eqn.invars[0].aval.shape
        self.shape: tuple[int, ...] = eqn.outvars[0].aval.shape
        self.known: dict[int, object] = {}

    def _maker(self, x) -> tuple | None:
        """(equation, operands) of arithmetic that can follow the gather."""
        eqn, operands = self.notes.find("maker", x) or (None, ())
        return (
            (eqn, operands)
            if eqn is not None and eqn.primitive.name in ELEMENTWISE and x.shape == self.source
            else None
        )

    def _repeated(self, x) -> tuple | None:
        """(array, its dimensions of the operand) if `x` repeats an array along everything that is looked up."""
        eqn, operands = self.notes.find("maker", x) or (None, ())
        array, dims = x, tuple(range(np.ndim(x)))
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim" and len(operands) == 1:
            (array,), dims = operands, eqn.params["broadcast_dimensions"]
        sizes, batched = (
            self.eqn.params["slice_sizes"],
            self.eqn.params["dimension_numbers"].operand_batching_dims,
        )
        long_dims = [dim for dim, size in zip(dims, np.shape(array)) if size > 1]
        whole_dims = {dim for dim in self.dims if dim in batched or sizes[dim] == self.source[dim]}
        if len(long_dims) == len(self.source) or not whole_dims.issuperset(long_dims):
            return None
        return lax.squeeze(array, [j for j, size in enumerate(np.shape(array)) if size == 1]), [
            self.dims[dim] for dim in long_dims
        ]

    def count(self, x) -> float:
        """Number of arrays that would be looked up; infinity where one of them repeats elements along a looked-up part."""
        waiting, seen, arrays = [x], set(), 0
        while waiting:
            x = waiting.pop()
            if np.ndim(x) == 0 or id(x) in seen:
                continue
            seen.add(id(x))
            maker = self._maker(x)
            waiting += maker[1] if maker else ()
            if maker is None and self._repeated(x) is None:
                if np.shape(x) != self.source:
                    return math.inf
                arrays += 1
        return arrays

    def __call__(self, x):
        if np.ndim(x) == 0:
            return x
        if id(x) not in self.known:
            self.known[id(x)] = self._picked(x)
        return self.known[id(x)]

    def _picked(self, x):
        maker, repeated = self._maker(x), self._repeated(x)
        if maker is not None:
            eqn, operands = maker
            return eqn.primitive.bind(*map(self, operands), **eqn.params)
        if repeated is not None:
            array, dims = repeated
            order = sorted(range(len(dims)), key=dims.__getitem__)
            return lax.broadcast_in_dim(lax.transpose(array, order), self.shape, sorted(dims))
        moved = {"mode": lax.GatherScatterMode.CLIP, "fill_value": None} if fills(self.eqn) else {}
        return self.eqn.primitive.bind(x, self.indices, **self.eqn.params | moved)

    def inside(self, values):
        """The values, and the fill value for windows that leave the operand."""
        if not fills(self.eqn):
            return values
        sizes = self.eqn.params["slice_sizes"]
        last = [
            self.source[axis] - sizes[axis]
            for axis in self.eqn.params["dimension_numbers"].start_index_map
        ]
        rank = self.indices.ndim - 1
        indices = (
            self.indices
            if self.indices.dtype.itemsize >= 4
            else lax.convert_element_type(self.indices, np.int32)
        )
        ok = lax.full(indices.shape[:rank], True)
        for column, limit in enumerate(last):
            i = lax.squeeze(lax.slice_in_dim(indices, column, column + 1, axis=rank), (rank,))
            ok = lax.bitwise_and(
                ok, lax.bitwise_and(lax.ge(i, i.dtype.type(0)), lax.le(i, i.dtype.type(limit)))
            )
        ok = lax.broadcast_in_dim(ok, self.shape, batch_dims(self.eqn))
        return lax.select(ok, values, lax.full(self.shape, fill_value(self.eqn)))
