"""Loops over chunks of keys, of which a mask hides some -> loops over the others.

    for %i < 16:                                              let %n = min(max(%g1 + 1, 0), 16)
      nest [q<64, k<64, d<64*]                                for %n steps:
        acc0 dot= a[q, d], b[64*%i + k, d]                      nest [q<64, k<64, d<64*]
        s[q, k] = where(64*%g1 + q >= 64*%i + k, acc0, 0.0)  ->   ...
      nest [q<64, d<64, k<64*]
        acc0 dot= s[q, k], b[64*%i + k, d]
        t[q, d] = t[q, d] + acc0  (after)

A step without effect stores to what other steps read what is there already: it adds zeros. A product with zeros is zero, and
exp(-inf - x) as well: a step whose other operands are infinite, or whose rows see no key at all, would make NaN of sums.

A running maximum x stays as it is where all that is new is -inf, and sums b are multiplied by exp(x - x), which is 1, or 0
where x is -inf, for no key has been seen. Sums are zero there, too: at first, and behind a step that leaves x at -inf.

Where what is new is a finite number c, a step is without effect if exp(c - x) is zero, which the program tests
(fill_tests.py). Of an x that is known before the loop, the test decides which steps the loop takes. A running maximum is
tested behind the steps that a mask leaves; where a row fails, the others follow, in their order:

    for %p < 2:
      let %from = %p == 0 ? 0 : %n
      let %left = %p == 0 ? %n : some exp(c - x) != 0 ? 16 - %n : 0
      for %left steps: ...
      the test
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects
from pbkern.lower.nest.conditions.mask_intervals import MaskSpan, is_masked, mask_span
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.inline import fills, stored_at
from pbkern.lower.nest.edit.rename import moved
from pbkern.lower.nest.ir import (
    INT32,
    Accumulator,
    Buf,
    Const,
    Expr,
    For,
    InRange,
    Let,
    Load,
    Nest,
    Op,
    Pool,
    Reduction,
    Stmt,
    Store,
    with_bodies,
)

from .fill_tests import ZeroExponential, cleared, reached, some_violated

# The place along a dimension that a loop takes in chunks.
KEY = "%key"


@dataclass(frozen=True)
class SkipHiddenSteps:
    """Leaves out steps of loops that masks make ones without effect, inner loops too."""

    fewest_steps: int = threshold(2, "steps of a loop that is worth bounds of its own")

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        return self.skipped(stmts, set(context.persistent), context)

    def skipped(
        self, stmts: Sequence[Stmt], elsewhere: set[Buf], context: NestContext
    ) -> list[Stmt]:
        """The statements, inner ones too; `elsewhere`: buffers that others read."""
        out: list[Stmt] = []
        for at, stmt in enumerate(stmts):
            beside = elsewhere | effects.read([x for n, x in enumerate(stmts) if n != at])
            live = None
            if (
                isinstance(stmt, For)
                and isinstance(stmt.trips, int)
                and stmt.trips >= self.fewest_steps
                and all(isinstance(x, Nest) for x in stmt.body)
            ):
                live = _live_steps(stmt, stmt.trips, stmts[:at], beside, context)
            out += live or [with_bodies(stmt, lambda body: self.skipped(body, beside, context))]  # noqa: B023
        return out


def _live_steps(
    loop: For, trips: int, before: Sequence[Stmt], elsewhere: set[Buf], context: NestContext
) -> list[Stmt] | None:
    """The loop over steps that masks leave; None where they leave all."""
    nests = [nest for nest in loop.body if isinstance(nest, Nest)]
    written = effects.written(nests)
    hidden = _hidden_steps(loop, nests, written, before, elsewhere, context)
    if not hidden or len({length for length, _ in hidden}) > 1:
        return None
    length = hidden[0][0]
    whole = MaskSpan()
    claims: dict[tuple, ZeroExponential] = {}
    for _, step in hidden:
        whole &= step.span
        claims |= step.claims
    late = reached(written, claims.values())
    if late and whole.lows:
        return None
    early = [claim for claim in claims.values() if claim not in late]
    lets: list[Stmt] = []
    violated: Expr | None = None
    if early:
        tests, violated = some_violated(early, {loop.counter: trips}, context)
        lets += tests
    bounds, first, left = _bounds(whole, length, trips, violated, context)
    lets += bounds
    if not late:
        body = moved(loop.body, {loop.counter: first + Affine.symbol(loop.counter)}, context.pool)
        return [*lets, For(loop.counter, left, tuple(body))]
    return [*lets, *_with_last_steps(loop, trips, left, late, context)]


def _hidden_steps(
    loop: For,
    nests: Sequence[Nest],
    written: set[Buf],
    before: Sequence[Stmt],
    elsewhere: set[Buf],
    context: NestContext,
) -> list[tuple[int, HiddenStep]]:
    """Steps without effect, with the lengths of their chunks: at most one for each mask and truth."""
    masks = [(node.args[0], nest) for nest in nests for node in nest.nodes() if is_masked(node)]
    spans = dict.fromkeys(
        chunks
        for mask, nest in masks
        for truth in (True, False)
        if (chunks := _span(mask, nest, loop.counter, truth, context.pool)) is not None
    )
    hidden: list[tuple[int, HiddenStep]] = []
    for length, span in spans:
        # Steps that are put off until a running maximum is tested must be the last ones.
        for ends in (span, MaskSpan(highs=span.highs)):
            step = HiddenStep(loop, elsewhere, ends, context.pool)
            if not ends or not step.is_without_effect(nests, before):
                continue
            if not (ends.lows and reached(written, step.claims.values())):
                hidden.append((length, step))
                break
    return hidden


def _bounds(
    whole: MaskSpan, length: int, trips: int, violated: Expr | None, context: NestContext
) -> tuple[list[Stmt], Affine, str]:
    """(Lets, the first step that the masks leave, the number of steps); all steps where a claim is violated.

    length: of a step's chunk; trips: of all steps.
    """
    lets: list[Stmt] = []

    def step_at(ends: frozenset[Affine], pick: str, up: int) -> Expr:
        """The step, from 0 to the last, of the largest or smallest of places."""
        values = [context.pool.index(INT32, end + up) for end in sorted(ends, key=str)]
        for value in values[1:]:
            values[0] = context.op(pick, INT32, values[0], value)
        shift = context.const(length.bit_length() - 1, INT32)
        return context.clamped(context.op("shift_right_arithmetic", INT32, values[0], shift), trips)

    def let(value: Expr) -> str:
        name = context.names("%s")
        lets.append(Let(name, value))
        context.bounds[name] = (0, trips)
        return name

    def number(value: int) -> Expr:
        return context.const(value, INT32)

    def unless_violated(value: Expr, otherwise: Expr) -> Expr:
        if violated is None:
            return value
        return context.select(context.op("eq", bool, violated, number(0)), value, otherwise)

    first: Affine = Affine()
    behind = number(trips)
    if whole.lows:
        first = Affine.symbol(let(unless_violated(step_at(whole.lows, "max", 0), number(0))))
    if whole.highs:
        behind = step_at(whole.highs, "min", length - 1)
    behind = unless_violated(behind, number(trips))
    count = context.op("sub", INT32, behind, context.pool.index(INT32, first))
    left = let(context.clamped(count, trips))
    return lets, first, left


def _with_last_steps(
    loop: For, trips: int, left: str, claims: Sequence[ZeroExponential], context: NestContext
) -> list[Stmt]:
    """The first steps of a loop, as many as a Let says, and the other ones where a claim does not hold behind these."""
    tests, flag = some_violated(claims, {}, context)
    turn, start, count = context.names("%i"), context.names("%s"), context.names("%s")
    is_first = context.op("eq", bool, context.pool.index(INT32, Affine.symbol(turn)), context.const(0, INT32))  # fmt: skip
    done = context.pool.index(INT32, Affine.symbol(left))
    rest = context.op("sub", INT32, context.const(trips, INT32), done)
    rest = context.op("mul", INT32, flag, rest)
    context.bounds |= {turn: (0, 1), start: (0, trips), count: (0, trips)}
    steps = {loop.counter: Affine.symbol(start) + Affine.symbol(loop.counter)}
    body = (
        Let(start, context.select(is_first, context.const(0, INT32), done)),
        Let(count, context.clamped(context.select(is_first, done, rest), trips)),
        For(loop.counter, count, tuple(moved(loop.body, steps, context.pool))),
        *tests,
    )
    return [cleared(flag, context), For(turn, 2, body)]


def _by_number(expr: Expr, nest: Nest, pool: Pool) -> Expr:
    """An expression whose dimensions are called by their number, those of one point left out."""
    long = [dim for dim, size in nest.dims.items() if size > 1]
    places: dict[str, Affine] = {dim: Affine() for dim in nest.dims if dim not in long}
    return pool.rename(
        expr, places | {dim: Affine.symbol(f"%{number}") for number, dim in enumerate(long)}
    )


def _holds(stmts: Sequence[Stmt], buf: Buf, number: float) -> bool:
    """Whether statements leave one number everywhere in a buffer."""
    for stmt in reversed(stmts):
        if buf in effects.written([stmt]):
            stores = [x for x in stmt.stores if x.buf.root is buf] if isinstance(stmt, Nest) else []
            return len(stores) == 1 and all(
                x.mask is None and not x.guard and fills(stmt, x) and isinstance(x.value, Const)
                and bool(x.value.value == number)
                for x in stores if isinstance(stmt, Nest)
            )  # fmt: skip
    return False


def _span(
    mask: Expr, nest: Nest, counter: str, truth: bool, pool: Pool
) -> tuple[int, MaskSpan] | None:
    """(length of the loop's chunks, places along them beyond which a test has the other value); None where there are none."""
    if not isinstance(mask, InRange):
        return None
    for dim, length in nest.dims.items():
        step, factor = mask.affine.coefficient(dim), mask.affine.coefficient(counter)
        if abs(step) == 1 and factor == step * length and not length & (length - 1):
            place = {dim: Affine.symbol(KEY) - Affine.symbol(counter, length)}
            test = pool.in_range(mask.affine.substitute(place.get), mask.low, mask.high)
            span = mask_span(test, truth, KEY, nest.dims)
            if any(end.symbols for end in (*span.lows, *span.highs)):
                return length, span
    return None


def _vanishes(fill: Const) -> bool:
    """Whether a number is finite and its power of 2, and so that of e, zero in all types: what fills scores of hidden keys."""
    if fill.value.dtype.kind not in "fV" or not np.isfinite(float(fill.value)):
        return False
    return float(fill.value) < 0 and bool(np.exp2(np.float64(fill.value)) == 0)


@dataclass(frozen=True)
class Derived:
    """A value that is made of a load x, on the way to a factor of sums.

    is_lowest: whether x is -inf. finite: x, or 0 where it is -inf. lowest: -inf where x is, else 0. factor: exp of that.
    scaled: `sums` times that.

    below: a finite fill, less x.

    at: where in an array of factors it was found.
    """

    kind: str
    load: Load
    at: tuple[Affine, ...] = ()
    sums: Load | None = None
    fill: Const | None = None


Value = Expr | Derived | None


@dataclass
class HiddenStep:
    """One step of a loop, beyond the span of its masks.

    fills: buffer -> what it holds, if that is known. stores: by which store. lowest: an expression that is -inf, its
    dimensions called by number. claims: what has to hold, by function, fill and peak, whose dimensions are called by number.
    maxima: pairs of fill and peak of which the peak is taken to be the greater one.
    """

    loop: For
    elsewhere: set[Buf]
    span: MaskSpan
    pool: Pool
    fills: dict[Buf, Value] = field(default_factory=dict)
    stores: dict[Buf, Store] = field(default_factory=dict)
    lowest: Expr | None = None
    claims: dict[tuple[str, Const, Expr], ZeroExponential] = field(default_factory=dict)
    maxima: set[tuple[Const, Expr]] = field(default_factory=set)

    def is_without_effect(self, nests: Sequence[Nest], before: Sequence[Stmt]) -> bool:
        """Whether it leaves everything that others read as it is; `before`: statements before the loop."""
        scaled: dict[
            Buf, Buf
        ] = {}  # sums -> the running maximum whose factor they are multiplied by
        for nest in nests:
            accumulators = [self._reduced(reduction, nest) for reduction in nest.reductions]
            for store in nest.stores:
                value = self._value(store.value, nest, accumulators)
                here = value.sums if isinstance(value, Derived) else value
                if isinstance(here, Load) and (here.buf, here.index) == (store.buf, store.index):
                    if isinstance(value, Derived):
                        scaled[store.buf] = value.load.buf
                    continue
                if not self._is_own(store.buf, nests):
                    return False
                is_known = isinstance(value, Const | Load) or (
                    isinstance(value, Derived) and value.load.index == store.index
                )
                self.fills[store.buf] = value if is_known else None
                self.stores[store.buf] = store
        if not self.maxima <= {(fill, peak) for _, fill, peak in self.claims}:
            return False
        tested = {claim.peak.buf for claim in self.claims.values()}  # these are not -inf
        return all(
            self._are_zero_at_lowest([x for x in scaled if scaled[x] is top], top, nests, before)
            for top in set(scaled.values()) - tested
        )

    def _are_zero_at_lowest(
        self, sums: Sequence[Buf], top: Buf, nests: Sequence[Nest], before: Sequence[Stmt]
    ) -> bool:
        """Whether sums are zero where a running maximum is -inf: before the loop, and behind a step that leaves it there."""
        numbers = dict.fromkeys(sums, 0.0) | {top: -np.inf}
        if not all(_holds(before, buf, number) for buf, number in numbers.items()):
            return False
        stores = {store.buf: (store, nest) for nest in nests for store in nest.stores}
        raised = [load.buf for load in Nest({}, stores=(stores[top][0],)).loads()]
        terms = [stores[buf] for buf in raised if buf is not top and buf in stores]
        if len(terms) != 1 or [x.op for x in terms[0][1].reductions] != ["max"]:
            return False
        (_, maker), assumed = terms[0], HiddenStep(self.loop, self.elsewhere, MaskSpan(), self.pool)
        assumed.lowest = _by_number(maker.reductions[0].args[0], maker, self.pool)
        assumed.fills |= {buf: self._number(number, buf.dtype) for buf, number in numbers.items()}
        for nest in nests:
            accumulators = [assumed._reduced(reduction, nest) for reduction in nest.reductions]
            values = [(x.buf, assumed._value(x.value, nest, accumulators)) for x in nest.stores]
            for buf, value in values:
                is_kept = isinstance(value, Const) and bool(value.value == numbers.get(buf, value.value))  # fmt: skip
                if buf in numbers and not is_kept:
                    return False
                assumed.fills[buf] = value if isinstance(value, Const) else None
        return True

    def _is_own(self, buf: Buf, nests: Sequence[Nest]) -> bool:
        """Whether each step stores to a buffer before it reads it, and nobody else does."""
        if not buf.arena or buf.storage is not None or buf in self.elsewhere:
            return False
        first = next(nest for nest in nests if buf in effects.touched([nest]))
        return buf not in effects.read([first]) and all(
            load.buf is buf for nest in nests for load in nest.loads() if load.buf.root is buf
        )

    def _reduced(self, reduction: Reduction, nest: Nest) -> Const | None:
        values = [self._value(arg, nest, []) for arg in reduction.args]
        zeros = [value for value in values if isinstance(value, Const) and value.value == 0]
        if reduction.op in ("sum", "dot") and zeros:
            return self._number(0, reduction.dtype)
        (value, *more) = values
        if reduction.op in ("max", "min") and isinstance(value, Const) and not more:
            return value
        return None

    def _number(self, value: float, dtype: np.dtype) -> Const:
        number = self.pool.const(dtype, np.asarray(value, dtype)[()])
        assert isinstance(number, Const)
        return number

    def _value(self, expr: Expr, nest: Nest, accumulators: Sequence[Const | None]) -> Value:
        """The value of an expression in the step: a number, a load, what is made of one; None where it may be anything else."""
        if self.lowest is not None and _by_number(expr, nest, self.pool) is self.lowest:
            return self._number(-np.inf, expr.dtype)
        match expr:
            case Const():
                return expr
            case Load(buf=buf):
                known = self.fills.get(buf, expr)
                if isinstance(known, Derived):
                    return replace(known, at=expr.index)
                if isinstance(known, Load) and known is not expr:
                    store = replace(self.stores[buf], value=known)
                    return stored_at(store, expr.index, self.pool)
                return known
            case Accumulator(number=number):
                return accumulators[number] if number < len(accumulators) else None
            case Op():
                if is_masked(expr) and self.span:
                    for truth in (True, False):
                        chunks = _span(expr.args[0], nest, self.loop.counter, truth, self.pool)
                        if chunks and chunks[1].lows >= self.span.lows and chunks[1].highs >= self.span.highs:  # fmt: skip
                            return self._value(expr.args[1 if truth else 2], nest, accumulators)
                args = [self._value(arg, nest, accumulators) for arg in expr.args]
                return self._operation(expr, args, nest)
        return None

    def _peak(self, value: Value) -> Load | None:
        """The number itself of a load, or of one in place of which -inf would be 0."""
        if isinstance(value, Derived) and value.kind == "finite":
            index = value.at or value.load.index
            load = self.pool.load(value.load.dtype, value.load.buf, index, value.load.guard)
            value = load if len(index) == len(value.load.index) else None
        return value if isinstance(value, Load) and not value.guard else None

    def _operation(self, expr: Op, args: Sequence[Value], nest: Nest) -> Value:
        """The value of an operation on these; None where it is not known."""
        value = self._of_maxima(expr, args, nest)
        return self._of_constants(expr, args) if value is None else value

    def _zero(self, dtype: np.dtype) -> Const | None:
        return self._number(0, dtype) if dtype.kind in "fiu" else None

    def _of_maxima(self, expr: Op, args: Sequence[Value], nest: Nest) -> Value:
        """The value of an operation on a running maximum, what is derived from one, or constants alone."""
        zero = self._zero(expr.dtype)
        match expr.info.primitive, args:
            case "eq", [Const() as one, Const() as other]:
                return self._number(one.value == other.value, expr.dtype)
            case "eq", [Load() as load, Const() as other] if other.value == -np.inf:
                return Derived("is_lowest", load)
            case "select_n", [Const() as test, *cases]:
                return cases[int(test.value)]
            case "select_n", [Derived("is_lowest", load), false, true] if false is load:
                return Derived("finite", load) if _is_number(true, 0) else None
            case "sub", [Load() as load, Load() as other] if load is other:
                return zero
            case "sub", [Load() as load, Derived("finite", other)] if load is other:
                return Derived("lowest", load)
            case "exp", [Derived("lowest", load)]:
                return Derived("factor", load)
            case "sub", [Const() as fill, other] if _vanishes(fill) and (peak := self._peak(other)):
                return Derived("below", peak, fill=fill)
            case ("exp" | "exp2") as function, [Derived("below", load, fill=Const() as fill)]:
                dims = tuple((x, size) for x, size in nest.dims.items() if x in load.symbols)
                key = function, fill, _by_number(load, nest, self.pool)
                self.claims[key] = ZeroExponential(function, fill, load, dims)
                return zero
            case "max", [Const() as fill, Load() as load] | [Load() as load, Const() as fill] if (
                _vanishes(fill)
            ):
                self.maxima.add((fill, _by_number(load, nest, self.pool)))
                return load
            case "mul", [Const() as one, Const() as other]:
                return self._number(float(one.value) * float(other.value), expr.dtype)
            case "mul", [Load() as sums, Derived("factor", load, at)]:
                is_row = sums.index[: len(at)] == at
                return Derived("scaled", load, sums=sums) if is_row else None
        return None

    def _of_constants(self, expr: Op, args: Sequence[Value]) -> Value:
        """The value of an operation with an operand for which it needs no other, such as a factor of zero."""
        zero = self._zero(expr.dtype)
        match expr.info.primitive:
            case "mul" if any(_is_number(arg, 0) for arg in args):
                return zero
            case "mul" if _is_number(args[0], -np.inf) and isinstance(args[1], Const):
                return args[0] if float(args[1].value) > 0 else None
            case "div" if _is_number(args[0], 0):
                return zero
            case "add" if any(_is_number(arg, 0) for arg in args):
                return args[1] if _is_number(args[0], 0) else args[0]
            case "sub" if _is_number(args[0], -np.inf):
                return args[0]
            case "max" if any(_is_number(arg, -np.inf) for arg in args):
                return args[1] if _is_number(args[0], -np.inf) else args[0]
            case "exp" if _is_number(args[0], -np.inf):
                return zero
            case "exp" if _is_number(args[0], 0):
                return self._number(1, expr.dtype)
            case "mul" if any(_is_number(arg, 1) for arg in args):
                return args[1] if _is_number(args[0], 1) else args[0]
            case "neg" if _is_number(args[0], 0):
                return zero
            case "convert_element_type" | "reduce_precision" if isinstance(args[0], Const):
                value = float(args[0].value)
                is_kept = float(np.asarray(value, expr.dtype)) == value
                return self._number(value, expr.dtype) if is_kept else None
            case "select_n":
                same = args[1] is not None and all(arg is args[1] for arg in args[1:])
                return args[1] if same else None
        return None


def _is_number(arg: Value, value: float) -> bool:
    return isinstance(arg, Const) and bool(arg.value == value)
