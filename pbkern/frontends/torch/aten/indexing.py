"""Operators that read and write elements at computed places."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pbkern.core.errors import UnsupportedOp

from .table import as_type, op


def _index(call, x, indices) -> tuple:
    """Indices of the first dimensions, negative ones from the end.

    Those that Torch itself has made are not checked.
    """
    is_unsafe = "_unsafe_" in call.name
    return tuple(
        slice(None) if i is None else i if is_unsafe else call.in_range(i, -size, size)
        for i, size in zip(indices, x.shape)
    )


@op("aten::index", "aten::_unsafe_index")
def index(call, x, indices):
    """Masks as indices have results of unknown shape, which AOTAutograd does not hand on."""
    return x[_index(call, x, indices)]


@op("aten::index_put", "aten::_unsafe_index_put")
def index_put(call, x, indices, values, accumulate):
    if any(i is not None and i.dtype == bool for i in indices):
        return _put_where(x, indices, values, accumulate)
    x = _addable(x) if accumulate else x
    at = x.at[_index(call, x, indices)]
    values = as_type(values, x.dtype)
    return at.add(values) if accumulate else at.set(values)


def _put_where(x, indices, values, accumulate):
    """A mask of the first dimensions and one value for all of them."""
    (mask,) = [i for i in indices if i is not None]
    if values.size != 1:
        raise UnsupportedOp(
            "index_put with a mask takes one value",
            why=f"values of shape {values.shape}",
            hint="torch.where",
        )
    mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    value = as_type(values.reshape(()), x.dtype)
    return jnp.where(mask, x + value if accumulate else value, x)


@op("aten::gather")
def gather(call, x, dim, index, sparse_grad):
    if not index.size:
        return jnp.zeros(index.shape, x.dtype)
    rows = _rows(x)
    return rows[_along(call, rows, dim, _rows(index))].reshape(index.shape)


def _rows(x):
    """An array of at least one dimension: a number is an array of one element."""
    return x if x.ndim else x.reshape(1)


def _along(call, x, dim, index) -> tuple:
    """Places of x that `index` names along a dimension; other dimensions keep theirs, from 0 on."""
    places = list(np.ogrid[tuple(slice(size) for size in index.shape)])
    places[dim] = call.in_range(index, 0, x.shape[dim])
    return tuple(places)


@op("aten::scatter", "aten::scatter_reduce", "aten::scatter_add")
def scatter(call, x, dim, index, values, reduce=None, include_self=True):
    """Without include_self, places that `index` names begin at the reduction's identity; a mean is a sum over a count."""
    name = {"add": "sum", "multiply": "prod"}.get(reduce, reduce)
    name = name or ("sum" if call.name == "aten::scatter_add" else "set")
    x = _addable(x) if name != "set" else x
    if not x.ndim:
        return scatter(
            call, x[None], 0, index.reshape(-1), jnp.reshape(values, -1), reduce, include_self
        )[0]
    if not index.size:
        return x
    if hasattr(values, "shape") and values.ndim:
        values = as_type(values[tuple(slice(size) for size in index.shape)], x.dtype)
    places = _along(call, x, dim, index)
    start = x if include_self or name == "set" else x.at[places].set(_unit(name, x.dtype))
    at = start.at[places]
    if name == "mean":
        count = jnp.full(x.shape, int(include_self), x.dtype).at[places].add(1)
        total, count = at.add(values), jnp.maximum(count, 1)
        return total / count if call.dtype.kind not in "iu" else jnp.floor_divide(total, count)
    return {"set": at.set, "sum": at.add, "prod": at.multiply, "amax": at.max, "amin": at.min}[
        name
    ](values)


def _addable(x):
    """Booleans as numbers, whose sums and products are then whether they are not zero."""
    return x.astype(np.int64) if x.dtype == np.bool_ else x


def _unit(name: str, dtype):
    """The identity of a reduction."""
    if name in ("sum", "mean"):
        return 0
    if name == "prod":
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if name == "amax" else np.inf
    return np.iinfo(dtype).min if name == "amax" else np.iinfo(dtype).max


@op("aten::index_select")
def index_select(call, x, dim, index):
    rows = _rows(x)
    return jnp.take(rows, call.in_range(index, 0, rows.shape[dim]), axis=dim).reshape(call.shape)


@op("aten::index_add")
def index_add(call, x, dim, index, values, alpha):
    x = _addable(x)
    return _at(call, x, dim, index).add(as_type(values * alpha, x.dtype)).reshape(x.shape)


def _at(call, x, dim, index):
    """Slices that `index` names along a dimension, to be updated."""
    rows = _rows(x)
    index = call.in_range(index.reshape(-1), 0, rows.shape[dim])
    return rows.at[(slice(None),) * (dim % rows.ndim) + (index,)]


@op("aten::index_copy")
def index_copy(call, x, dim, index, values):
    return _at(call, x, dim, index).set(as_type(values, x.dtype)).reshape(x.shape)


@op("aten::max_unpool2d", "aten::max_unpool3d")
def max_unpool(call, x, indices, output_size, stride=None, padding=None):
    """Values at the places that a maximum pool has found in each plane, between zeros."""
    planes = x.shape[: x.ndim - len(output_size)]
    flat = jnp.zeros((*planes, math.prod(output_size)), x.dtype)
    places = _along(call, flat, -1, indices.reshape(*planes, -1))
    return flat.at[places].set(x.reshape(*planes, -1)).reshape(call.shape)


@op("aten::embedding")
def embedding(call, weight, index, *_):
    return weight[call.in_range(index, 0, weight.shape[0])]


@op("aten::embedding_dense_backward")
def embedding_backward(call, g, index, count, padding, scale):
    """Gradients of the padding row are dropped."""
    rows = g.reshape(-1, g.shape[-1])
    index = call.in_range(index.reshape(-1), 0, count)
    rows = jnp.where((index != padding)[:, None], rows, 0) if padding >= 0 else rows
    if scale:
        rows = rows / jnp.zeros(count, g.dtype).at[index].add(1)[index][:, None]
    return jnp.zeros((count, g.shape[-1]), g.dtype).at[index].add(rows)


@op("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(call, weight, index, offsets, scale, mode, sparse, weights, last, padding):
    """Modes: 0 sums the rows of a bag, 1 takes their mean."""
    if mode == 2:
        raise UnsupportedOp(
            "embedding_bag with mode='max' is not compiled", why="the table has sum and mean"
        )
    bags = offsets.shape[0] - int(last)
    bag = _bag_of(index, _checked_offsets(call, offsets, index.shape[0]))
    index = call.in_range(index, 0, weight.shape[0])
    rows = weight[index]
    rows = rows if weights is None else rows * weights[:, None]
    is_counted = index != padding
    sizes = jax.ops.segment_sum(is_counted.astype(np.int64), bag, bags)
    sums = jax.ops.segment_sum(jnp.where(is_counted[:, None], rows, 0), bag, bags)
    if mode == 1:
        sums = sums / jnp.maximum(sizes, 1)[:, None].astype(sums.dtype)
    # What Torch keeps for a gradient alone, it leaves empty where there is none.
    kept_for_gradients = (bag, sizes, jnp.zeros((bags,), np.int64))
    return sums, *(
        gradient if gradient.shape == shape else jnp.zeros(shape, gradient.dtype)
        for gradient, shape in zip(kept_for_gradients, call.shapes[1:])
    )


def _checked_offsets(call, offsets, count):
    """Offsets of bags: they begin at 0, do not decrease, and end within the entries."""
    offsets = call.in_range(offsets, 0, count + 1, "offset")
    first = call.in_range(offsets[:1], 0, 1, "first offset")
    steps = call.in_range(offsets[1:] - offsets[:-1], 0, count + 1, "step between offsets")
    return jnp.concatenate([first, offsets[:-1] + steps])


def _bag_of(index, offsets):
    """The bag of each entry; entries behind the last offset, where it ends the last bag, are in none."""
    return jnp.searchsorted(offsets, jnp.arange(index.shape[0]), side="right") - 1


@op("aten::_embedding_bag_backward")
def embedding_bag_backward(
    call, g, index, offsets, bag, sizes, most, rows, scale, mode, sparse, weights, padding
):
    if scale:
        raise UnsupportedOp(
            "embedding_bag with scale_grad_by_freq has no compiled gradient",
            why="Torch's divides by the counts of other rows than those of the gradient",
        )
    if sparse:
        raise UnsupportedOp(
            "embedding_bag with sparse=True has no compiled gradient", why="it is a sparse tensor"
        )
    if not g.size:
        return jnp.zeros((rows, g.shape[1]), g.dtype)
    if mode == 2:  # each column of a bag has a row of its own
        g = jnp.where((sizes > 0)[:, None], g, 0)
        return jnp.zeros((rows, g.shape[1]), g.dtype).at[most, jnp.arange(g.shape[1])].add(g)
    index = call.in_range(index, 0, rows)
    bag = (
        bag if bag.size else _bag_of(index, offsets)
    )  # Torch leaves it empty where rows are summed
    g = g / jnp.maximum(sizes, 1)[:, None].astype(g.dtype) if mode == 1 else g
    each = g.at[bag].get(mode="fill", fill_value=0)  # entries of no bag have no gradient
    each = each if weights is None else each * weights[:, None]
    return (
        jnp.zeros((rows, g.shape[1]), g.dtype)
        .at[index]
        .add(jnp.where((index != padding)[:, None], each, 0))
    )


@op("aten::bucketize")
def bucketize(call, x, edges, out_int32, right):
    return _places(edges, x, right)


@op("aten::searchsorted")
def searchsorted(call, edges, x, out_int32, right, side, sorter):
    """Searches one sorted sequence."""
    if edges.ndim != 1 or sorter is not None:
        raise UnsupportedOp(
            "searchsorted of several sequences is not compiled",
            why=f"boundaries of shape {edges.shape}",
        )
    return _places(edges, x, right or side == "right")


def _places(edges, x, right):
    """Places of elements among sorted edges; that of NaN is behind all, also behind edges that are NaN."""
    x = jnp.asarray(x)
    place = jnp.searchsorted(edges, x, side="right" if right else "left")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return place
    return jnp.where(x != x, np.asarray(edges.shape[0], place.dtype), place)
