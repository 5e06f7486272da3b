"""Which part of a dimension a nest really works on: interval analysis of the masks under its selects.

    where(q >= k, s, c)    is c, whatever s, unless    k <= q: with q in a block, an interval of k that moves with the grid

`live_span` finds such intervals; `outside` is the value that an expression has beyond one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.ir import Accumulator, Expr, Gather, InRange, Load, Nest, Op, Pool, nodes

from .index_tests import BOOL, UNBOUNDED


@dataclass(frozen=True)
class MaskSpan:
    """max(lows) <= index < min(highs); the ends are affine in symbols that are known when the nest starts."""

    lows: frozenset[Affine] = frozenset()
    highs: frozenset[Affine] = frozenset()

    def __and__(self, other: MaskSpan) -> MaskSpan:
        return MaskSpan(self.lows | other.lows, self.highs | other.highs)

    def __bool__(self) -> bool:
        return bool(self.lows or self.highs)


EVERYWHERE = MaskSpan()


def mask_span(mask: Expr, truth: bool, dim: str, dims: Mapping[str, int]) -> MaskSpan:
    """Beyond this span of `dim`, `mask` differs from `truth` at all points of the other dimensions."""
    if isinstance(mask, InRange):
        affine, low, high = mask.affine, mask.low, mask.high
        if truth:
            return _range_span(affine, low, high, dim, dims)
        if high >= UNBOUNDED:
            return _range_span(affine, -UNBOUNDED, low, dim, dims)
        return _range_span(affine, high, UNBOUNDED, dim, dims) if low <= -UNBOUNDED else EVERYWHERE
    if not isinstance(mask, Op):
        return EVERYWHERE
    if mask.info.primitive == "not":
        return mask_span(mask.args[0], not truth, dim, dims)
    if mask.info.primitive == ("and" if truth else "or"):
        return mask_span(mask.args[0], truth, dim, dims) & mask_span(mask.args[1], truth, dim, dims)
    return EVERYWHERE


def _range_span(affine: Affine, low: int, high: int, dim: str, dims: Mapping[str, int]) -> MaskSpan:
    """low <= a < high solved for `dim`, over the extremes of the other dimensions."""
    coefficient = affine.coefficient(dim)
    if abs(coefficient) != 1:
        return EVERYWHERE
    rest = affine - Affine.symbol(dim, coefficient)
    smallest, largest = (_extreme(rest, dims, pick) for pick in (min, max))
    lows: set[Affine] = set()
    highs: set[Affine] = set()
    if coefficient == 1:  # low - rest <= dim < high - rest
        if low > -UNBOUNDED:
            lows.add(largest * -1 + low)
        if high < UNBOUNDED:
            highs.add(smallest * -1 + high)
    else:  # rest - high < dim <= rest - low
        if high < UNBOUNDED:
            lows.add(smallest - high + 1)
        if low > -UNBOUNDED:
            highs.add(largest - low + 1)
    return MaskSpan(frozenset(lows), frozenset(highs))


def _extreme(affine: Affine, dims: Mapping[str, int], pick) -> Affine:
    """The smallest or largest value over the dimensions of a nest, affine in what remains."""
    total: Affine[str] = Affine((), affine.const)
    for symbol, coefficient in affine.terms:
        total = total + (
            pick(0, coefficient * (dims[symbol] - 1))
            if symbol in dims
            else Affine.symbol(symbol, coefficient)
        )
    return total


def live_span(nest: Nest, dim: str) -> MaskSpan:
    """The span that the masked selects of a nest share and that moves with the program, or EVERYWHERE."""
    spans = {
        mask_span(node.args[0], truth, dim, nest.dims)
        for node in nest.nodes()
        if is_masked(node)
        for truth in (True, False)
        if not _varies(node.args[1 if truth else 2], dim)
    }
    streamed = [span for span in spans if any(expr.symbols for expr in (*span.lows, *span.highs))]
    return streamed[0] if len(streamed) == 1 else EVERYWHERE


def _varies(expr: Expr, dim: str) -> bool:
    """Whether an expression, or what a nest has reduced in it, may change along `dim`."""
    return dim in expr.symbols or any(isinstance(node, Accumulator) for node in nodes([expr]))


def is_masked(expr: Expr) -> bool:
    return (
        isinstance(expr, Op)
        and expr.info.primitive == "select_n"
        and expr.args[0].dtype == BOOL
        and len(expr.args) == 3
    )


def outside(
    expr: Expr, nest: Nest, dim: str, span: MaskSpan, fill_of: Callable, pool: Pool
) -> Expr | None:
    """The value of `expr` beyond `span`; None if it depends on `dim`, but for values of each index of `dim` alone.

    fill_of(load) -> (True, value beyond the span or None) for loads of buffers that are written in the span only, or
    (False, None).
    """
    memo: dict[int, Expr | None] = {}

    def go(x: Expr) -> Expr | None:
        if id(x) not in memo:
            memo[id(x)] = value(x)
        return memo[id(x)]

    def value(x: Expr) -> Expr | None:
        if is_masked(x):
            for truth in (True, False):
                inner = mask_span(x.args[0], truth, dim, nest.dims)
                if inner.lows >= span.lows and inner.highs >= span.highs:
                    return go(x.args[1 if truth else 2])
            false, true = go(x.args[1]), go(x.args[2])
            if false is not None and false is true:
                return false
        if isinstance(x, Load | Gather):
            ours, fill = fill_of(x)
            if ours:
                return fill
        if isinstance(x, Accumulator) or (
            dim in x.symbols and not x.args and not isinstance(x, Load)
        ):
            return None
        args = tuple(arg for arg in map(go, x.args) if arg is not None)
        if len(args) < len(x.args) or (isinstance(x, Gather) and dim in x.symbols):
            return None
        return (
            x
            if all(arg is before for arg, before in zip(args, x.args))
            else x.with_args(args, pool)
        )

    mask = go(expr)
    other_axes = {axis for axis, size in nest.dims.items() if size > 1 and axis != dim}
    return None if mask is not None and dim in mask.symbols and other_axes & mask.symbols else mask
