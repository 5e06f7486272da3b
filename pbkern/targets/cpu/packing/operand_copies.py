"""Load of a contraction -> the same from a copy whose rows have padded length, in the type that is multiplied.

The copy holds what the load reads, in the order of the source: a dimension of its own for each that
the load walks alone, one for all those that walk an axis together, as windows do (image[y + h]
reads each row once for every h).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import field, replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import LINE_BYTES
from pbkern.lower.mlir.element_types import compute_el
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.edit.stage import CopySpan, copied
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Stmt
from pbkern.targets.costs.caches import CONFLICT_BYTES, ROW_REUSE, SCATTERED_REUSE, Caches, fit
from pbkern.targets.cpu.machines.machine import ROW_PADDING

from .limits import PackLimits


@dataclass
class OperandCopies:
    """Copies of operands that were made earlier in a list of statements; `written` buffers may have changed since."""

    written: set[Buf]
    copies: dict[tuple, Buf] = field(default_factory=dict)


@dataclass(frozen=True)
class _Walk(CopySpan):
    """A span, and where in it a point of the nest is."""

    place: Affine


def copy_dtype(dtype: np.dtype) -> np.dtype:
    """Elements of a copy: small floats in the type that they are multiplied in."""
    return np.dtype(np.float32) if compute_el(dtype) == "f32" else dtype


def is_expensive(expr: Expr) -> bool:
    """A load that converts its elements, or that may be outside its array and is tested."""
    return isinstance(expr, Load) and (copy_dtype(expr.buf.dtype) != expr.buf.dtype or expr.guard)


def stage(
    nest: Nest,
    load: Load,
    dtype: np.dtype,
    context,
    out: list[Stmt],
    staged: OperandCopies,
    turned: bool = False,
) -> Expr | None:
    """The load from a copy, made by a statement that is added to `out` if there is none yet.

    None where places are diagonal.

    `turned`: what is reduced is last in the copy, wherever it is in the source.
    """
    spans = _spans(load, nest)
    if not spans:
        return None
    if turned:
        spans.sort(key=lambda piece: bool(piece.place.symbols & set(nest.rdims)))
    source, index, guard = load.buf, load.index, load.guard
    rows, row = _split(spans, nest)
    sizes = [piece.size for piece in rows]
    shape = (*sizes, math.prod(piece.size for piece in row) + (ROW_PADDING if rows else 0))
    names = [context.names("d") for _ in spans]

    def within(places: Sequence[Affine]) -> tuple[Affine, ...]:
        flat: Affine = Affine()
        for piece, place in zip(row, places[len(rows) :]):
            flat = flat * piece.size + place
        return *places[: len(rows)], flat

    start = [position.substitute(dict.fromkeys(nest.dims, 0).get) for position in index]
    key = (
        source,
        guard,
        dtype,
        tuple(start),
        tuple((piece.axis, piece.step, piece.size) for piece in spans),
        len(rows),
        turned,
    )
    buf = staged.copies.get(key)
    if buf is None:
        buf = context.new_buffer(shape, dtype)
        out.append(
            copied(
                lambda index: context.pool.load(load.dtype, source, index, guard),
                tuple(start),
                dict(zip(names, spans)),
                buf,
                within,
                nest.at,
            )
        )
        if source.root not in staged.written:
            staged.copies[key] = buf
    return context.pool.load(load.dtype, buf, within([piece.place for piece in spans]), False)


def is_scattered(nest: Nest, load: Load, reuse: int, caches: Caches) -> bool:
    """Whether a tile reads a broadcast operand from a line for each reduced element, and these evict one another.

    The vectors of the other operand have half of the cache. Measured on Zen 3, 32 KB, a.T @ b of 33 x 4000 x 517: 2.1 ms with
    a copy, 2.7 without.
    """
    if reuse < SCATTERED_REUSE:
        return False
    buf, index = load.access
    steps = {
        dim: abs(flat_coefficient(buf, index, dim)) * buf.dtype.itemsize
        for dim in nest.dims
        if nest.dims[dim] > 1
    }
    apart = [(steps[rdim], nest.dims[rdim]) for rdim in nest.rdims if steps.get(rdim)]
    rows = [step for dim, step in steps.items() if dim not in nest.rdims and step]
    if not apart or not rows or min(rows) > min(apart)[0] or min(apart)[0] < LINE_BYTES:
        return False
    lines = math.prod(size for _, size in apart)
    return not fit(2 * lines, min(apart)[0], caches)


def replace_operand(nest: Nest, old: Expr, new: Expr) -> Nest:
    """The product with another operand in place of one of its own."""
    reduction = nest.reductions[0]
    args = tuple(new if arg is old else arg for arg in reduction.args)
    return Nest(
        dict(nest.dims),
        nest.rdims,
        (replace(reduction, args=args),),
        nest.stores,
        nest.ordered,
        nest.at,
    )


def rows_conflict(nest: Nest, load: Load, reuse: int, limits: PackLimits) -> bool:
    """Whether the rows of a broadcast operand fall into few cache sets, and are read so often that a copy of them pays."""
    spans = _spans(load, nest)
    if not spans:
        return False
    rows, row = _split(spans, nest)
    if len(rows) != 1 or rows[0].size < limits.fewest_conflicting_rows:
        return False
    if rows[0].place.symbols & set(nest.rdims):
        return False
    buf = load.buf
    apart = rows[0].step * buf.strides[rows[0].axis] * buf.dtype.itemsize
    length = math.prod(span.size for span in row) * buf.dtype.itemsize
    if apart % CONFLICT_BYTES or length < limits.short_row_bytes:
        return False
    is_spread = row[-1].step * buf.strides[row[-1].axis] > 1
    return reuse >= (limits.spread_row_reuse if is_spread else ROW_REUSE)


def _split(spans: list[_Walk], nest: Nest) -> tuple[list[_Walk], list[_Walk]]:
    """(those that count rows, those that a row holds): a row is what is reduced, or all but the first dimension."""
    free = itertools.takewhile(lambda span: not span.place.symbols & set(nest.rdims), spans[:-1])
    count = len([*free]) or min(len(spans) - 1, 1)
    return spans[:count], spans[count:]


def _spans(load: Load, nest: Nest) -> list[_Walk] | None:
    """Dimensions of what a load reads, those whose steps in memory are longest first.

    None where one moves along two axes.
    """
    buf, index = load.access
    spans, seen = list[_Walk](), set[str]()
    for axis, position in enumerate(index):
        mine = sorted(
            (
                (position.coefficient(dim), dim)
                for dim in position.symbols & nest.dims.keys()
                if nest.dims[dim] > 1
            ),
            reverse=True,
        )
        if seen & {dim for _, dim in mine} or any(coeff < 0 for coeff, _ in mine):
            return None
        seen |= {dim for _, dim in mine}
        lengths = [
            sum(coeff * (nest.dims[dim] - 1) for coeff, dim in mine[n:]) + 1
            for n in range(len(mine) + 1)
        ]
        if all(coeff >= length for (coeff, _), length in zip(mine, lengths[1:])):
            spans += [_Walk(axis, coeff, nest.dims[dim], Affine.symbol(dim)) for coeff, dim in mine]
        else:
            step = math.gcd(*(coeff for coeff, _ in mine))
            spans.append(
                _Walk(
                    axis,
                    step,
                    (lengths[0] - 1) // step + 1,
                    Affine.make({dim: coeff // step for coeff, dim in mine}, 0),
                )
            )
    return sorted(spans, key=lambda span: -span.step * buf.strides[span.axis])
