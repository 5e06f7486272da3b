"""ClosedJaxpr -> the same with one element picked where values under a mask of one element per row are summed up.

    sum(j * (labels[:, None] == iota))           ->     where(labels are inside, j[labels], 0)
    sum(where(labels[:, None] == iota, j, 0))    ->     the same

A cross entropy is often written so, with j = x - max(x) - log(sum(exp(x - max(x)))). The sum needs both reductions, and
therefore a pass over the rows of its own. What is picked is computed of the element that is picked from x
(fuse/indexing/gather_hoisting.py).

The product with a mask is taken as a choice, as XLA takes it: an infinite j beside the label does not make the sum NaN.
"""

from __future__ import annotations

import numpy as np
from jax import lax
from jax.extend import core as jex

from pbkern.core.jaxprs.evaluation import Notes
from pbkern.core.jaxprs.walks import primitive_names
from pbkern.core.ops.elementwise import ELEMENTWISE
from pbkern.fuse.access.dimension_map import MOVING, moved
from pbkern.fuse.simplify.driver import retrace


def pick_labels(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Rewrites sums along rows that a comparison with an iota masks, of values that follow from the row's maximum."""
    if not primitive_names(closed) >= {"iota", "eq", "reduce_max", "reduce_sum"}:
        return closed
    seen = _MaskedRows()
    rules = (
        dict.fromkeys(ELEMENTWISE, seen.note)
        | dict.fromkeys(MOVING, seen.moved)
        | {name: getattr(seen, name) for name in ("iota", "reduce_max", "reduce_sum")}
    )
    return retrace(closed, rules)


class _MaskedRows:
    """Remembers, by value: the equation that made it, and its operands; the dimension along which it counts; its maxima."""

    def __init__(self) -> None:
        self.notes = Notes()

    def note(self, eqn, operands):
        if eqn.primitive.multiple_results:
            return None
        return self.notes.bound("maker", eqn, operands, eqn.primitive.name, operands)

    def iota(self, eqn, operands):
        """Notes an iota as counting: per dimension of its result, 0 for the one along which it counts, None for the others."""
        out, dim = eqn.outvars[0].aval, eqn.params["dimension"]
        if out.dtype.kind not in "iu" or out.shape[dim] - 1 > np.iinfo(out.dtype).max:
            return None
        places = tuple(0 if axis == dim else None for axis in range(out.ndim))
        return self.notes.bound("counts", eqn, operands, places)

    def moved(self, eqn, operands):
        counts = self.notes.find("counts", operands[0])
        places = moved(eqn, counts[0]) if counts is not None and len(operands) == 1 else None
        if places is None:
            return self.note(eqn, operands)
        return self.notes.bound("counts", eqn, operands, places)

    def reduce_max(self, eqn, operands):
        (x,) = operands
        if eqn.params["axes"] == (x.ndim - 1,):
            self.notes.note("has maxima", x)
        return

    def reduce_sum(self, eqn, operands):
        (terms,) = operands
        shape, rank = terms.shape, terms.ndim
        if eqn.params["axes"] != (rank - 1,) or eqn.outvars[0].aval.dtype != terms.dtype:
            return None
        if terms.dtype.kind != "f":
            return None
        for values, mask in self._masked(terms):
            labels = self._labels(mask, shape[-1])
            if labels is not None and values.shape == shape and self._needs_maxima(values):
                return [_picked(values, labels)]
        return None

    def _maker(self, x) -> tuple:
        """(name, operands) of the equation that made a value."""
        return self.notes.find("maker", x) or ("", ())

    def _masked(self, terms) -> list[tuple]:
        """Pairs of values and a mask of which the terms are the product."""
        name, operands = self._maker(terms)
        if name == "select_n" and len(operands) == 3 and self._is_zero(operands[1]):
            return [(operands[2], operands[0])]
        if name != "mul":
            return []
        pairs = (operands, operands[::-1])
        return [
            (values, *mask)
            for values, numbers in pairs
            for converted, mask in [self._maker(numbers)]
            if converted == "convert_element_type" and mask[0].dtype == bool
        ]

    def _is_zero(self, x) -> bool:
        name, operands = self._maker(x)
        if name == "broadcast_in_dim":
            return self._is_zero(operands[0])
        return isinstance(x, (np.ndarray, np.generic, float)) and bool(np.all(x == 0))

    def _labels(self, mask, size: int):
        """The number per row with which a mask compares an iota along rows of `size` elements. None for another mask."""
        name, operands = self._maker(mask)
        if name != "eq":
            return None
        for labels, count in (operands, operands[::-1]):
            counts = self.notes.find("counts", count)
            if counts is None or counts[0][-1] != 0 or np.shape(count)[-1] != size:
                continue
            if np.ndim(labels) == 0 or np.shape(labels)[-1] == 1:
                return labels
        return None

    def _needs_maxima(self, values) -> bool:
        """Whether values follow, element by element, from some whose maxima are taken, and from what is one number per row."""
        waiting, seen = list(self._maker(values)[1]), set[int]()
        while waiting:
            x = waiting.pop()
            if id(x) in seen or np.shape(x) != values.shape:
                continue
            seen.add(id(x))
            if self.notes.find("has maxima", x) is not None:
                return True
            waiting += self._maker(x)[1]
        return False


def _picked(values, labels):
    """The value of each row at its label, zero where that is outside of the row."""
    rows, size = values.shape[:-1], values.shape[-1]
    batch, last = tuple(range(len(rows))), len(rows)
    dims = range(last + 1) if np.ndim(labels) else ()
    labels = lax.broadcast_in_dim(labels, (*rows, 1), dims)
    inside = lax.clamp(labels.dtype.type(0), labels, labels.dtype.type(size - 1))
    numbers = lax.GatherDimensionNumbers((), (last,), (last,), batch, batch)
    ones = (1,) * values.ndim
    at_labels = lax.gather(values, inside, numbers, ones, mode=lax.GatherScatterMode.CLIP)
    is_inside = lax.squeeze(lax.eq(inside, labels), (last,))
    return lax.select(is_inside, at_labels, lax.full(rows, 0, values.dtype))
