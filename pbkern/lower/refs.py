"""Ref effects of a body: reads become stored values, writes become store items in program order.

Integer arrays as indices that are affine (index_arrays.py) are slices. Others read through gathers and write in a loop over
their elements, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jax.extend import core as jex

from ..affine import Affine
from ..dsl.refs import Gather, Range, ref_access
from .index_arrays import AffineArray, affine_array, are_distinct
from .nest import Expr, For, Let, Nest, Pool, Stmt, Write
from .values import ZERO, Index, Lazy, Literal, Stored, Value, dims_index


@dataclass
class _Place:
    """Where an access goes: index of the value -> index of the Ref.

    Of the axes with index arrays, `runs` have affine ones, which are a position like any other; `gathers` the others.
    """

    shape: tuple[int, ...]
    offsets: list[Affine]
    strides: list[int | None]  # None: the axis takes no dimension of the value
    runs: dict[int, AffineArray]
    gathers: dict[int, Value]
    gather_at: int  # first dimension of the value that runs along the gathered elements
    gather_shape: tuple[int, ...]

    def split(self, ix: Index) -> tuple[Index, Index]:
        """(position among gathered elements, the rest)."""
        low, high = self.gather_at, self.gather_at + len(self.gather_shape)
        return ix[low:high], ix[:low] + ix[high:]

    def __call__(self, ix: Index) -> Index:
        """Index of the Ref; gathered axes at 0."""
        gathered, others = self.split(ix)
        rest = iter(others)
        index = [o if s is None else o + next(rest) * s for o, s in zip(self.offsets, self.strides)]
        for axis, array in self.runs.items():
            index[axis] = array.at(gathered)
        return tuple(index)


def access(builder, eqn, env: dict) -> None:
    """get, swap, addupdate, masked_load, masked_store."""
    acc = ref_access(eqn)
    ref = builder.refs[acc.ref]
    masked = acc.mask is not None
    mask = None if not masked else builder.read(env, acc.mask)
    place = _place(builder, env, acc.indices, ref.shape, mask, writes=acc.kind != "load")
    guard = ref.guard or masked
    if eqn.outvars:  # of a store: the elements before, as a lazy value that costs nothing unless it is used
        value = _load(builder, ref, place, guard)
        if masked and acc.kind == "load":
            other = Literal((), ref.dtype, 0) if acc.other is None else builder.read(env, acc.other)
            value = builder.new(_masked(builder, mask, value, other, place.shape))
        env[eqn.outvars[0]] = value
    if acc.kind == "load":
        return
    value = _broadcast(builder, builder.read(env, acc.value), place.shape)
    mask = None if mask is None else _broadcast(builder, mask, place.shape)
    if place.gathers:
        _scatter(builder, eqn, ref, place, value, mask, guard, acc.kind == "add")
    else:
        _store(builder, eqn, ref, place, value, mask, guard, acc.kind == "add")


def _place(builder, env: dict, indices, ref_shape, mask: Value | None, writes: bool) -> _Place:
    masked = mask is not None
    offsets: list[Affine] = []
    strides: list[int | None] = []
    shape: list[int] = []
    gathers: dict[int, Value] = {}
    first, split, seen_range = None, False, False
    for axis, (index, extent) in enumerate(zip(indices, ref_shape)):
        if isinstance(index, Range):
            reach = (index.size - 1) * index.stride + 1 if index.size else 0
            offsets.append(_start(builder, env, index.start, None if masked else extent - reach))
            strides.append(index.stride)
            shape.append(index.size)
            seen_range = first is not None
            continue
        strides.append(None)
        split |= seen_range and first is not None
        if isinstance(index, Gather):
            gathers[axis] = builder.read(env, index.at) if isinstance(index.at, jex.Var) else _constant(index.at)
            offsets.append(ZERO)
        else:
            offsets.append(_start(builder, env, index.at, None if masked else extent - 1))
        first = len(shape) if first is None else first
    gather_shape = next(iter(gathers.values())).shape if gathers else ()
    at = 0 if split or first is None else first
    shape[at:at] = gather_shape
    runs = _runs(builder, gathers, ref_shape, mask, tuple(shape) == tuple(gather_shape), writes)
    gathers = {axis: v for axis, v in gathers.items() if axis not in runs}
    return _Place(tuple(shape), offsets, strides, runs, gathers, at, tuple(gather_shape))


def _runs(builder, gathers: dict[int, Value], ref_shape, mask: Value | None, covers: bool,
          writes: bool) -> dict[int, AffineArray]:
    """Axes whose indices are affine and need not be clamped. Stores go to distinct elements, as else the last one stays."""
    if not gathers:
        return {}
    shape = next(iter(gathers.values())).shape
    given = mask if covers else None  # the mask's dimensions are those of the index arrays
    found = {axis: array for axis, v in gathers.items() if (array := affine_array(builder, v, given)) is not None}
    if mask is None:
        found = {axis: a for axis, a in found.items() if a.inside(ref_shape[axis])}
    if writes and len(found) == len(gathers) and not are_distinct(list(found.values()), shape):
        return {}
    return {axis: a.evaluated(builder) for axis, a in found.items()}


def _constant(values) -> Value:
    array = np.asarray(values)
    if array.size and (array == array.ravel()[0]).all():
        return Literal(array.shape, array.dtype, array.ravel()[0])
    raise AssertionError("constant index arrays are inputs of a kernel")


def _start(builder, env: dict, start, clamp: int | None) -> Affine:
    """A static or dynamic start. Dynamic ones are clamped so that the slice stays inside the block, as
    lax.dynamic_slice does; masked accesses drop outside elements instead."""
    if isinstance(start, (int, np.integer)):
        return Affine((), int(start))
    return builder.index_symbol(builder.read(env, start), clamp)


def _load(builder, ref, place: _Place, guard: bool) -> Value:
    if not place.gathers:
        return builder.new(Stored(place.shape, ref.dtype, ref.buf, lambda ix: ref.place(place(ix)), guard))
    whole = builder.new(Stored(ref.shape, ref.dtype, ref.buf, ref.place, guard))
    axes = list(place.gathers)

    def route(ix: Index):
        # The Ref is an operand so that order of effects sees it; its elements are read in `combine`.
        return [(ZERO,) * len(ref.shape), *(place.split(ix)[0] for _ in axes)]

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        return builder.gather_expr(whole, list(place(ix)), dict(zip(axes, xs[1:])), (1,) * len(ref.shape), None)

    return builder.new(Lazy(place.shape, ref.dtype, (whole, *place.gathers.values()), route, combine, cost=8.0))


def _store(builder, eqn, ref, place: _Place, value: Value, mask, guard: bool, add: bool) -> None:
    from .build import StoreItem

    target: Callable[[Index], Index] = lambda ix: ref.place(place(ix))
    if add:
        value = _sum(builder, Stored(place.shape, ref.dtype, ref.buf, target, guard), value)
    builder.items.append(StoreItem(ref.buf, place.shape, target, value, mask, guard, at=builder.line(eqn)))


def _scatter(builder, eqn, ref, place: _Place, value: Value, mask, guard: bool, add: bool) -> None:
    """for each gathered element: evaluate its indices, then store that slice of the value."""
    from .build import ControlItem

    def run() -> None:
        counters = [(builder.names("%i"), n) for n in place.gather_shape]
        at = dims_index(counters)
        body: list[Stmt] = []
        names = {axis: builder.names("%s") for axis in place.gathers}
        body += [Let(names[axis], builder.clamped(builder.pull(index, at), ref.shape[axis] - 1))
                 for axis, index in place.gathers.items()]
        rest = place.shape[: place.gather_at] + place.shape[place.gather_at + len(place.gather_shape) :]
        dims = [(builder.names("d"), n) for n in rest]
        ix = dims_index(dims)
        full = ix[: place.gather_at] + at + ix[place.gather_at :]
        index = ref.place(tuple(Affine.symbol(names[k]) if k in names else i for k, i in enumerate(place(full))))
        nest = Nest(dict(dims), at=builder.line(eqn))
        e = builder.pull(value, full, None)
        if add:
            e = builder.op("add", ref.dtype, builder.pool.make("load", ref.dtype, (ref.buf, index, guard)), e)
        nest.writes.append(Write(ref.buf, index, e, True, guard, None if mask is None else builder.pull(mask, full)))
        body.append(nest)
        for name, n in reversed(counters):
            body = [For(name, n, body)]
        builder.stmts += body

    uses = (value, *place.gathers.values()) + (() if mask is None else (mask,))
    builder.append_control(ControlItem(uses, frozenset({ref.buf}), run), [])


def _masked(builder, mask: Value, stored: Value, other: Value, shape) -> Lazy:
    def route(ix: Index):
        return [_fit(ix, v.shape) for v in (mask, stored, other)]

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        return builder.select(xs[0], xs[1], xs[2])

    return Lazy(shape, stored.dtype, (mask, stored, other), route, combine, cost=1.0)


def _sum(builder, old: Value, new: Value) -> Lazy:
    builder.new(old)

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        return builder.op("add", old.dtype, *xs)

    return builder.new(Lazy(old.shape, old.dtype, (old, new), lambda ix: (ix, ix), combine, cost=1.0))


def _fit(ix: Index, shape) -> Index:
    """Index of an operand that broadcasts (rank 0, or size-1 dimensions)."""
    return tuple(i if n != 1 else ZERO for i, n in zip(ix, shape)) if shape else ()


def _broadcast(builder, v: Value, shape) -> Value:
    if v.shape == shape:
        return v
    if isinstance(v, Literal):
        return Literal(shape, v.dtype, v.scalar)
    lead = len(shape) - len(v.shape)
    return builder.new(Lazy(shape, v.dtype, (v,), lambda ix: (_fit(ix[lead:], v.shape),),
                            lambda pool, ix, xs: xs[0], is_view=True))


