"""Rules for operations that only move data: each becomes an index map (a Lazy value) and emits no code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.ops.gather import batch_dims, fill_value, fills, result_dims
from pbkern.core.rules import RuleTable
from pbkern.lower.nest.ir import Expr, Pool
from pbkern.lower.values.affine_index_arrays import AffineArray, affine_array
from pbkern.lower.values.values import (
    TEST_COST,
    ZERO,
    Index,
    Joined,
    Lazy,
    Literal,
    Opaque,
    Stored,
    Value,
    Windowed,
    is_index_only,
)

# Vector operations that a gathered element costs. Source: not recorded.
GATHER_COST = 12.0
# Vector operations that an element of a contiguous window costs. Source: not recorded.
RUN_COST = 2.0

# rule(builder, eqn, operands: list[Value]) -> Value
RULES: RuleTable = RuleTable("shape")


def view(eqn, src: Value, route) -> Lazy:
    """A value that reads one operand elsewhere."""
    out = eqn.outvars[0].aval
    return Lazy(
        tuple(out.shape),
        np.dtype(out.dtype),
        (src,),
        lambda ix: (route(ix),),
        lambda pool, ix, xs: xs[0],
        is_view=True,
        index_only=is_index_only(src),
    )


@RULES.register("broadcast_in_dim")
def _broadcast(builder, eqn, ins):
    src, dims = ins[0], eqn.params["broadcast_dimensions"]
    if isinstance(src, Literal):
        return Literal(tuple(eqn.params["shape"]), src.dtype, src.scalar)
    return view(
        eqn,
        src,
        lambda ix: tuple(ix[dim] if src.shape[k] != 1 else ZERO for k, dim in enumerate(dims)),
    )


@RULES.register("broadcast_to")
def _broadcast_to(builder, eqn, ins):
    src, lead = ins[0], len(eqn.outvars[0].aval.shape) - len(ins[0].shape)
    if isinstance(src, Literal):
        return Literal(tuple(eqn.outvars[0].aval.shape), src.dtype, src.scalar)
    return view(
        eqn,
        src,
        lambda ix: tuple(
            position if size != 1 else ZERO for position, size in zip(ix[lead:], src.shape)
        ),
    )


@RULES.register("transpose")
def _transpose(builder, eqn, ins):
    perm = list(eqn.params["permutation"])
    return view(eqn, ins[0], lambda ix: tuple(ix[perm.index(k)] for k in range(len(perm))))


@RULES.register("slice")
def _slice(builder, eqn, ins):
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return view(
        eqn,
        ins[0],
        lambda ix: tuple(
            position * stride + start for position, stride, start in zip(ix, strides, starts)
        ),
    )


@RULES.register("rev")
def _rev(builder, eqn, ins):
    axes, shape = eqn.params["dimensions"], ins[0].shape
    return view(
        eqn,
        ins[0],
        lambda ix: tuple(
            position * -1 + (shape[k] - 1) if k in axes else position
            for k, position in enumerate(ix)
        ),
    )


@RULES.register("squeeze")
def _squeeze(builder, eqn, ins):
    gone = {dim % len(ins[0].shape) for dim in eqn.params["dimensions"]}

    def route(ix: Index) -> Index:
        rest = iter(ix)
        return tuple(ZERO if k in gone else next(rest) for k in range(len(ins[0].shape)))

    return view(eqn, ins[0], route)


@RULES.register("expand_dims")
def _expand_dims(builder, eqn, ins):
    new = {dim % len(eqn.outvars[0].aval.shape) for dim in eqn.params["dimensions"]}
    return view(
        eqn, ins[0], lambda ix: tuple(position for k, position in enumerate(ix) if k not in new)
    )


@RULES.register("reshape")
def _reshape(builder, eqn, ins):
    """Unit dimensions and merged leading ones are index maps; any other reshape reinterprets a contiguous buffer."""
    src, new = ins[0], tuple(eqn.outvars[0].aval.shape)
    if isinstance(src, Literal):
        return Literal(new, src.dtype, src.scalar)
    route = _split_route(src.shape, new)
    if route is not None:
        return view(eqn, src, route)
    return Opaque(
        new, src.dtype, (src,), lambda inner_builder, stored: inner_builder.reinterpret(stored, new)
    )


def _split_route(old: tuple[int, ...], new: tuple[int, ...]):
    """new index -> old index where each old axis is a mixed-radix combination of consecutive new axes, else None."""
    groups, cursor = [], 0
    rest = list(enumerate(new))
    for extent in old:
        taken, product = [], 1
        while product < extent:
            if (
                cursor == len(rest)
                or extent % (product * rest[cursor][1] or 1)
                or rest[cursor][1] == 0
            ):
                return None
            product *= rest[cursor][1]
            taken.append(rest[cursor][0])
            cursor += 1
        groups.append(taken)
    if any(size != 1 for _, size in rest[cursor:]) or math.prod(old) != math.prod(new):
        return None

    def route(ix: Index) -> Index:
        out = []
        for taken in groups:
            total = ZERO
            for axis in taken:
                total = total * new[axis] + ix[axis]
            out.append(total)
        return tuple(out)

    return route


@RULES.register("dynamic_slice")
def _dynamic_slice(builder, eqn, ins):
    src, starts = ins[0], ins[1:]
    sizes = eqn.outvars[0].aval.shape
    offsets = [
        builder.index_symbol(start, clamp=size - length)
        for start, size, length in zip(starts, src.shape, sizes)
    ]
    return view(
        eqn, src, lambda ix: tuple(position + offset for position, offset in zip(ix, offsets))
    )


@RULES.register("dynamic_update_slice")
def _dynamic_update_slice(builder, eqn, ins):
    src, update, starts = ins[0], ins[1], ins[2:]
    offsets = [
        builder.index_symbol(start, clamp=size - length)
        for start, size, length in zip(starts, src.shape, update.shape)
    ]

    def route(ix):
        return ix, tuple(position - offset for position, offset in zip(ix, offsets))

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        inside = inside_range(
            pool,
            builder,
            tuple(position - offset for position, offset in zip(ix, offsets)),
            update.shape,
            src.shape,
        )
        return xs[1] if inside is None else builder.select(inside, xs[1], xs[0])

    return Windowed(
        src.shape,
        src.dtype,
        (src, update),
        route,
        combine,
        cost=TEST_COST,
        guard=True,
        offsets=tuple(offsets),
    )


def inside_range(pool: Pool, builder, ix: Index, extents, outer=None) -> Expr | None:
    """Bool expression: every index is in [0, extent).

    Axes that are as large as `outer` need no test.
    """
    test = None
    for k, (position, extent) in enumerate(zip(ix, extents)):
        if outer is not None and outer[k] == extent:
            continue
        part = pool.in_range(position, 0, extent)
        test = part if test is None else builder.op("and", np.dtype(bool), test, part)
    return test


@RULES.register("pad")
def _pad(builder, eqn, ins):
    src, fill = ins
    config = eqn.params["padding_config"]
    out = tuple(eqn.outvars[0].aval.shape)
    if any(interior for _, _, interior in config):
        return _pad_interior(eqn, ins)

    def source(ix: Index) -> Index:
        return tuple(position - lo for position, (lo, _, _) in zip(ix, config))

    # An axis needs a test only on the sides that are really padded.
    padded = [(lo > 0 or hi > 0) for lo, hi, _ in config]

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        test = inside_range(
            pool,
            builder,
            source(ix),
            src.shape,
            [None if is_padded else size for is_padded, size in zip(padded, src.shape)],
        )
        return xs[0] if test is None else builder.select(test, xs[0], xs[1])

    return Lazy(
        out,
        src.dtype,
        (src, fill),
        lambda ix: (source(ix), ()),
        combine,
        cost=TEST_COST,
        guard=any(padded),
        is_view=not any(padded),
    )


def _pad_interior(eqn, ins):
    """Interior padding has no affine inverse: fill a buffer, then copy the source to strided positions."""
    src, fill = ins
    config = eqn.params["padding_config"]
    out = tuple(eqn.outvars[0].aval.shape)

    def make(inner_builder, stored: Stored, fill_value: Stored) -> Stored:
        result = inner_builder.new_buffer(out, src.dtype)
        inner_builder.store_value(result, fill_value, lambda ix: ix, broadcast=out)
        inner_builder.store_value(
            result,
            stored,
            lambda ix: tuple(
                position * (inner + 1) + lo for position, (lo, _, inner) in zip(ix, config)
            ),
            guard=any(lo < 0 or hi < 0 for lo, hi, _ in config),
        )
        return result

    return Opaque(out, src.dtype, (src, fill), make)


@RULES.register("concatenate")
def _concatenate(builder, eqn, ins):
    return joined(ins, tuple(eqn.outvars[0].aval.shape), eqn.params["dimension"])


def joined(parts: Sequence[Value], shape: tuple[int, ...], axis: int) -> Joined:
    """Values side by side along `axis`."""
    starts = list(itertools.accumulate((part.shape[axis] for part in parts), initial=0))

    def make(builder, *operands: Value, target: Stored | None = None) -> Stored:
        result = target or builder.new_buffer(shape, parts[0].dtype)
        for start, operand in zip(starts, operands):
            builder.store_value(
                result,
                operand,
                lambda ix, shift=start: tuple(
                    position + shift if k == axis else position for k, position in enumerate(ix)
                ),
            )
        return result

    return Joined(
        shape, parts[0].dtype, tuple(parts), make, needs_buffers=False, takes_target=True, axis=axis
    )


@RULES.register("iota")
def _iota(builder, eqn, ins):
    out, axis = eqn.outvars[0].aval, eqn.params["dimension"]
    return index_value(tuple(out.shape), np.dtype(out.dtype), lambda ix: ix[axis], builder)


def index_value(shape, dtype, at, builder) -> Lazy:
    """A value that is an affine function of its own index."""
    integer = dtype if dtype.kind in "iu" else np.dtype(np.int32)

    def combine(pool: Pool, ix: Index, xs) -> Expr:
        expr = pool.index(integer, at(ix))
        return (
            expr
            if dtype == integer
            else builder.op("convert_element_type", dtype, expr, params={"new_dtype": dtype})
        )

    return Lazy(shape, dtype, (), lambda ix: (), combine, index_only=True)


@RULES.register("copy", "stop_gradient", "optimization_barrier")
def _copy(builder, eqn, ins):
    return ins[0]


@RULES.register("gather")
def _gather(builder, eqn, ins):
    """General XLA gather: operand axes are affine or indexed per element; out-of-bounds follows `mode`."""
    dn, sizes, out = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.outvars[0].aval
    shape, dtype = tuple(out.shape), np.dtype(out.dtype)
    fill, batched, dims = fill_value(eqn) if fills(eqn) else None, batch_dims(eqn), result_dims(eqn)
    start = _affine_start(builder, eqn, ins)
    if start is not None:
        (axis,) = dn.start_index_map

        def shifted(ix: Index) -> Index:
            first = start.at((*(ix[dim] for dim in batched), ZERO))
            places = [ix[dims[k]] if k in dims else ZERO for k in range(len(ins[0].shape))]
            return tuple(at + first if k == axis else at for k, at in enumerate(places))

        return view(eqn, ins[0], shifted)
    window = set(dims) - set(dn.operand_batching_dims)
    operand = _in_memory(builder, ins[0])
    # Of a whole window, the indices are scalars, which are cheaper computed before in vectors.
    # Elements have one each.
    indices = _in_memory(builder, ins[1]) if window else ins[1]

    def route(ix: Index) -> list[Index]:
        batch = tuple(ix[dim] for dim in batched)
        return [
            (ZERO,) * len(ins[0].shape),
            *((*batch, Affine((), component)) for component in range(len(dn.start_index_map))),
        ]

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        axes: list[Affine] = [ix[dims[k]] if k in dims else ZERO for k in range(len(ins[0].shape))]
        starts = dict(zip(dn.start_index_map, xs[1:]))
        return builder.gather_expr(builder.resolve(operand), axes, starts, sizes, fill)

    operands = (operand, *[indices] * len(dn.start_index_map))
    return Lazy(shape, dtype, operands, route, combine, cost=RUN_COST if window else GATHER_COST)


def _affine_start(builder, eqn, ins) -> AffineArray | None:
    """The start of a window along one axis, if it is affine in the place of the window and all windows are inside."""
    axes = eqn.params["dimension_numbers"].start_index_map
    if len(axes) != 1:
        return None
    (axis,) = axes
    array = affine_array(builder, ins[1])
    most = ins[0].shape[axis] - eqn.params["slice_sizes"][axis]
    return array.evaluated(builder) if array is not None and array.inside(most + 1) else None


def _in_memory(builder, value: Value) -> Value:
    """Stores a value in memory, where it is from here on."""
    return builder.new(
        Opaque(value.shape, value.dtype, (value,), lambda inner_builder, stored: stored)
    )
