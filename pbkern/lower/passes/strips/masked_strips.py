"""Attention with masks that move with the program: strips of keys that they hide are skipped.

Before -> after, for causal attention (rows r of a block, keys k; every nest over all 1024 keys):

    s[r, k] = sum q[r] k[k]                         m' = lowest
    m[r] = max where(r >= k, s[r, k], c)            for strip < live strips:  s[strip] = ..., m' = max(m', ...)
    p[r, k] = exp(where(r >= k, s, c) - m[r])       m = max m'
    l[r] = sum p[r, k]                              test that exp(c - m[r]) is 0 in all rows; if not, all strips are live
    o[r] = sum p[r, k] v[k]                         for strip < live strips:  p = ..., l' += p, o' += p v[strip]

The masked elements contribute what `spans.outside` finds: the fill value of a maximum is its
starting value, a sum must find zeros. Values under a product's zeros are not read: an infinity
there would have made the result NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.conditions.mask_intervals import MaskSpan, live_span, outside
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.inline import stored_at
from pbkern.lower.nest.ir import Buf, Const, Expr, Let, Load, Nest, Pool, Reduction, Stmt, Store

from .strip_mining import (
    JOINS,
    Chain,
    NestRun,
    StripLimits,
    StripMinedLoop,
    Trips,
    with_runs_changed,
)

INT32 = np.dtype(np.int32)
BOOL = np.dtype(bool)


@dataclass(frozen=True)
class SkipMaskedStrips(StripLimits):
    """Cuts runs of nests into strips where masks leave some of them without effect, inner statements too."""

    fewest_strips: int = threshold(
        4, "strips of the shortest dimension that is cut: shorter ones are not worth the loops"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        def skipped(run: list[Nest], elsewhere: set[Buf]) -> list[Stmt] | None:
            masks = _masks(run, self.fewest_strips * context.policy.mask_strip)
            nests = NestRun(run if masks else ())
            ways = (
                _without_masked(nests, seeds, span, elsewhere, context, self.many_strips)
                for seeds, span in masks
            )
            return next((way for way in ways if way is not None), None)

        return with_runs_changed(stmts, set(context.persistent), self.longest_run, skipped)


def _without_masked(
    run: NestRun,
    seeds: dict[int, str],
    span: MaskSpan,
    elsewhere: set[Buf],
    context: NestContext,
    many_strips: int,
) -> list[Stmt] | None:
    chain = Chain.find(run, seeds)
    if chain is None or not all(_is_private(buf, elsewhere) for buf in _written_along(chain)):
        return None  # where all of a result is wanted, nothing can be left out
    outer = _DeadTiles(chain, span, context.pool)
    if not outer.settle():
        return None
    strips = _LiveTiles(chain, outer, elsewhere, context, many_strips)
    return (
        None
        if any(strips.reads_skipped(group) for group in chain.groups() if isinstance(group, list))
        else strips.statements()
    )


def _masks(run: list[Nest], shortest: int) -> list[tuple[dict[int, str], MaskSpan]]:
    """Position -> dimension of the nests with masks that move with the program, and their span.

    The span is along rows of a block, along its columns, or either, longer ones first.
    """
    masks = [
        (size, at, mask_dim, span)
        for at, nest in enumerate(run)
        for mask_dim, size in nest.dims.items()
        if size >= shortest and (span := live_span(nest, mask_dim))
    ]
    along: dict[tuple[int, MaskSpan], dict[int, str]] = {}
    for size, at, dim, span in masks:
        along.setdefault((size, span), {})[at] = dim
    ways = [
        (seeds, span) for (_, span), seeds in sorted(along.items(), key=lambda each: -each[0][0])
    ]
    return (
        ways
        if all(len({mask_span for z, mask_span in along if z == size}) == 1 for size, _ in along)
        else []
    )


def _written_along(chain: Chain) -> list[Buf]:
    return [
        store.buf
        for at, dim in chain.dims.items()
        for store in chain.run[at].stores
        if any(dim in position.symbols for position in store.index)
    ]


def _is_private(buf: Buf, elsewhere: set[Buf]) -> bool:
    return buf.arena and buf.storage is None and buf not in elsewhere


# ---------------------------------------------------------------- outside of the mask


class _DeadTiles:
    """Values of a chain beyond the span of its masks.

    needs: position -> values that must be zero for the nest to do without points outside of the mask.
    starts: (position, reduction) -> what a maximum or minimum takes from outside.
    fills: buffer -> (its write, value outside in the writer's dimensions, None where that is anything).
    """

    def __init__(self, chain: Chain, span: MaskSpan, pool: Pool):
        self.chain, self.span, self.pool = chain, span, pool
        self.needs: dict[int, list[Expr]] = {}
        self.starts: dict[tuple[int, int], Expr] = {}
        self.fills: dict[Buf, tuple[Store, Expr | None]] = {}

    def settle(self) -> bool:
        """Finds the points outside of the mask for every nest, in order; False where one of them needs them."""
        for at, along in sorted(self.chain.dims.items()):
            nest = self.chain.run[at]

            def value(expr: Expr, nest=nest, dim=along) -> Expr | None:
                return outside(expr, nest, dim, self.span, self._fill_of, self.pool)

            if along in nest.rdims and not all(
                self._settle_reduction(at, k, reduction, value)
                for k, reduction in enumerate(nest.reductions)
            ):
                return False
            for store in nest.stores:
                if any(along in position.symbols for position in store.index):
                    self.fills[store.buf] = (
                        store,
                        value(store.value) if store.mask is None else None,
                    )
        return True

    def _settle_reduction(
        self, at: int, number: int, reduction: Reduction, value: Callable
    ) -> bool:
        operands = [operand for operand in map(value, reduction.args) if operand is not None]
        if not operands or reduction.op not in JOINS or reduction.dtype.kind == "b":
            return False
        if reduction.op in ("max", "min"):
            self.starts[at, number] = operands[0]
            return isinstance(operands[0], Const)
        if not any(isinstance(operand, Const) and operand.value == 0 for operand in operands):
            self.needs.setdefault(at, []).append(operands[0])
        return True

    def _fill_of(self, load: Load) -> tuple[bool, Expr | None]:
        """(whether a load is of a chain's buffer, its value outside the span in the reader's dimensions)."""
        buf, index = load.buf, load.index
        if buf not in self.chain.axes:
            return False, None
        store, fill = self.fills.get(buf, (None, None))
        if store is None or fill is None or not isinstance(load, Load):
            return True, None
        return True, stored_at(replace(store, value=fill), index, self.pool)


# ---------------------------------------------------------------- the loops


class _LiveTiles(StripMinedLoop):
    """Strips whose number is known when the program runs."""

    def __init__(
        self, chain: Chain, outer: _DeadTiles, elsewhere: set[Buf], context: NestContext, many: int
    ):
        super().__init__(chain, context.policy.mask_strip, elsewhere, context, many)
        self.span, self.outer = outer.span, outer

    def missed(self, at: int, number: int) -> Expr | None:
        return self.outer.starts.get((at, number))

    def reads_skipped(self, group: list[int]) -> bool:
        """Whether the group may have to run everywhere and would then read what an earlier loop left out."""
        if not any(at in self.outer.needs for at in group):
            return False
        written = {store.buf for at in group for store in self.run[at].stores}
        read = {buf for at in group for buf, _, written in self.run.accesses[at] if not written}
        return any(
            buf in self.chain.axes and buf not in written and self.outer.fills[buf][1] is not None
            for buf in read
        )

    def trips(self, group: list[int]) -> Trips:
        """Live strips; all of them if a value that is left out turns out not to be zero."""
        needs = [expr for at in group for expr in self.outer.needs.get(at, ())]
        everywhere = self._test_needs(needs, group) if needs else None

        def unless(normal: Expr, otherwise: int) -> Expr:
            if everywhere is None:
                return normal
            test = self.context.op("eq", bool, everywhere, self._number(0))
            return self.context.select(test, normal, self._number(otherwise))

        low = self._strip_of(self._extreme("max", self.span.lows), 0) if self.span.lows else None
        high = self._number(self.full)
        last = self._number(1)
        if self.span.highs:
            end = self._extreme("min", self.span.highs)
            high = self._strip_of(end, self.length - 1)
            last = self._clamped(self._op("sub", end, self._number(self.full * self.length)), 1)
        count = (
            high if low is None else self._op("max", self._op("sub", high, low), self._number(0))
        )
        first = Affine() if low is None else Affine.symbol(self._let(unless(low, 0)))
        name = self._let(unless(count, self.full))
        rest = self._let(unless(last, 1)) if self.rest else 1
        return Trips(first, name, rest, self._all_live(name, rest))

    def _all_live(self, count: str, rest: str | int) -> Expr:
        test = self.pool.in_range(Affine.symbol(count), self.full, self.full + 1)
        if not isinstance(rest, str):
            return test
        return self.context.op("and", bool, test, self.pool.in_range(Affine.symbol(rest), 1, 2))

    def _test_needs(self, needs: list[Expr], group: list[int]) -> Expr:
        """1 if one of the values is not zero at some point (NaN is not), as a scalar; else 0."""
        flags = []
        sizes = {dim: size for at in group for dim, size in self.run[at].dims.items()}
        for need in dict.fromkeys(needs):
            dims = {size: sizes[size] for size in sizes if size in need.symbols} or {
                self.context.names("d"): 1
            }
            buf = self.context.new_buffer((1,), INT32)
            test = self.context.op("ne", bool, need, self.context.const(0, need.dtype))
            value = self.context.select(test, self._number(1), self._number(0))
            result = Store(buf, (Affine(),), self.pool.accumulator(INT32, 0), inner=False)
            self.out.append(
                Nest(dims, tuple(dims), (Reduction("max", (value,), INT32),), (result,))
            )
            flags.append(self.pool.load(INT32, buf, (Affine(),), False))
        for flag in flags[1:]:
            flags[0] = self._op("max", flags[0], flag)
        return flags[0]

    def _op(self, name: str, *args: Expr) -> Expr:
        return self.context.op(name, INT32, *args)

    def _number(self, value: int) -> Expr:
        return self.context.const(value, INT32)

    def _let(self, value: Expr) -> str:
        name = self.context.names("%s")
        self.out.append(Let(name, value))
        return name

    def _clamped(self, expr: Expr, high: int) -> Expr:
        return self._op("min", self._op("max", expr, self._number(0)), self._number(high))

    def _extreme(self, name: str, ends: frozenset[Affine]) -> Expr:
        values = [self.pool.index(INT32, end) for end in sorted(ends, key=str)]
        for value in values[1:]:
            values[0] = self._op(name, values[0], value)
        return values[0]

    def _strip_of(self, expr: Expr, up: int) -> Expr:
        moved = self._op("add", expr, self._number(up)) if up else expr
        return self._clamped(
            self._op("shift_right_arithmetic", moved, self._number(self.length.bit_length() - 1)),
            self.full,
        )
