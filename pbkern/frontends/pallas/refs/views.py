"""Ref + transforms (index, reshape, transpose, bitcast) -> loads and stores with one index per dimension.

Indices and transposes compose into the access itself, and where they can, indices move to before a
reshape or bitcast (reorder_transforms.py). The first transform that does not compose, and all
behind it, act on values: a load applies them to the elements that it read; a store loads the
elements of the access, replaces the part that the transforms select, and stores all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pbkern import _jax
from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.body_rewrites.narrow_floats import (
    decode,
    encode,
    in_body,
    is_narrow_float,
    quantise,
)
from pbkern.dsl.primitives import grid
from pbkern.dsl.primitives.atomics import positions, update_p
from pbkern.dsl.primitives.prng_keys import WORD, is_key, words_of
from pbkern.dsl.primitives.ref_access import (
    GatheredIndex,
    Index,
    Point,
    Range,
    add_index,
    bind_access,
    mul_index,
    narrow,
    stays,
)

from .reorder_transforms import before, runs, shape_after
from .value_transforms import apply_all, dtype_after, has_arrays, replaced, stays_inside


@dataclass(frozen=True)
class IndexedRef:
    """A view of a Ref: `ref[indices]`, transposed, then transforms of the value.

    Attributes:
      ref: the Ref.
      dtype: type of the elements in the body; in memory, int4 and narrower types have a byte each.
      indices: one per dimension of the Ref.
      perm: order of the access's dimensions; None: as the access gives them.
      rest: transforms of the value.
    """

    ref: object
    dtype: np.dtype
    indices: tuple[Index, ...]
    perm: tuple[int, ...] | None
    rest: tuple

    @property
    def writes_back(self) -> bool:
        """Whether a store writes elements that it leaves as they are."""
        return any(
            isinstance(transform, _jax.NDIndexer) and not has_arrays(transform)
            for transform in self.rest
        )

    @property
    def stays(self) -> bool:
        """Whether no part of it can be outside of the Ref, or outside of a transform's operand."""
        return all(map(stays, self.indices, self.ref_shape)) and all(map(stays_inside, self.rest))

    @property
    def ref_shape(self) -> tuple[int, ...]:
        return _jax.ref_type(jax.typeof(self.ref))[0]

    def load(self):
        (value,) = bind_access(_jax.REF_PRIMITIVES["get"], self.ref_shape, [self.ref], self.indices)
        return apply_all(self._out(value), self.dtype, self.rest)

    def swap(self, value, want_old: bool):
        """Stores a value. Returns the old one if `want_old`, else None."""
        if any(map(has_arrays, self.rest)):
            old = self.load() if want_old else None
            self._gathered().swap(value, want_old=False)
            return old
        if not self.rest:
            (old,) = bind_access(
                _jax.REF_PRIMITIVES["swap"],
                self.ref_shape,
                [self.ref, self._back(value)],
                self.indices,
            )
            return self._out(old) if want_old else None
        whole = self._head().load()
        self._head().swap(replaced(whole, self.dtype, self.rest, value), want_old=False)
        return apply_all(whole, self.dtype, self.rest) if want_old else None

    def _head(self) -> IndexedRef:
        """The view without the transforms of values."""
        return IndexedRef(self.ref, self.dtype, self.indices, self.perm, ())

    def add(self, value) -> None:
        if self.rest or is_narrow_float(self.dtype):
            total = lax.add(self.load(), value)
            self.swap(
                quantise(total, self.dtype) if is_narrow_float(self.dtype) else total,
                want_old=False,
            )
        else:
            bind_access(
                _jax.REF_PRIMITIVES["addupdate"],
                self.ref_shape,
                [self.ref, self._back(value)],
                self.indices,
            )

    def masked_load(self, mask, other):
        """Elements where the mask is true, `other` elsewhere.

        Slices are not shifted inside: elements outside of the Ref have any value.
        """
        other = in_body(other)
        if self.rest:
            value = apply_all(self._whole(), self.dtype, self.rest, fixed=True)
            return lax.select(
                jnp.broadcast_to(mask, value.shape), value, jnp.broadcast_to(other, value.shape)
            )
        shape = self._shape()
        mask, other = (self._back(jnp.broadcast_to(x, shape)) for x in (mask, other))
        (value,) = bind_access(
            grid.masked_load_p, self.ref_shape, [self.ref, mask, other], self.indices
        )
        return self._out(value)

    def masked_store(self, value, mask) -> None:
        """Stores elements where the mask is true that are inside the Ref."""
        if any(map(has_arrays, self.rest)):
            at, inside = self._gathered_inside()
            at.masked_store(value, jnp.broadcast_to(mask, value.shape) & inside)
        elif any(
            isinstance(transform, _jax.NDIndexer | _jax.BitcastTransform) for transform in self.rest
        ):
            whole = self._whole()
            old = apply_all(whole, self.dtype, self.rest, fixed=True)
            new = lax.select(jnp.broadcast_to(mask, old.shape), value, old)
            self._head().masked_store(
                replaced(whole, self.dtype, self.rest, new, fixed=True), np.bool_(True)
            )
        elif self.rest:  # elements in another order
            like = lax.full(self._shape(), False)
            mask = replaced(like, like.dtype, self.rest, jnp.broadcast_to(mask, value.shape))
            self._head().masked_store(replaced(like, self.dtype, self.rest, value), mask)
        else:
            mask = self._back(jnp.broadcast_to(mask, value.shape))
            bind_access(
                grid.masked_store_p,
                self.ref_shape,
                [self.ref, self._back(value), mask],
                self.indices,
            )

    def _whole(self):
        """Elements of the view without transforms of values; slices are not shifted inside."""
        head = self._head()
        if head.stays:
            return head.load()
        return head.masked_load(np.bool_(True), np.zeros((), jax.eval_shape(head.load).dtype))

    def update(self, combine, values: Sequence, mask):
        """elements = combine(elements, *values). Returns the old elements.

        Where an array index may name an element twice, updates happen one after the other.
        """
        if any(isinstance(index, GatheredIndex) for index in self.indices) or any(
            map(has_arrays, self.rest)
        ):
            if combine is not lax.add or self.rest or self.perm or is_narrow_float(self.dtype):
                return (self._gathered() if self.rest else self)._update_each(combine, values, mask)
            shape, masks = self._shape(), [] if mask is None else [mask]
            given = [jnp.broadcast_to(x, shape) for x in (values[0].astype(self.dtype), *masks)]
            params = {"kind": "add", "values": 1, "masked": bool(masks)}
            operands = [self.ref, *given]
            return bind_access(update_p, self.ref_shape, operands, self.indices, **params)[0]
        old = self.load() if mask is None else self.masked_load(mask, np.zeros((), self.dtype))
        new = combine(old, *values)
        if mask is None:
            self.swap(new, want_old=False)
        else:
            self.masked_store(new, mask)
        return old

    def _update_each(self, combine, values: Sequence, mask):
        shape = self._shape()
        flat = [
            lax.reshape(position, (math.prod(shape),))
            for position in positions(self.indices, shape)
        ]
        columns = [
            lax.reshape(jnp.broadcast_to(value, shape), (math.prod(shape),)) for value in values
        ]
        masks = (
            None
            if mask is None
            else lax.reshape(jnp.broadcast_to(mask, shape), (math.prod(shape),))
        )

        def step(_, x):
            at, new, taking_part = x
            one = IndexedRef(self.ref, self.dtype, tuple(map(Point, at)), None, ())
            return None, one.update(combine, new, taking_part)

        _, old = lax.scan(step, None, (tuple(flat), tuple(columns), masks))
        return lax.reshape(old, shape)

    def _gathered(self) -> IndexedRef:
        """Returns a view of the elements, each named by array indices alone."""
        return self._places(fixed=False)[0]

    def _gathered_inside(self) -> tuple[IndexedRef, jax.Array]:
        """Returns such a view with slices that are not shifted inside, and whether each element is inside."""
        return self._places(fixed=True)

    def _places(self, fixed: bool) -> tuple[IndexedRef, jax.Array]:
        if any(isinstance(transform, _jax.BitcastTransform) for transform in self.rest):
            raise UnsupportedOp(
                "a store through an array index after a bitcast", hint="index before the bitcast"
            )
        shape = self.ref_shape
        places = positions(self.indices, self._head()._natural_shape())
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        flat = functools.reduce(
            lax.add, (place * np.int32(stride) for place, stride in zip(places, strides))
        )
        if fixed:
            inside = (
                lax.ge(place, np.int32(0)) & lax.lt(place, np.int32(size))
                for place, size in zip(places, shape)
            )
            flat = lax.select(
                functools.reduce(lax.bitwise_and, inside), flat, lax.full_like(flat, -1)
            )
        flat = flat if self.perm is None else lax.transpose(flat, self.perm)
        flat = apply_all(flat, flat.dtype, self.rest, fixed, fill=-1)
        at = (
            lax.rem(lax.div(flat, lax.full_like(flat, stride)), lax.full_like(flat, size))
            for stride, size in zip(strides, shape)
        )
        return IndexedRef(self.ref, self.dtype, tuple(map(GatheredIndex, at)), None, ()), lax.ge(
            flat, np.int32(0)
        )

    def _natural_shape(self) -> tuple[int, ...]:
        """Shape of the value as the access gives it."""
        shape = self._shape()
        return (
            shape
            if self.perm is None
            else tuple(shape[self.perm.index(axis)] for axis in range(len(shape)))
        )

    def _shape(self) -> tuple[int, ...]:
        """Shape of the value, without the rest."""
        sizes = [index.size for index in self.indices if isinstance(index, Range)]
        if any(isinstance(index, GatheredIndex) for index in self.indices):
            return tuple(
                np.shape(
                    jax.eval_shape(
                        lambda: IndexedRef(self.ref, self.dtype, self.indices, None, ()).load()
                    )
                )
            )
        return tuple(sizes if self.perm is None else (sizes[axis] for axis in self.perm))

    def _out(self, value):
        """Converts elements that are read to the body's type."""
        value = (
            decode(value, self.dtype)
            if is_narrow_float(self.dtype)
            else lax.convert_element_type(value, self.dtype)
        )
        return value if self.perm is None else lax.transpose(value, self.perm)

    def _back(self, value):
        """Converts a value of the body to the Ref's type."""
        held = _jax.ref_type(jax.typeof(self.ref))[1]
        if is_narrow_float(self.dtype) and value.dtype != np.uint8 and value.dtype != bool:
            value = encode(lax.convert_element_type(value, np.float32), self.dtype)
        value = value if value.dtype != self.dtype else lax.convert_element_type(value, held)
        return value if self.perm is None else lax.transpose(value, tuple(np.argsort(self.perm)))


def view(ref, dtype, transforms: Sequence) -> IndexedRef:
    """Composes as many transforms as an access can express."""
    if is_key(dtype):
        transforms, dtype = _over_words(dtype, transforms), WORD
    access = _ViewAccess(ref, np.dtype(dtype))
    for transform in transforms:
        access.take(transform)
    return access.view()


def _over_words(dtype, transforms: Sequence) -> list:
    """Transforms of a Ref of keys as those of the Ref of their words, whose last dimensions they leave alone."""
    words = words_of(dtype)
    transforms_of_words: list = []
    for transform in transforms:
        match transform:
            case _jax.NDIndexer():
                whole = tuple(_jax.Slice(0, word) for word in words)
                transforms_of_words.append(
                    _jax.NDIndexer(
                        (*transform.indices, *whole),
                        (*transform.shape, *words),
                        transform.int_indexer_shape,
                    )
                )
            case _jax.ReshapeTransform(shape=shape):
                transforms_of_words.append(_jax.ReshapeTransform((*shape, *words)))
            case _jax.TransposeTransform(permutation=p):
                transforms_of_words.append(
                    _jax.TransposeTransform((*p, *range(len(p), len(p) + len(words))))
                )
            case _:
                raise UnsupportedOp(
                    f"{type(transform).__name__} of a Ref of PRNG keys",
                    hint="index, reshape or transpose it",
                )
    return transforms_of_words


class _ViewAccess:
    """A View in the making.

    order: per dimension of what the access gives, the Ref's dimension that it runs along.
    rest: transforms that come after it.
    """

    def __init__(self, ref, dtype: np.dtype):
        self.ref, self.dtype = ref, dtype
        self.indices: list[Index] = [
            Range(0, extent) for extent in _jax.ref_type(jax.typeof(ref))[0]
        ]
        self.order = list(range(len(self.indices)))
        self.rest: list = []

    def take(self, transform) -> None:
        if isinstance(transform, _jax.NDIndexer):
            if self.rest and (exchanged := self._exchanged(transform)) is not None:
                transform, self.rest = exchanged
                self._index(transform)
            elif not self.rest and _composes(transform, self.indices, self.order):
                self._index(transform.indices)
            else:
                self.rest.append(transform)
        elif (
            isinstance(transform, _jax.TransposeTransform) and not self.rest and not self._gathers()
        ):
            self.order = [self.order[axis] for axis in transform.permutation]
        else:
            self.rest.append(transform)

    def _gathers(self) -> bool:
        return any(isinstance(index, GatheredIndex) for index in self.indices)

    def _index(self, entries: Sequence) -> None:
        for dim, raw in zip(self.order, entries):
            outer = self.indices[dim]
            assert isinstance(outer, Range), "the others have no dimension in the order"
            self.indices[dim] = narrow(outer, _from_start(raw, outer.size), add_index, mul_index)
        self.order = [axis for axis in self.order if isinstance(self.indices[axis], Range)]

    def _exchanged(self, indexer) -> tuple[list, list] | None:
        """(indices before the rest, the new rest) with the meaning of the rest, then indexer."""
        taken = None if self._gathers() else runs(indexer)
        ranges = [i for dim in self.order if isinstance(i := self.indices[dim], Range)]
        if taken is None or len(ranges) < len(self.order):
            return None
        shapes, dtypes = [tuple(range_.size for range_ in ranges)], [self.dtype]
        for transform in self.rest:
            if isinstance(transform, _jax.NDIndexer):
                return None
            shapes.append(shape_after(transform, shapes[-1], dtypes[-1]))
            dtypes.append(dtype_after(dtypes[-1], transform))
        rest = []
        for transform, shape, kind in zip(self.rest[::-1], shapes[-2::-1], dtypes[-2::-1]):
            exchanged = before(transform, shape, kind, taken)
            if exchanged is None:
                return None
            taken, moved = exchanged
            rest.append(moved)
        return [run.start if run.point else run.as_slice() for run in taken], rest[::-1]

    def view(self) -> IndexedRef:
        axes = sorted(self.order)
        perm = tuple(axes.index(dim) for dim in self.order)
        natural = perm == tuple(range(len(perm))) or self._gathers()
        return IndexedRef(
            self.ref, self.dtype, tuple(self.indices), None if natural else perm, tuple(self.rest)
        )


def _from_start(raw, extent: int):
    """An array index counted from the start: negative elements count from the end, as in NumPy."""
    if _jax.is_slice(raw) or not np.ndim(raw) or raw.dtype.kind == "u":
        return raw
    return lax.select(
        lax.lt(raw, lax.full_like(raw, 0)), lax.add(raw, lax.full_like(raw, extent)), raw
    )


def _composes(indexer, indices: list, order: list) -> bool:
    """Whether the indexer can join the access: no array index before it, and array indices only in the Ref's own order."""
    if any(isinstance(index, GatheredIndex) for index in indices):
        return False
    return not has_arrays(indexer) or order == list(range(len(indices)))
