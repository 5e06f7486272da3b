"""Access rules of windows and contractions: conv_general_dilated, reduce_window, dot_general, partial_reduce.

Windows arrive without padding and input dilation (fuse/simplify/driver.py makes them pads).
Contracted dimensions are taken whole; batch, row and column dimensions follow the output.
`partial_reduce` is the first stage of a reduction that fuse/split/two_stage.py splits.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import mlir

from pbkern.core.affine import Affine

from .rules import Access, NeedsWhole, Pull, Span, require_whole, rules, shapes, whole


def _window(span: Span, size: int, stride: int, dilation: int) -> Span:
    """Input elements under output elements `span` of a window without padding."""
    return Span(span.start * stride, (span.size - 1) * stride + (size - 1) * dilation + 1)


@rules.register("dot_general")
def _dot_general(eqn, out: Access) -> Pull:
    lhs, rhs = shapes(eqn)
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    source_l, source_r = [whole(extent) for extent in lhs], [whole(extent) for extent in rhs]
    spans = iter(out)
    for lhs_dim, rhs_dim in zip(lb, rb):
        source_l[lhs_dim] = source_r[rhs_dim] = next(spans)
    for source, used in ((source_l, (*lc, *lb)), (source_r, (*rc, *rb))):
        for axis in range(len(source)):
            if axis not in used:
                source[axis] = next(spans)
    return Pull((tuple(source_l), tuple(source_r)), eqn.params)


def _feature_groups(span: Span, extent: int, groups: int, inner: int) -> tuple[Span, Span, int]:
    """(output channels, input channels, groups) of a grouped convolution's block."""
    per = extent // groups
    parts = (span.size, span.start.const, *(coeff for _, coeff in span.start.terms))
    if any(part % per for part in parts):
        if span.start.terms:
            raise NeedsWhole(
                span.start.symbols,
                f"blocks of {span.size} channels do not hold whole groups of {per}",
            )
        return whole(extent), whole(inner * groups), groups
    start = Affine(
        tuple((axis, coeff // per * inner) for axis, coeff in span.start.terms),
        span.start.const // per * inner,
    )
    return span, Span(start, span.size // per * inner), span.size // per


@rules.register("conv_general_dilated")
def _conv(eqn, out: Access) -> Pull:
    params, (lhs, rhs), extents = eqn.params, shapes(eqn), eqn.outvars[0].aval.shape
    dn = params["dimension_numbers"]
    lhs_dims, rhs_dims, out_dims = dn.lhs_spec, dn.rhs_spec, dn.out_spec
    if any(lo or hi for lo, hi in params["padding"]) or any(
        dim != 1 for dim in params["lhs_dilation"]
    ):
        raise NotImplementedError("padding is taken out of convolutions by simplify")
    groups = params["feature_group_count"]
    if params["batch_group_count"] != 1:
        out = require_whole(eqn, out, (out_dims[0], out_dims[1]))
        channels, inputs, batch = (
            whole(extents[out_dims[1]]),
            whole(lhs[lhs_dims[1]]),
            whole(lhs[lhs_dims[0]]),
        )
    elif groups != 1:
        channels, inputs, groups = _feature_groups(
            out[out_dims[1]], extents[out_dims[1]], groups, rhs[rhs_dims[1]]
        )
        batch = out[out_dims[0]]
    else:
        channels, inputs, batch = out[out_dims[1]], whole(lhs[lhs_dims[1]]), out[out_dims[0]]
    out = tuple(channels if axis == out_dims[1] else span for axis, span in enumerate(out))
    of_lhs: list = [None] * len(lhs)
    of_rhs = [whole(extent) for extent in rhs]
    of_lhs[lhs_dims[0]], of_lhs[lhs_dims[1]], of_rhs[rhs_dims[0]] = batch, inputs, channels
    for k, (lhs_dim, rhs_dim, out_dim) in enumerate(zip(lhs_dims[2:], rhs_dims[2:], out_dims[2:])):
        of_lhs[lhs_dim] = _window(
            out[out_dim], rhs[rhs_dim], params["window_strides"][k], params["rhs_dilation"][k]
        )
    return Pull((tuple(of_lhs), tuple(of_rhs)), {**params, "feature_group_count": groups}, out=out)


@rules.register("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window(eqn, out: Access) -> Pull:
    params = eqn.params
    if any(lo or hi for lo, hi in params["padding"]) or any(
        dim != 1 for dim in params["base_dilation"]
    ):
        raise NotImplementedError("padding is taken out of windows by simplify")
    sizes = zip(
        out, params["window_dimensions"], params["window_strides"], params["window_dilation"]
    )
    return Pull((tuple(_window(*each) for each in sizes),), params)


# ---- the first stage of a split reduction

partial_reduce_p = jex.Primitive("partial_reduce")

REDUCERS = {
    "reduce_sum": (lax.reduce_sum_p, lambda dtype: np.zeros((), dtype)),
    "reduce_prod": (lax.reduce_prod_p, lambda dtype: np.ones((), dtype)),
    "reduce_max": (lax.reduce_max_p, lambda dtype: least(dtype)),
    "reduce_min": (lax.reduce_min_p, lambda dtype: greatest(dtype)),
}


def least(dtype):
    """The least number of a type. Complex numbers are ordered by their parts, the real one first."""
    element = np.dtype(dtype)
    if element.kind == "c":
        return np.asarray(complex(-np.inf, -np.inf), element)
    if jax.numpy.issubdtype(element, np.floating):
        return np.asarray(-np.inf, element)
    return np.asarray(False if element.kind == "b" else np.iinfo(element).min, element)


def greatest(dtype):
    """The greatest number of a type. Complex numbers are ordered by their parts, the real one first."""
    element = np.dtype(dtype)
    if element.kind == "c":
        return np.asarray(complex(np.inf, np.inf), element)
    if jax.numpy.issubdtype(element, np.floating):
        return np.asarray(np.inf, element)
    return np.asarray(True if element.kind == "b" else np.iinfo(element).max, element)


def reducer_params(name: str, axes: tuple[int, ...]) -> dict:
    return {"axes": axes, "out_sharding": None} if name == "reduce_sum" else {"axes": axes}


def chunk_dimensions(axis: int, axes, outer: int) -> range:
    """Dimensions of a partial result that count chunks."""
    first = axis - outer - sum(dim < axis - outer for dim in axes)
    return range(first, first + outer + 1)


@partial_reduce_p.def_abstract_eval
def _partial_type(x, *, reducer, axis, block, axes, outer, part):
    """f[..., n, ...] -> f[..., ceil(n / block), ...] without the other dimensions of `axes`: reduces chunks along `axis`.

    The `outer` dimensions before `axis` count chunks as well. `part`, (dimension, how many),
    restricts each chunk to its first elements along a dimension.
    """
    return jax.core.ShapedArray(
        _partial_shape(x.shape, axis, -(-x.shape[axis] // block), axes), x.dtype
    )


def _partial_shape(shape, axis: int, runs: int, axes) -> tuple[int, ...]:
    return tuple(
        runs if dim == axis else size
        for dim, size in enumerate(shape)
        if dim == axis or dim not in axes
    )


@partial_reduce_p.def_impl
def _partial_eager(x, *, reducer, axis, block, axes, outer, part):
    _, identity = REDUCERS[reducer]
    runs = -(-x.shape[axis] // block)
    config = [(0, runs * block - size if dim == axis else 0, 0) for dim, size in enumerate(x.shape)]
    return _reduce_runs(lax.pad(x, identity(x.dtype), config), reducer, axis, block, axes, part)


# Bodies of loops and branches that XLA keeps may hold it.
mlir.register_lowering(partial_reduce_p, mlir.lower_fun(_partial_eager, multiple_results=False))


def _reduce_runs(x, reducer: str, axis: int, block: int, axes: tuple[int, ...], part):
    """f[..., r * block, ...] -> f[..., r, ...]: reduces `axes`, but `axis` only within each chunk."""
    runs = x.shape[axis] // block
    if part is None and runs == 1:
        reduced = REDUCERS[reducer][0].bind(x, **reducer_params(reducer, tuple(sorted(axes))))
        remaining = [dim for dim in range(x.ndim) if dim == axis or dim not in axes]
        places = [k for k, dim in enumerate(remaining) if dim != axis]
        return lax.broadcast_in_dim(reduced, _partial_shape(x.shape, axis, 1, axes), places)
    x = lax.reshape(x, (*x.shape[:axis], runs, block, *x.shape[axis + 1 :]))
    if part is not None:
        x = lax.slice_in_dim(x, 0, part[1], axis=part[0] + (part[0] >= axis))
    inner = tuple(
        sorted(dim + (dim >= axis) for dim in axes)
    )  # `axis` itself becomes the inside of its chunks
    return REDUCERS[reducer][0].bind(x, **reducer_params(reducer, inner))


@rules.register("partial_reduce")
def _partial_reduce(eqn, out: Access) -> Pull:
    """One program reduces one chunk, or all of them; elements past the edge are the identity.

    All chunks of a part of the columns would be narrow parts of far rows, which chunks exist to
    avoid.
    """
    params, (shape,), spans = eqn.params, shapes(eqn), iter(out)
    axis, block, axes = params["axis"], params["block"], params["axes"]
    counts = [out[dim] for dim in chunk_dimensions(axis, axes, params["outer"])]
    moving = frozenset(axis for part in out for axis in part.start.symbols)
    if (
        moving
        and any(count.size > 1 for count in counts)
        and all(count.is_const for count in counts)
    ):
        raise NeedsWhole(moving, "its runs are several programs' work")
    source: list[Span] = []
    for source_dim, size in enumerate(shape):
        span = next(spans) if source_dim == axis or source_dim not in axes else whole(size)
        source.append(Span(span.start * block, span.size * block) if source_dim == axis else span)
    asked = source[axis]
    beyond = max(asked.start.const + asked.size - shape[axis], 0) if asked.is_const else 0
    source[axis] = Span(asked.start, asked.size - beyond)

    def compute(ctx, x):
        _, identity = REDUCERS[params["reducer"]]
        if beyond:
            x = lax.pad(
                x,
                identity(x.dtype),
                [(0, beyond if dim == axis else 0, 0) for dim in range(x.ndim)],
            )
        elif shape[axis] % block and not asked.is_const:
            line = tuple(extent if dim == axis else 1 for dim, extent in enumerate(x.shape))
            index = lax.broadcasted_iota(np.int32, line, axis)
            left = lax.sub(np.int32(shape[axis]), ctx.affine(asked.start, np.int32))
            inside = lax.broadcast_in_dim(lax.lt(index, left), x.shape, tuple(range(x.ndim)))
            x = lax.select_n(inside, lax.full(x.shape, identity(x.dtype), x.dtype), x)
        return [_reduce_runs(x, params["reducer"], axis, block, axes, params["part"])]

    return Pull((tuple(source),), {}, compute)
