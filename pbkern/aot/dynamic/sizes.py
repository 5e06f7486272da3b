"""Sizes that a library's caller says, and the programs that compute a function of any of them.

Kernels are compiled for fixed sizes. Where the rows of a function's arrays do not depend on each
other (independence.py), a call computes them in parts whose sizes are powers of two: 7 rows are
4 + 2 + 1. Elsewhere there is a program for each size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from pbkern.aot.function import LibraryFunction
from pbkern.aot.interface.names import distinct
from pbkern.aot.interface.sizes import Division, Sizes, Symbol, size_at
from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import CompileOptions

# Programs of a library that has one for each size, at most: about a second of compilation each.
# Source: chosen.
MOST_PROGRAMS = 64


@dataclass(frozen=True)
class FunctionOfSizes:
    """A function that is compiled for several sizes.

    Attributes:
      symbols: the sizes that the caller says; none for a function of fixed sizes.
      make: plans the function for sizes.
      traced: the function's jaxpr for sizes, and which operands are constants of its scope.
      obstacle: why the function may be another one for other sizes, or "".
    """

    symbols: tuple[Symbol, ...]
    make: Callable[[CompileOptions, Sizes], LibraryFunction]
    traced: Callable[[Sizes], TracedForSizes] | None = None
    obstacle: str = ""


@dataclass(frozen=True)
class TracedForSizes:
    """A jaxpr for certain sizes. held: values of its first operands, the function's scope."""

    closed: jex.ClosedJaxpr
    held: tuple

    @property
    def given(self) -> list:
        """Types of the operands that are arguments."""
        return list(self.closed.in_avals[len(self.held) :])


def parameters_of_sizes(
    ranges: Mapping[str, tuple[int, int]], arrays: Sequence[str]
) -> tuple[Symbol, ...]:
    """Symbols whose names are those of no other parameter.

    Args:
      ranges: what the program calls a size -> the least and the greatest.
      arrays: names of the arguments and results.
    """
    names = distinct([*arrays, *ranges])[len(arrays) :]
    return tuple(
        Symbol(name, low, high, source)
        for name, (source, (low, high)) in zip(names, ranges.items())
    )


def by_source(symbols: Sequence[Symbol], sizes: Sizes) -> Sizes:
    """Sizes by their names in the program."""
    return {symbol.source: sizes[symbol.name] for symbol in symbols}


def divided(symbols: Sequence[Symbol], rows: str | None, why: str) -> Division:
    """The programs that compute all sizes.

    Args:
      symbols: the sizes that the caller says.
      rows: the symbol whose rows may be computed in parts, or None.
      why: the reason against parts, for the error.
    Raises UnsupportedOp for too many programs.
    """
    ladders = [
        powers_of_two(symbol.high)
        if symbol.name == rows
        else range(symbol.high, symbol.low - 1, -1)
        for symbol in symbols
    ]
    count = math.prod(map(len, ladders))
    if count > MOST_PROGRAMS:
        raise UnsupportedOp(
            f"a library for {' and '.join(map(str, symbols))} would hold {count} programs",
            why=f"{why}, so that each size has a program of its own, and a library holds {MOST_PROGRAMS} at most",
            hint="state a smaller range, or make a library for each of a few sizes",
        )
    names = [symbol.name for symbol in symbols]
    programs = [dict(zip(names, sizes)) for sizes in itertools.product(*ladders)]
    programs.sort(key=lambda sizes: -sizes[rows] if rows else 0)
    return Division(tuple(symbols), rows, tuple(programs))


def powers_of_two(most: int) -> list[int]:
    """2^n ... 4, 2, 1."""
    return [1 << n for n in reversed(range(most.bit_length()))]


def linear_dimensions(
    path: str, shape_at: Callable[[Sizes], Sequence[int]], symbols: Sequence[Symbol]
) -> tuple[Affine[str], ...]:
    """Dimensions of an array as linear expressions of the symbols.

    Args:
      path: names the array in the error.
      shape_at: sizes -> its shape.
      symbols: the sizes that the caller says.
    Raises UnsupportedOp where a dimension is no such expression.
    """
    low = {symbol.name: symbol.low for symbol in symbols}
    base = shape_at(low)
    slopes: list[dict[str, int]] = [{} for _ in base]
    for symbol in symbols:
        if symbol.low < symbol.high:
            more = shape_at(low | {symbol.name: symbol.low + 1})
            for slope, before, after in zip(slopes, base, more):
                slope[symbol.name] = after - before
    dimensions = tuple(
        Affine.make(slope, size - sum(part * low[name] for name, part in slope.items()))
        for slope, size in zip(slopes, base)
    )
    high = {symbol.name: symbol.high for symbol in symbols}
    if tuple(size_at(dimension, high) for dimension in dimensions) != tuple(shape_at(high)):
        raise UnsupportedOp(
            f"a dimension of `{path}` is no sum of multiples of sizes",
            why=f"shape {tuple(base)} for {low}, {tuple(shape_at(high))} for {high}",
            hint="a library for each size",
        )
    return dimensions


def by_sizes(function: Callable[[Sizes], Any]) -> Callable[[Sizes], Any]:
    """The function, which is called once for the same sizes."""
    known: dict[tuple, Any] = {}

    def remembered(sizes: Sizes) -> Any:
        key = tuple(sorted(sizes.items()))
        if key not in known:
            known[key] = function(sizes)
        return known[key]

    return remembered
