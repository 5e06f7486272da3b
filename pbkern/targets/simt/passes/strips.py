"""Nests that read more again than shared memory holds -> loops over strips, inside of which they take turns.

    for all rows: m[row] = max x[row, :]                     for each strip of rows:  m[row] = max x[row, :]
    for all rows: y[row, :] = exp(x[row, :] - m[row])   ->                            y[row, :] = exp(x[row, :] - m[row])

Nests walk a dimension in step where what one writes another one touches at the same place along it.
A nest by itself that reads across rows is cut as well, into pieces that can be turned in shared
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pbkern.core.affine import Affine
from pbkern.core.passes import threshold
from pbkern.lower.nest import scratch
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.ir import Buf, For, Nest, Stmt, with_bodies
from pbkern.lower.passes.strips.strip_mining import Access, accesses, even_part
from pbkern.targets.simt.options import ThreadOptions

from .regions import BoxRegion, is_contraction, lane_dimension
from .staging import Stage, StageLimits


@dataclass(frozen=True)
class CutIntoStrips(StageLimits):
    """Cuts runs of nests where that lets copies fit, inner statements too."""

    turned_rows: int = threshold(
        32,
        "rows of a strip that is turned: neighbouring threads read and write so many neighbours each",
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext[ThreadOptions]) -> list[Stmt]:
        return _cut(stmts, Stage.of(stmts, context, self), self.turned_rows)


def _cut(stmts: Sequence[Stmt], stage: Stage, turned_rows: int) -> list[Stmt]:
    """The statements, inner ones too, with runs of nests in strips where that lets copies fit."""
    out = [with_bodies(stmt, lambda body: _cut(body, stage, turned_rows)) for stmt in stmts]
    for region in stage.wanted(out):
        if (
            scratch.padded_bytes(stage.context.new_buffer(region.box.shape, region.buf.dtype))
            <= stage.usual
        ):
            continue
        found = _cut_for(out, region, stage, turned_rows)
        if found is not None:
            low, high, inner = found
            return [
                *_cut(out[:low], stage, turned_rows),
                *inner,
                *_cut(out[high:], stage, turned_rows),
            ]
    return out


def _cut_for(
    stmts: Sequence[Stmt], region: BoxRegion, stage: Stage, turned_rows: int
) -> tuple[int, int, list[Stmt]] | None:
    """(first, behind the last of the statements that become strips, what they become)."""
    low, high = min(region.readers), max(region.readers) + 1
    run = [
        stmt
        for stmt in stmts[low:high]
        if isinstance(stmt, Nest) and not stmt.moves() and not stmt.ordered
    ]
    if len(run) != high - low or any(is_contraction(nest) for nest in run):
        return None  # contractions read all of one operand for each part of the other
    best: tuple[int, dict[int, str]] | None = None
    for dim, size in run[0].dims.items():
        dims = in_step(run, dim) if dim not in run[0].rdims and size > 1 else None
        length = _length(run, dims, region, stage, turned_rows) if dims else 0
        if dims and 0 < length < size and (best is None or length > best[0]):
            best = length, dims
    if best is None:
        return None
    return low, high, _strips(run, best[1], best[0], stage, turned_rows)


def in_step(run: Sequence[Nest], first: str) -> dict[int, str] | None:
    """Position -> dimension that all nests of a run walk in step with dimension `first` of the first; None if they do not."""
    size, dims = run[0].dims[first], {0: first}
    touching: dict[Buf, list[tuple[int, Access]]] = {}
    for at, nest in enumerate(run):
        for access in accesses(nest):
            touching.setdefault(access[0].root, []).append((at, access))
    written = {b for b, found in touching.items() if any(stored for _, (_, _, stored) in found)}
    for at, nest in enumerate(run):
        if at not in dims:
            dim = _dimension_of(nest, at, dims, touching, written, run) or _along_reads(
                nest, run[0], first
            )
            if dim is None or nest.dims.get(dim) != size or dim in nest.rdims:
                return None
            dims[at] = dim
    for buf in written:  # every strip touches its own part
        axes = {_place(touch, dims[at]) for at, touch in touching[buf]}
        if len(axes) != 1 or None in axes or len({id(touch[0]) for _, touch in touching[buf]}) > 1:
            return None
    return dims


def _dimension_of(
    nest: Nest, at: int, dims: dict[int, str], touching: dict, written: set[Buf], run
) -> str | None:
    """Finds the dimension by what earlier nests wrote or this one writes over: the dimension at the same axis."""
    for buf in written:
        mine = [a for k, a in touching[buf] if k == at]
        for k, access in touching[buf]:
            place = _place(access, dims[k]) if k in dims else None
            if place is None or not mine or mine[0][1][place[0]] is None:
                continue
            names = mine[0][1][place[0]].symbols & nest.dims.keys()
            if len(names) == 1:
                return next(iter(names))
    return None


def _along_reads(nest: Nest, first: Nest, dim: str) -> str | None:
    """Finds the dimension by an array that the first nest reads as well."""
    for buf, index, _ in accesses(first):
        for other, there, _ in accesses(nest):
            if other is buf:
                for position, j in zip(index, there):
                    if (
                        position is not None
                        and j is not None
                        and dim in position.symbols
                        and len(j.symbols & nest.dims.keys()) == 1
                    ):
                        return next(iter(j.symbols & nest.dims.keys()))
    return None


def _place(access: Access, dim: str) -> tuple[int, Affine] | None:
    """(the one axis along which an access goes with `dim`, one by one; where it starts), None if there is no such axis."""
    axes = [k for k, i in enumerate(access[1]) if i is not None and dim in i.symbols]
    if len(axes) != 1 or access[1][axes[0]].coefficient(dim) != 1:
        return None
    return axes[0], access[1][axes[0]] - Affine.symbol(dim)


def _length(
    run: Sequence[Nest], dims: dict[int, str], region: BoxRegion, stage: Stage, turned_rows: int
) -> int:
    """Longest strips for which all copies fit; 0 if none does."""

    def nbytes(length: int) -> int:
        first = [part(n, dims[k], Affine(), length, stage.context.pool) for k, n in enumerate(run)]
        return sum(x.nbytes for x in stage.wanted(first) or [region])

    one, two = nbytes(1), nbytes(2)
    step = max(two - one, 1)
    if two <= one and one > stage.usual:
        return 0
    if one > stage.usual:
        return 1 if one <= stage.most else 0
    length = 1 + (stage.usual - one) // step
    if region.turned and len(run) == 1:
        lane = lane_dimension(run[0], stage.context.options)
        length = min(length, turned_rows * (2 if dims[0] == lane else 1))
    return even_part(length, run[0].dims[dims[0]])


def _strips(
    run: Sequence[Nest], dims: dict[int, str], length: int, stage: Stage, turned_rows: int
) -> list[Stmt]:
    size = run[0].dims[dims[0]]
    full, rest = divmod(size, length)
    counter = stage.context.names("%i")

    def body(start: Affine, count: int) -> list[Stmt]:
        pieces = [part(n, dims[k], start, count, stage.context.pool) for k, n in enumerate(run)]
        return _cut(pieces, stage, turned_rows)

    out: list[Stmt] = [For(counter, full, tuple(body(Affine.symbol(counter, length), length)))]
    return out + (body(Affine((), full * length), rest) if rest else [])
