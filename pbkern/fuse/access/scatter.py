"""Access rules of scatters: which programs may share the result of one.

Programs own disjoint blocks of the result. Along batch dimensions, and along window dimensions that
an update spans in full, a program sees the updates of its own block. Along a dimension in which
indices choose one element, it walks all updates and drops those of other owners: their indices,
counted from its block's start, are out of bounds.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from pbkern.core.ops.scatter import SCATTERS, ScatterForm

from .rules import Access, Pull, is_whole, require_whole, rules, shapes, whole


def owned(eqn) -> dict[int, int]:
    """Operand dimensions in which indices choose one element -> position in an index vector."""
    form = ScatterForm.of(eqn)
    return {dim: start for dim, start in form.starts.items() if dim not in form.windows}


def share(eqn, out: Access) -> float:
    """The part of the updates that falls into a block of the result, if they are spread evenly."""
    extents, part = eqn.outvars[0].aval.shape, 1.0
    for dim in owned(eqn):
        part *= min(1.0, out[dim].size / max(extents[dim], 1))
    return part


@rules.register(*SCATTERS)
def _scatter(eqn, out: Access) -> Pull:
    form, (extents, indices, updates) = ScatterForm.of(eqn), shapes(eqn)
    full = {
        axis: window
        for axis, window in form.windows.items()
        if axis not in form.starts and updates[window] == extents[axis]
    }
    follows = full | {axis: form.loops[loop] for axis, loop in form.batch.items()}
    out = require_whole(
        eqn,
        out,
        [axis for axis in range(len(extents)) if axis not in follows and axis not in owned(eqn)],
    )
    chosen, source = [whole(index) for index in indices], [whole(update) for update in updates]
    for dim, place in form.batch.items():
        chosen[place] = out[dim]
    for dim, place in follows.items():
        source[place] = out[dim]
    cut = {
        axis: entry for axis, entry in owned(eqn).items() if not is_whole(out[axis], extents[axis])
    }
    params = {**eqn.params, "mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}

    def compute(ctx, x, index, update):
        starts = {entry: ctx.affine(out[axis].start, np.int32) for axis, entry in cut.items()}
        return [eqn.primitive.bind(x, _counted_from(eqn, index, starts), update, **params)]

    return Pull((out, tuple(chosen), tuple(source)), eqn.params, compute if cut else None, out=out)


def _counted_from(eqn, index, starts: dict):
    """i32 indices less `starts`: position in an index vector -> scalar. Indices out of bounds stay out of bounds."""
    form = ScatterForm.of(eqn)
    limits = {start: form.limits[dim] for dim, start in form.starts.items()}
    clip = "CLIP" in str(eqn.params["mode"])
    if clip or index.dtype.itemsize > 4 or index.dtype == np.uint32:
        largest = np.iinfo(index.dtype).max
        low = 0 if clip or index.dtype.kind == "u" else -1
        high = _columns(
            index,
            {
                k: np.asarray(min(limit if clip else limit + 1, largest), index.dtype)
                for k, limit in limits.items()
            },
        )
        index = lax.min(lax.max(index, lax.full(index.shape, low, index.dtype)), high)
    if index.dtype != np.int32:
        index = lax.convert_element_type(index, np.int32)
    return lax.sub(index, _columns(index, starts))


def _columns(index, values: dict):
    """Array of `index`'s type and shape: values[k] in column k of the index vectors, 0 in others."""
    columns = lax.full(index.shape, 0, index.dtype)
    column = lax.broadcasted_iota(np.int32, index.shape, index.ndim - 1)
    for k, value in values.items():
        spread = lax.broadcast_in_dim(value, index.shape, ())
        columns = (
            spread
            if index.shape[-1] == 1
            else lax.select_n(lax.eq(column, np.int32(k)), columns, spread)
        )
    return columns
