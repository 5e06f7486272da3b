"""Products of few rows with a far operand, a few of its rows at a time."""

from __future__ import annotations

from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import (
    Expr,
    Load,
    Nest,
    Stmt,
    with_nests,
)
from pbkern.targets.costs.caches import are_apart
from pbkern.targets.cpu.machines.machine import ROWS_AT_ONCE
from pbkern.targets.cpu.packing.limits import PackLimits
from pbkern.targets.cpu.schedule.nest_schedule import scheduled
from pbkern.targets.cpu.schedule.prefetch import is_far
from pbkern.targets.cpu.schedule.register_tiles.choice import contraction_tile

from .depth_runs import in_depth_runs


def is_streamed(
    nest: Nest, streamed: Expr, vector: str, depth: int, context, limits: PackLimits
) -> bool:
    """Whether a panel of a far operand would pay, if more than these few rows shared it."""
    inner = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
    if (
        not isinstance(streamed, Load)
        or len(inner) != 1
        or inner[0] not in streamed.symbols
        or not is_far(streamed.buf)
    ):
        return False
    step, is_row = (
        row_bytes(streamed, inner[0]),
        flat_coefficient(streamed.buf, streamed.index, vector) == 1,
    )
    few = nest.reuse(streamed) < limits.far_panel_reuse
    return (
        few
        and is_row
        and depth >= 4 * ROWS_AT_ONCE
        and are_apart(depth, step, depth * step, context.options)
    )


def rows_together(nest: Nest, streamed: Expr, limits: PackLimits) -> int:
    """Rows of a far operand that the few rows of the other one are multiplied with at a time."""
    waits = nest.reuse(streamed) <= limits.waiting_rows
    return ROWS_AT_ONCE if waits else limits.multiplied_rows


def rows_at_once(nest: Nest, streamed: Load, vector: str, far_rows: int, context) -> list[Stmt]:
    """Products of a few far rows at a time along their whole length, while the next ones are fetched.

    Each adds to the sums.
    """
    root, step = (
        streamed.buf.root,
        max(flat_coefficient(streamed.buf, streamed.index, rdim) for rdim in nest.rdims),
    )

    def decided(part: Nest) -> list[Stmt]:
        if not part.reductions:
            return [part]
        tile = contraction_tile(part, vector, context.options.vectors)[1]
        return [scheduled(part, schedule=tile, prefetched={root: far_rows * step})]

    return with_nests(in_depth_runs(nest, vector, far_rows, context), decided)


def row_bytes(load: Load, dim: str) -> int:
    buf = load.buf
    return abs(flat_coefficient(buf, load.index, dim)) * buf.dtype.itemsize
