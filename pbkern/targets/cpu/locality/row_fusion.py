"""Nests that make something of each row and sum products of rows with it -> one loop over rows, with the sums in registers.

    for all rows: t[row] = x[row, :] . w            for each row:  t = x[row, :] . w
    s[:] = sum t[row] * x[row, :]            ->                    s[:] += t * x[row, :]

Each row is read once, one after the other, as prefetchers expect, and found in the nearest cache
the second time. This is for sums of so few columns that registers hold them
(targets/cpu/schedule/register_promotion.py); others are cut into strips of rows
(cache_blocking.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pbkern.lower.nest import effects
from pbkern.lower.nest.ir import Buf, For, Nest, Stmt
from pbkern.lower.passes.strips.strip_mining import (
    Chain,
    NestRun,
    StripLimits,
    StripMinedLoop,
    even_part,
    runs,
)
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.schedule.register_tiles.along_results import column_vectors
from pbkern.targets.cpu.schedule.register_tiles.choice import choose
from pbkern.targets.cpu.schedule.register_tiles.prices import LONGEST_CHAIN_OF_FEW_PRODUCTS

# Rows of one loop: the additions to one accumulator in a row. Several loops join their sums.
LONGEST = LONGEST_CHAIN_OF_FEW_PRODUCTS


def fuse_over_rows(
    chain: Chain, elsewhere: set[Buf], context, limits: StripLimits
) -> list[Stmt] | None:
    """The statements of a chain; None where it does not suit. elsewhere: buffers that others touch too."""
    vectors = context.options.vectors
    if not _suits(chain, vectors):
        return None
    if chain.size <= LONGEST:
        return _row_by_row(chain, elsewhere, context)
    length = even_part(LONGEST, chain.size)
    out = StripMinedLoop(chain, length, elsewhere, context, limits.many_strips).statements()
    for k, stmt in enumerate(out):
        if isinstance(stmt, For):
            touched = elsewhere | effects.touched(out[:k] + out[k + 1 :])
            out[k] = replace(stmt, body=tuple(_rows_of(stmt.body, touched, context)))
    for low, high in list(runs(out, limits.longest_run))[::-1]:  # the rows that are left
        touched = elsewhere | effects.touched(out[:low] + out[high:])
        out[low:high] = _rows_of(out[low:high], touched, context)
    return out


def _row_by_row(chain: Chain, elsewhere: set[Buf], context) -> list[Stmt]:
    """Strips of one row: a sum over all of them is as exact as one of an accumulator."""
    return StripMinedLoop(chain, 1, elsewhere, context, many=LONGEST).statements()


def _rows_of(stmts: Sequence[Stmt], elsewhere: set[Buf], context) -> list[Stmt]:
    """A run of nests in which sums of rows are made row by row, with the rows."""
    vectors = context.options.vectors
    run = NestRun(stmt for stmt in stmts if isinstance(stmt, Nest))
    for at, nest in enumerate(run):
        chain = Chain.find(run, {at: nest.rdims[0]}) if _sum_vectors(nest, vectors) else None
        if chain is not None and chain.size > 1 and _suits(chain, vectors):
            return _row_by_row(chain, elsewhere, context)
    return list(stmts)


def _suits(chain: Chain, vectors: Vectors) -> bool:
    """Whether one loop holds all nests, none with of_sums along the rows, and registers hold all sums of rows."""
    nests = [(chain.run[at], dim) for at, dim in chain.dims.items()]
    if any(choose(n, vectors).vector == dim for n, dim in nests):
        return False
    sums = [n for n, dim in nests if dim in n.rdims]
    of_sums = [_sum_vectors(sum_, vectors) for sum_ in sums]
    if (
        not sums
        or len(sums) == len(nests)
        or not all(of_sums)
        or sum(of_sums) > column_vectors(vectors.registers)
    ):
        return False
    return sum(isinstance(group, list) for group in chain.groups()) == 1


def _sum_vectors(nest: Nest, vectors: Vectors) -> int:
    """Vectors that the sums of products of a nest fill; 0 for other nests."""
    live = [dim for dim, size in nest.dims.items() if size > 1]
    if (
        len(live) != 2
        or len(nest.rdims) != 1
        or not nest.reductions
        or not all(reduction.is_product for reduction in nest.reductions)
    ):
        return 0
    sched = choose(nest, vectors)
    if sched.vector is None or sched.vector in nest.rdims:
        return 0
    return -(-nest.dims[sched.vector] // sched.lanes) * len(nest.reductions)
