"""Products by strips of rows that are copied to the second cache, each of which takes the panels of all columns in turn."""

from __future__ import annotations

from pbkern.core.affine import Affine
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.ir import (
    Expr,
    For,
    Load,
    Nest,
    Stmt,
)
from pbkern.targets.cpu.packing.limits import PackLimits
from pbkern.targets.cpu.packing.operand_copies import (
    OperandCopies,
    is_expensive,
)
from pbkern.targets.cpu.schedule.register_tiles.choice import contraction_tile

from .broadcast_operand import has_parts_of_lines, stage_still
from .panels import ProductPanels


def row_strips(
    nest: Nest,
    vector: str,
    streamed: Expr,
    stationary: Expr,
    depth: int,
    context,
    limits: PackLimits,
) -> list[Stmt] | None:
    """Panels of all columns, then strips of rows that are copied to the second cache, each of which takes the panels in turn.

        out[i, j] = sum of a[k, i] * b[k, j]
    ->
        panels[p, k, j] = b[k, 16 p + j]
        for each strip s:
          rows[i, k] = a[k, 96 s + i]                                             (i < 96)
          for each panel p:
            out[96 s + i, 16 p + j] = sum of rows[i, k] * panels[p, k, j]         (i < 96)

    For rows whose elements are apart, so that they are copied in any case: of rows that are read where they are, 64 columns
    of 8000 x 256 took 8 to 15 % longer so, of 9000 x 300 as long (Zen 3). A panel stays in the first cache for a whole strip.
    None where the first cache holds all panels or the second one does not, where it does not hold a panel beside rows, and
    where vectors are whole lines.
    """
    sizes = _strip_sizes(nest, vector, streamed, stationary, depth, context, limits)
    if sizes is None:
        return None
    row, width, height, length = sizes
    pool = context.pool
    panels = ProductPanels(nest, streamed, vector, {}, context, limits, None)
    full, left = divmod(nest.dims[vector], width)
    places: list[tuple[Affine, int, int]] = [(Affine(), full, width)] + (
        [(Affine((), full * width), 1, left)] if left else []
    )
    copies = [panels.packed(*place) for place in places]

    def strip(start: Affine, size: int) -> list[Stmt]:
        out = list[Stmt]()
        piece = part(nest, row, start, size, pool)
        (still,) = (arg for arg in piece.reductions[0].args if vector not in arg.symbols)
        # A copy of the strip holds other rows each time: no other product may read it.
        piece, _ = stage_still(piece, still, True, context, limits, out, OperandCopies(set()))
        products = ProductPanels(piece, streamed, vector, {}, context, limits, None)
        for (_, buf), place in zip(copies, places):
            out += products.products(buf, *place)
        return out

    number = -(-nest.dims[row] // length)
    length = min(-(-nest.dims[row] // (number * height)) * height, nest.dims[row])
    counter, (count, rest) = context.names("%i"), divmod(nest.dims[row], length)
    strips = For(counter, count, tuple(strip(Affine.symbol(counter, length), length)))
    last = strip(Affine((), count * length), rest) if rest else []
    return [*(copy for copy, _ in copies), strips, *last]


def _strip_sizes(
    nest: Nest,
    vector: str,
    streamed: Expr,
    stationary: Expr,
    depth: int,
    context,
    limits: PackLimits,
) -> tuple[str, int, int, int] | None:
    """(dimension of rows, columns of a panel, rows of a register tile, rows of a strip at most), where strips pay."""
    options = context.options
    rows = [
        dim
        for dim, size in nest.dims.items()
        if size > 1 and dim not in nest.rdims and dim != vector
    ]
    reduced = {rdim for rdim in nest.rdims if nest.dims[rdim] > 1}
    if len(rows) != 1 or rows[0] in streamed.symbols or not reduced <= streamed.symbols:
        return None
    if not all(isinstance(arg, Load) and not is_expensive(arg) for arg in (streamed, stationary)):
        return None
    (row,), row_bytes = rows, depth * nest.reductions[0].dtype.itemsize
    lanes = options.vectors.bits // (8 * nest.reductions[0].dtype.itemsize)
    if nest.dims[vector] < 2 * lanes:
        return None
    # Columns that fill no vector have a panel of their own.
    filled = part(nest, vector, Affine(), nest.dims[vector] // lanes * lanes, context.pool)
    width, tile = contraction_tile(filled, vector, options.vectors, has_far_rows=False)
    height = tile.jam.get(row, 1)
    length = options.l2_bytes // limits.strip_share // row_bytes // height * height
    if (
        not has_parts_of_lines(context)
        or not options.l1_bytes
        < row_bytes * nest.dims[vector]
        <= options.l2_bytes // limits.panel_share
        or row_bytes * width > options.l1_bytes * limits.near_panel // 100
        or length < limits.fewest_strip_rows
        or nest.dims[row] < limits.fewest_stripped_rows
        or nest.dims[vector] < 2 * width
    ):
        return None
    return row, width, height, length
