"""(equation, wanted part of its output) -> the part of each input it needs, and how to compute it.

An access holds one Span per dimension: a start, affine in grid axes (symbols 0, 1, ... count
programs), and a size. A whole dimension is the span from 0 over its extent. Each rule returns a
`Pull`: input accesses together with the computation on blocks of just these shapes, so the two
cannot disagree. Operands of size 1 are recognised by their *full* shapes. A rule that needs more of
a dimension than was asked returns a wider `out` where the span is constant, and raises `NeedsWhole`
where it moves with the grid: the schedule then leaves these grid axes out. Grouping accesses into
blocks is blocks.py. Rules for shapes that need several dimensions at once are in reshape_gather.py,
for windows and contractions in windows_contractions.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from jax import lax

from pbkern._jax import user_line
from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.rules import RuleTable

ZERO: Affine = Affine()


@dataclass(frozen=True, slots=True)
class Span:
    """`size` elements from `start` of one dimension."""

    start: Affine
    size: int

    def __hash__(self) -> int:
        """Hash of the fields, by one call in place of two: blocks are looked up with every step."""
        start = self.start
        return hash((start.terms, start.const, self.size))

    @property
    def is_const(self) -> bool:
        return not self.start.terms

    def shifted(self, by: int) -> Span:
        return Span(self.start + int(by), self.size) if by else self

    def __str__(self) -> str:
        return f"{self.start}:+{self.size}"


Access = tuple[Span, ...]


def whole(size: int) -> Span:
    return Span(ZERO, size)


def is_whole(span: Span, extent: int) -> bool:
    return span.is_const and span.start.const == 0 and span.size == extent


def block_shape(access: Access) -> tuple[int, ...]:
    return tuple(span.size for span in access)


class NeedsWhole(Exception):
    """Grid axes `axes` must not be split: an equation needs all of a dimension that moves with them.

    If `multiple` is not 0, blocks of multiples of `multiple` elements along them may do as well.
    """

    def __init__(self, axes: frozenset, why: str, multiple: int = 0):
        self.axes, self.why, self.multiple = axes, why, multiple
        super().__init__(f"axes {sorted(axes)}: {why}")

    def without_frames(self) -> NeedsWhole:
        """A copy, for a memo and to raise what it holds: an error that was raised holds frames, and all their values."""
        return NeedsWhole(self.axes, self.why, self.multiple)


@dataclass(frozen=True)
class Pull:
    """Computation of one block of an equation's results.

    Attributes:
      inputs: access per operand; None for an operand that this block does not need.
      params: the equation's parameters at block shape.
      compute: (ctx, *operands) -> list of results; None binds the primitive with `params`.
      out: the access that is computed; None: the one asked for.
    """

    inputs: tuple[Any, ...]  # Access | None
    params: dict = field(default_factory=dict)
    compute: Callable | None = None
    out: Access | None = None


rules: RuleTable = RuleTable("access")


def pull(eqn, out: Access) -> Pull:
    """Applies the primitive's rule. Raises UnsupportedOp or NeedsWhole."""
    rule = rules.get(eqn.primitive.name)
    if rule is None:
        types = ", ".join(str(var.aval) for var in eqn.invars)
        rule = rules.lookup(eqn.primitive.name, operands=types, at=user_line(eqn))
    return rule(eqn, out)


def shapes(eqn) -> tuple[tuple[int, ...], ...]:
    return tuple(var.aval.shape for var in eqn.invars)


# Indices in kernels are of 32 bits; in flat arrays, of 64.
MAX_EXTENT = 2**31 - 1


def is_long(eqn) -> bool:
    """Whether an operand or result has more than MAX_EXTENT elements along a dimension."""
    return any(is_long_type(var.aval) for var in (*eqn.outvars, *eqn.invars))


def is_long_type(aval) -> bool:
    """Whether an array has more than MAX_EXTENT elements along a dimension."""
    return max(getattr(aval, "shape", ()), default=0) > MAX_EXTENT


def require_whole(eqn, out: Access, dims: Sequence[int]) -> Access:
    """`out` with the given output dimensions widened to their whole extent."""
    extents = eqn.outvars[0].aval.shape
    moving = frozenset(symbol for dim in dims for symbol in out[dim].start.symbols)
    if moving:
        raise NeedsWhole(
            moving, f"{eqn.primitive.name} takes dimension {', '.join(map(str, dims))} as a whole"
        )
    return tuple(whole(extents[axis]) if axis in dims else span for axis, span in enumerate(out))


# ---- elementwise


@rules.elementwise
def _elementwise(eqn, out: Access) -> Pull:
    """Rank-0 operands and dimensions of size 1 repeat."""
    extents = eqn.outvars[0].aval.shape
    if eqn.primitive.name == "bitcast_convert_type" and tuple(shapes(eqn)[0]) != tuple(extents):
        raise UnsupportedOp(
            "a bitcast between widths",
            at=user_line(eqn),
            why=f"{eqn.invars[0].aval} to {eqn.outvars[0].aval}",
        )
    inputs = []
    for shape in shapes(eqn):
        if shape == extents:
            inputs.append(out)
        elif not shape:
            inputs.append(())
        else:
            inputs.append(
                tuple(
                    whole(1) if size == 1 != extents[axis] else out[axis]
                    for axis, size in enumerate(shape)
                )
            )
    return Pull(tuple(inputs), eqn.params)


@rules.register("iota")
def _iota(eqn, out: Access) -> Pull:
    params = eqn.params
    axis = params["dimension"]

    def compute(ctx, *_):
        counted = lax.broadcasted_iota(params["dtype"], block_shape(out), axis)
        return [
            counted
            if out[axis].start == ZERO
            else counted + ctx.affine(out[axis].start, params["dtype"])
        ]

    return Pull(tuple(() for _ in eqn.invars), params, compute)


# ---- dimensions that move, appear or disappear


@rules.register("broadcast_in_dim")
def _broadcast(eqn, out: Access) -> Pull:
    params = eqn.params
    (shape, *dynamic), extents = shapes(eqn), eqn.outvars[0].aval.shape
    source = tuple(
        whole(1) if size == 1 != extents[dim] else out[dim]
        for size, dim in zip(shape, params["broadcast_dimensions"])
    )
    return Pull((source, *(() for _ in dynamic)), {**params, "shape": block_shape(out)})


@rules.register("squeeze")
def _squeeze(eqn, out: Access) -> Pull:
    (shape,) = shapes(eqn)
    gone = {dim % len(shape) for dim in eqn.params["dimensions"]}
    rest = iter(out)
    return Pull(
        (tuple(whole(1) if axis in gone else next(rest) for axis in range(len(shape))),), eqn.params
    )


@rules.register("transpose")
def _transpose(eqn, out: Access) -> Pull:
    source: list = [None] * len(out)
    for axis, span in zip(eqn.params["permutation"], out):
        source[axis] = span
    return Pull((tuple(source),), eqn.params)


@rules.register("rev")
def _rev(eqn, out: Access) -> Pull:
    (shape,) = shapes(eqn)
    reversed_dims = eqn.params["dimensions"]
    source = tuple(
        Span(span.start * -1 + (size - span.size), span.size) if axis in reversed_dims else span
        for axis, (span, size) in enumerate(zip(out, shape))
    )
    return Pull((source,), eqn.params)


@rules.register("slice")
def _slice(eqn, out: Access) -> Pull:
    """Offsets go into the access; the block keeps only strides."""
    config = eqn.params
    strides = config["strides"] or (1,) * len(out)
    source = tuple(
        Span(
            span.start * int(stride) + int(index),
            (span.size - 1) * int(stride) + 1 if span.size else 0,
        )
        for span, index, stride in zip(out, config["start_indices"], strides)
    )
    if all(stride == 1 for stride in strides):
        return Pull((source,), {}, lambda ctx, x: [x])
    limits = block_shape(source)
    params = {"start_indices": (0,) * len(out), "limit_indices": limits, "strides": tuple(strides)}
    return Pull((source,), params)


# ---- reductions and scans over a whole dimension


@rules.register(
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "argmax",
    "argmin",
)
def _reduce(eqn, out: Access) -> Pull:
    (shape,) = shapes(eqn)
    axes, rest = eqn.params["axes"], iter(out)
    return Pull(
        (tuple(whole(size) if axis in axes else next(rest) for axis, size in enumerate(shape)),),
        eqn.params,
    )


@rules.register("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(eqn, out: Access) -> Pull:
    access = require_whole(eqn, out, (eqn.params["axis"],))
    return Pull((access,), eqn.params, out=access)


@rules.register("sort")
def _sort(eqn, out: Access) -> Pull:
    access = require_whole(eqn, out, (eqn.params["dimension"],))
    return Pull((access,) * len(eqn.invars), eqn.params, out=access)


# ---- padding and joining: which elements come from where is decided by index


def _index(ctx, access: Access, dim: int):
    """i32 array of `access`'s shape: each element's index along `dim` in the whole array."""
    counted = lax.broadcasted_iota(np.int32, block_shape(access), dim)
    return (
        counted if access[dim].start == ZERO else counted + ctx.affine(access[dim].start, np.int32)
    )


def _pad_const(
    span: Span, extent: int, lo: int, interior: int
) -> tuple[Span, tuple[int, int, int]]:
    """Part of the input under a constant span of the padded dimension, and the padding that turns it into the span."""
    step, first = interior + 1, span.start.const
    begin = min(max(-((lo - first) // step), 0), extent)  # first input element at or after `first`
    end = min(max((first + span.size - 1 - lo) // step + 1, begin), extent)
    if end == begin:  # padding only: one element, cropped again
        return whole(min(extent, 1)), (-min(extent, 1), span.size, 0)
    low, size = begin * step + lo - first, (end - begin - 1) * step + 1
    return Span(Affine((), begin), end - begin), (low, span.size - low - size, interior)


@rules.register("pad")
def _pad(eqn, out: Access) -> Pull:
    """Moving spans read past the edge and select by index; constant spans pad the block."""
    (shape, _), config = shapes(eqn), eqn.params["padding_config"]
    source, static, moving = [], [], []
    for axis, (asked, size, (lo, hi, interior)) in enumerate(
        zip(out, shape, [tuple(map(int, entry)) for entry in config])
    ):
        if (lo, hi, interior) == (0, 0, 0):
            source.append(asked)
            static.append((0, 0, 0))
        elif asked.is_const:
            span, padding = _pad_const(asked, size, lo, interior)
            source.append(span)
            static.append(padding)
        elif interior:
            require_whole(eqn, out, (axis,))
        else:
            source.append(asked.shifted(-lo))
            static.append((0, 0, 0))
            if lo > 0 or hi > 0:
                moving.append((axis, lo, size))

    def compute(ctx, x, value):
        if any(entry != (0, 0, 0) for entry in static):
            x = lax.pad_p.bind(x, value, padding_config=tuple(static))
        inside = None
        for dim, lo, extent in moving:
            # One row of indices per dimension: comparisons stay one-dimensional until they are
            # combined.
            line = tuple(part if k == dim else whole(1) for k, part in enumerate(out))
            index = _index(ctx, line, dim)
            here = lax.ge(index, np.int32(lo)) & lax.lt(index, np.int32(lo + extent))
            here = lax.broadcast_in_dim(here, x.shape, tuple(range(x.ndim)))
            inside = here if inside is None else inside & here
        return [x if inside is None else lax.select_n(inside, _splat(value, x), x)]

    return Pull((tuple(source), ()), {}, compute)


def _splat(value, like):
    return lax.broadcast_in_dim(value, like.shape, ())


@rules.register("concatenate")
def _concatenate(eqn, out: Access) -> Pull:
    """A constant span joins the operands under it; a moving one reads all of them and selects by index."""
    axis = eqn.params["dimension"]
    offsets = np.cumsum([0] + [shape[axis] for shape in shapes(eqn)]).tolist()
    span = out[axis]
    if span.is_const:
        lo, hi = span.start.const, span.start.const + span.size
        inputs: list = []
        for offset, limit in itertools.pairwise(offsets):
            first, last = max(offset, lo), min(limit, hi)
            part = Span(Affine((), first - offset), last - first)
            inputs.append(
                tuple(part if k == axis else piece for k, piece in enumerate(out))
                if last > first
                else None
            )

        def join(ctx, *xs):
            xs = [x for x in xs if x is not None]
            return [xs[0] if len(xs) == 1 else lax.concatenate_p.bind(*xs, dimension=axis)]

        return Pull(tuple(inputs), {}, join)

    def select(ctx, *xs):
        line = tuple(piece if k == axis else whole(1) for k, piece in enumerate(out))
        index, joined = _index(ctx, line, axis), xs[-1]
        for x, end in zip(reversed(xs[:-1]), reversed(offsets[1:-1])):
            here = lax.broadcast_in_dim(lax.lt(index, np.int32(end)), x.shape, tuple(range(x.ndim)))
            joined = lax.select_n(here, joined, x)
        return [joined]

    moved = [
        tuple(piece.shifted(-origin) if k == axis else piece for k, piece in enumerate(out))
        for origin in offsets[:-1]
    ]
    return Pull(tuple(moved), {}, select)


def widened(pulled: Pull, asked: Access) -> Access:
    """The access that a pull computes when asked for `asked`."""
    return asked if pulled.out is None else pulled.out
