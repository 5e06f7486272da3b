"""Nests that read more again than shared memory holds -> loops over strips, inside of which they take turns.

    for all rows: m[row] = max x[row, :]                     for each strip of rows:  m[row] = max x[row, :]
    for all rows: y[row, :] = exp(x[row, :] - m[row])   ->                            y[row, :] = exp(x[row, :] - m[row])

Nests walk a dimension in step where what one writes another one touches at the same place along it.
A nest by itself that reads across rows is cut as well, into pieces that can be turned in shared
memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import Buf, For, Nest, Stmt, with_bodies
from pbkern.lower.passes.strips.strip_mining import (
    Chain,
    NestRun,
    accesses,
    axis_of,
    even_part,
    fills,
)
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.schedule.threads import is_parallel

from .regions import BoxRegion, is_contraction
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
        if stage.nbytes(region) <= stage.usual:
            continue
        cut = _cut_for(out, region, stage, turned_rows)
        if cut is not None:
            low, high, inner = cut
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
    nests, seeds = NestRun(run), {0: first}
    while True:
        chain = Chain.find(nests, seeds, stays=True)
        if chain is None or any(
            dim in run[at].rdims or not is_parallel(run[at], {dim: chain.size})
            for at, dim in chain.dims.items()
        ):
            return None
        if len(chain.dims) == len(run):
            return chain.dims
        at = min(set(range(len(run))) - chain.dims.keys())
        dim = _along_reads(run[at], run[0], first)
        if dim is None or run[at].dims[dim] != chain.size:
            return None
        seeds[at] = dim


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


def _length(
    run: Sequence[Nest], dims: dict[int, str], region: BoxRegion, stage: Stage, turned_rows: int
) -> int:
    """Longest strips for which all copies fit, or of one place where that alone does not fit; 0 where strips save nothing."""

    def nbytes(length: int) -> int:
        pieces = [part(n, dims[k], Affine(), length, stage.context.pool) for k, n in enumerate(run)]
        return sum(map(stage.nbytes, stage.wanted(pieces)))

    size = run[0].dims[dims[0]]
    # Strips of few places may need no copy at all; longer ones need the more, the longer they are.
    if size > 2 and nbytes(size) == nbytes(2):
        return 0
    length = bisect.bisect_right(range(2, size), stage.usual, key=nbytes) + 1
    if region.turned and len(run) == 1:
        lane = stage.context.policy.vector_dimension(run[0])
        length = min(length, turned_rows * (2 if dims[0] == lane else 1))
    return even_part(length, size)


def _strips(
    run: Sequence[Nest], dims: dict[int, str], length: int, stage: Stage, turned_rows: int
) -> list[Stmt]:
    size = run[0].dims[dims[0]]
    full, rest = divmod(size, length)
    counter = stage.context.names("%i")

    # With a rest behind the loop, two places would touch what holds one strip.
    small = {} if rest else _strip_buffers(run, dims, length, stage)

    def body(start: Affine, count: int) -> list[Stmt]:
        pieces = [part(n, dims[k], start, count, stage.context.pool) for k, n in enumerate(run)]

        def place(buf: Buf, index: tuple) -> tuple:
            axis, _ = small[buf]
            return tuple(at - start if k == axis else at for k, at in enumerate(index))

        shorter = {buf: strip for buf, (_, strip) in small.items()}
        pieces = relocated(pieces, shorter.get, stage.context.pool, place)
        return _cut(pieces, stage, turned_rows)

    out: list[Stmt] = [For(counter, full, tuple(body(Affine.symbol(counter, length), length)))]
    return out + (body(Affine((), full * length), rest) if rest else [])


def _strip_buffers(
    run: Sequence[Nest], dims: dict[int, str], length: int, stage: Stage
) -> dict[Buf, tuple[int, Buf]]:
    """Scratch of which each strip fills its part before it reads it -> (the axis of strips, scratch for one of them)."""
    nests = NestRun(run)
    small: dict[Buf, tuple[int, Buf]] = {}
    for root, touching in nests.touching.items():
        first, _ = touching[0]
        axes = {
            axis_of(index, dims[at]) if buf is root else None for at, (buf, index, _) in touching
        }
        is_free = root.arena and root.storage is None and root not in stage.context.persistent
        is_alone = len({at for at, _ in touching}) == stage.users[root]
        if not is_free or not is_alone or len(axes) > 1 or not fills(run[first], root):
            continue
        (axis,) = axes
        if axis is not None and root.shape[axis] == run[first].dims[dims[first]]:
            shape = (*root.shape[:axis], length, *root.shape[axis + 1 :])
            small[root] = axis, stage.context.new_buffer(shape, root.dtype)
    return small
