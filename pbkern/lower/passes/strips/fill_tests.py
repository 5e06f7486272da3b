"""Exponentials of finite fills, less a running maximum: whether they are zero, which only the program can tell.

where(i >= k, s, -1e30)   of hidden keys is -1e30;   exp(-1e30 - m[i]) is 0 unless row i has seen no other key

for each row:  t[i] = exp(-1e30 - m[i]) != 0
u = max t[i]                                            1: hidden keys count
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Buf, Const, Expr, Load, Nest, Reduction, Stmt, Store

INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class ZeroExponential:
    """Says that function(fill - peak) is zero wherever a nest takes it.

    Attributes:
      dims: of the nest, along which the peak's place moves.
    """

    function: str
    fill: Const
    peak: Load
    dims: tuple[tuple[str, int], ...]

    def violated(self, context: NestContext) -> Expr:
        """1 where it does not hold; a peak that is no number is such a place."""
        dtype = self.peak.dtype
        difference = context.op("sub", dtype, self.fill, self.peak)
        power = context.op(self.function, dtype, difference)
        test = context.op("ne", bool, power, context.const(0, dtype))
        return context.select(test, context.const(1, INT32), context.const(0, INT32))


def some_violated(
    claims: Iterable[ZeroExponential], counters: Mapping[str, int], context: NestContext
) -> tuple[list[Stmt], Load]:
    """(statements, 1 behind them if any claim does not hold, else 0).

    counters: of loops whose steps all count, with their trips.
    """
    out: list[Stmt] = []
    flags: list[Expr] = []
    for claim in claims:
        moving = {x: trips for x, trips in counters.items() if x in claim.peak.symbols}
        sizes = {**dict(claim.dims), **moving} or {"": 1}
        names = {dim: context.names("d") for dim in sizes}
        renamed = context.pool.renamer({dim: Affine.symbol(name) for dim, name in names.items()})
        # Each row by the threads that hold its peak; then all rows.
        rows = {names[dim]: size for dim, size in sizes.items()}
        each = context.new_buffer(tuple(rows.values()), INT32)
        # No pass takes the tests into what joins them: that goes across rows, and peaks would leave their threads' registers.
        context.persistent |= {each}
        value = renamed(claim.violated(context))
        out.append(Nest(rows, stores=(Store(each, tuple(map(Affine.symbol, rows)), value),)))
        again = {context.names("d"): size for size in rows.values()}
        loads = context.pool.load(INT32, each, tuple(map(Affine.symbol, again)), False)
        joined = _scalar(context.pool.accumulator(INT32, 0), context)
        joined = replace(joined, dims=again, rdims=tuple(again))
        out.append(replace(joined, reductions=(Reduction("max", (loads,), INT32),)))
        flags.append(_loaded(joined, context))
    while len(flags) > 1:
        both = _scalar(context.op("max", INT32, *flags[:2]), context)
        out.append(both)
        flags[:2] = [_loaded(both, context)]
    (flag,) = flags
    assert isinstance(flag, Load)
    return out, flag


def _scalar(value: Expr, context: NestContext) -> Nest:
    """A nest that stores one number to a buffer of its own."""
    store = Store(context.new_buffer((1,), INT32), (Affine(),), value, inner=False)
    return Nest({}, stores=(store,))


def _loaded(scalar: Nest, context: NestContext) -> Load:
    """The number that such a nest has stored."""
    load = context.pool.load(INT32, scalar.stores[0].buf, (Affine(),), False)
    assert isinstance(load, Load)
    return load


def cleared(flag: Load, context: NestContext) -> Nest:
    """A nest that says, ahead of a test, that no claim is violated."""
    store = Store(flag.buf, flag.index, context.const(0, INT32), inner=False)
    return Nest({}, stores=(store,))


def reached(buffers: Iterable[Buf], claims: Iterable[ZeroExponential]) -> list[ZeroExponential]:
    """The claims about peaks in some root buffers."""
    roots = {buf.root for buf in buffers}
    return [claim for claim in claims if claim.peak.buf.root in roots]
