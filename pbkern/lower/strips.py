"""Nests that walk one long dimension -> loops over strips of it, which skip strips that masks silence.

Before -> after, for causal attention (rows r of a block, keys k; every nest over all 1024 keys):

    s[r, k] = sum q[r] k[k]                         m' = lowest
    m[r] = max where(r >= k, s[r, k], c)            for strip < live strips:  s[strip] = ..., m' = max(m', ...)
    p[r, k] = exp(where(r >= k, s, c) - m[r])       m = max m'
    l[r] = sum p[r, k]                              test that exp(c - m[r]) is 0 in all rows; if not, all strips are live
    o[r] = sum p[r, k] v[k]                         for strip < live strips:  p = ..., l' += p, o' += p v[strip]

A reduction keeps its state between strips in memory, one value per lane. The masked elements contribute what `spans.outside`
finds: the fill value of a maximum is its starting value, a sum must find zeros. Values under a product's zeros are not
read: an infinity there would have made the result NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..affine import Affine
from . import arena
from .nest import Buf, Expr, For, If, Let, Nest, Pool, Reduction, Stmt, While, Write
from .reductions import IDENTITY
from .schedule import flat_coefficient, register_bits
from .spans import EVERYWHERE, Span, live_span, outside

INT32 = np.dtype(np.int32)
# A power of two: strip numbers are shifts. A strip of float32 probabilities of 64 rows is 16 KB and stays in the L1 cache.
STRIP = 64
# Shorter dimensions are not worth the loops.
MIN_STRIPS = 4
# reduction -> the operation that joins two states
JOINS = {"sum": "add", "dot": "add", "max": "max", "min": "min"}


def skip_masked(stmts: list[Stmt], builder, vector_bits: int) -> list[Stmt]:
    """Cuts runs of nests into strips where masks leave some of them without effect, inner statements too."""
    out: list[Stmt] = []
    for s in stmts:
        match s:
            case If(index=i, branches=bs):
                s = If(i, [skip_masked(b, builder, vector_bits) for b in bs])
            case For(counter=c, trips=t, body=b):
                s = For(c, t, skip_masked(b, builder, vector_bits))
            case While(condition=c, predicate=p, body=b):
                s = While(skip_masked(c, builder, vector_bits), p, skip_masked(b, builder, vector_bits))
        out.append(s)
    for low, high in list(_runs(out))[::-1]:
        out[low:high] = _strips_of_run(out[low:high], arena.touched(out[:low] + out[high:]), builder, vector_bits)
    return out


def _runs(stmts: list[Stmt]) -> Iterator[tuple[int, int]]:
    """[low, high) of neighbouring nests."""
    low = 0
    for at in range(len(stmts) + 1):
        if at == len(stmts) or not isinstance(stmts[at], Nest):
            if at - low >= 2:
                yield low, at
            low = at + 1


def _strips_of_run(run: list[Stmt], elsewhere: set[Buf], builder, vector_bits: int) -> list[Stmt]:
    seeds, span = _masked(run)
    chain = _Chain.find(run, seeds, elsewhere) if seeds else None
    if chain is None or not chain.settle(span, builder.pool):
        return run
    return _Rewrite(run, chain, span, builder, vector_bits).statements() or run


def _masked(run: list[Nest]) -> tuple[dict[int, str], Span]:
    """Position -> dimension of the nests with masks that move with the program, and the span of those masks."""
    found = {(at, d): span for at, n in enumerate(run) for d, size in n.dims.items()
             if size >= STRIP * MIN_STRIPS and (span := live_span(n, d))}
    return ({at: d for at, d in found}, next(iter(found.values()))) if len(set(found.values())) == 1 else ({}, EVERYWHERE)


# ---------------------------------------------------------------- which nests take part


@dataclass
class _Chain:
    """Nests of a run that walk the long dimension: position -> their name of it. `axes`: of the scratch between them.

    needs: position -> values that must be zero for the nest to do without what lies outside the span.
    starts: (position, reduction) -> what a maximum or minimum takes from outside.
    fills: buffer -> (its write, value outside the span in the writer's dimensions, None where that is anything).
    """

    run: list[Nest]
    dims: dict[int, str]
    size: int
    axes: dict[Buf, int] = field(default_factory=dict)
    needs: dict[int, list[Expr]] = field(default_factory=dict)
    starts: dict[tuple[int, int], Expr] = field(default_factory=dict)
    fills: dict[Buf, tuple[Write, Expr | None]] = field(default_factory=dict)

    @staticmethod
    def find(run: list[Nest], seeds: dict[int, str], elsewhere: set[Buf]) -> _Chain | None:
        """Follows scratch buffers from the seeds; None where some access is not at the very index of the dimension."""
        sizes = {run[at].dims[d] for at, d in seeds.items()}
        if len(sizes) != 1:
            return None
        chain, followed = _Chain(run, dict(seeds), sizes.pop()), -1
        while followed != len(chain.dims):
            followed = len(chain.dims)
            for at, d in list(chain.dims.items()):
                for buf, index, written in _accesses(run[at]):
                    if buf in chain.axes or not any(i is not None and d in i.symbols for i in index):
                        continue
                    if not buf.arena or buf.storage is not None or buf in elsewhere:
                        if written:
                            return None  # all of it is wanted
                    elif not chain._take(buf, index, d):
                        return None
        return chain

    def _take(self, buf: Buf, index: tuple, d: str) -> bool:
        """Takes in every nest that touches `buf`, if each walks it at its own name of the dimension and one writes it."""
        axis = _axis_of(index, d)
        if axis is None:
            return False
        self.axes[buf], writers = axis, 0
        for at, n in enumerate(self.run):
            for other, i, written in _accesses(n):
                if other.root is not buf:
                    continue
                d = next(iter(i[axis].symbols), None) if other is buf and i[axis] is not None else None
                if d not in n.dims or n.dims[d] != self.size or n.ordered or _axis_of(i, d) != axis:
                    return False
                if self.dims.setdefault(at, d) != d:
                    return False
                writers += written
        return writers == 1

    def settle(self, span: Span, pool: Pool) -> bool:
        """Finds what lies outside the span for every nest, in order; False where one of them needs it."""
        for at, d in sorted(self.dims.items()):
            nest = self.run[at]

            def value(e: Expr, nest=nest, d=d) -> Expr | None:
                return outside(e, nest, d, span, lambda load: self._fill_of(load, pool), pool)

            if d in nest.rdims and not all(self._settle_reduction(at, k, r, value) for k, r in enumerate(nest.reductions)):
                return False
            for w in nest.writes:
                if any(d in i.symbols for i in w.index):
                    self.fills[w.buf] = (w, value(w.value) if w.mask is None else None)
                elif d not in nest.rdims:
                    return False
        return True

    def _settle_reduction(self, at: int, k: int, r: Reduction, value) -> bool:
        found = [v for v in map(value, r.args) if v is not None]
        if not found or r.op not in JOINS or r.dtype.kind == "b":
            return False
        if r.op in ("max", "min"):
            self.starts[at, k] = found[0]
            return found[0].kind == "const"
        if not any(v.kind == "const" and v.info == 0 for v in found):
            self.needs.setdefault(at, []).append(found[0])
        return True

    def _fill_of(self, load: Expr, pool: Pool) -> tuple[bool, Expr | None]:
        """(whether a load is of a chain's buffer, its value outside the span in the reader's dimensions)."""
        buf, index = load.info[0], load.info[1]
        if buf not in self.axes:
            return False, None
        w, fill = self.fills.get(buf, (None, None))
        if w is None or fill is None or load.kind != "load":
            return True, None
        names: dict[str, Affine] = {}
        for mine, theirs in zip(w.index, index):
            if len(mine.terms) != 1 or mine != Affine.symbol(mine.terms[0][0]):
                if mine.terms:
                    return True, None
                continue
            names[mine.terms[0][0]] = theirs
        return True, pool.rename(fill, names)


def _accesses(n: Nest) -> Iterator[tuple[Buf, tuple, bool]]:
    """(buffer, index, whether it is a write) of every access."""
    for e in n.loads():
        yield e.info[0], e.info[1], False
    for w in n.writes:
        yield w.buf, w.index, True


def _axis_of(index: tuple, d: str) -> int | None:
    """The one axis that is walked by `d` alone, step by step from 0."""
    axes = [k for k, i in enumerate(index) if i is not None and d in i.symbols]
    return axes[0] if len(axes) == 1 and index[axes[0]] == Affine.symbol(d) else None


# ---------------------------------------------------------------- the loops


class _Rewrite:
    """Statements of a run whose chain is cut into strips."""

    def __init__(self, run: list[Nest], chain: _Chain, span: Span, builder, vector_bits: int):
        self.run, self.chain, self.span, self.builder, self.vector_bits = run, chain, span, builder, vector_bits
        self.pool = builder.pool
        self.full, self.rest = divmod(chain.size, STRIP)
        self.out: list[Stmt] = []

    def statements(self) -> list[Stmt] | None:
        """None where a later loop would need what an earlier one skipped."""
        for group in self._groups():
            if isinstance(group, Nest):
                self.out.append(group)
            elif self._reads_skipped(group):
                return None
            else:
                self._emit(group)
        return self.out

    def _groups(self) -> list[list[int] | Nest]:
        """Runs of chain nests that can share a loop: none reads what another reduces."""
        groups: list[list[int] | Nest] = []
        for at, nest in enumerate(self.run):
            if at not in self.chain.dims:
                groups.append(nest)
            elif groups and isinstance(groups[-1], list) and not self._waits(nest, groups[-1]):
                groups[-1].append(at)
            else:
                groups.append([at])
        return groups

    def _waits(self, nest: Nest, group: list[int]) -> bool:
        results = {w.buf.root for at in group for w in self.run[at].writes if not w.inner and self._reduces(at)}
        inner = Nest({}, reductions=nest.reductions, writes=[w for w in nest.writes if w.inner])
        return any(buf.root in results for buf, _, _ in _accesses(inner if nest.rdims else nest))

    def _reduces(self, at: int) -> bool:
        return self.chain.dims[at] in self.run[at].rdims

    def _reads_skipped(self, group: list[int]) -> bool:
        """Whether the group may have to run everywhere and would then read what an earlier loop left out."""
        if not any(at in self.chain.needs for at in group):
            return False
        own = {w.buf for at in group for w in self.run[at].writes}
        read = {buf for at in group for buf, _, written in _accesses(self.run[at]) if not written}
        return any(buf in self.chain.axes and buf not in own and self.chain.fills[buf][1] is not None for buf in read)

    def _emit(self, group: list[int]) -> None:
        trips = self._trips([e for at in group for e in self.chain.needs.get(at, ())], group)
        small = self._strip_buffers(group)
        nests = [_StripNest(self, at, small, trips) for at in group]
        for n in nests:
            self.out += n.before()
        counter = self.builder.names("%i")
        start = (Affine.symbol(counter) + trips.first) * STRIP
        self.out.append(For(counter, trips.count, [n.body(start, STRIP) for n in nests]))
        if self.rest:
            counter, start = self.builder.names("%i"), Affine((), self.full * STRIP)
            self.out.append(For(counter, trips.rest, [n.body(start, self.rest) for n in nests]))
        for n in nests:
            self.out += n.after()

    def _strip_buffers(self, group: list[int]) -> dict[Buf, Buf]:
        """Scratch that only this group touches holds one strip."""
        found = {}
        inside = {id(self.run[at]) for at in group}
        for buf, axis in self.chain.axes.items():
            users = {id(n) for n in self.run for b, _, _ in _accesses(n) if b is buf}
            if users <= inside:
                shape = (*buf.shape[:axis], STRIP, *buf.shape[axis + 1 :])
                found[buf] = self.builder.new_buffer(shape, buf.dtype).buf
        return found

    # ------------------------------------------------------------ how many strips

    def _op(self, name: str, *args: Expr) -> Expr:
        return self.builder.op(name, INT32, *args)

    def _number(self, n: int) -> Expr:
        return self.builder.const(n, INT32)

    def _let(self, value: Expr) -> str:
        name = self.builder.names("%s")
        self.out.append(Let(name, value))
        return name

    def _clamped(self, e: Expr, high: int) -> Expr:
        return self._op("min", self._op("max", e, self._number(0)), self._number(high))

    def _extreme(self, name: str, ends: frozenset[Affine]) -> Expr:
        values = [self.pool.make("index", INT32, a) for a in sorted(ends, key=str)]
        for v in values[1:]:
            values[0] = self._op(name, values[0], v)
        return values[0]

    def _strip_of(self, e: Expr, up: int) -> Expr:
        moved = self._op("add", e, self._number(up)) if up else e
        return self._clamped(self._op("shift_right_arithmetic", moved, self._number(STRIP.bit_length() - 1)), self.full)

    def _trips(self, needs: list[Expr], group: list[int]) -> _Trips:
        everywhere = self._test_needs(needs, group) if needs else None

        def unless(normal: Expr, otherwise: int) -> Expr:
            if everywhere is None:
                return normal
            test = self.builder.op("eq", bool, everywhere, self._number(0))
            return self.builder.select(test, normal, self._number(otherwise))

        low = self._strip_of(self._extreme("max", self.span.lows), 0) if self.span.lows else None
        high = self._number(self.full)
        last = self._number(1)
        if self.span.highs:
            end = self._extreme("min", self.span.highs)
            high = self._strip_of(end, STRIP - 1)
            last = self._clamped(self._op("sub", end, self._number(self.full * STRIP)), 1)
        count = high if low is None else self._op("max", self._op("sub", high, low), self._number(0))
        first = Affine() if low is None else Affine.symbol(self._let(unless(low, 0)))
        return _Trips(first, self._let(unless(count, self.full)), self._let(unless(last, 1)) if self.rest else None)

    def _test_needs(self, needs: list[Expr], group: list[int]) -> Expr:
        """1 if one of the values is not zero at some point (NaN is not), as a scalar; else 0."""
        flags = []
        sizes = {d: n for at in group for d, n in self.run[at].dims.items()}
        for e in dict.fromkeys(needs):
            dims = {d: sizes[d] for d in sizes if d in e.symbols} or {self.builder.names("d"): 1}
            buf = self.builder.new_buffer((1,), INT32).buf
            test = self.builder.op("ne", bool, e, self.builder.const(0, e.dtype))
            value = self.builder.select(test, self._number(1), self._number(0))
            result = Write(buf, (Affine(),), self.pool.make("acc", INT32, 0), inner=False)
            self.out.append(Nest(dims, tuple(dims), [Reduction("max", (value,), INT32)], [result]))
            flags.append(self.pool.make("load", INT32, (buf, (Affine(),), False)))
        for f in flags[1:]:
            flags[0] = self._op("max", flags[0], f)
        return flags[0]


@dataclass(frozen=True)
class _Trips:
    """Names of Lets: the number of strips and, where the size is no multiple of a strip, whether the rest is live."""

    first: Affine
    count: str
    rest: str | None


class _StripNest:
    """One nest of a chain: its state between strips, its form on a strip, and its results."""

    def __init__(self, rewrite: _Rewrite, at: int, small: dict[Buf, Buf], trips: _Trips):
        self.nest, self.d = rewrite.run[at], rewrite.chain.dims[at]
        self.rewrite, self.builder, self.pool = rewrite, rewrite.builder, rewrite.pool
        self.small, self.axes, self.trips = small, rewrite.chain.axes, trips
        self.starts = {k: e for (a, k), e in rewrite.chain.starts.items() if a == at}
        self.states: list[Buf] = []
        self.reduces = self.d in self.nest.rdims
        self.outer = {d: n for d, n in self.nest.dims.items() if d not in self.nest.rdims}
        self.lanes = self._lanes() if self.reduces else 0

    def _lanes(self) -> int:
        """Values per state: a vector where the dimension is contiguous, so that strips end without a horizontal step."""
        if any(r.op == "dot" for r in self.nest.reductions):
            return 0
        contiguous = any(flat_coefficient(e.info[0], e.info[1], self.d) == 1 for e in self.nest.loads())
        return min(self.rewrite.vector_bits // register_bits(self.nest), STRIP) if contiguous else 0

    def _state_index(self, lane: Affine) -> tuple[Affine, ...]:
        return (*map(Affine.symbol, self.outer), *((lane,) if self.lanes else ()))

    def before(self) -> list[Stmt]:
        """The states' starting values: what a reduction has seen of the masked elements that are skipped."""
        if not self.reduces:
            return []
        lane = self.builder.names("d")
        dims = self.outer | ({lane: self.lanes} if self.lanes else {})
        writes = []
        for k, r in enumerate(self.nest.reductions):
            buf = self.builder.new_buffer(tuple(dims.values()), r.dtype).buf
            self.states.append(buf)
            start = self.builder.const(IDENTITY[r.op](r.dtype), r.dtype)
            if k in self.starts:
                start = self.builder.select(self._all_live(), start, self.starts[k])
            writes.append(Write(buf, self._state_index(Affine.symbol(lane)), start))
        return [Nest(dims, writes=writes, at=self.nest.at)]

    def _all_live(self) -> Expr:
        full = self.rewrite.full
        tests = [self.pool.make("range", np.dtype(bool), (Affine.symbol(self.trips.count), full, full + 1))]
        if self.trips.rest is not None:
            tests.append(self.pool.make("range", np.dtype(bool), (Affine.symbol(self.trips.rest), 1, 2)))
        return tests[0] if len(tests) == 1 else self.builder.op("and", bool, *tests)

    def body(self, start: Affine, size: int) -> Nest:
        """The nest on elements start .. start + size - 1."""
        lane, step = self.builder.names("d"), self.builder.names("d")
        rdims = tuple(step if x == self.d else x for x in self.nest.rdims)
        if not self.lanes or size % self.lanes:
            return self._renamed(start, Affine.symbol(step), {step: size}, rdims, Affine())
        within = Affine.symbol(step, self.lanes) + Affine.symbol(lane)
        return self._renamed(start, within, {lane: self.lanes, step: size // self.lanes}, rdims, Affine.symbol(lane))

    def _renamed(self, start: Affine, within: Affine, named: dict[str, int], rdims: tuple[str, ...], lane: Affine) -> Nest:
        nest, whole = self.nest, {self.d: start + within}

        def place(buf: Buf, index: tuple) -> tuple[Buf, tuple]:
            moved = tuple(i if i is None else i.substitute(whole.get) for i in index)
            if buf not in self.small:
                return buf, moved
            return self.small[buf], tuple(within if k == self.axes[buf] else i for k, i in enumerate(moved))

        def replace(x: Expr) -> Expr | None:
            if x.kind == "load" and x.info[0] in self.small:
                return self.pool.make("load", x.dtype, (*place(*x.info[:2]), x.info[2]))
            return None

        def expr(e: Expr) -> Expr:
            return self.pool.rename(self.pool.rewrite(e, replace), whole)

        reductions = [Reduction(r.op, tuple(map(expr, r.args)), r.dtype) for r in nest.reductions]
        writes = [Write(*place(w.buf, w.index), expr(w.value), w.inner, w.guard, None if w.mask is None else expr(w.mask))
                  for w in nest.writes if w.inner or not self.reduces]
        for k, (r, state) in enumerate(zip(nest.reductions, self.states)):
            index = self._state_index(lane)
            before = self.pool.make("load", r.dtype, (state, index, False))
            joined = self.builder.op(JOINS[r.op], r.dtype, before, self.pool.make("acc", r.dtype, k))
            writes.append(Write(state, index, joined, inner=False))
        dims: dict[str, int] = {}
        for d, n in nest.dims.items():
            dims |= named if d == self.d else {d: n}
        return Nest(dims, rdims, reductions, writes, at=nest.at)

    def after(self) -> list[Stmt]:
        """The nest's results from the states."""
        if not self.reduces:
            return []
        lane = self.builder.names("d")
        index = self._state_index(Affine.symbol(lane))
        states = [self.pool.make("load", r.dtype, (b, index, False)) for r, b in zip(self.nest.reductions, self.states)]
        finals = [w for w in self.nest.writes if not w.inner]
        if self.lanes:
            reductions = [Reduction(r.op, (e,), r.dtype) for r, e in zip(self.nest.reductions, states)]
            return [Nest(self.outer | {lane: self.lanes}, (lane,), reductions, finals, at=self.nest.at)]

        def result(e: Expr) -> Expr:
            return self.pool.rewrite(e, lambda x: states[x.info] if x.kind == "acc" else None)

        writes = [Write(w.buf, w.index, result(w.value), True, w.guard, None if w.mask is None else result(w.mask))
                  for w in finals]
        return [Nest(dict(self.outer), writes=writes, at=self.nest.at)]
