"""Transforms of Refs (index, reshape, transpose, bitcast) as functions of values: what they select, and that part replaced.

A slice that reaches over the end of its dimension is moved inside, as `ref[pl.ds(start, n)]` is.
With `fixed` it stays where it is, as under a mask: what is outside reads as zero, and is not
replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.dsl.body_rewrites import bitcasts
from pbkern.dsl.primitives.ref_access import as_index, stays


def has_arrays(transform) -> bool:
    """Whether a transform is an index with arrays in it."""
    return isinstance(transform, _jax.NDIndexer) and any(
        not _jax.is_slice(index) and np.ndim(index) for index in transform.indices
    )


def stays_inside(transform) -> bool:
    """Whether a transform is no index of which a part can be outside."""
    return not isinstance(transform, _jax.NDIndexer) or all(
        stays(as_index(index, size), size)
        for index, size in zip(transform.indices, transform.shape)
    )


def dtype_after(dtype: np.dtype, transform) -> np.dtype:
    return np.dtype(transform.dtype) if isinstance(transform, _jax.BitcastTransform) else dtype


def apply_all(value, dtype: np.dtype, transforms: Sequence, fixed: bool = False, fill: int = 0):
    """`dtype` is what the body takes the elements for, which is not the value's for narrow floats; `fill`: what is outside."""
    for transform in transforms:
        value, dtype = _apply(value, dtype, transform, fixed, fill), dtype_after(dtype, transform)
    return value


def _apply(value, dtype: np.dtype, transform, fixed: bool, fill: int = 0):
    match transform:
        case _jax.ReshapeTransform(shape=shape):
            return lax.reshape(value, tuple(shape))
        case _jax.TransposeTransform(permutation=p):
            return lax.transpose(value, tuple(p))
        case _jax.BitcastTransform():
            return bitcasts.rows(value, dtype, dtype_after(dtype, transform))
        case _jax.NDIndexer():
            return _index_value(value, transform, fixed, fill)
    raise UnsupportedOp(
        f"Ref transform {type(transform).__name__}",
        hint="index, reshape, transpose and bitcast are supported",
    )


def replaced(value, dtype: np.dtype, transforms: Sequence, new, fixed: bool = False):
    """The value with the part that `transforms` select replaced by `new`."""
    if not transforms:
        return new
    transform, rest = transforms[0], transforms[1:]
    if not rest and not isinstance(transform, _jax.NDIndexer):
        inner = new
    else:
        inner = replaced(
            _apply(value, dtype, transform, fixed), dtype_after(dtype, transform), rest, new, fixed
        )
    match transform:
        case _jax.ReshapeTransform():
            return lax.reshape(inner, value.shape)
        case _jax.TransposeTransform(permutation=p):
            return lax.transpose(inner, tuple(np.argsort(p)))
        case _jax.BitcastTransform():
            return bitcasts.rows(inner, dtype_after(dtype, transform), dtype)
    return _update_value(value, transform, inner, fixed)


def _index_value(value, indexer, fixed: bool, fill: int):
    if has_arrays(indexer):
        for axis, index in enumerate(indexer.indices):
            if _jax.is_slice(index):
                span = _span(index)
                value, (start,) = _widened(value, [(axis, index, span)], [index.start], fixed, fill)
                window = lax.dynamic_slice_in_dim(value, start, span, axis)
                value = lax.slice_in_dim(window, 0, span, index.stride, axis)
        return value[tuple(slice(None) if _jax.is_slice(i) else i for i in indexer.indices)]
    starts, spans, strides, points = _slices(indexer)
    slices = [(dim, i, spans[dim]) for dim, i in enumerate(indexer.indices)]
    value, starts = _widened(value, slices, starts, fixed, fill)
    window = lax.dynamic_slice(value, starts, spans)
    window = lax.slice(window, [0] * window.ndim, spans, strides)
    return lax.squeeze(window, points)


def _update_value(value, indexer, new, fixed: bool):
    starts, spans, strides, points = _slices(indexer)
    slices = [(axis, index, spans[axis]) for axis, index in enumerate(indexer.indices)]
    wide, starts = _widened(value, slices, starts, fixed, 0)
    new = lax.expand_dims(new, points)
    if math.prod(strides) != 1:  # widen with what is between
        window = lax.dynamic_slice(wide, starts, spans)
        config = [
            (0, span - ((size - 1) * stride + 1), stride - 1)
            for span, size, stride in zip(spans, new.shape, strides)
        ]
        inside = lax.pad(jnp.ones(new.shape, bool), np.False_, config)
        new = lax.select(inside, lax.pad(new, np.zeros((), new.dtype), config), window)
    wide = lax.dynamic_update_slice(wide, new, starts)
    margins = [(size - extent) // 2 for size, extent in zip(wide.shape, value.shape)]
    return lax.slice(wide, margins, [margin + size for margin, size in zip(margins, value.shape)])


def _widened(value, slices: Sequence[tuple], starts: Sequence, fixed: bool, fill: int) -> tuple:
    """(value, starts): with `fixed`, a span is added on both sides of dimensions that a (dimension, index, span) may leave."""
    margins, moved = [0] * value.ndim, []
    for (dim, i, span), start in zip(slices, starts):
        extent, start = value.shape[dim], jnp.asarray(start, np.int32)
        if fixed and not stays(as_index(i, extent), extent):
            margins[dim] = span
            start = lax.clamp(
                np.int32(0), start + np.int32(span), np.int32(extent + span)
            )  # where all of it is outside
        moved.append(start)
    if any(margins):
        value = lax.pad(
            value, np.asarray(fill, value.dtype), [(margin, margin, 0) for margin in margins]
        )
    return value, moved


def _span(i: _jax.Slice) -> int:
    """From the first element of a slice of constant size to the end of its last one."""
    return (int(i.size) - 1) * i.stride + 1 if i.size else 0


def _slices(indexer) -> tuple[list, list[int], list[int], list[int]]:
    """(starts, spans, strides, dimensions to drop) of an indexer without array indices."""
    starts, spans, strides, points = [], [], [], []
    for axis, index in enumerate(indexer.indices):
        if _jax.is_slice(index):
            starts.append(index.start)
            spans.append(_span(index))
            strides.append(index.stride)
        else:
            starts.append(index)
            spans.append(1)
            strides.append(1)
            points.append(axis)
    return starts, spans, strides, points
