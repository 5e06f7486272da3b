"""Ref + transforms (index, reshape, transpose, bitcast) -> loads and stores with one index per dimension.

Indices and transposes compose into the access itself, and where they can, indices move to before a reshape or bitcast
(ref_exchange.py). From the first transform that does not compose the view is a value: a load applies the rest to what it read,
a store reads, replaces and writes back what the access takes.
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
from ..dsl.random_keys import WORD, is_key, words_of
from ..dsl.refs import Gather, Index, Point, Range, add_index, bind_access, mul_index, narrow, stays
from ..errors import UnsupportedOp
from . import bits
from .float8 import decode, encode, in_body, is_float8, quantise
from .ref_exchange import before, runs, shape_after


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
    def writes_back(self) -> bool:
        """Whether a store writes elements that it leaves as they are."""
        return any(isinstance(t, _jax.NDIndexer) and not _has_arrays(t) for t in self.rest)

    @property
    def stays(self) -> bool:
        """Whether no part of it can lie outside the Ref."""
        return bool(self.rest) or all(map(stays, self.indices, self.ref_shape))

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
        if self.rest or is_float8(self.dtype):
            total = lax.add(self.load(), value)
            self.swap(quantise(total, self.dtype) if is_float8(self.dtype) else total, want_old=False)
        else:
            bind_access(_jax.REF_PRIMITIVES["addupdate"], self.ref_shape, [self.ref, self._back(value)], self.indices)

    def masked_load(self, mask, other):
        other = in_body(other)
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
    if is_key(dtype):
        transforms, dtype = _over_words(dtype, transforms), WORD
    access = _Access(ref, np.dtype(dtype))
    for t in transforms:
        access.take(t)
    return access.view()


def _over_words(dtype, transforms: Sequence) -> list:
    """Transforms of a Ref of keys as those of the Ref of their words, whose last dimensions they leave alone."""
    words, found = words_of(dtype), []
    for t in transforms:
        match t:
            case _jax.NDIndexer():
                whole = tuple(_jax.Slice(0, n) for n in words)
                found.append(_jax.NDIndexer((*t.indices, *whole), (*t.shape, *words), t.int_indexer_shape))
            case _jax.ReshapeTransform(shape=shape):
                found.append(_jax.ReshapeTransform((*shape, *words)))
            case _jax.TransposeTransform(permutation=p):
                found.append(_jax.TransposeTransform((*p, *range(len(p), len(p) + len(words)))))
            case _:
                raise UnsupportedOp(f"{type(t).__name__} of a Ref of PRNG keys", hint="index, reshape or transpose it")
    return found


class _Access:
    """A View in the making.

    order: per dimension of what the access gives, the Ref's dimension that it runs along.
    rest: transforms that come after it.
    """

    def __init__(self, ref, dtype: np.dtype):
        self.ref, self.dtype = ref, dtype
        self.indices: list[Index] = [Range(0, n) for n in _jax.ref_type(jax.typeof(ref))[0]]
        self.order = list(range(len(self.indices)))
        self.rest: list = []

    def take(self, t) -> None:
        if isinstance(t, _jax.NDIndexer):
            if self.rest and (exchanged := self._exchanged(t)) is not None:
                t, self.rest = exchanged
                self._index(t)
            elif not self.rest and _composes(t, self.indices, self.order):
                self._index(t.indices)
            else:
                self.rest.append(t)
        elif isinstance(t, _jax.TransposeTransform) and not self.rest and not self._gathers():
            self.order = [self.order[p] for p in t.permutation]
        else:
            self.rest.append(t)

    def _gathers(self) -> bool:
        return any(isinstance(i, Gather) for i in self.indices)

    def _index(self, entries: Sequence) -> None:
        for d, raw in zip(self.order, entries):
            self.indices[d] = narrow(self.indices[d], _from_start(raw, self.indices[d].size), add_index, mul_index)
        self.order = [d for d in self.order if isinstance(self.indices[d], Range)]

    def _exchanged(self, t) -> tuple[list, list] | None:
        """(indices before the rest, the new rest) with the meaning of the rest, then t."""
        taken = None if self._gathers() else runs(t)
        if taken is None or not all(isinstance(i, Range) for i in map(self.indices.__getitem__, self.order)):
            return None
        shapes, dtypes = [tuple(self.indices[d].size for d in self.order)], [self.dtype]
        for r in self.rest:
            if isinstance(r, _jax.NDIndexer):
                return None
            shapes.append(shape_after(r, shapes[-1], dtypes[-1]))
            dtypes.append(_dtype_after(dtypes[-1], r))
        rest = []
        for r, shape, kind in zip(self.rest[::-1], shapes[-2::-1], dtypes[-2::-1]):
            found = before(r, shape, kind, taken)
            if found is None:
                return None
            taken, moved = found
            rest.append(moved)
        return [r.start if r.point else r.as_slice() for r in taken], rest[::-1]

    def view(self) -> View:
        kept = sorted(self.order)
        perm = tuple(kept.index(d) for d in self.order)
        natural = perm == tuple(range(len(perm))) or self._gathers()
        return View(self.ref, self.dtype, tuple(self.indices), None if natural else perm, tuple(self.rest))


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
        for d, i in enumerate(t.indices):
            if _jax.is_slice(i):
                span = (i.size - 1) * i.stride + 1 if i.size else 0
                window = lax.dynamic_slice_in_dim(value, jnp.asarray(i.start, np.int32), span, d)
                value = lax.slice_in_dim(window, 0, span, i.stride, d)
        return value[tuple(slice(None) if _jax.is_slice(i) else i for i in t.indices)]
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
