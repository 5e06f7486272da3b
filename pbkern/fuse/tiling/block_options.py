"""Role of a dimension -> sizes of blocks that are worth a try along it, in ascending order, and the one to start from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pbkern.fuse.cost.sizes import Sizes

# Results of at most this many elements are little work, so that the number of programs counts.
SMALL_RESULT = 1 << 14
# Programs that divide a dimension chosen by the indices of a scatter: each walks all indices.
OWNERS = (2, 4, 8, 16, 32, 64, 128, 256)
# Scatters that one program may do together.
SCATTER_BATCHES = (1, 2, 4, 16, 64, 256, 1024)
# Elements of an outer dimension of a contraction that one program may take together.
MOST_OUTER = 64
# Results per image and channel up to which several images share a program's copies of filters. More
# results only fill its cache: copies are then little work beside their use.
FEW_PLACES = 64
# Elements of an outer dimension, such as the fields of a simulation, that one program may take
# together.
FEW_OUTER_ELEMENTS = 32

# Elements of the longest line that is a vector or two.
SHORT_LINE = 128


def are_matrices(eqn, sizes: Sizes) -> bool:
    """Whether matrix instructions multiply the operands of a product."""
    return {operand.aval.dtype.name for operand in eqn.invars} <= sizes.matrix_types


def contraction_roles(eqn, sizes: Sizes) -> list[str]:
    """Role of each output dimension of a contraction: batch, row, column; for convolutions also space and channel.

    Rows and columns of products that matrix instructions compute have roles of their own.
    """
    rank = len(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        (lc, _), (lb, _) = eqn.params["dimension_numbers"]
        extents, batch = eqn.outvars[0].aval.shape, len(lb)
        rows = len(eqn.invars[0].aval.shape) - len(lc) - batch
        names = ["batch"] * batch + ["outer"] * (rank - batch)
        by = "matrix " if are_matrices(eqn, sizes) else ""
        # Among several free dimensions of an operand, such as positions and heads, the longest is
        # tiled.
        if rows:
            names[max(range(batch, batch + rows), key=lambda dim: (extents[dim], dim))] = f"{by}row"
        if batch + rows < rank:
            column = max(range(batch + rows, rank), key=lambda dim: (extents[dim] > 1, dim))
            names[column] = f"{by}column"
        return names
    spec = eqn.params["dimension_numbers"].out_spec
    names = ["space"] * rank
    places = math.prod(eqn.outvars[0].aval.shape[dim] for dim in spec[2:])
    names[spec[0]] = "image" if places <= FEW_PLACES else "batch"
    names[spec[1]] = "matrix column" if are_matrices(eqn, sizes) else "channel"
    first = spec[2] if rank > 2 else spec[0]
    if rank > 3:
        names[first] = "line"
    return names


def _contraction_options(extent: int, role: str, sizes: Sizes) -> tuple[list[int], int]:
    match role:
        case "batch" | "run":
            return [1], 1
        case "image":  # several share the copies of filters
            return _powers(extent, (1, 4, 16)), 1
        case "outer":  # whole if an operand or the result is contiguous along it
            return (
                even_cuts(extent, [1, -(-extent // 8), -(-extent // 2)])
                if extent <= MOST_OUTER
                else [1]
            ), 1
        case "row":
            return even_cuts(extent, sizes.tile_rows), 256
        case "column":
            return even_cuts(extent, sizes.tile_columns, 16), 512
        case "matrix row":
            return even_cuts(extent, sizes.matrix_tiles, sizes.matrix_tiles[0]), extent
        case "matrix column":
            return even_cuts(extent, sizes.matrix_columns, sizes.matrix_columns[0]), extent
        case "channel":
            return _powers(extent, (16, 32, 64)) if extent <= 64 else [32, 64], 64
        case "line":
            return _powers(extent, (1, 2, 4, 7, 8, 14, 16, 28)), 14
    return ([extent] if extent <= 256 else [64, 128]), 128


def options_of(
    shape: Sequence[int],
    forced: set[int],
    roles: Mapping[int, str],
    sizes: Sizes,
    grain: int = 1,
    cuts_planes: bool = False,
) -> tuple[list[list[int]], list[int]]:
    """(sorted options, preferred size) per dimension; `cuts_planes`: parts of several short lines are worth a try."""
    options: list[list[int]] = [[size] for size in shape]
    target = list(shape)
    if any(role not in ("run", "owned", "scatter batch") for role in roles.values()):
        for dim, extent in enumerate(shape):
            if dim not in forced and extent > 1:
                options[dim], target[dim] = _contraction_options(
                    extent, roles.get(dim, "batch"), sizes
                )
        return options, target
    # If a program reads a long line for one element of the root, the root is tiled by rows.
    run, stage = (grain, "rows") if grain >= 256 else (1, "lanes")
    for dim in reversed(range(len(shape))):
        extent = shape[dim]
        if extent == 1 or extent == 0:
            continue
        if roles.get(dim) == "run":
            options[dim], target[dim] = [1], 1
            continue
        if roles.get(dim) == "scatter batch":
            options[dim], target[dim] = (
                _powers(extent, SCATTER_BATCHES),
                max(1, min(extent // 4, 256 // run)),
            )
            run *= target[dim]
            continue
        if roles.get(dim) == "owned":
            options[dim] = even_cuts(extent, [-(-extent // count) for count in OWNERS])
            run *= extent
            continue
        if dim in forced:
            run *= extent if stage == "lanes" else 1  # otherwise counted in the grain
            stage = "rows" if run >= 256 else stage
            continue
        if stage == "lanes" and run * extent <= 8192:
            # A long line may be cut, for halos and for parallelism; a short one is a vector or two.
            is_short = extent <= SHORT_LINE
            is_sum = grain > 1 and sizes.cuts_planes
            if run > 1 and (cuts_planes or (is_short and is_sum)):
                options[dim] = _powers(
                    extent, sorted({-(-part // run) for part in sizes.line_parts})
                )
            elif not is_short:
                options[dim] = _powers(extent, sizes.line_parts)
            run *= extent
            stage = "rows" if run >= 256 else "lanes"
        elif stage == "lanes":
            lengths = [
                _even(max(1, size // run), sizes.even_part)
                for size in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
            ]
            options[dim], target[dim] = _powers(extent, sorted(set(lengths))), max(1, 4096 // run)
            run, stage = 4096, "rows"
        elif stage == "rows":
            options[dim], target[dim] = (
                _powers(extent, (1, 2, 4, 8, 16, 32, 64, 128)),
                max(1, min(32, 32768 // run)),
            )
            stage = "outer" if run * extent > 4096 else "rows"
            run *= extent
        else:
            # One element at a time; but launching programs of little work costs more, and parts of
            # a short one may share work.
            options[dim], target[dim] = (
                (
                    _powers(extent, (1, 4, 16))
                    if math.prod(shape) <= SMALL_RESULT
                    else [1, extent]
                    if extent <= FEW_OUTER_ELEMENTS
                    else [1]
                ),
                1,
            )
    return options, target


def _even(size: int, part: int) -> int:
    return size // part * part or size


def multiples(options: list[int], least: int) -> list[int]:
    """The options as multiples of `least`, which divides the dimension."""
    return sorted({max(least, option // least * least) for option in options})


def _powers(limit: int, among: Sequence[int]) -> list[int]:
    """`among` below `limit`, and `limit` itself."""
    return [size for size in among if size < limit] + [limit]


def even_cuts(limit: int, among: Sequence[int], grain: int = 1) -> list[int]:
    """Sizes near those of `among` that cut `limit` into equal blocks, in steps of `grain`, and `limit` itself."""
    counts = {-(-limit // size) for size in among if size < limit}
    return sorted({min(-(-limit // (count * grain)) * grain, limit) for count in counts} | {limit})
