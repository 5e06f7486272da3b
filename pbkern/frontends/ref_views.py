"""Ref + transforms (index, reshape, transpose, bitcast) -> loads and stores with one index per dimension.

Indices and transposes compose into the access itself. From the first transform that does not (a reshape, a bitcast,
an index after an array index) the view is a value: a load applies the rest to what it read, a store reads, replaces
and writes back, which is the same thing because a program's block is its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from ..dsl import primitives
from ..dsl.atomics import positions
from ..dsl.refs import Gather, Index, Point, Range, add_index, bind_access, mul_index, narrow
from ..errors import UnsupportedOp
from . import bits
from .float8 import decode, encode, is_float8


@dataclass(frozen=True)
class View:
    """`ref[indices]`, its dimensions in the order `perm`, then `rest` applied to the value.

    `dtype` is what the body takes the Ref's elements for; those of int4 and its like are held in a byte each.
    """

    ref: object
    dtype: np.dtype
    indices: tuple[Index, ...]
    perm: tuple[int, ...] | None  # None: as the access gives them
    rest: tuple

    @property
    def ref_shape(self) -> tuple[int, ...]:
        return _jax.ref_type(jax.typeof(self.ref))[0]

    def load(self):
        (value,) = bind_access(_jax.REF_PRIMITIVES["get"], self.ref_shape, [self.ref], self.indices)
        return _apply_all(self._out(value), self.dtype, self.rest)

    def swap(self, value, want_old: bool):
        """Stores a value; the old one if it is wanted."""
        if any(map(_has_arrays, self.rest)):
            old = self.load() if want_old else None
            self._gathered().swap(value, want_old=False)
            return old
        if not self.rest:
            (old,) = bind_access(_jax.REF_PRIMITIVES["swap"], self.ref_shape, [self.ref, self._back(value)], self.indices)
            return self._out(old) if want_old else None
        head = View(self.ref, self.dtype, self.indices, self.perm, ())
        whole = head.load()
        head.swap(_replace(whole, self.dtype, self.rest, value), want_old=False)
        return _apply_all(whole, self.dtype, self.rest) if want_old else None

    def add(self, value) -> None:
        if self.rest:
            self.swap(lax.add(self.load(), value), want_old=False)
        else:
            bind_access(_jax.REF_PRIMITIVES["addupdate"], self.ref_shape, [self.ref, self._back(value)], self.indices)

    def masked_load(self, mask, other):
        if self.rest:
            value = self.load()
            return lax.select(jnp.broadcast_to(mask, value.shape), value, jnp.broadcast_to(other, value.shape))
        shape = self._shape()
        mask, other = (self._back(jnp.broadcast_to(x, shape)) for x in (mask, other))
        (value,) = bind_access(primitives.masked_load_p, self.ref_shape, [self.ref, mask, other], self.indices)
        return self._out(value)

    def masked_store(self, value, mask) -> None:
        if any(map(_has_arrays, self.rest)):
            self._gathered().masked_store(value, mask)
        elif self.rest:
            old = self.load()
            self.swap(lax.select(jnp.broadcast_to(mask, old.shape), value, old), want_old=False)
        else:
            mask = self._back(jnp.broadcast_to(mask, value.shape))
            bind_access(primitives.masked_store_p, self.ref_shape, [self.ref, self._back(value), mask], self.indices)

    def update(self, combine, values: Sequence, mask):
        """elements = combine(elements, *values), one after the other where an array index may name one twice.

        Returns what was there.
        """
        if any(isinstance(i, Gather) for i in self.indices) or any(map(_has_arrays, self.rest)):
            return (self._gathered() if self.rest else self)._update_each(combine, values, mask)
        old = self.load() if mask is None else self.masked_load(mask, np.zeros((), self.dtype))
        new = combine(old, *values)
        if mask is None:
            self.swap(new, want_old=False)
        else:
            self.masked_store(new, mask)
        return old

    def _update_each(self, combine, values: Sequence, mask):
        shape = self._shape()
        flat = [lax.reshape(p, (math.prod(shape),)) for p in positions(self.indices, shape)]
        columns = [lax.reshape(jnp.broadcast_to(v, shape), (math.prod(shape),)) for v in values]
        masks = None if mask is None else lax.reshape(jnp.broadcast_to(mask, shape), (math.prod(shape),))

        def step(_, x):
            at, new, taking_part = x
            one = View(self.ref, self.dtype, tuple(map(Point, at)), None, ())
            return None, one.update(combine, new, taking_part)

        _, old = lax.scan(step, None, (tuple(flat), tuple(columns), masks))
        return lax.reshape(old, shape)

    def _gathered(self) -> View:
        """The same elements, each named by array indices alone."""
        if any(isinstance(t, _jax.BitcastTransform) for t in self.rest):
            raise UnsupportedOp("a store through an array index after a bitcast", hint="index before the bitcast")
        shape, head = self.ref_shape, View(self.ref, self.dtype, self.indices, self.perm, ())
        places = positions(self.indices, head._natural_shape())
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        flat = functools.reduce(lax.add, (p * np.int32(s) for p, s in zip(places, strides)))
        flat = _apply_all(flat if self.perm is None else lax.transpose(flat, self.perm), flat.dtype, self.rest)
        at = (lax.rem(lax.div(flat, lax.full_like(flat, s)), lax.full_like(flat, n)) for s, n in zip(strides, shape))
        return View(self.ref, self.dtype, tuple(map(Gather, at)), None, ())

    def _natural_shape(self) -> tuple[int, ...]:
        """Shape of the value as the access gives it."""
        shape = self._shape()
        return shape if self.perm is None else tuple(shape[self.perm.index(d)] for d in range(len(shape)))

    def _shape(self) -> tuple[int, ...]:
        """Shape of the value, without the rest."""
        sizes = [i.size for i in self.indices if isinstance(i, Range)]
        if any(isinstance(i, Gather) for i in self.indices):
            return tuple(np.shape(jax.eval_shape(lambda: View(self.ref, self.dtype, self.indices, None, ()).load())))
        return tuple(sizes if self.perm is None else (sizes[p] for p in self.perm))

    def _out(self, value):
        """What the body sees of elements read."""
        value = decode(value, self.dtype) if is_float8(self.dtype) else lax.convert_element_type(value, self.dtype)
        return value if self.perm is None else lax.transpose(value, self.perm)

    def _back(self, value):
        """What the Ref holds of a value of the body."""
        held = _jax.ref_type(jax.typeof(self.ref))[1]
        if is_float8(self.dtype) and value.dtype != np.uint8 and value.dtype != bool:
            value = encode(lax.convert_element_type(value, np.float32), self.dtype)
        value = value if value.dtype != self.dtype else lax.convert_element_type(value, held)
        return value if self.perm is None else lax.transpose(value, tuple(np.argsort(self.perm)))


def view(ref, dtype, transforms: Sequence) -> View:
    """Composes as many transforms as an access can express."""
    indices: list[Index] = [Range(0, n) for n in _jax.ref_type(jax.typeof(ref))[0]]
    order = list(range(len(indices)))  # the Ref's dimension that each dimension of the view runs along
    transforms = list(transforms)
    while transforms:
        t = transforms[0]
        if isinstance(t, _jax.NDIndexer) and _composes(t, indices, order):
            for d, raw in zip(order, t.indices):
                indices[d] = narrow(indices[d], _from_start(raw, indices[d].size), add_index, mul_index)
            order = [d for d in order if isinstance(indices[d], Range)]
        elif isinstance(t, _jax.TransposeTransform) and not any(isinstance(i, Gather) for i in indices):
            order = [order[p] for p in t.permutation]
        else:
            break
        transforms.pop(0)
    kept = sorted(order)
    perm = tuple(kept.index(d) for d in order)
    natural = perm == tuple(range(len(perm))) or any(isinstance(i, Gather) for i in indices)
    return View(ref, np.dtype(dtype), tuple(indices), None if natural else perm, tuple(transforms))


def _from_start(raw, extent: int):
    """An array index counted from the start: negative elements count from the end, as in NumPy."""
    if _jax.is_slice(raw) or not np.ndim(raw) or raw.dtype.kind == "u":
        return raw
    return lax.select(lax.lt(raw, lax.full_like(raw, 0)), lax.add(raw, lax.full_like(raw, extent)), raw)


def _has_arrays(t) -> bool:
    """Whether a transform is an index with arrays in it."""
    return isinstance(t, _jax.NDIndexer) and any(not _jax.is_slice(i) and np.ndim(i) for i in t.indices)


def _composes(t, indices: list, order: list) -> bool:
    """Whether the indexer can join the access: no array index before it, and array indices only in the Ref's own order."""
    if any(isinstance(i, Gather) for i in indices):
        return False
    return not _has_arrays(t) or order == list(range(len(indices)))


# --- transforms of values ------------------------------------------------------------------------------------------


def _apply_all(value, dtype: np.dtype, transforms: Sequence):
    """`dtype` is what the body takes the elements for, which is not the value's for 8-bit floats."""
    for t in transforms:
        value, dtype = _apply(value, dtype, t), _dtype_after(dtype, t)
    return value


def _dtype_after(dtype: np.dtype, t) -> np.dtype:
    return np.dtype(t.dtype) if isinstance(t, _jax.BitcastTransform) else dtype


def _apply(value, dtype: np.dtype, t):
    match t:
        case _jax.ReshapeTransform(shape=shape):
            return lax.reshape(value, tuple(shape))
        case _jax.TransposeTransform(permutation=p):
            return lax.transpose(value, tuple(p))
        case _jax.BitcastTransform():
            return bits.rows(value, dtype, _dtype_after(dtype, t))
        case _jax.NDIndexer():
            return _index_value(value, t)
    raise UnsupportedOp(f"Ref transform {type(t).__name__}", hint="index, reshape, transpose and bitcast are supported")


def _replace(value, dtype: np.dtype, transforms: Sequence, new):
    """The value with the part that `transforms` select replaced by `new`."""
    if not transforms:
        return new
    t, rest = transforms[0], transforms[1:]
    inner = _replace(_apply(value, dtype, t), _dtype_after(dtype, t), rest, new)
    match t:
        case _jax.ReshapeTransform():
            return lax.reshape(inner, value.shape)
        case _jax.TransposeTransform(permutation=p):
            return lax.transpose(inner, tuple(np.argsort(p)))
        case _jax.BitcastTransform():
            return bits.rows(inner, _dtype_after(dtype, t), dtype)
    return _update_value(value, t, inner)


def _index_value(value, t):
    if _has_arrays(t):
        parts = [i if not _jax.is_slice(i) else slice(i.start, i.start + i.size * i.stride, i.stride) for i in t.indices]
        return value[tuple(parts)]
    starts, spans, strides, points = _slices(t)
    window = lax.dynamic_slice(value, [jnp.asarray(s, np.int32) for s in starts], spans)
    window = lax.slice(window, [0] * window.ndim, spans, strides)
    return lax.squeeze(window, points)


def _update_value(value, t, new):
    starts, spans, strides, points = _slices(t)
    starts = [jnp.asarray(s, np.int32) for s in starts]
    new = lax.expand_dims(new, points)
    if math.prod(strides) != 1:  # widen with what lies between
        window = lax.dynamic_slice(value, starts, spans)
        config = [(0, n - ((m - 1) * s + 1), s - 1) for n, m, s in zip(spans, new.shape, strides)]
        inside = lax.pad(jnp.ones(new.shape, bool), np.False_, config)
        new = lax.select(inside, lax.pad(new, np.zeros((), new.dtype), config), window)
    return lax.dynamic_update_slice(value, new, starts)


def _slices(t) -> tuple[list, list[int], list[int], list[int]]:
    """(starts, spans, strides, dimensions to drop) of an indexer without array indices."""
    starts, spans, strides, points = [], [], [], []
    for d, i in enumerate(t.indices):
        if _jax.is_slice(i):
            starts.append(i.start)
            spans.append((i.size - 1) * i.stride + 1 if i.size else 0)
            strides.append(i.stride)
        else:
            starts.append(i)
            spans.append(1)
            strides.append(1)
            points.append(d)
    return starts, spans, strides, points
