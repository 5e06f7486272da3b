"""Rules for operations with an iteration space of their own: reductions, contractions, windows, cumulative ops."""

from __future__ import annotations

import itertools
import math
from functools import partial, reduce

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.rules import RuleTable
from pbkern.lower.nest.ir import INT32, Expr
from pbkern.lower.nest.reductions import highest, lowest
from pbkern.lower.values.values import ZERO, Contract, Index, Lazy, Value, dims_index

# Fewest results of a convolution that is written out, term by term. Not measured: two vectors of 16 floats.
FEWEST_WRITTEN_OUT = 32
# Elements of a padded row, for each lane that its ends leave unused, from which on the ends are computed apart. Measured
# on Zen 4, 3 x 3 taps of float32, 16 lanes, of which both ends leave 15: 64 channels of 28 x 28 25.6 us copied and 27.7 apart,
# of 56 x 56 72.7 and 72.0, of 112 x 112 265 and 206; one of 1000 x 1000 285 and 195.
ROW_PER_UNUSED_LANE = 2
# rule(builder, eqn, operands: list[Value]) -> Value
CONTRACTIONS: RuleTable = RuleTable("reduction")


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Half precision accumulates in float32."""
    return np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype


def _number_dtype(dtype: np.dtype) -> np.dtype:
    """Type of a contraction with results of this dtype.

    Whether any product of booleans is true follows from how many are; sums of short integers wrap when they are stored.
    """
    is_short = dtype.kind in "iu" and dtype.itemsize < INT32.itemsize
    return INT32 if dtype.kind == "b" or is_short else dtype


def _symbol(pair: tuple[str, int]) -> Affine:
    return dims_index([pair])[0]


def _reduce(op: str):
    def rule(builder, eqn, ins):
        src, axes = ins[0], eqn.params["axes"]
        out = eqn.outvars[0].aval
        dims = tuple((builder.names("d"), size) for size in src.shape)
        index = dims_index(dims)
        return Contract(
            tuple(out.shape),
            np.dtype(out.dtype),
            dims,
            tuple(dims[axis][0] for axis in axes),
            tuple(position for k, position in enumerate(index) if k not in axes),
            (src,),
            (index,),
            op,
            accumulator_dtype(np.dtype(out.dtype)),
            at_line=builder.line(eqn),
        )

    return rule


for _name, _op in (
    ("reduce_sum", "sum"),
    ("reduce_max", "max"),
    ("reduce_min", "min"),
    ("reduce_prod", "prod"),
    ("reduce_and", "and"),
    ("reduce_or", "or"),
    ("reduce_xor", "xor"),
):
    CONTRACTIONS.register(_name)(_reduce(_op))


@CONTRACTIONS.register("argmax", "argmin")
def _argmax(builder, eqn, ins):
    src, axis = ins[0], eqn.params["axes"][0]
    out = eqn.outvars[0].aval
    dims = tuple((builder.names("d"), size) for size in src.shape)
    index = dims_index(dims)
    return Contract(
        tuple(out.shape),
        np.dtype(out.dtype),
        dims,
        (dims[axis][0],),
        tuple(position for k, position in enumerate(index) if k != axis),
        (src,),
        (index,),
        eqn.primitive.name,
        np.dtype(out.dtype),
        index_arg=index[axis],
        at_line=builder.line(eqn),
    )


def _cumulative(op: str):
    def rule(builder, eqn, ins):
        src, axis = ins[0], eqn.params["axis"]
        dims = tuple((builder.names("d"), size) for size in src.shape)
        index = list(dims_index(dims))
        if eqn.params["reverse"] and src.shape[axis] > 1:
            index[axis] = index[axis] * -1 + (src.shape[axis] - 1)
        return Contract(
            src.shape,
            src.dtype,
            dims,
            (dims[axis][0],),
            tuple(index),
            (src,),
            (tuple(index),),
            op,
            accumulator_dtype(src.dtype),
            ordered=True,
            at_line=builder.line(eqn),
        )

    return rule


for _name, _op in (
    ("cumsum", "sum"),
    ("cumprod", "prod"),
    ("cummax", "max"),
    ("cummin", "min"),
    ("cumlogsumexp", "logaddexp"),
):
    CONTRACTIONS.register(_name)(_cumulative(_op))


@CONTRACTIONS.register("dot_general")
def _dot_general(builder, eqn, ins):
    (lhs_k, rhs_k), (lhs_b, rhs_b) = eqn.params["dimension_numbers"]
    lhs, rhs = ins
    out = eqn.outvars[0].aval
    dtype = _number_dtype(np.dtype(out.dtype))
    shape = [("", 0)] * len(out.shape)
    for axis, size in enumerate(out.shape):
        shape[axis] = (builder.names("d"), size)
    reduced = [(builder.names("k"), lhs.shape[a]) for a in lhs_k]
    free = iter(shape[len(lhs_b) :])

    def route(rank: int, batch, contracted) -> tuple[Affine, ...]:
        index = []
        for a in range(rank):
            if a in contracted:
                index.append(_symbol(reduced[list(contracted).index(a)]))
            elif a in batch:
                index.append(_symbol(shape[list(batch).index(a)]))
            else:
                index.append(_symbol(next(free)))
        return tuple(index)

    routes = (route(len(lhs.shape), lhs_b, lhs_k), route(len(rhs.shape), rhs_b, rhs_k))
    acc = accumulator_dtype(dtype)
    operands = (builder.cast(lhs, acc), builder.cast(rhs, acc))
    if not reduced:
        return builder.cast(
            _products(builder, tuple(out.shape), shape, operands, routes), np.dtype(out.dtype)
        )
    contract = Contract(
        tuple(out.shape),
        dtype,
        tuple(shape) + tuple(reduced),
        tuple(dim for dim, _ in reduced),
        dims_index(shape),
        operands,
        routes,
        "dot",
        acc,
        at_line=builder.line(eqn),
    )
    return builder.cast(builder.new(contract), np.dtype(out.dtype))


def _products(builder, shape: tuple[int, ...], dims, operands, routes) -> Lazy:
    """Every product of elements of two operands: a contraction of no dimension."""

    def route(ix: Index) -> list[Index]:
        places = {dim: position for (dim, _), position in zip(dims, ix)}
        return [tuple(i.substitute(places.get) for i in access) for access in routes]

    def combine(pool, ix: Index, xs: list[Expr]) -> Expr:
        return builder.op("mul", operands[0].dtype, *xs)

    return builder.new(Lazy(shape, operands[0].dtype, operands, route, combine, cost=1.0))


@CONTRACTIONS.register("conv_general_dilated")
def _conv(builder, eqn, ins: list[Value]) -> Value:
    """A contraction over (window..., input feature); padding and lhs dilation become a padded operand first."""
    params = eqn.params
    lhs, rhs = ins
    dn = params["dimension_numbers"]
    groups = max(params["feature_group_count"], params["batch_group_count"])
    out = eqn.outvars[0].aval
    dtype = _number_dtype(np.dtype(out.dtype))
    acc = accumulator_dtype(dtype)
    lhs = _dilate_and_pad(builder, lhs, dn.lhs_spec[2:], params["lhs_dilation"], params["padding"])
    if _is_written_out(builder, params, lhs, rhs, out):
        terms = _sum_over_window(builder, params, tuple(out.shape), lhs, rhs, acc)
        return builder.cast(terms, np.dtype(out.dtype))
    shape = tuple((builder.names("d"), size) for size in out.shape)
    o_dim = shape[dn.out_spec[1]]
    window = [(builder.names("k"), rhs.shape[a]) for a in dn.rhs_spec[2:]]
    feature = (builder.names("k"), rhs.shape[dn.rhs_spec[1]])
    out_per_group = rhs.shape[dn.rhs_spec[0]] // groups
    channel, group = _grouped(builder, o_dim, out_per_group, groups)

    index = list(dims_index(shape))
    dims = list(shape)
    if groups > 1:  # the output channel is split into (group, channel within it)
        index[dn.out_spec[1]] = channel
        at = dims.index(o_dim)
        dims[at : at + 1] = [(str(group.terms[0][0]), groups)] if group.terms else []
        if out_per_group > 1:
            within = channel - group * out_per_group
            dims.append((str(within.terms[0][0]), out_per_group))
    taps = dims_index(window)
    sample, in_channel = dims_index(shape)[dn.out_spec[0]], _symbol(feature)
    if params["feature_group_count"] > 1:
        in_channel += group * feature[1]
    if params["batch_group_count"] > 1:
        sample += group * out.shape[dn.out_spec[0]]
    # In the order of the filters in memory: where there are many channels, they are many times as
    # much as caches hold.
    reduced = [
        dim for _, dim in sorted(zip((*dn.rhs_spec[2:], dn.rhs_spec[1]), [*window, feature]))
    ]
    contract = Contract(
        tuple(out.shape),
        dtype,
        (*dims, *reduced),
        tuple(dim for dim, _ in reduced),
        tuple(index),
        (builder.cast(lhs, acc), builder.cast(rhs, acc)),
        (
            _place_in_input(params, dims_index(shape), taps, sample, in_channel),
            _place_in_filters(dn, taps, channel, _symbol(feature)),
        ),
        "dot",
        acc,
        at_line=builder.line(eqn),
    )
    return builder.cast(builder.new(contract), np.dtype(out.dtype))


def _is_written_out(builder, params, lhs: Value, rhs: Value, out) -> bool:
    """Whether each result is a sum over few elements of its own channel, and there are many results."""
    dn = params["dimension_numbers"]
    taps = math.prod(rhs.shape[axis] for axis in dn.rhs_spec[2:])
    return (
        params["feature_group_count"] == rhs.shape[dn.rhs_spec[0]]
        and rhs.shape[dn.rhs_spec[1]] == 1
        and all(factor == 1 for factor in params["lhs_dilation"])
        and 2 <= taps <= builder.context.options.most_taps
        and out.size >= FEWEST_WRITTEN_OUT
        and _is_padded(lhs)
        and _edges_pay(builder, params, rhs, out)
    )


def _is_padded(value: Value) -> bool:
    """Whether elements of a value, before it is stored, are looked up outside others."""
    return isinstance(value, Lazy) and (value.guard or any(map(_is_padded, value.operands)))


def _edges_pay(builder, params, rhs: Value, out) -> bool:
    """Whether to compute the ends of padded rows apart, as partial vectors, rather than to copy what is padded."""
    dn = params["dimension_numbers"]
    windows = {
        axis: (rhs.shape[tap], step)
        for axis, tap, step in zip(dn.out_spec[2:], dn.rhs_spec[2:], params["window_strides"])
    }
    if windows.get(len(out.shape) - 1, (1, 1))[1] > 1:
        return False  # vectors of elements apart are loaded better from a copy with room behind its rows
    last = max(axis for axis, (taps, _) in windows.items() if taps > 1)
    lanes = max(builder.context.policy.step_bytes // out.dtype.itemsize, 1)
    taps, _ = windows[last]
    unused = (taps - 1) * (-math.prod(out.shape[last + 1 :]) % lanes)
    return math.prod(out.shape[last:]) >= ROW_PER_UNUSED_LANE * unused


def _sum_over_window(
    builder, params, shape: tuple[int, ...], lhs: Value, rhs: Value, dtype: np.dtype
) -> Lazy:
    """The sum of products over a window, term by term."""
    dn = params["dimension_numbers"]
    windows = [
        tuple(ZERO + tap for tap in taps)
        for taps in itertools.product(*(range(rhs.shape[axis]) for axis in dn.rhs_spec[2:]))
    ]
    operands = builder.cast(lhs, dtype), builder.cast(rhs, dtype)

    def route(ix: Index) -> list[Index]:
        sample, channel = ix[dn.out_spec[0]], ix[dn.out_spec[1]]
        return [
            *(_place_in_input(params, ix, window, sample, channel) for window in windows),
            *(_place_in_filters(dn, window, channel, ZERO) for window in windows),
        ]

    def combine(pool, ix: Index, values: list[Expr]) -> Expr:
        pairs = zip(values[: len(windows)], values[len(windows) :])
        products = [builder.op("mul", dtype, *pair) for pair in pairs]
        return reduce(partial(builder.op, "add", dtype), products)

    repeated = tuple(operand for operand in operands for _ in windows)
    return builder.new(Lazy(shape, dtype, repeated, route, combine, cost=2.0 * len(windows)))


def _place_in_input(params, result: Index, window: Index, sample: Affine, channel: Affine) -> Index:
    """Place in the padded input that a product of a convolution reads.

    result, window: places in the result and in the window; sample, channel: of the input.
    """
    dn = params["dimension_numbers"]
    place: list[Affine] = [ZERO] * len(result)
    place[dn.lhs_spec[0]], place[dn.lhs_spec[1]] = sample, channel
    for axis, out_axis, tap, stride, dilation in zip(
        dn.lhs_spec[2:], dn.out_spec[2:], window, params["window_strides"], params["rhs_dilation"]
    ):
        place[axis] = result[out_axis] * stride + tap * dilation
    return tuple(place)


def _place_in_filters(dn, window: Index, out_channel: Affine, channel: Affine) -> Index:
    """Place in the filters that a product of a convolution reads."""
    place: list[Affine] = [ZERO] * len(dn.rhs_spec)
    place[dn.rhs_spec[0]], place[dn.rhs_spec[1]] = out_channel, channel
    for axis, tap in zip(dn.rhs_spec[2:], window):
        place[axis] = tap
    return tuple(place)


def _grouped(builder, o_dim, per_group: int, groups: int) -> tuple[Affine, Affine]:
    """(output channel, group) as affine expressions."""
    if groups == 1:
        return _symbol(o_dim), ZERO
    group = _symbol((builder.names("d"), groups))
    return group * per_group + _symbol((builder.names("d"), per_group)), group


def _dilate_and_pad(builder, lhs: Value, axes, dilation, padding) -> Value:
    if all(factor == 1 for factor in dilation) and all(lo == hi == 0 for lo, hi in padding):
        return lhs
    config = [(0, 0, 0)] * len(lhs.shape)
    for axis, dim, (lo, hi) in zip(axes, dilation, padding):
        config[axis] = (int(lo), int(hi), dim - 1)
    return builder.pad(lhs, 0, tuple(config))


def _window(op: str, identity):
    def rule(builder, eqn, ins):
        params, src = eqn.params, ins[0]
        out = eqn.outvars[0].aval
        dtype = np.dtype(out.dtype)
        config = tuple(
            (int(lo), int(hi), dim - 1)
            for (lo, hi), dim in zip(params["padding"], params["base_dilation"])
        )
        if any(pad != (0, 0, 0) for pad in config):
            src = builder.pad(src, identity(dtype), config)
        shape = [(builder.names("d"), size) for size in out.shape]
        window = [(builder.names("k"), dim) for dim in params["window_dimensions"]]
        index = tuple(
            _symbol(size) * stride + _symbol(window_dim) * dilation
            for size, window_dim, stride, dilation in zip(
                shape, window, params["window_strides"], params["window_dilation"]
            )
        )
        return Contract(
            tuple(out.shape),
            dtype,
            (*shape, *window),
            tuple(dim for dim, _ in window),
            dims_index(shape),
            (src,),
            (index,),
            op,
            accumulator_dtype(dtype),
            at_line=builder.line(eqn),
        )

    return rule


for _name, _op, _identity in (
    ("reduce_window_sum", "sum", lambda dtype: 0),
    ("reduce_window_max", "max", lowest),
    ("reduce_window_min", "min", highest),
):
    CONTRACTIONS.register(_name)(_window(_op, _identity))

__all__ = ["CONTRACTIONS", "Lazy", "accumulator_dtype"]
