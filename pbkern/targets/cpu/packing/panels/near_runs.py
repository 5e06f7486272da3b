"""Products of two operands whose rows run across the depth, in runs of few rows that the first cache holds."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.ir import Expr, For, Load, Nest, Stmt
from pbkern.targets.costs.caches import fit
from pbkern.targets.cpu.packing.limits import PackLimits
from pbkern.targets.cpu.packing.operand_copies import is_expensive

from .broadcast_operand import has_parts_of_lines
from .depth_runs import in_depth_runs


def near_runs(
    nest: Nest, vector: str, streamed: Expr, stationary: Expr, context, limits: PackLimits
) -> list[Stmt] | None:
    """Runs of rows of both operands, which register tiles read where they are, from the first cache; None where rows are long.

        out[i, j] = sum of a[k, i] * b[k, j]
    ->
        out[i, j] = 0
        for each run r: out[i, j] = out[i, j] + sum of a[50 r + k, i] * b[50 r + k, j]      (k < 50)

    Longer runs need a transposed copy of `a`, and each tile of rows reads `b` from the second cache. Measured on Zen 3, one
    thread, float32, ms so and with copies: a.T @ b of 3000 x 48 and 3000 x 100 0.40 and 0.45, of 5000 x 100 and 5000 x 100
    1.44 and 1.60, of 5000 x 100 and 5000 x 30 0.61 and 0.60. Products of a batch are made one after the other, so that their
    sums stay near as well. None where vectors are whole lines.
    """
    free = [dim for dim, size in nest.dims.items() if size > 1 and dim not in nest.rdims]
    batch = [dim for dim in free if dim in streamed.symbols and dim in stationary.symbols]
    rows = [dim for dim in free if dim not in batch and dim != vector]
    reduced = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1]
    if len(rows) != 1 or len(reduced) != 1 or rows[0] in streamed.symbols:
        return None
    along = {streamed: vector, stationary: rows[0]}
    length = _rows_of_run(nest, along, reduced[0], context, limits)
    if length < limits.fewest_near_rows or length >= nest.dims[reduced[0]]:
        return None
    sizes = nest.dims
    counters = {dim: context.names("%i") for dim in batch}
    for dim, counter in counters.items():
        nest = part(nest, dim, Affine.symbol(counter), 1, context.pool)
    out = in_depth_runs(nest, vector, length, context)
    for dim, counter in reversed(counters.items()):
        out = [For(counter, sizes[dim], tuple(out))]
    return out


def _rows_of_run(
    nest: Nest, along: Mapping[Expr, str], rdim: str, context, limits: PackLimits
) -> int:
    """Rows of the operands that the first cache holds beside a tile's sums; 0 where rows are read from copies.

    `along`: the dimension that rows of each operand run along.
    """
    results = math.prod(nest.dims[dim] for dim in along.values())
    results_bytes = results * nest.reductions[0].dtype.itemsize
    if not has_parts_of_lines(context) or results_bytes > context.options.l2_bytes // (
        limits.panel_share
    ):
        return 0
    row_bytes, steps = dict[object, int](), list[int]()
    for operand, dim in along.items():
        if not isinstance(operand, Load) or is_expensive(operand):
            return 0
        itemsize = operand.buf.dtype.itemsize
        steps.append(abs(flat_coefficient(operand.buf, operand.index, rdim)) * itemsize)
        if flat_coefficient(operand.buf, operand.index, dim) != 1 or not steps[-1]:
            return 0
        # Both may be the same rows, which take their place once.
        first = tuple(position.substitute({dim: 0}.get) for position in operand.index)
        key = (operand.buf.root, first)
        row_bytes[key] = max(row_bytes.get(key, 0), nest.dims[dim] * itemsize)
    most = context.options.l1_bytes * limits.near_panel // 100 // sum(row_bytes.values())
    # Lines of longer runs evict one another, so that their rows would be copied.
    return next(
        (n for n in range(most, 0, -1) if all(fit(2 * n, step, context.options) for step in steps)),
        0,
    )
