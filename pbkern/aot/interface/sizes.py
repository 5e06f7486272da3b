"""Sizes that a library's caller says, dimensions as expressions of them, and the programs among which a call is divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Symbol:
    """A size that the caller says, from `low` to `high`.

    Attributes:
      name: of the parameter of the C function.
      source: what the program calls it.
    """

    name: str
    low: int
    high: int
    source: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.low} to {self.high}"


@dataclass(frozen=True)
class Division:
    """The programs among which a call's sizes are divided.

    Attributes:
      symbols: the sizes that the caller says.
      rows: the symbol whose rows are computed in parts, or None.
      programs: sizes of each program; of those that differ in `rows` alone, the largest first.
    """

    symbols: tuple[Symbol, ...] = ()
    rows: str | None = None
    programs: tuple[Sizes, ...] = ({},)

    @property
    def most(self) -> Sizes:
        """The largest sizes."""
        return {symbol.name: symbol.high for symbol in self.symbols}


def size_at(dimension: Affine[str], sizes: Sizes) -> int:
    """A dimension for sizes."""
    return dimension.const + sum(part * sizes[name] for name, part in dimension.terms)


def row_extent(dimensions: Sequence[Affine[str]], rows: str) -> int | None:
    """Elements along the first dimension per row, where that alone depends on `rows` and is a multiple of it; else None."""
    first, *further = dimensions
    extent = first.coefficient(rows)
    is_multiple = extent > 0 and first == Affine.symbol(rows, extent)
    if is_multiple and not any(rows in dimension.symbols for dimension in further):
        return extent
    return None
