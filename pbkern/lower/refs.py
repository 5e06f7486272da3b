"""Ref effects of a body: reads become stored values, writes become store items in program order."""

from __future__ import annotations

import numpy as np
from jax.extend import core as jex

from ..affine import Affine
from ..dsl.refs import Point, Range, ref_access
from ..errors import UnsupportedOp
from .nest import Expr, Pool
from .values import ZERO, Index, Lazy, Literal, Stored, Value


def access(builder, eqn, env: dict) -> None:
    """get, swap, addupdate, masked_load, masked_store."""
    from .build import StoreItem

    acc = ref_access(eqn)
    ref = builder.refs[acc.ref]
    masked = acc.mask is not None
    offsets, strides, shape = [], [], []
    for index, extent in zip(acc.indices, ref.shape):
        if isinstance(index, Point):
            offsets.append(_start(builder, env, index.at, None if masked else extent - 1))
            strides.append(None)
        elif isinstance(index, Range):
            reach = (index.size - 1) * index.stride + 1 if index.size else 0
            offsets.append(_start(builder, env, index.start, None if masked else extent - reach))
            strides.append(index.stride)
            shape.append(index.size)
        else:
            raise UnsupportedOp("integer-array indices on Refs are not lowered", at=builder.line(eqn),
                                hint="load the whole Ref and index the value, e.g. x_ref[...][indices]")

    def place(ix: Index) -> Index:
        rest = iter(ix)
        return ref.place(tuple(o if s is None else o + next(rest) * s for o, s in zip(offsets, strides)))

    shape = tuple(shape)
    guard = ref.guard or masked
    mask = None if not masked else builder.read(env, acc.mask)
    if acc.kind == "load" or (eqn.primitive.name in ("swap", "masked_store") and _used(eqn)):
        stored = Stored(shape, ref.dtype, ref.buf, place, guard)
        value: Value = builder.new(stored)
        if masked:
            other = Literal((), ref.dtype, 0) if acc.other is None else builder.read(env, acc.other)
            value = builder.new(_masked(builder, mask, stored, other, shape))
        env[eqn.outvars[0]] = value
    if acc.kind == "load":
        return
    value = _broadcast(builder, builder.read(env, acc.value), shape)
    if mask is not None:
        mask = _broadcast(builder, mask, shape)
    op = "set"
    if acc.kind == "add":
        value, op = _sum(builder, Stored(shape, ref.dtype, ref.buf, place, guard), value), "set"
    builder.items.append(StoreItem(ref.buf, shape, place, value, mask, guard, op, at=builder.line(eqn)))


def _used(eqn) -> bool:
    return bool(eqn.outvars) and type(eqn.outvars[0]).__name__ != "DropVar"


def _start(builder, env: dict, start, clamp: int | None) -> Affine:
    """A static or dynamic start. Dynamic ones are clamped so that the slice stays inside the block, as
    lax.dynamic_slice does; masked accesses drop outside elements instead."""
    if isinstance(start, (int, np.integer)):
        return Affine((), int(start))
    value = builder.read(env, start) if isinstance(start, (jex.Var, jex.Literal)) else Literal((), np.dtype(np.int32), start)
    return builder.index_symbol(value, clamp)


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
