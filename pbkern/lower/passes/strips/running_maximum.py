"""Exponentials of long rows, less the greatest element -> one pass over each row, in strips with levels of their own.

    m = max x[k]                                     for each strip:
    s = sum exp(x[k] - c(m))                  ->         g[strip] = max x,  q[strip] = sum exp(x - level),  p = exp(x - level)
    p[k] = exp(x[k] - c(m))                              if g[strip] > level + 4:  level = g[strip],  q and p again
    y[k] = p[k] / s                                      l[strip] = level
                                                     m = max g,  w[strip] = exp(l - c(m)),  s = sum q w
                                                     for each strip:  y = p w / s

A level is a number that no x exceeds by much: what was the greatest before mostly is one. Each
element is read once, and no strip waits for another. (Levels that follow every new greatest
element: Milakov, Gimelshein 2018.) The identity holds for any c and any finite levels. Where the
greatest of a strip is infinite or no number, its level is 0, so that sums and weights are 0, inf or
NaN as without strips. exp_of_difference.py says which nests these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.fuse import fused
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.edit.version import versioned
from pbkern.lower.nest.ir import (
    Buf,
    Expr,
    For,
    Load,
    Nest,
    Pool,
    Reduction,
    Stmt,
    Store,
)

from .exp_of_difference import ExpOfDifference, Row, find_exp_of_difference
from .strip_mining import RunLimits, with_runs_changed

HERE: Affine = Affine()  # the place of a scalar
STRIP = Affine.symbol("%strip")  # that of a strip, where results of strips are joined
BOOL = np.dtype(bool)
INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class RunningMaximum(RunLimits):
    """Rewrites runs of nests over long rows, inner statements too, with strips of part of the nearest cache."""

    cache_share: int = threshold(4, "strips that the nearest cache holds")
    fewest_strips: int = threshold(
        2, "strips of the shortest row that is cut. Source: not recorded"
    )
    strips_ahead: int = threshold(
        2, "strips between the one at work and the one that is prefetched. Source: not recorded"
    )
    whole_run: int = threshold(64, "elements that nests walk without a rest, whatever their dtype")
    # Rounding the difference adds a unit in the last place of its exponential.
    level_excess: float = threshold(4.0, "the most by which an element may exceed the level")
    first_part: int = threshold(
        4, "parts of the first strip, of the first of which the greatest is the first level"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        strip_bytes = context.policy.near_bytes // self.cache_share
        shortest = self.fewest_strips * strip_bytes

        def rewritten(run: list[Nest], elsewhere: set[Buf]) -> list[Stmt] | None:
            maxima = next(find_exp_of_difference(run, shortest, context, elsewhere), None)
            if maxima is None or _is_copied_near(maxima, context):
                return None
            return _RunningMaxima(maxima, strip_bytes, context, self).statements()

        return with_runs_changed(stmts, set(context.persistent), self.longest_run, rewritten)


def _is_copied_near(excess: ExpOfDifference, context: NestContext) -> bool:
    """Whether other nests read the row as well, and a later pass copies it near: strips would leave two reads from afar."""
    row = excess.greatest
    if row.size * row.itemsize() > context.policy.row_bytes:
        return False
    far = {load.buf.root for load in row.nest.loads() if context.policy.is_far(load.buf)}
    beside = [x for at, x in enumerate(excess.run) if at not in (excess.at, excess.later)]
    return any(load.buf.root in far for nest in beside for load in nest.loads())


@dataclass(frozen=True)
class _Cut:
    """Cut of a row: `full` strips of `length` elements, then the rest."""

    size: int
    length: int

    @staticmethod
    def of(row: Row, strip_bytes: int, whole_run: int) -> _Cut:
        """Strips of equal length where one of about the right length divides the row."""
        length = strip_bytes // row.itemsize()
        even = [
            n for n in range(length * 3 // 4, length * 3 // 2 + 1, whole_run) if row.size % n == 0
        ]
        return _Cut(row.size, min(even, key=lambda n: abs(n - length), default=length))

    @property
    def full(self) -> int:
        return self.size // self.length

    @property
    def rest(self) -> int:
        return self.size % self.length

    @property
    def count(self) -> int:
        return self.full + bool(self.rest)


@dataclass(frozen=True)
class _Strip:
    start: Affine
    number: Affine
    size: int


class _RunningMaxima:
    """Statements in place of a run of nests."""

    def __init__(
        self,
        excess: ExpOfDifference,
        strip_bytes: int,
        context: NestContext,
        limits: RunningMaximum,
    ) -> None:
        self.excess, self.context, self.pool = excess, context, context.pool
        self.limits = limits
        self.cut = _Cut.of(excess.greatest, strip_bytes, limits.whole_run)
        self.peaks, self.added = self._partials(excess.greatest), self._partials(excess.sums)
        dtype = self.peaks[excess.which].dtype  # half precision is carried in float32
        self.level = context.new_buffer((1,), dtype)
        self.levels, self.weights = self._buffer(dtype), self._buffer(dtype)

    def statements(self) -> list[Stmt]:
        excess, out = self.excess, []
        for at, nest in enumerate(excess.run):
            if at == excess.at:
                out += [*self._first_maximum(), *self._strips(self._one_pass)]
                out.append(self._joined(excess.greatest, self._greatest_of_strips()))
            elif at == excess.later:
                out.append(self._weighed_sums())
            elif any(load.buf in excess.scaled for load in nest.loads()):
                out += self._reader(Row.known(nest))
            else:
                out.append(nest)
        return out

    # ---- small makers

    def _buffer(self, dtype) -> Buf:
        return self.context.new_buffer((self.cut.count,), np.dtype(dtype))

    def _partials(self, row: Row) -> list[Buf]:
        return [self._buffer(reduction.dtype) for reduction in row.nest.reductions]

    def _load(self, buf: Buf, at: Affine) -> Expr:
        return self.pool.load(buf.dtype, buf, (at,), False)

    def _set(self, buf: Buf, at: Affine, value: Expr) -> Nest:
        return Nest({}, stores=(Store(buf, (at,), value),))

    def _again(self, expr: Expr, *args: Expr) -> Expr:
        """An operation on other operands."""
        return expr.with_args(args, self.pool)

    def _strips(self, make: Callable[[_Strip], list[Stmt]]) -> list[Stmt]:
        """A loop over statements on strips, and those on the rest."""
        cut, counter = self.cut, self.context.names("%i")
        number = Affine.symbol(counter)
        loop = For(counter, cut.full, tuple(make(_Strip(number * cut.length, number, cut.length))))
        if not cut.rest:
            return [loop]
        return [
            loop,
            *make(_Strip(Affine((), cut.full * cut.length), Affine((), cut.full), cut.rest)),
        ]

    # ---- the pass over the row

    def _first_maximum(self) -> list[Stmt]:
        """The greatest of a part of the first strip; below everything where it is infinite."""
        excess, dtype, step = self.excess, self.level.dtype, self.context.names("d")
        reduction = excess.greatest.nest.reductions[excess.which]
        of = self.pool.rename(reduction.args[0], excess.greatest.places(Affine.symbol(step)))
        greatest = self.pool.accumulator(dtype, 0)
        finite = self.context.op("is_finite", BOOL, greatest)
        first = self.context.select(
            finite, greatest, self.context.const(np.finfo(dtype).min, dtype)
        )
        store = Store(self.level, (HERE,), first, inner=False)
        size = self.cut.length // self.limits.first_part
        return [
            Nest(
                {step: size},
                (step,),
                (Reduction("maxnum", (of,), dtype),),
                (store,),
                at=excess.greatest.nest.at,
            )
        ]

    def _one_pass(self, strip: _Strip) -> list[Stmt]:
        """Greatest elements and sums of a strip with the level so far; the sums again where that is too low."""
        excess, dtype = self.excess, self.level.dtype
        level, greatest = (
            self._load(self.level, HERE),
            self._load(self.peaks[excess.which], strip.number),
        )
        sums = self._on_strip(excess.sums, strip, self.added, lambda x: self._less(x, level))
        both = self.context.policy.prefetching(
            _fused(self._found_on(strip), sums, self.pool), self._next_strips(excess.sums)
        )
        above = self.context.op("sub", dtype, greatest, level)
        near = self.context.op(
            "le", BOOL, above, self.context.const(self.limits.level_excess, dtype)
        )
        zero, one = (self.context.const(n, INT32) for n in range(2))
        test = self.context.names("%s")
        raised = self._set(self.level, HERE, self._finite(greatest))
        return [
            both,
            *versioned(
                test, self.context.select(near, zero, one), ((), (raised, sums)), self.context
            ),
            self._set(self.levels, strip.number, level),
        ]

    def _found_on(self, strip: _Strip) -> Nest:
        nest = self._on_strip(self.excess.greatest, strip, self.peaks)
        if self.excess.telling is not None:
            reduction = nest.reductions[self.excess.which]
            reductions = list(nest.reductions)
            reductions[self.excess.which] = replace(reduction, op="maxnum")
            nest = replace(nest, reductions=tuple(reductions))
        return nest

    def _finite(self, expr: Expr) -> Expr:
        return self.context.select(
            self.context.op("is_finite", BOOL, expr), expr, self.context.const(0, expr.dtype)
        )

    def _less(self, expr: Expr, level: Expr) -> Expr:
        """An expression of the sums, its exponential of x less the level."""
        exp = self.excess.exponential
        (difference,) = exp.args
        less = self._again(exp, self._again(difference, difference.args[0], level))
        return self.pool.rewrite(expr, lambda x: less if x is exp else None)

    def _on_strip(
        self,
        row: Row,
        strip: _Strip,
        partials: list[Buf],
        change: Callable[[Expr], Expr] = lambda expr: expr,
    ) -> Nest:
        """A nest on one strip of its row. What its reductions find goes to `partials`."""
        nest, step = row.nest, self.context.names("d")
        stores = [store for store in nest.stores if store.inner or not nest.rdims]
        places = row.places(strip.start + Affine.symbol(step))
        rename = self.pool.renamer(places)
        reductions = [
            reduction.mapped(lambda arg: rename(change(arg))) for reduction in nest.reductions
        ]
        stores = [store.moved(places, lambda x: rename(change(x))) for store in stores]
        stores += [
            Store(buf, (strip.number,), self.pool.accumulator(buf.dtype, k), inner=False)
            for k, buf in enumerate(partials)
        ]
        ahead = {} if row.nest is self.excess.greatest.nest else self._next_strips(row)
        on_strip = Nest(
            {step: strip.size},
            (step,) if nest.rdims else (),
            tuple(reductions),
            tuple(stores),
            at=nest.at,
        )
        return self.context.policy.prefetching(on_strip, ahead)

    def _next_strips(self, row: Row) -> dict[Buf, int]:
        """Distance of what is prefetched, by buffer that comes from afar."""
        far = [
            load
            for load in row.nest.loads()
            if isinstance(load, Load) and self.context.policy.is_far(load.buf)
        ]
        steps = {
            expr.buf.root: step
            for expr in far
            if (step := flat_coefficient(expr.buf, expr.index, row.d))
        }
        return {
            buf: self.limits.strips_ahead * self.cut.length * step for buf, step in steps.items()
        }

    # ---- what strips found together

    def _joined(self, row: Row, parts: list[Expr], inner: Iterable[Store] = ()) -> Nest:
        """A nest's results from those of strips, and `inner` writes for each strip; both are given at STRIP."""
        dim = self.context.names("d")
        places = row.places(HERE) | {"%strip": Affine.symbol(dim)}
        rename = self.pool.renamer(places)
        stores = [
            output.moved(places, rename)
            for output in (*inner, *(store for store in row.nest.stores if not store.inner))
        ]
        reductions = [
            replace(reduction, args=(rename(part),))
            for reduction, part in zip(row.nest.reductions, parts)
        ]
        return Nest({dim: self.cut.count}, (dim,), tuple(reductions), tuple(stores), at=row.nest.at)

    def _parts(self, partials: list[Buf]) -> list[Expr]:
        return [self._load(buf, STRIP) for buf in partials]

    def _greatest_of_strips(self) -> list[Expr]:
        parts = self._parts(self.peaks)
        if self.excess.telling is not None:  # these are numbers: a sum says whether there was NaN
            told = self._load(self.added[self.excess.telling], STRIP)
            is_nan = self.context.op("ne", BOOL, told, told)
            parts[self.excess.which] = self.context.select(is_nan, told, parts[self.excess.which])
        return parts

    def _weighed_sums(self) -> Nest:
        excess, exp = self.excess, self.excess.exponential
        (difference,) = exp.args
        weight = self._again(
            exp, self._again(difference, self._load(self.levels, STRIP), difference.args[1])
        )
        parts = [
            self.context.op("mul", part.dtype, part, weight) if k in excess.weighted else part
            for k, part in enumerate(self._parts(self.added))
        ]
        return self._joined(
            excess.sums, parts, [Store(self.weights, (STRIP,), weight)] if excess.scaled else []
        )

    def _reader(self, row: Row) -> list[Stmt]:
        """A nest that reads exponentials, strip by strip."""
        partials = self._partials(row)

        def on(strip: _Strip) -> list[Stmt]:
            weight = self._load(self.weights, strip.number)

            def weighed(expr: Expr) -> Expr | None:
                read = isinstance(expr, Load) and expr.buf in self.excess.scaled
                return self.context.op("mul", expr.dtype, expr, weight) if read else None

            return [self._on_strip(row, strip, partials, self.pool.rewriter(weighed))]

        return self._strips(on) + ([self._joined(row, self._parts(partials))] if partials else [])


def _fused(first: Nest, second: Nest, pool: Pool) -> Nest:
    """One nest of two that walk equally many elements."""
    (mine,), (theirs,) = first.dims, second.dims
    same = renamed(second, {theirs: Affine.symbol(mine)}, first.dims, pool)
    return fused(first, replace(same, rdims=first.rdims), pool)
