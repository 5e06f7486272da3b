"""Sizes of blocks that are worth a try along each dimension of a result, by the dimension's role."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pbkern.fuse.cost.sizes import Sizes

# Elements of the largest result that counts as little work: starting programs is a part of its time.
SMALL_RESULT = 1 << 14
# Numbers of programs that may share a dimension into which a scatter's indices point: each program
# walks all indices.
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
# Elements along a program's vectors that are enough: dimensions further out are rows.
ENOUGH_LANES = 256
# Elements of the longest line that one program prefers to take whole.
MOST_LINE_ELEMENTS = 8192
# Elements of a part of a longer line that a program prefers, and of a plane that is enough for it: dimensions
# further out are taken one element at a time.
PLANE_ELEMENTS = 4096
# Elements of the rows that a program prefers, at most.
MOST_ROWS_ELEMENTS = 32768
# Elements of a line's parts that are tried where it is longer than MOST_LINE_ELEMENTS.
LANE_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Numbers of rows that one program may take together.
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
# Roles of dimensions that no contraction gives.
PLAIN_ROLES = frozenset(("chunk", "owned", "scatter batch"))


def are_matrices(eqn, sizes: Sizes) -> bool:
    """Whether matrix instructions multiply the operands of a product."""
    return {operand.aval.dtype.name for operand in eqn.invars} <= sizes.matrix_types


def contraction_roles(eqn, sizes: Sizes) -> list[str]:
    """Role of each output dimension of a contraction: batch, row, column; for convolutions also space and channel.

    Columns of products of one row are "column of a row", where the target has sizes for them. Rows and columns of products
    that matrix instructions compute are "matrix row" and "matrix column"; images of few
    places are "image", and the first of several dimensions in space is "line".
    """
    rank = len(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
        extents, batch = eqn.outvars[0].aval.shape, len(batched)
        rows = len(eqn.invars[0].aval.shape) - len(contracted) - batch
        names = ["batch"] * batch + ["outer"] * (rank - batch)
        by = "matrix " if are_matrices(eqn, sizes) else ""
        # Among several free dimensions of an operand, such as positions and heads, the longest is
        # tiled.
        if rows:
            names[max(range(batch, batch + rows), key=lambda dim: (extents[dim], dim))] = f"{by}row"
        if batch + rows < rank:
            column = max(range(batch + rows, rank), key=lambda dim: (extents[dim] > 1, dim))
            is_row = sizes.longest_row_part and max(extents[batch : batch + rows], default=1) == 1
            names[column] = "column of a row" if is_row else f"{by}column"
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


def _parts_of_a_row(extent: int, sizes: Sizes, cores: int) -> list[int]:
    """Columns to try of a product of one row, which reads its operand once: no more programs than cores have each a part.

    The longer the parts of rows, the better they are read ahead.
    """
    least = max(min(-(-extent // cores), sizes.longest_row_part), sizes.tile_columns[0])
    among = [least, *(columns for columns in sizes.tile_columns if columns > least)]
    cuts = even_cuts(extent, among, 16)
    return cuts[:-1] if len(cuts) > 1 and extent > sizes.longest_row_part else cuts


def _contraction_options(extent: int, role: str, sizes: Sizes, cores: int) -> tuple[list[int], int]:
    """(sizes to try, preferred size) of a dimension with a role that `contraction_roles` gives."""
    match role:
        case "batch" | "chunk":
            return [1], 1
        case "image":  # several share the copies of filters
            return _powers(extent, (1, 4, 16)), 1
        case "outer" if extent <= MOST_OUTER:
            # All of it suits an operand or a result that is contiguous along it.
            return even_cuts(extent, [1, -(-extent // 8), -(-extent // 2)]), 1
        case "outer":
            return [1], 1
        case "row":
            return even_cuts(extent, sizes.tile_rows), 256
        case "column":
            return even_cuts(extent, sizes.tile_columns, 16), 512
        case "column of a row":
            return _parts_of_a_row(extent, sizes, cores), extent
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
    cores: int = 1,
) -> tuple[list[list[int]], list[int]]:
    """Lists the block sizes to try along each dimension of a result, and the one to start from.

    Args:
      shape: the result's.
      forced: dimensions that stay whole.
      roles: dimension -> role; dimensions without one are elementwise.
      sizes: the target's.
      grain: elements that a program reads for one element of the result.
      cuts_planes: whether parts of several short lines are worth a try.
      cores: programs that run at the same time.

    Returns:
      (sizes in ascending order, preferred size), both per dimension.
    """
    options: list[list[int]] = [[size] for size in shape]
    target = list(shape)
    if not PLAIN_ROLES.issuperset(roles.values()):
        for dim, extent in enumerate(shape):
            if dim not in forced and extent > 1:
                options[dim], target[dim] = _contraction_options(
                    extent, roles.get(dim, "batch"), sizes, cores
                )
        return options, target
    inner = _InnerBlock(math.prod(shape), sizes, grain, cuts_planes)
    for dim in reversed(range(len(shape))):
        extent, role = shape[dim], roles.get(dim)
        if extent <= 1:
            continue
        if role is not None:
            options[dim], target[dim] = inner.with_role(role, extent)
        elif dim in forced:
            inner.take_whole(extent)
        else:
            options[dim], target[dim] = inner.elementwise(extent)
    return options, target


class _InnerBlock:
    """The inner dimensions of a block of an elementwise result, while its outer ones get their options.

    Attributes:
      elements: how many a program takes of the inner dimensions.
      stage: what the next dimension gives a program: "lanes" while its vectors are short, then "rows" that share what
        they read, then "outer": one element at a time.
    """

    def __init__(self, result_elements: int, sizes: Sizes, grain: int, cuts_planes: bool) -> None:
        self.result_elements = result_elements
        self.sizes = sizes
        self.cuts_planes = cuts_planes
        self.is_sum = grain > 1
        # A program that reads a long line for one element of the result has its lanes along that line.
        has_lanes = grain >= ENOUGH_LANES
        self.elements, self.stage = (grain, "rows") if has_lanes else (1, "lanes")

    def with_role(self, role: str, extent: int) -> tuple[list[int], int]:
        """(sizes to try, preferred size) of a dimension with one of PLAIN_ROLES."""
        if role == "chunk":
            return [1], 1
        if role == "scatter batch":
            preferred = max(1, min(extent // 4, ENOUGH_LANES // self.elements))
            self.elements *= preferred
            return _powers(extent, SCATTER_BATCHES), preferred
        self.elements *= extent
        return even_cuts(extent, [-(-extent // count) for count in OWNERS]), extent

    def take_whole(self, extent: int) -> None:
        """Adds a dimension that is not cut. Beside rows, it is counted in the grain already."""
        if self.stage == "lanes":
            self.elements *= extent
        if self.elements >= ENOUGH_LANES:
            self.stage = "rows"

    def elementwise(self, extent: int) -> tuple[list[int], int]:
        """(sizes to try, preferred size) of the next dimension outwards."""
        if self.stage == "lanes":
            is_line = self.elements * extent <= MOST_LINE_ELEMENTS
            return self._line(extent) if is_line else self._part_of_line(extent)
        return self._rows(extent) if self.stage == "rows" else self._outer(extent)

    def _line(self, extent: int) -> tuple[list[int], int]:
        """A line that one program can take; a long one may be cut for halos and for parallelism."""
        is_short = extent <= SHORT_LINE
        cuts_short = self.cuts_planes or (is_short and self.is_sum and self.sizes.cuts_planes)
        options = [extent]
        if self.elements > 1 and cuts_short:
            parts = {-(-part // self.elements) for part in self.sizes.line_parts}
            options = _powers(extent, sorted(parts))
        elif not is_short:
            options = _powers(extent, self.sizes.line_parts)
        self.elements *= extent
        if self.elements >= ENOUGH_LANES:
            self.stage = "rows"
        return options, extent

    def _part_of_line(self, extent: int) -> tuple[list[int], int]:
        parts = {
            _even(max(1, length // self.elements), self.sizes.even_part) for length in LANE_LENGTHS
        }
        preferred = max(1, PLANE_ELEMENTS // self.elements)
        options = (
            self._parts(extent, sorted(parts))
            if self.elements > 1
            else _powers(extent, sorted(parts))
        )
        self.elements, self.stage = PLANE_ELEMENTS, "rows"
        return options, preferred

    def _rows(self, extent: int) -> tuple[list[int], int]:
        preferred = max(1, min(32, MOST_ROWS_ELEMENTS // self.elements))
        self.elements *= extent
        if self.elements > PLANE_ELEMENTS:
            self.stage = "outer"
        return self._parts(extent, ROW_COUNTS), preferred

    def _parts(self, extent: int, among: Sequence[int]) -> list[int]:
        """Sizes near `among` of parts of a dimension along which no vectors lie."""
        return even_cuts(extent, among) if self.sizes.equal_parts else _powers(extent, among)

    def _outer(self, extent: int) -> tuple[list[int], int]:
        """One element at a time is preferred.

        But launching programs of little work costs more, and parts of a short dimension may share work.
        """
        if self.result_elements <= SMALL_RESULT:
            return _powers(extent, (1, 4, 16)), 1
        return ([1, extent] if extent <= FEW_OUTER_ELEMENTS else [1]), 1


def _even(size: int, part: int) -> int:
    """The size as a multiple of `part`, rounded down; the size itself where it is smaller."""
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
