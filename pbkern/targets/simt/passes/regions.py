"""Parts of arrays that statements of a program read: per array and start a box that holds all that is read from there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.edit.stage import Box
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Stmt, nodes
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.schedule.threads import lane_dimension


@dataclass
class BoxRegion:
    """One box.

    Attributes:
      readers: positions of the statements. reads: of elements, by all of them together.
      guard: whether some place may lie outside of the array. across: whether neighbouring threads
        read elements that are no neighbours.
      uniform: whether all threads of a warp read one element at a time.
    """

    buf: Buf
    box: Box
    readers: list[int] = field(default_factory=list)
    reads: int = 0
    guard: bool = False
    across: bool = False
    uniform: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.box.shape)

    @property
    def turned(self) -> bool:
        """Whether neighbouring threads read across rows."""
        return self.across and self.box.shape[-1] > 1

    @property
    def nbytes(self) -> int:
        return self.size * self.buf.dtype.itemsize

    def is_wanted(self, fewest_reads: int) -> bool:
        """Whether a copy saves loads of memory, with so many reads of an element, on average, at least."""
        again = self.reads >= fewest_reads * self.size and not self.uniform
        return self.size > 1 and (again or (self.turned and self.reads >= self.size))


def regions(stmts: Sequence[Stmt], options: ThreadOptions, written: set[Buf]) -> list[BoxRegion]:
    """Regions of the nests of one list of statements; `written`: arrays that are stored to somewhere, which have none."""
    by_base: dict[tuple, BoxRegion] = {}
    for at, stmt in enumerate(stmts):
        if not isinstance(stmt, Nest) or stmt.moves() or not all(stmt.dims.values()):
            continue
        if is_tiled(stmt):
            continue
        mapping = options.policy.mapping(stmt)
        lane = lane_dimension(stmt, mapping)
        gaps = mapping.team < options.device.warp and stmt.dims.get(lane, 0) % mapping.team > 0
        often = {id(node) for node in nodes(terms(stmt))}
        for load in staged_loads(stmt, written):
            buf, index, guard = load.buf, load.index, load.guard
            box = Box.around(index, stmt.dims)
            region = by_base.setdefault((buf, box.base), BoxRegion(buf, box))
            region.box = region.box.joined(box)
            region.readers += [at] if at not in region.readers else []
            region.reads += math.prod(
                size
                for dim, size in stmt.dims.items()
                if id(load) in often or dim not in stmt.rdims
            )
            region.guard |= guard
            step = abs(flat_coefficient(buf, index, lane))
            region.across |= step > 1 or (gaps and step == 1)
            region.uniform &= step == 0
    return list(by_base.values())


def is_tiled(nest: Nest) -> bool:
    """Whether a matrix instruction computes it, or it stores to that instruction's tiles: its dimensions stay."""
    return nest.by is not None or any(store.buf.space for store in nest.stores)


def terms(nest: Nest) -> list[Expr]:
    """Expressions that are computed at every point, also of reduced dimensions."""
    reduced = [arg for reduction in nest.reductions for arg in reduction.args]
    return reduced + [
        expr
        for store in nest.stores
        if store.inner or not nest.rdims
        for expr in (store.value, store.mask)
        if expr is not None
    ]


def staged_loads(nest: Nest, written: set[Buf]) -> Iterator[Load]:
    """Loads that may come from a copy."""
    for load in nest.loads():
        if isinstance(load, Load):
            buf = load.buf
            if (
                not buf.arena
                and buf.storage is None
                and buf not in written
                and buf.size
                and buf.dtype.itemsize
            ):
                yield load


def is_contraction(nest: Nest) -> bool:
    """Whether sums of products take each element many times: results have dimensions that an operand lacks."""
    free = {dim for dim, size in nest.dims.items() if dim not in nest.rdims and size > 1}
    return any(
        reduction.is_product and any(not free <= arg.symbols for arg in reduction.args)
        for reduction in nest.reductions
    )
