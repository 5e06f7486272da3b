"""Operators that move elements and compute none: views, slices, joins, pads."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern.core.errors import UnsupportedOp

from .table import as_type, axes_of, op


@op("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::_reshape_alias")
def reshape(call, x, *shape, **_):
    """`view` of another dtype of the same size looks at the bits anew."""
    return (
        lax.bitcast_convert_type(x, call.dtype)
        if x.dtype != call.dtype
        else jnp.reshape(x, call.shape)
    )


@op("aten::permute")
def permute(call, x, dims):
    return jnp.transpose(x, dims)


@op("aten::unsqueeze")
def unsqueeze(call, x, dim):
    return jnp.expand_dims(x, dim)


@op("aten::squeeze")
def squeeze(call, x, dims=None):
    return jnp.reshape(x, call.shape)


@op("aten::expand")
def expand(call, x, shape, implicit):
    return jnp.broadcast_to(x, call.shape)


@op("aten::repeat")
def repeat(call, x, repeats):
    return jnp.tile(x, repeats)


@op("aten::repeat_interleave")
def repeat_interleave(call, x, repeats, dim, output_size):
    return jnp.repeat(
        x, repeats, axis=dim, total_repeat_length=None if dim is None else call.shape[dim]
    )


@op("aten::cat")
def cat(call, xs, dim):
    """Empty vectors are left out, whatever the dimensions of the others."""
    nonempty = [as_type(x, call.dtype) for x in xs if x.shape != (0,)]
    return jnp.concatenate(nonempty, dim) if nonempty else jnp.zeros(call.shape, call.dtype)


@op("aten::stack")
def stack(call, xs, dim):
    return jnp.stack([as_type(x, call.dtype) for x in xs], dim)


def span(x, dim: int, start, end, step) -> tuple[slice, ...]:
    """The index of a slice along a dimension, with bounds as Python's."""
    return (slice(None),) * (dim % x.ndim) + (
        slice(*slice(start, end, step).indices(x.shape[dim])),
    )


@op("aten::slice")
def slice_(call, x, dim, start, end, step):
    return x[span(x, dim, start, end, step)]


@op("aten::slice_scatter")
def slice_scatter(call, x, values, dim, start, end, step):
    return x.at[span(x, dim, start, end, step)].set(as_type(values, x.dtype))


@op("aten::slice_backward")
def slice_backward(call, g, sizes, dim, start, end, step):
    x = jnp.zeros(call.shape, g.dtype)
    return x.at[span(x, dim, start, end, step)].set(g)


@op("aten::select")
def select(call, x, dim, index):
    return lax.index_in_dim(x, index % x.shape[dim], dim % x.ndim, keepdims=False)


@op("aten::select_scatter")
def select_scatter(call, x, values, dim, index):
    return x.at[(slice(None),) * (dim % x.ndim) + (index % x.shape[dim],)].set(
        as_type(values, x.dtype)
    )


@op("aten::select_backward")
def select_backward(call, g, sizes, dim, index):
    return select_scatter(call, jnp.zeros(call.shape, g.dtype), g, dim, index)


@op("aten::split", "aten::split_with_sizes", "aten::unsafe_split", "aten::unsafe_split_with_sizes")
def split(call, x, sizes, dim):
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - k) for k in range(0, x.shape[dim], sizes)] or [0]
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1], dim)


@op("aten::unbind")
def unbind(call, x, dim):
    return [lax.index_in_dim(x, k, dim, keepdims=False) for k in range(x.shape[dim])]


@op("aten::constant_pad_nd")
def constant_pad(call, x, pads, value):
    """Pads come in pairs from the last dimension on; negative ones cut."""
    config = [(0, 0, 0)] * x.ndim
    for k in range(len(pads) // 2):
        config[x.ndim - 1 - k] = (int(pads[2 * k]), int(pads[2 * k + 1]), 0)
    return lax.pad(x, as_type(value, x.dtype), config)


def _pad(mode: str):
    def rule(call, x, pads):
        rank = len(pads) // 2
        widths = [(0, 0)] * (x.ndim - rank) + [
            (int(pads[2 * axis]), int(pads[2 * axis + 1])) for axis in reversed(range(rank))
        ]
        cut = tuple(
            slice(max(-low, 0), size - max(-high, 0)) for (low, high), size in zip(widths, x.shape)
        )
        return jnp.pad(x[cut], [(max(low, 0), max(high, 0)) for low, high in widths], mode=mode)

    return rule


for _n in (1, 2, 3):
    op(f"aten::reflection_pad{_n}d")(_pad("reflect"))
    op(f"aten::replication_pad{_n}d")(_pad("edge"))


@op("aten::flip")
def flip(call, x, dims):
    return jnp.flip(x, axes_of(x, dims) if dims else ())


@op("aten::roll")
def roll(call, x, shifts, dims):
    return (
        jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0]).reshape(x.shape)
    )


@op("aten::tril")
def tril(call, x, diagonal):
    return jnp.tril(x, diagonal)


@op("aten::triu")
def triu(call, x, diagonal):
    return jnp.triu(x, diagonal)


@op("aten::diagonal")
def diagonal(call, x, offset, dim1, dim2):
    return jnp.diagonal(x, offset, dim1, dim2)


@op("aten::diagonal_scatter")
def diagonal_scatter(call, x, values, offset, dim1, dim2):
    d1, d2 = dim1 % x.ndim, dim2 % x.ndim
    index = np.arange(values.shape[-1])
    turned = jnp.moveaxis(x, (d1, d2), (-2, -1))
    updated = turned.at[..., index + max(-offset, 0), index + max(offset, 0)].set(
        as_type(values, x.dtype)
    )
    return jnp.moveaxis(updated, (-2, -1), (d1, d2))


@op("aten::unfold")
def unfold(call, x, dim, size, step):
    """Windows of a dimension, their elements in a new last one."""
    x = x if x.ndim else x[None]
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    taken = jnp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return jnp.moveaxis(taken, dim % x.ndim + 1, -1).reshape(call.shape)


def _places(size, stride, offset) -> np.ndarray:
    """Places of a strided view's elements in memory."""
    at = np.full((), offset or 0, np.int64)
    for n, step in zip(size, stride):
        at = at[..., None] + np.arange(n) * step
    return at


def _check_dense(call) -> None:
    if not call.dense:
        raise UnsupportedOp(
            "a strided view of what is one itself",
            why="arrays here lie one element after the other",
        )


@op("aten::as_strided")
def as_strided(call, x, size, stride, storage_offset):
    """Makes a strided view of a tensor whose elements lie one after the other."""
    _check_dense(call)
    at = _places(size, stride, storage_offset)
    if at.size == x.size and (at.ravel() == np.arange(x.size)).all():
        return x.reshape(call.shape)
    return x.reshape(-1)[at]


@op("aten::as_strided_scatter", "prims::as_strided_scatter")
def as_strided_scatter(call, x, values, size, stride, storage_offset):
    _check_dense(call)
    at = _places(size, stride, storage_offset)
    return x.reshape(-1).at[at].set(as_type(values, x.dtype)).reshape(x.shape)
