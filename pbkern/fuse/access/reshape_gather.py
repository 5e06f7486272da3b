"""Access rules of primitives whose dimensions depend on each other or on data: reshape, gather, dynamic slices.

Indices are data, so operands are taken whole along the dimensions that indices choose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax import lax

from pbkern.core.affine import Affine
from pbkern.core.ops.reshape import segments

from .rules import (
    Access,
    NeedsWhole,
    Pull,
    Span,
    block_shape,
    is_whole,
    require_whole,
    rules,
    shapes,
    whole,
)

# ---- reshape


def _strides(extents: Sequence[int]) -> list[int]:
    return [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]


def _flat(spans: Sequence[Span], extents: Sequence[int]) -> tuple[Affine, int] | None:
    """(start, size) in row-major order if the spans are one contiguous run."""
    first = next((axis for axis, part in enumerate(spans) if part.size != 1), len(spans) - 1)
    if any(
        not is_whole(part, extent) for part, extent in zip(spans[first + 1 :], extents[first + 1 :])
    ):
        return None
    start: Affine[int] = Affine()
    for span, stride in zip(spans, _strides(extents)):
        start = start + span.start * stride
    return start, spans[first].size * _strides(extents)[first]


def _unflatten(
    start: Affine, size: int, extents: Sequence[int], programs: Mapping[int, int]
) -> list[Span] | None:
    """Spans of dimensions `extents` that cover exactly the run, or None. `programs`: grid axis -> number of programs."""
    if len(extents) == 1:
        return [Span(start, size)]
    strides = _strides(extents)
    for axis, stride in enumerate(strides):
        if size % stride or size // stride > extents[axis]:
            continue
        spans, rest = [], start
        for outer in strides[: axis + 1]:
            terms = tuple(
                (symbol, coeff // outer) for symbol, coeff in rest.terms if coeff % outer == 0
            )
            const = rest.const // outer if outer != strides[axis] else rest.const / outer
            if const != int(const):
                return None
            spans.append(Affine(terms, int(const)))
            rest = rest - spans[-1] * outer
        if rest.terms or rest.const:
            return None
        # An index that crosses into the next outer one would need a division.
        if any(_reach(span, programs) >= extent for span, extent in zip(spans[1:], extents[1:])):
            return None
        return [
            *(Span(span, 1) for span in spans[:axis]),
            Span(spans[axis], size // stride),
            *(whole(extent) for extent in extents[axis + 1 :]),
        ]
    return None


def _reach(index: Affine, programs: Mapping[int, int]) -> int:
    """The largest value of an index."""
    return index.const + sum(
        max(coeff, 0) * (programs[symbol] - 1) for symbol, coeff in index.terms
    )


def _programs(spans: Sequence[Span], extents: Sequence[int]) -> dict[int, int]:
    """Grid axis -> number of programs along it, as far as these dimensions show."""
    programs: dict[int, int] = {}
    for span, extent in zip(spans, extents):
        for axis, coeff in span.start.terms:
            programs[axis] = max(programs.get(axis, 1), -(-extent // abs(coeff)))
    return programs


def _split_dimension(eqn, asked: Access, outer: Sequence[int], inner: Sequence[int]) -> Access:
    """`asked` with `outer` taken whole.

    Raises NeedsWhole, with the next block size that starts at whole inner runs.
    """
    multiple = 0
    if len(outer) == 1:
        size, (shape, *_) = asked[outer[0]].size, shapes(eqn)
        strides = _strides([shape[dim] for dim in inner])[:-1]
        multiple = min((stride for stride in strides if stride > size or size % stride), default=0)
    try:
        return require_whole(eqn, asked, outer)
    except NeedsWhole as e:
        raise NeedsWhole(e.axes, e.why, multiple) from None


@rules.register("reshape")
def _reshape(eqn, out: Access) -> Pull:
    """Dimensions map one to one, or a contiguous run maps to one; otherwise a run is taken whole."""
    (shape, *dynamic), extents = shapes(eqn), eqn.outvars[0].aval.shape
    source: list[Span] = [whole(size) for size in shape]
    # A concatenation may ask for more than a dimension of one element has: the element is repeated.
    asked = [whole(1) if extent == 1 < part.size else part for extent, part in zip(extents, out)]
    for inner, outer in segments(shape, extents):
        if len(inner) == len(outer) == 1:
            source[inner[0]] = asked[outer[0]]
            continue
        if all(is_whole(asked[axis], extents[axis]) for axis in outer):
            continue
        flat = _flat([asked[axis] for axis in outer], [extents[axis] for axis in outer])
        programs = _programs([asked[axis] for axis in outer], [extents[axis] for axis in outer])
        spans = flat and _unflatten(*flat, [shape[axis] for axis in inner], programs)
        if spans is None:
            asked = list(_split_dimension(eqn, tuple(asked), outer, inner))
            continue
        for dim, span in zip(inner, spans):
            source[dim] = span
    params, inputs = (
        {**eqn.params, "new_sizes": block_shape(tuple(asked))},
        (tuple(source), *(() for _ in dynamic)),
    )
    if not any(extent == 1 < part.size for extent, part in zip(extents, out)):
        return Pull(inputs, params, out=tuple(asked))
    repeated = tuple(
        part if extent == 1 else clipped for extent, part, clipped in zip(extents, out, asked)
    )

    def repeat(ctx, x, *dynamic):
        x = eqn.primitive.bind(x, *dynamic, **params)
        return [lax.broadcast_in_dim(x, block_shape(repeated), range(x.ndim))]

    return Pull(inputs, {}, repeat, out=repeated)


# ---- data-dependent positions


@rules.register("gather")
def _gather(eqn, out: Access) -> Pull:
    """Blocks run over batch dimensions (those of the indices) and over slice dimensions taken in full."""
    (operand, indices), config = shapes(eqn), eqn.params
    dn, sizes = config["dimension_numbers"], config["slice_sizes"]
    window = [
        axis
        for axis in range(len(operand))
        if axis not in dn.collapsed_slice_dims and axis not in dn.operand_batching_dims
    ]
    source, slice_sizes = [whole(extent) for extent in operand], list(sizes)
    partial = []
    for dim, operand_axis in zip(dn.offset_dims, window):
        if sizes[operand_axis] == operand[operand_axis]:
            source[operand_axis], slice_sizes[operand_axis] = out[dim], out[dim].size
        else:
            partial.append(dim)
    out = require_whole(eqn, out, partial)
    batch = [span for axis, span in enumerate(out) if axis not in dn.offset_dims]
    for operand_axis, index_dim in zip(dn.operand_batching_dims, dn.start_indices_batching_dims):
        source[operand_axis] = batch[index_dim]
    params = {**config, "slice_sizes": tuple(slice_sizes)}
    if any(
        axis in dn.start_index_map and slice_sizes[axis] != sizes[axis]
        for axis in range(len(operand))
    ):
        # The start of a full slice is always clamped to 0; on a block, another start would be in
        # bounds.
        moving = frozenset(
            symbol
            for out_dim, window_axis in zip(dn.offset_dims, window)
            if window_axis in dn.start_index_map
            for symbol in out[out_dim].start.symbols
        )
        if moving:
            raise NeedsWhole(moving, "gather moves along this dimension")
        return _gather_whole(eqn, out)
    return Pull((tuple(source), (*batch, whole(indices[-1]))), params, out=out)


def _gather_whole(eqn, out: Access) -> Pull:
    extents = eqn.outvars[0].aval.shape
    out = require_whole(eqn, out, range(len(extents)))
    return Pull(
        tuple(tuple(whole(size) for size in shape) for shape in shapes(eqn)), eqn.params, out=out
    )


@rules.register("dynamic_slice")
def _dynamic_slice(eqn, out: Access) -> Pull:
    (operand, *starts), sizes = shapes(eqn), eqn.params["slice_sizes"]
    moved = [axis for axis, (extent, size) in enumerate(zip(operand, sizes)) if extent != size]
    out = require_whole(eqn, out, moved)
    source = tuple(
        whole(extent) if axis in moved else out[axis] for axis, extent in enumerate(operand)
    )
    params = {
        **eqn.params,
        "slice_sizes": tuple(
            sizes[axis] if axis in moved else out[axis].size for axis in range(len(operand))
        ),
    }
    # Starts along dimensions taken in full are clamped to 0, as they are on a block taken in full.
    return Pull((source, *(() for _ in starts)), params, out=out)


@rules.register("dynamic_update_slice")
def _dynamic_update_slice(eqn, out: Access) -> Pull:
    """Dimensions that the update spans in full follow the output."""
    operand, update = shapes(eqn)[:2]
    moved = [axis for axis, (extent, size) in enumerate(zip(operand, update)) if extent != size]
    if all(out[dim].is_const for dim in moved):
        out = require_whole(eqn, out, moved)
        part = tuple(
            whole(update[axis]) if axis in moved else span for axis, span in enumerate(out)
        )
        return Pull((out, part, *(() for _ in operand)), eqn.params, out=out)
    raise NeedsWhole(
        frozenset(symbol for dim in moved for symbol in out[dim].start.symbols),
        "the update moves along this dimension",
    )
