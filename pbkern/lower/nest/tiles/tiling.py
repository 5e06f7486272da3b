"""Tiling: one matrix instruction repeated over the tile of a thread block or of a CPU's core, shared out among warps.

128 x 128 x 32 by m16n8k16 2x4:   each of 8 warps has 64 x 32 of the sums: 4 x 4 instructions, in 2 steps along the depth
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass

from .instructions import ProductInstruction
from .layout import Layout, steps


@dataclass(frozen=True)
class Tiling:
    """Which thread computes which points of a nest: rows, columns and, of products, the depth.

    It is the same for tiles of all shapes that it fits, so that nests agree about an array where their tilings are equal.

    warps: along rows and along columns; of an instruction that several warps compute together, groups of them.
    """

    instruction: ProductInstruction
    warps: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.instruction.name} {self.warps[0]}x{self.warps[1]}"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether each extent is that of all warps' instructions times a power of two."""
        units = map(operator.mul, self.instruction.shape, (*self.warps, 1))
        counts = [(size // unit, size % unit) for size, unit in zip(shape, units)]
        return all(not rest and count > 0 and not count & (count - 1) for count, rest in counts)

    def holds_like(self, other: object) -> bool:
        """Whether threads hold the same elements of arrays by another tiling: its instruction may take other types."""
        if not isinstance(other, Tiling):
            return False
        mine, theirs = self.instruction, other.instruction
        return self == other or (
            (self.warps, mine.shape, mine.warps, mine.row_bytes)
            == (other.warps, theirs.shape, theirs.warps, theirs.row_bytes)
            and mine.layouts == theirs.layouts
        )

    def repeats(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Instructions of a warp along each dimension of a tile."""
        units = map(operator.mul, self.instruction.shape, (*self.warps, 1))
        return tuple(size // unit for size, unit in zip(shape, units))

    @functools.cache  # noqa: B019 (tilings are few, and live as long as the process)
    def sums(self, rows: int, columns: int) -> Layout:
        """(register, lane, warp) -> (row, column); registers: of an instruction, then along columns, then along rows."""
        (height, width, _), (wide_rows, wide_columns) = self.instruction.shape, self.warps
        *_, fragment = self.instruction.layouts
        registers = (
            *steps(columns // wide_columns, width, 1),
            *steps(rows // wide_rows, height, 0),
        )
        warps = (
            *steps(columns, columns // wide_columns, 1),
            *steps(rows, rows // wide_rows, 0),
        )
        return fragment.with_bits("register", *registers).with_bits("warp", *warps)

    @functools.cache  # noqa: B019
    def first(self, rows: int, depth: int) -> Layout:
        """(register, lane, warp, step) -> (row, depth) of the first operand; warps side by side hold the same."""
        height, _, deep = self.instruction.shape
        fragment, *_ = self.instruction.layouts
        none = ((0, 0),) * (self.warps[1].bit_length() - 1)
        return (
            fragment.with_bits("register", *steps(rows // self.warps[0], height, 0))
            .with_bits("warp", *none, *steps(rows, rows // self.warps[0], 0))
            .with_bits("step", *steps(depth, deep, 1))
        )

    @functools.cache  # noqa: B019
    def second(self, depth: int, columns: int) -> Layout:
        """(register, lane, warp, step) -> (depth, column) of the second operand; warps one above the other hold the same."""
        _, width, deep = self.instruction.shape
        _, fragment, _ = self.instruction.layouts
        none = ((0, 0),) * (self.warps[0].bit_length() - 1)
        return (
            fragment.with_bits("register", *steps(columns // self.warps[1], width, 1))
            .with_bits("warp", *steps(columns, columns // self.warps[1], 1), *none)
            .with_bits("step", *steps(depth, deep, 0))
        )

    def held(self, shape: Sequence[int]) -> Layout:
        """(register, lane, warp) -> place in an array of a tile's rows, or of its rows and columns.

        Of rows alone a thread has one register for all columns.
        """
        if len(shape) == 2:
            return self.sums(shape[0], shape[1])
        layout = self.sums(shape[0], self.instruction.shape[1] * self.warps[1]).along((0,))
        registers = tuple(vector for vector in layout.vectors("register") if any(vector))
        inputs = dict(layout.inputs) | {"register": registers}
        return Layout(tuple(inputs.items()), 1)

    @functools.cache  # noqa: B019
    def held_first(self, rows: int, depth: int) -> list[list[int]] | None:
        """Sums of one product as the first operand of the next: per step along the depth, which registers of the sums it takes.

        None where lanes would have to exchange them, or the depth is no extent of sums.
        """
        if not self.fits((rows, depth, self.instruction.shape[2])):
            return None
        sums = self.sums(rows, depth)
        conversion = sums.converted(self.first(rows, depth))
        for name, vectors in conversion.inputs:
            axis = (
                sums.names.index(name) if name in ("lane", "warp") else sums.names.index("register")
            )
            across = [vector[:axis] + vector[axis + 1 :] for vector in vectors]
            stay = [1 << bit for bit in range(len(vectors))]
            moved = name in ("lane", "warp") and [vector[axis] for vector in vectors] != stay
            if moved or any(map(any, across)):
                return None
        registers, steps_ = (self.first(rows, depth).size(name) for name in ("register", "step"))
        axis = sums.names.index("register")
        return [
            [conversion.place(register=register, step=step)[axis] for register in range(registers)]
            for step in range(steps_)
        ]
