"""FunctionOfSizes -> Division, and the dimensions of its arrays: whether one size's rows may be computed in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pbkern.aot.interface.sizes import Division, Sizes, Symbol, row_extent
from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass

from .independence import FEWER, MORE, Depends, compared, parts_differ, why_rows_depend
from .sizes import FunctionOfSizes, divided, linear_dimensions, powers_of_two

# The largest part of the rows that are computed together and in parts, 4 + 2 + 1, before a library is made.
MOST_TRIED_PART = 4

Dimensions = tuple[Affine[str], ...]


@dataclass(frozen=True)
class Divided:
    """A division, with the dimensions of arguments and results as expressions of the symbols.

    Attributes:
      division: sizes of the programs.
      arguments, results: dimensions of each array.
    """

    division: Division
    arguments: tuple[Dimensions, ...] = ()
    results: tuple[Dimensions, ...] = ()


def divide(function: FunctionOfSizes, is_donated: bool) -> Divided:
    """Divides a function's sizes among programs.

    is_donated: whether an argument may be a result, so that computing a part twice is not the same
    as once.

    Raises UnsupportedOp where there would be too many programs, or a dimension is no linear
    expression of the sizes.
    """
    symbols, traced = function.symbols, function.traced
    if not symbols or traced is None:
        return Divided(Division())
    arguments = _dimensions("argument", lambda sizes: traced(sizes).given, symbols)
    results = _dimensions("result", lambda sizes: traced(sizes).closed.out_avals, symbols)
    reasons = {}
    for symbol in symbols:
        why = (
            "an argument is donated"
            if is_donated
            else _why_not(function, symbol, arguments, results)
        )
        if not why:
            return Divided(divided(symbols, symbol.name, ""), arguments, results)
        reasons[symbol.name] = why
    why = "; ".join(
        f"rows of `{name}` cannot be computed apart: {why}" for name, why in reasons.items()
    )
    return Divided(divided(symbols, None, why), arguments, results)


def _dimensions(
    kind: str, types_at: Callable[[Sizes], Sequence[Any]], symbols: Sequence[Symbol]
) -> tuple[Dimensions, ...]:
    count = len(types_at({symbol.name: symbol.low for symbol in symbols}))

    def of(n: int) -> Dimensions:
        return linear_dimensions(f"{kind} {n}", lambda sizes: types_at(sizes)[n].shape, symbols)

    return tuple(map(of, range(count)))


def _why_not(
    function: FunctionOfSizes,
    symbol: Symbol,
    arguments: tuple[Dimensions, ...],
    results: tuple[Dimensions, ...],
) -> str:
    """The reason why the rows of a symbol cannot be computed apart, or ""."""
    traced, name = function.traced, symbol.name
    assert traced is not None
    extents = []
    for kind, arrays in (("argument", arguments), ("result", results)):
        for n, array in enumerate(arrays):
            extent = row_extent(array, name) if array else None
            if extent is None and any(name in size.symbols for size in array):
                return f"{kind} {n} has them in another than its first dimension"
            extents.append(extent or 0)
    if function.obstacle:
        return function.obstacle
    fixed: Sizes = {other.name: other.high for other in function.symbols if other is not symbol}
    at = lambda rows: traced({**fixed, name: rows})
    count = len(arguments)
    fewer = at(FEWER)
    why = why_rows_depend(fewer, at(MORE), extents[:count], extents[count:])
    if why:
        return why
    parts = powers_of_two(min(symbol.high, MOST_TRIED_PART))
    tried = sum(parts) if sum(parts) <= symbol.high else sum(parts[1:])
    try:
        for rows in {*powers_of_two(symbol.high), tried, symbol.high} - {1}:
            compared(fewer, at(rows))
    except Depends as e:
        return str(e)
    if parts_differ(at, tried, extents[:count], extents[count:]):
        return f"{tried} rows together have other results than in parts"
    return ""
