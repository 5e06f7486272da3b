"""Access rules of scatters: which programs may share the result of one.

Programs own disjoint blocks of the result. Along batch dimensions and along window dimensions that an update spans in
full, a program sees the updates of its own block. Along a dimension that indices choose one element of, it goes through
all updates and drops those that belong to others: their indices, counted from its block's start, lie outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import lax

from ..jaxprs import SCATTERS
from .access import Access, Pull, is_whole, require_whole, rules, shapes, whole


@dataclass(frozen=True)
class Form:
    """Which dimensions of a scatter's operand go with which of its updates and indices.

    Attributes:
      follows: dimension of the operand -> dimension of the updates that moves with it.
      batch: dimension of the operand -> dimension of the indices, of those that are batched.
      owned: dimension of the operand -> position in an index vector, where indices choose one element.
    """

    follows: dict[int, int]
    batch: dict[int, int]
    owned: dict[int, int]

    @staticmethod
    def of(eqn) -> Form:
        (operand, _, updates), dn = shapes(eqn), eqn.params["dimension_numbers"]
        loops = [d for d in range(len(updates)) if d not in dn.update_window_dims]
        absent = (*dn.inserted_window_dims, *dn.operand_batching_dims)
        windows = zip((d for d in range(len(operand)) if d not in absent), dn.update_window_dims)
        chosen = {int(d): k for k, d in enumerate(dn.scatter_dims_to_operand_dims)}
        batch = {int(d): int(k) for d, k in zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims)}
        follows = {d: int(w) for d, w in windows if d not in chosen and updates[w] == operand[d]}
        owned = {d: k for d, k in chosen.items() if d in dn.inserted_window_dims}
        return Form(follows | {d: loops[k] for d, k in batch.items()}, batch, owned)

    def share(self, eqn, out: Access) -> float:
        """The part of the updates that belongs to a block of the result, where they are spread evenly."""
        extents = eqn.outvars[0].aval.shape
        found = 1.0
        for d in self.owned:
            found *= min(1.0, out[d].size / max(extents[d], 1))
        return found


@rules.register(*SCATTERS)
def _scatter(eqn, out: Access) -> Pull:
    form, (extents, indices, updates) = Form.of(eqn), shapes(eqn)
    out = require_whole(eqn, out, [d for d in range(len(extents)) if d not in form.follows and d not in form.owned])
    chosen, source = [whole(n) for n in indices], [whole(n) for n in updates]
    for d, k in form.batch.items():
        chosen[k] = out[d]
    for d, k in form.follows.items():
        source[k] = out[d]
    cut = {d: k for d, k in form.owned.items() if not is_whole(out[d], extents[d])}
    params = {**eqn.params, "mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}

    def compute(ctx, x, index, update):
        starts = {k: ctx.affine(out[d].start, np.int32) for d, k in cut.items()}
        return [eqn.primitive.bind(x, _counted_from(eqn, index, starts), update, **params)]

    return Pull((out, tuple(chosen), tuple(source)), eqn.params, compute if cut else None, out=out)


def _counted_from(eqn, index, starts: dict):
    """i32 indices less `starts`: position in an index vector -> scalar. Those outside the array stay outside."""
    limits = _limits(eqn)
    clip = "CLIP" in str(eqn.params["mode"])
    if clip or index.dtype.itemsize > 4 or index.dtype == np.uint32:
        largest = np.iinfo(index.dtype).max
        low = 0 if clip or index.dtype.kind == "u" else -1
        high = _columns(index, {k: np.asarray(min(n if clip else n + 1, largest), index.dtype) for k, n in limits.items()})
        index = lax.min(lax.max(index, lax.full(index.shape, low, index.dtype)), high)
    if index.dtype != np.int32:
        index = lax.convert_element_type(index, np.int32)
    return lax.sub(index, _columns(index, starts))


def _limits(eqn) -> dict[int, int]:
    """Position in an index vector -> largest start whose window lies inside."""
    (operand, _, updates), dn = shapes(eqn), eqn.params["dimension_numbers"]
    absent = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    windows = dict(zip((d for d in range(len(operand)) if d not in absent), dn.update_window_dims))
    sizes = {d: updates[windows[d]] if d in windows else 1 for d in range(len(operand))}
    return {k: operand[d] - sizes[d] for k, d in enumerate(dn.scatter_dims_to_operand_dims)}


def _columns(index, values: dict):
    """Array of `index`'s type and shape: values[k] in column k of the index vectors, 0 in others."""
    made = lax.full(index.shape, 0, index.dtype)
    column = lax.broadcasted_iota(np.int32, index.shape, index.ndim - 1)
    for k, value in values.items():
        spread = lax.broadcast_in_dim(value, index.shape, ())
        made = spread if index.shape[-1] == 1 else lax.select_n(lax.eq(column, np.int32(k)), made, spread)
    return made


