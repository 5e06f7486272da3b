"""Nest + NestSchedule -> scf + vector text.

Every expression is placed in the shallowest block that knows its dimensions; a point of the register tile is an offset
per dimension, and values are shared between points through the addresses they resolve to.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from ..affine import Affine
from . import elementwise
from .builder import BITS, Builder, compute_el, storage_el
from .builder import Value as Ssa
from .lane_shifts import shifted_loads
from .nest import Buf, Expr, Nest, Reduction, Write
from .reductions import IDENTITY
from .schedule import NestSchedule, choose, flat_coefficient, flat_index, is_long_point, is_turned
from .text import Block, Text

Point = dict[str, int]
INDEX_BITS_32 = 2**31 - 1
CACHE_LINE = 64
# Strided vectors are put together from whole ones up to this step.
MAX_STEP = 4
# Additions to one accumulator in a row. A new run costs a long point the registers that hold its constants, and products
# memory for accumulators that fill more than half of the registers: they start anew less often.
LONGEST_CHAIN, LONGEST_CHAIN_OF_LONG_POINTS = 8, 64
LONGEST_CHAIN_OF_PRODUCTS, LONGEST_CHAIN_OF_FEW_PRODUCTS, FEW_ACCUMULATORS = 640, 256, 16


@dataclass
class Tail:
    """The last, partial vector: how many lanes are live."""

    live: int


@dataclass
class _Walk:
    """State while one nest is emitted."""

    nest: Nest
    sched: NestSchedule
    top: Block
    written: set[Buf]
    memo: dict = field(default_factory=dict)
    shifted: dict[tuple, set[int]] = field(default_factory=dict)  # places of loads that are made of aligned vectors
    turned_rows: int = 0  # points of the transposed dimension in the current step


class NestEmitter:
    """Emits nests of one function into blocks of `text`."""

    def __init__(self, text: Text, vector_bits: int = 512):
        self.text, self.vector_bits = text, vector_bits
        self.streamed: frozenset[Buf] = frozenset()  # too large for the caches: written past them
        self.streams = False  # whether some store went past the caches
        self.has_scalar_loops = False  # which LLVM's optimiser still improves; vector code it leaves as it is

    def emit(self, block: Block, nest: Nest, sched: NestSchedule | None = None) -> NestSchedule:
        """Appends the nest to `block`."""
        sched = sched or nest.schedule or choose(nest, self.vector_bits, reassociate=self.text.contract)
        if any(n == 0 for d, n in nest.dims.items() if d not in nest.rdims):
            return sched
        self.has_scalar_loops |= sched.vector is None and math.prod(nest.dims.values()) > 1
        top = Block(block)
        walk = _Walk(nest, sched, top, {w.buf.root for w in nest.writes}, shifted=shifted_loads(nest, sched))
        outer = [d for d in sched.order if d not in nest.rdims]
        self._outer(walk, top, outer, [{}])
        block.lines += top.lines
        return sched

    def scalar(self, block: Block, e: Expr, nest: Nest) -> Ssa:
        """A scalar expression outside any nest, evaluated in `block`."""
        inner = Block(block)
        walk = _Walk(nest, NestSchedule(), inner, set())
        v = self._value(walk, inner, e, {}, None)
        block.lines += inner.lines
        return v

    # ---------------------------------------------------------------- loops

    def _outer(self, w: _Walk, block: Block, dims: list[str], points: list[Point]) -> None:
        if not dims:
            self._vector(w, block, points)
            return
        d, rest = dims[0], dims[1:]
        size, jam = w.nest.dims[d], w.sched.jam.get(d, 1)
        full = size // jam * jam
        for low, high, step in ((0, full, jam), (full, size, size - full)):
            if high > low:
                def fill(inner: Block, _, step=step):
                    if d == w.sched.transpose:
                        w.turned_rows = step
                    self._outer(w, inner, rest, [{**p, d: o} for p in points for o in range(step)] if jam > 1 else points)
                    return []

                self.text.loop(block, d, low, high, step, fill)

    def _chunks(self, w: _Walk) -> list[tuple[int, int, int, Tail | None]]:
        """(low, high, vectors per step, tail) along the vector dimension."""
        size, lanes, unroll = w.nest.dims[w.sched.vector], w.sched.lanes, w.sched.unroll
        full, tail = divmod(size, lanes)
        main = full // unroll * unroll
        chunks: list[tuple[int, int, int, Tail | None]] = []
        if main:
            chunks.append((0, main * lanes, unroll, None))
        if full > main:
            chunks.append((main * lanes, full * lanes, full - main, None))
        if tail:
            chunks.append((full * lanes, size, 1, Tail(tail)))
        return chunks

    def _vector(self, w: _Walk, block: Block, points: list[Point]) -> None:
        vector, lanes = w.sched.vector, w.sched.lanes
        if vector is None:
            self._reduce(w, block, points, None)
        elif vector in w.nest.rdims:
            self._horizontal(w, block, points)
        else:
            for low, high, vectors, tail in self._chunks(w):
                tile = [{**p, vector: lanes * u} for p in points for u in range(vectors)]

                def fill(inner: Block, _, tile=tile, tail=tail):
                    self._reduce(w, inner, tile, tail)
                    return []

                self.text.loop(block, vector, low, high, vectors * lanes, fill)

    def _reduce(self, w: _Walk, block: Block, points: list[Point], tail: Tail | None) -> None:
        """Accumulators per point in registers, loops over the reduced dimensions, then the final writes."""
        nest = w.nest
        if not nest.rdims:
            self._writes(w, block, points, tail, [], inner=True)
            return
        start = [a for _ in points for a in self._identities(w, block, w.sched.lanes)]

        def over(b: Block, dims: tuple[str, ...], accs: list[Ssa]) -> list[Ssa]:
            if not dims:
                return self._step(w, b, points, tail, accs)
            terms = math.prod(nest.dims[d] for d in dims[1:])
            return self._accumulate(w, b, (dims[0], 0, nest.dims[dims[0]], 1), terms,
                                    lambda inner, c: over(inner, dims[1:], c), accs)

        accs = over(block, nest.rdims, start)
        self._writes(w, block, points, tail, accs, inner=False)

    def _horizontal(self, w: _Walk, block: Block, points: list[Point]) -> None:
        """Vectors along a reduced dimension; lanes are combined at the end."""
        nest, vector, lanes = w.nest, w.sched.vector, w.sched.lanes
        others = tuple(d for d in nest.rdims if d != vector)
        chunks = self._chunks(w)
        vectors = max(c[2] for c in chunks)
        width = len(self._identities(w, block, lanes))
        accs = [a for _ in points for _ in range(vectors) for a in self._identities(w, block, lanes)]

        def sweep(b: Block, accs: list[Ssa]) -> list[Ssa]:
            for low, high, count, tail in chunks:
                tile = [{**p, vector: lanes * u} for p in points for u in range(count)]
                used = [k * vectors + u for k in range(len(points)) for u in range(count)]
                mine = [accs[t * width + j] for t in used for j in range(width)]
                new = self._accumulate(w, b, (vector, low, high, count * lanes), 1,
                                       lambda inner, c, tile=tile, tail=tail: self._step(w, inner, tile, tail, c), mine)
                accs = list(accs)
                for n, t in enumerate(used):
                    accs[t * width : (t + 1) * width] = new[n * width : (n + 1) * width]
            return accs

        def over(b: Block, dims: tuple[str, ...], accs: list[Ssa]) -> list[Ssa]:
            if not dims:
                return sweep(b, accs)
            terms = math.prod(nest.dims[d] for d in dims[1:]) * -(-nest.dims[vector] // (lanes * vectors))
            return self._accumulate(w, b, (dims[0], 0, nest.dims[dims[0]], 1), terms,
                                    lambda inner, c: over(inner, dims[1:], c), accs)

        accs = over(block, others, accs)
        scalars: list[Ssa] = []
        for k in range(len(points)):
            parts = [accs[(k * vectors + u) * width : (k * vectors + u + 1) * width] for u in range(vectors)]
            scalars += self._fold(w, block, parts)
        self._writes(w, block, [{**p, vector: 0} for p in points], None, scalars, inner=False, scalar=True)

    # ---------------------------------------------------------------- accumulators

    def _accumulate(
        self, w: _Walk, block: Block, loop: tuple[str, int, int, int], terms: int, fill, accs: list[Ssa]
    ) -> list[Ssa]:
        """A loop (symbol, low, high, step) of which each trip adds `terms` numbers, one after the other, to every accumulator.

        The rounding error of a sum grows with the length of its chain of additions. Where floats are summed, accumulators
        therefore start anew with every run of a few additions, and what they held is added to others; those are runs of
        runs where there are many. Source: Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2.
        """
        d, low, high, step = loop
        limit = self._longest_chain(w, accs)

        def sweep(b: Block, base: str | int, first: int, trips: int, accs: list[Ssa]) -> list[Ssa]:
            run = _run_length(trips, terms, limit) if limit else trips

            def one(inner: Block, accs: list[Ssa]) -> list[Ssa]:
                at = self._sum_of_indices(inner, base, inner.values[f"{d}'"])
                if run == trips:
                    inner.values[d] = at
                    return fill(inner, accs)
                return self._joined(w, inner, accs, sweep(inner, at, 0, run, self._restarted(w, inner, accs)))

            full = trips // run * run
            if run < trips <= 2 * run and accs == self._restarted(w, b, accs):  # two runs: nothing is added to the first
                accs, full = sweep(b, base, first, run, accs), run
            else:
                length = 1 if run == trips else run
                accs = self.text.loop(b, f"{d}'", first, first + full * step, length * step, one, accs)
            if full == trips:
                return accs
            rest = sweep(b, base, first + full * step, trips - full, self._restarted(w, b, accs))
            return self._joined(w, b, accs, rest)

        return sweep(block, 0, low, -(-(high - low) // step), accs)

    def _longest_chain(self, w: _Walk, accs: list[Ssa]) -> int:
        """Additions to one accumulator in a row; 0 for any number of them."""
        if not self.text.contract or w.nest.ordered or not any(map(_is_rounded, w.nest.reductions)):
            return 0
        if any(r.op.startswith("dot") for r in w.nest.reductions):
            return LONGEST_CHAIN_OF_PRODUCTS if len(accs) > FEW_ACCUMULATORS else LONGEST_CHAIN_OF_FEW_PRODUCTS
        return LONGEST_CHAIN_OF_LONG_POINTS if is_long_point(w.nest) else LONGEST_CHAIN

    def _sum_of_indices(self, block: Block, x: str | int, y: str | int) -> str | int:
        if isinstance(x, int) and isinstance(y, int):
            return x + y
        if x == 0:
            return y
        names = (v if isinstance(v, str) else self.text.index(v) for v in (x, y))
        return self.text.put(block, f"arith.addi {', '.join(names)} : index")

    def _restarted(self, w: _Walk, block: Block, accs: list[Ssa]) -> list[Ssa]:
        """Accumulators of floating-point sums at zero, the others as they are."""
        zeros = self._identities(w, block, accs[0].lanes)
        rounded = self._per_accumulator(w, _is_rounded)
        return [zeros[k % len(zeros)] if rounded[k % len(zeros)] else a for k, a in enumerate(accs)]

    def _joined(self, w: _Walk, block: Block, before: list[Ssa], run: list[Ssa]) -> list[Ssa]:
        """Accumulators that hold what they held before a run and what they were given in it."""
        b, rounded = self.text.builder(block, before[0].lanes), self._per_accumulator(w, _is_rounded)
        return [b.add(x, y) if rounded[k % len(rounded)] else y for k, (x, y) in enumerate(zip(before, run))]

    def _per_accumulator(self, w: _Walk, f) -> list:
        """f(reduction) for each accumulator of one point."""
        return [f(r) for r in w.nest.reductions for _ in range(2 if r.op in ("argmax", "argmin") else 1)]

    def _identities(self, w: _Walk, block: Block, lanes: int) -> list[Ssa]:
        found = []
        b = self.text.builder(block, lanes)
        for r in w.nest.reductions:
            if r.op in ("argmax", "argmin"):
                value = r.args[0].dtype
                found.append(b.c(IDENTITY[r.op](value), compute_el(value)))
                found.append(b.c(np.iinfo(r.dtype).max, compute_el(r.dtype)))
            else:
                found.append(b.c(IDENTITY[r.op](r.dtype), compute_el(r.dtype)))
        return found

    def _step(self, w: _Walk, block: Block, points: list[Point], tail: Tail | None, accs: list[Ssa]) -> list[Ssa]:
        """One point of every reduction per tile point; returns the next accumulators."""
        width, out = len(accs) // len(points), []
        lanes = w.sched.lanes
        b = self.text.builder(block, lanes)
        masked = tail is not None and w.sched.vector in w.nest.rdims
        for k, p in enumerate(points):
            mine, at = accs[k * width : (k + 1) * width], 0
            for r in w.nest.reductions:
                args = [self._wide(b, self._value(w, block, e, p, tail), lanes) for e in r.args]
                count = 2 if r.op in ("argmax", "argmin") else 1
                old = mine[at : at + count]
                new = self._combine(b, r, old, args)
                if masked:
                    mask = self._tail_mask(tail, lanes)
                    new = [b.select(mask, n, o) for n, o in zip(new, old)]
                out += new
                at += count
        if any(x.inner for x in w.nest.writes):
            self._writes(w, block, points, tail, out if w.nest.ordered else [], inner=True)
        return out

    def _combine(self, b: Builder, r: Reduction, acc: list[Ssa], args: list[Ssa]) -> list[Ssa]:
        unsigned = r.dtype.kind == "u"
        match r.op:
            case "dot":
                fused = b.contract and args[0].el in ("f32", "f64")
                return [b.fma(args[0], args[1], acc[0]) if fused else b.add(acc[0], b.mul(args[0], args[1]))]
            case "dot_bf16" | "dot_i16":
                return [self._pair_product(b, r.op, acc[0], args)]
            case "sum":
                return [b.add(acc[0], args[0])] if acc[0].el != "i1" else [b.or_(acc[0], args[0])]
            case "prod":
                return [b.mul(acc[0], args[0])]
            case "max":
                return [b.max(acc[0], args[0], unsigned=unsigned)] if acc[0].el != "i1" else [b.or_(acc[0], args[0])]
            case "min":
                return [b.min(acc[0], args[0], unsigned=unsigned)] if acc[0].el != "i1" else [b.and_(acc[0], args[0])]
            case "and":
                return [b.and_(acc[0], args[0])]
            case "or":
                return [b.or_(acc[0], args[0])]
            case "xor":
                return [b.xor(acc[0], args[0])]
            case "logaddexp":
                return [self._logaddexp(b, r, acc[0], args[0])]
            case "argmax" | "argmin":
                return self._better(b, r, acc, args)
        raise AssertionError(r.op)

    def _pair_product(self, b: Builder, op: str, acc: Ssa, args: list[Ssa]) -> Ssa:
        """acc + a.low * b.low + a.high * b.high per lane, on words that hold two values."""
        el, name = ("i16", "avx512.vpdpwssd") if op == "dot_i16" else ("bf16", "avx512bf16.dpbf16ps")
        halves = f"vector<{2 * acc.lanes}x{el}>"
        x, y = (b.emit(f"vector.bitcast {a.name} : {a.type} to {halves}") for a in args)
        types = f"({acc.type}, {halves}, {halves}) -> {acc.type}"
        call = f'llvm.call_intrinsic "llvm.x86.{name}.{32 * acc.lanes}"({acc.name}, {x}, {y}) : {types}'
        return acc._replace(name=b.emit(call))

    def _logaddexp(self, b: Builder, r: Reduction, x: Ssa, y: Ssa) -> Ssa:
        """max + log1p(exp(min - max)); infinite maxima stand for themselves (exp of inf - inf is NaN)."""
        def call(name: str, v: Ssa) -> Ssa:
            info = elementwise.EqnInfo(name, {"accuracy": None}, (r.dtype,), r.dtype, None)
            return elementwise.RULES.lookup(name)(b, info, v)

        high = b.max(x, y)
        total = b.add(high, call("log1p", call("exp", b.sub(b.min(x, y), high))))
        infinite = b.cmp("eq", b.abs(high), b.c(np.inf, high.el))
        return b.select(infinite, high, total)

    def _better(self, b: Builder, r: Reduction, acc: list[Ssa], args: list[Ssa]) -> list[Ssa]:
        """The larger (smaller) value, NaN above all; among equals the smaller index."""
        (v, i), (x, n) = acc, args
        unsigned = r.args[0].dtype.kind == "u"
        if v.el == "i1":
            v2, x2 = b.int_resize(v, "i8", unsigned=True), b.int_resize(x, "i8", unsigned=True)
            wins = b.cmp("gt" if r.op == "argmax" else "lt", x2, v2, unsigned=True)
            ties = b.cmp("eq", x2, v2)
        else:
            wins = b.cmp("gt" if r.op == "argmax" else "lt", x, v, unsigned=unsigned)
            ties = b.cmp("eq", x, v)
        if v.el in ("f32", "f64"):
            wins = b.or_(b.and_(wins, b.not_(b.is_nan(v))), b.and_(b.is_nan(x), b.not_(b.is_nan(v))))
            ties = b.or_(ties, b.and_(b.is_nan(x), b.is_nan(v)))
        wins = b.or_(wins, b.and_(ties, b.cmp("lt", n, i)))
        return [b.select(wins, x, v), b.select(wins, n, i)]

    def _fold(self, w: _Walk, block: Block, parts: list[list[Ssa]]) -> list[Ssa]:
        """Accumulators of several vectors -> one scalar per accumulator."""
        b, at, out = self.text.builder(block, w.sched.lanes), 0, []
        for r in w.nest.reductions:
            count = 2 if r.op in ("argmax", "argmin") else 1
            mine = [p[at : at + count] for p in parts]
            merged = Reduction({"dot": "sum"}.get(r.op, r.op), r.args, r.dtype)
            while len(mine) > 1:
                pairs = itertools.zip_longest(mine[::2], mine[1::2])
                mine = [x if y is None else self._combine(b, merged, x, y) for x, y in pairs]
            out += self._across(block, r, mine[0]) if count == 1 else self._across_arg(block, r, mine[0])
            at += count
        return out

    def _across(self, block: Block, r: Reduction, x: list[Ssa]) -> list[Ssa]:
        v, unsigned, isfloat = x[0], r.dtype.kind == "u", x[0].el in ("f32", "f64")
        kind = {"dot": "add", "sum": "add", "prod": "mul", "and": "and", "or": "or", "xor": "xor",
                "max": "maximumf" if isfloat else "maxui" if unsigned else "maxsi",
                "min": "minimumf" if isfloat else "minui" if unsigned else "minsi"}[r.op]
        if v.el == "i1":
            kind = {"add": "or", "maxsi": "or", "minsi": "and"}.get(kind, kind)
        return [Ssa(self.text.put(block, f"vector.reduction <{kind}>, {v.name} : {v.type} into {v.el}"), v.el, 0)]

    def _across_arg(self, block: Block, r: Reduction, x: list[Ssa]) -> list[Ssa]:
        """Lane by lane: log2(lanes) shuffles of (value, index)."""
        b, (v, i) = self.text.builder(block, x[0].lanes), x
        half = v.lanes // 2
        while half:
            order = [(k + half) % v.lanes for k in range(v.lanes)]

            def turn(s: Ssa, order=order) -> Ssa:
                name = self.text.put(block, f"vector.shuffle {s.name}, {s.name} {order} : {s.type}, {s.type}")
                return Ssa(name, s.el, s.lanes)

            v, i = self._combine(b, r, [v, i], [turn(v), turn(i)])
            half //= 2
        return [Ssa(self.text.put(block, f"vector.extract {s.name}[0] : {s.el} from {s.type}"), s.el, 0) for s in (v, i)]

    # ---------------------------------------------------------------- writes

    def _writes(self, w: _Walk, block: Block, points: list[Point], tail: Tail | None, accs: list[Ssa], *, inner: bool,
                scalar: bool = False) -> None:
        width = len(accs) // len(points) if accs else 0
        for k, p in enumerate(points):
            bound = None if inner and not w.nest.ordered else self._bind_accumulators(w, accs[k * width : (k + 1) * width])
            for write in w.nest.writes:
                if write.inner == inner:
                    self._write(w, block, write, p, tail, bound, scalar)

    def _bind_accumulators(self, w: _Walk, accs: list[Ssa]) -> dict[int, Ssa]:
        """Accumulator number -> value (of argmax: the index)."""
        bound, at = {}, 0
        for n, r in enumerate(w.nest.reductions if accs else []):
            count = 2 if r.op in ("argmax", "argmin") else 1
            bound[n] = accs[at + count - 1]
            at += count
        return bound

    def _write(
        self, w: _Walk, block: Block, write: Write, p: Point, tail: Tail | None, accs: dict | None, scalar: bool
    ) -> None:
        vector = None if scalar else w.sched.vector
        coefficient = flat_coefficient(write.buf, write.index, vector) if vector else 0
        moves = bool(vector) and any(vector in i.symbols for i in write.index)
        lanes = w.sched.lanes if moves else 0
        b = self.text.builder(block, lanes)
        value = self._wide(b, self._value(w, block, write.value, p, tail, accs), lanes)
        mask = None if write.mask is None else self._value(w, block, write.mask, p, tail, accs)
        stored = b.to_storage(value, write.buf.dtype)
        if not moves:
            self._store_scalar(w, block, write, stored, mask, p)
            return
        live = self._tail_mask(tail, lanes) if tail else None
        if mask is not None:
            mask = self._wide(b, mask, lanes)
            live = mask if live is None else b.and_(live, mask)
        conditions: list[str] = []
        if write.guard:
            lane_masks, conditions = self._guard_masks(w, block, write.buf, write.index, p, lanes)
            for m in lane_masks:
                live = m if live is None else b.and_(live, m)
        self._under(block, conditions, lambda inner: self._store_vector(w, inner, write, stored, live, coefficient, p))

    def _under(self, block: Block, conditions: list[str], fill) -> None:
        if not conditions:
            fill(block)
            return
        test = conditions[0]
        for c in conditions[1:]:
            test = self.text.put(block, f"arith.andi {test}, {c} : i1")
        self.text.when(block, test, fill)

    def _store_vector(self, w: _Walk, block: Block, write: Write, v: Ssa, live: Ssa | None, coefficient: int, p: Point) -> None:
        _, address = self._address(block, write.buf, write.index, p)
        m, name = memref(write.buf), write.buf.root.name
        if coefficient == 1 and live is None:
            past = ""
            if write.buf.root in self.streamed and self._fills_lines(w, write, v.lanes, p):
                past, self.streams = f" {{alignment = {CACHE_LINE} : i64, nontemporal = true}}", True
            block.lines.append(f"vector.store {v.name}, {name}[{address}]{past} : {m}, {v.type}")
        elif coefficient == 1:
            block.lines.append(f"vector.maskedstore {name}[{address}], {live.name}, {v.name} : {m}, {live.type}, {v.type}")
        else:
            steps = [k * coefficient for k in range(v.lanes)]
            offsets = self.text.const(f"arith.constant dense<{steps}> : vector<{v.lanes}xi32>")
            live = live or self._tail_mask(Tail(v.lanes), v.lanes)
            block.lines.append(f"vector.scatter {name}[{address}] [{offsets}], {live.name}, {v.name} : {m}, "
                               f"vector<{v.lanes}xi32>, {live.type}, {v.type}")

    def _fills_lines(self, w: _Walk, write: Write, lanes: int, p: Point) -> bool:
        """Whether a vector is one whole cache line at its boundary, wherever the loops are."""
        size = write.buf.root.dtype.itemsize
        flat = flat_index(write.buf, write.index)
        start = flat.const + sum(flat.coefficient(d) * o for d, o in p.items())
        steps = [c * lanes if s == w.sched.vector else c for s, c in flat.terms]
        return lanes * size == CACHE_LINE and all(n * size % CACHE_LINE == 0 for n in (start, *steps))

    def _store_scalar(self, w: _Walk, block: Block, write: Write, v: Ssa, mask: Ssa | None, p: Point) -> None:
        conditions = [] if mask is None else [mask.name]
        if write.guard:
            conditions += self._guard_masks(w, block, write.buf, write.index, p, 0)[1]

        def fill(inner: Block) -> None:
            _, address = self._address(inner, write.buf, write.index, p)
            inner.lines.append(f"memref.store {v.name}, {write.buf.root.name}[{address}] : {memref(write.buf)}")

        self._under(block, conditions, fill)

    # ---------------------------------------------------------------- addresses and masks

    def _address(self, block: Block, buf: Buf, index, p: Point) -> tuple[Block, str]:
        flat = flat_index(buf, index)
        return self.text.affine(block, flat, sum(flat.coefficient(d) * o for d, o in p.items()))

    def _tail_mask(self, tail: Tail, lanes: int) -> Ssa:
        return Ssa(self.text.const(f"vector.constant_mask [{tail.live}] : vector<{lanes}xi1>"), "i1", lanes)

    def _axis_is_safe(self, w: _Walk, i: Affine, extent: int) -> bool:
        """Whether an index stays inside without looking at runtime values."""
        if not i.symbols <= w.nest.dims.keys():
            return False
        low, high = i.bounds(w.nest.dims.__getitem__)
        return low >= 0 and high < extent

    def _guard_masks(self, w: _Walk, block: Block, buf: Buf, index, p: Point, lanes: int) -> tuple[list[Ssa], list[str]]:
        """(lane masks, scalar conditions) under which every index lies inside its axis."""
        masks, conditions = [], []
        vector = w.sched.vector if lanes else None
        for i, extent in zip(index, buf.shape):
            if self._axis_is_safe(w, i, extent):
                continue
            if vector and i.coefficient(vector):
                masks.append(self._range(w, block, (i, 0, extent), p, lanes))
            else:
                conditions.append(self._range(w, block, (i, 0, extent), p, 0).name)
        return masks, conditions

    def _range(self, w: _Walk, block: Block, info, p: Point, lanes: int) -> Ssa:
        """low <= index < high, per lane where the index moves along the vector dimension."""
        i, low, high = info
        b = self.text.builder(block, lanes)
        value = self._index(w, block, i, p, lanes, "i64" if max(abs(low), abs(high)) > INDEX_BITS_32 else "i32")
        parts = [] if low <= -INDEX_BITS_32 else [b.cmp("ge", value, b.c(low, value.el))]
        parts += [] if high >= INDEX_BITS_32 else [b.cmp("lt", value, b.c(high, value.el))]
        return b.and_(*parts) if len(parts) == 2 else parts[0]

    def _index(self, w: _Walk, block: Block, i: Affine, p: Point, lanes: int, el: str) -> Ssa:
        """An index as an integer value; lanes follow the vector dimension."""
        vector = w.sched.vector
        offset = sum(i.coefficient(d) * o for d, o in p.items())
        _, name = self.text.affine(block, i, offset)
        scalar = Ssa(self.text.put(block, f"arith.index_cast {name} : index to {el}"), el, 0)
        c = i.coefficient(vector) if vector else 0
        if not lanes or not c:
            return scalar if not lanes else self.text.builder(block, lanes).broadcast(scalar)
        b = self.text.builder(block, lanes)
        half = 1 << (int(el[1:]) - 1)
        numbers = [(k * c + half) % (2 * half) - half for k in range(lanes)]
        steps = Ssa(self.text.const(f"arith.constant dense<{numbers}> : vector<{lanes}x{el}>"), el, lanes)
        return b.add(b.broadcast(scalar), steps)

    # ---------------------------------------------------------------- expressions

    def _wide(self, b: Builder, v: Ssa, lanes: int) -> Ssa:
        return b.broadcast(v, lanes) if lanes and not v.lanes else v

    def _place(self, w: _Walk, block: Block, e: Expr) -> Block:
        """The shallowest block of this nest that knows e's symbols. Reads of what the nest writes stay put."""
        if self._reads_written(w, e):
            return block
        depth = w.top.depth
        for s in e.symbols:
            depth = max(depth, block.lookup(s)[0].depth)
        return block.ancestor(depth)

    def _reads_written(self, w: _Walk, e: Expr) -> bool:
        key = ("reads", id(e))
        if key not in w.memo:
            own = e.kind in ("load", "gather") and e.info[0].root in w.written
            w.memo[key] = own or e.kind == "acc" or any(self._reads_written(w, a) for a in e.args)
        return w.memo[key]

    def _value(self, w: _Walk, block: Block, e: Expr, p: Point, tail: Tail | None, accs: dict | None = None) -> Ssa:
        if e.kind == "acc":
            return accs[e.info]
        scalar_epilogue = accs is not None and w.sched.vector in w.nest.rdims
        vector = None if scalar_epilogue else w.sched.vector
        lanes = w.sched.lanes if vector and vector in e.symbols else 0
        where = self._place(w, block, e)
        offsets = tuple(sorted((d, o) for d, o in p.items() if d in e.symbols))
        key = (id(e), offsets, tail.live if tail and lanes else None, lanes)
        fixed = self._depends_on_acc(w, e)
        if not fixed and key in where.memo:
            return where.memo[key]
        v = self._make(w, where, e, p, tail if lanes else None, lanes, accs)
        if not fixed:
            where.memo[key] = v
        return v

    def _depends_on_acc(self, w: _Walk, e: Expr) -> bool:
        key = ("acc", id(e))
        if key not in w.memo:
            w.memo[key] = e.kind == "acc" or any(self._depends_on_acc(w, a) for a in e.args)
        return w.memo[key]

    def _make(self, w: _Walk, block: Block, e: Expr, p: Point, tail: Tail | None, lanes: int, accs: dict | None) -> Ssa:
        b = self.text.builder(block, lanes)
        match e.kind:
            case "const":
                return b.c(e.info, compute_el(e.dtype))
            case "index":
                return self._index(w, block, e.info, p, lanes, compute_el(e.dtype))
            case "range":
                return self._range(w, block, e.info, p, lanes)
            case "load":
                return self._load(w, block, e, p, tail, lanes)
            case "gather":
                return self._gather(w, block, e, p, tail, lanes, accs)
        args = [self._value(w, block, a, p, tail, accs) for a in e.args]
        lanes = max([lanes, *(a.lanes for a in args)])
        b = self.text.builder(block, lanes)
        return elementwise.RULES.lookup(e.info.primitive)(b, e.info, *(self._wide(b, a, lanes) for a in args))

    def _load(self, w: _Walk, block: Block, e: Expr, p: Point, tail: Tail | None, lanes: int) -> Ssa:
        buf, index, guard = e.info
        b = self.text.builder(block, lanes)
        turn = w.sched.transpose
        if lanes and turn and buf.root not in w.written and is_turned(w.nest, e, w.sched.vector, turn):
            return b.from_storage(self._load_turned(w, block, buf, index, p, tail, lanes), buf.dtype)
        flat = flat_index(buf, index)
        key = ("load", buf.root.name, storage_el(buf.dtype), flat.linear(),
               flat.const + sum(flat.coefficient(d) * o for d, o in p.items()),
               tail.live if tail else None, lanes, self._guard_key(w, index, p) if guard else None)
        if key in block.memo and buf.root not in w.written:
            return block.memo[key]
        if tail is None and lanes and key[4] in w.shifted.get((buf.root, flat.linear()), ()):
            v = self._load_shifted(block, buf, flat, key[4], lanes)
        else:
            v = self._load_storage(w, block, buf, index, p, tail, lanes, guard)
        v = b.from_storage(v, buf.dtype)
        block.memo[key] = v
        return v

    def _load_shifted(self, block: Block, buf: Buf, flat: Affine, const: int, lanes: int) -> Ssa:
        """The elements at flat.linear() + const, from the aligned vectors around them."""
        first = const // lanes * lanes
        low = self._load_aligned(block, buf, flat, first, lanes)
        if const == first:
            return low
        high = self._load_aligned(block, buf, flat, first + lanes, lanes)
        order = list(range(const - first, const - first + lanes))
        both = f"{low.name}, {high.name} {order} : {low.type}, {high.type}"
        return low._replace(name=self.text.put(block, f"vector.shuffle {both}"))

    def _load_aligned(self, block: Block, buf: Buf, flat: Affine, const: int, lanes: int) -> Ssa:
        key = ("aligned", buf.root.name, flat.linear(), const)
        if key not in block.memo:
            el = storage_el(buf.dtype)
            _, address = self.text.affine(block, flat, const - flat.const)
            load = f"vector.load {buf.root.name}[{address}] : {memref(buf)}, vector<{lanes}x{el}>"
            block.memo[key] = Ssa(self.text.put(block, load), el, lanes)
        return block.memo[key]

    def _load_turned(self, w: _Walk, block: Block, buf: Buf, index, p: Point, tail, lanes: int) -> Ssa:
        """One vector of a lanes x lanes square that is loaded row by row and transposed in registers, once per square.

        Butterfly: in step s, rows that differ in bit s exchange the elements whose index differs in that bit.
        """
        along, vector = w.sched.transpose, w.sched.vector
        corner = {**p, along: 0}
        flat = flat_index(buf, index)
        key = ("square", buf.root.name, flat, tuple(sorted(corner.items())), tail.live if tail else None, w.turned_rows)
        if key not in block.memo:
            rows = [self._square_row(w, block, buf, index, {**corner, vector: corner.get(vector, 0) + r}, lanes)
                    for r in range(tail.live if tail else lanes)]
            rows += [rows[-1]] * (lanes - len(rows))
            t, step = rows[0].type, 1
            while step < lanes:
                low = [k if not k & step else lanes + (k ^ step) for k in range(lanes)]
                high = [k | step if not k & step else lanes + k for k in range(lanes)]
                turned = list(rows)
                for r in range(lanes):
                    if not r & step:
                        pair = f"{rows[r].name}, {rows[r | step].name}"
                        for place, order in ((r, low), (r | step, high)):
                            name = self.text.put(block, f"vector.shuffle {pair} {order} : {t}, {t}")
                            turned[place] = rows[r]._replace(name=name)
                rows, step = turned, step * 2
            block.memo[key] = rows
        return block.memo[key][p.get(along, 0)]

    def _square_row(self, w: _Walk, block: Block, buf: Buf, index, p: Point, lanes: int) -> Ssa:
        el, m, name = storage_el(buf.dtype), memref(buf), buf.root.name
        _, address = self._address(block, buf, index, p)
        t = f"vector<{lanes}x{el}>"
        if w.turned_rows == lanes:
            return Ssa(self.text.put(block, f"vector.load {name}[{address}] : {m}, {t}"), el, lanes)
        live, zero = self._tail_mask(Tail(w.turned_rows), lanes), self.text.builder(block, lanes).c(0, el)
        load = f"vector.maskedload {name}[{address}], {live.name}, {zero.name} : {m}, {live.type}, {t} into {t}"
        return Ssa(self.text.put(block, load), el, lanes)

    def _guard_key(self, w: _Walk, index, p: Point):
        return tuple((i, tuple((d, o) for d, o in sorted(p.items()) if d in i.symbols)) for i in index)

    def _load_storage(self, w: _Walk, block: Block, buf: Buf, index, p: Point, tail, lanes: int, guard: bool) -> Ssa:
        """The stored element(s); guarded axes are clamped, or masked along the vector dimension."""
        el, m, name = storage_el(buf.root.dtype), memref(buf), buf.root.name
        wanted = storage_el(buf.dtype)
        if BITS[el] < BITS[wanted]:
            return self._load_word(block, buf, index, p, wanted)
        if el != wanted:  # the same bits under another type
            root = Buf(name, buf.shape, buf.root.dtype, buf.arena, storage=buf.root)
            stored = self._load_storage(w, block, root, index, p, tail, lanes, guard)
            return self.text.builder(block, lanes).bitcast(stored, wanted)
        vector = w.sched.vector
        c = flat_coefficient(buf, index, vector) if lanes else 0
        masks: list[Ssa] = []
        if guard:
            address, masks = self._guarded_address(w, block, buf, index, p, lanes)
        else:
            _, address = self._address(block, buf, index, p)
        if not lanes or c == 0:
            v = Ssa(self.text.put(block, f"memref.load {name}[{address}] : {m}"), el, 0)
            return v if not lanes else self.text.builder(block, lanes).broadcast(v)
        b = self.text.builder(block, lanes)
        live = self._tail_mask(tail, lanes) if tail else None
        for mask in masks:
            live = mask if live is None else b.and_(live, mask)
        t = f"vector<{lanes}x{el}>"
        if c == 1 and buf.root in w.nest.fetch and self._leads(w, buf, index):
            self._fetch(w, block, buf, index, p)
        if c == 1 and live is None:
            return Ssa(self.text.put(block, f"vector.load {name}[{address}] : {m}, {t}"), el, lanes)
        zero = b.c(0, el).name
        if c == 1:
            load = f"vector.maskedload {name}[{address}], {live.name}, {zero} : {m}, {live.type}, {t} into {t}"
            return Ssa(self.text.put(block, load), el, lanes)
        if c == -1 and live is None:
            low = self.text.put(block, f"arith.subi {address}, {self.text.index(lanes - 1)} : index")
            v = self.text.put(block, f"vector.load {name}[{low}] : {m}, {t}")
            order = list(range(lanes))[::-1]
            return Ssa(self.text.put(block, f"vector.shuffle {v}, {v} {order} : {t}, {t}"), el, lanes)
        if 2 <= c <= MAX_STEP and live is None:
            return self._load_steps(block, buf, address, c, lanes)
        offsets = self.text.const(f"arith.constant dense<{[k * c for k in range(lanes)]}> : vector<{lanes}xi32>")
        live = live or self._tail_mask(Tail(lanes), lanes)
        return Ssa(self.text.put(block, f"vector.gather {name}[{address}] [{offsets}], {live.name}, {zero} : {m}, "
                                 f"vector<{lanes}xi32>, {live.type}, {t} into {t}"), el, lanes)

    def _load_steps(self, block: Block, buf: Buf, address: str, c: int, lanes: int) -> Ssa:
        """Every c-th element: c whole vectors and shuffles, which are far cheaper than a gather.

        The vectors lie side by side but for the last, which ends at the last element wanted: nothing behind it is read.
        """
        el, m, name = storage_el(buf.dtype), memref(buf), buf.root.name
        t = f"vector<{lanes}x{el}>"
        starts = [k * lanes for k in range(c - 1)] + [(lanes - 1) * (c - 1)]
        found = ""
        for k, start in enumerate(starts):
            at = self.text.put(block, f"arith.addi {address}, {self.text.index(start)} : index")
            v = self.text.put(block, f"vector.load {name}[{at}] : {m}, {t}")
            # Lanes that this vector or an earlier one holds; the others are filled later.
            order = [lane if not k or lane * c < start else lanes + lane * c - start for lane in range(lanes)]
            order = [o if o < 2 * lanes else 0 for o in order] if k else [min(lane * c, lanes - 1) for lane in range(lanes)]
            found = self.text.put(block, f"vector.shuffle {found or v}, {v} {order} : {t}, {t}")
        return Ssa(found, el, lanes)

    def _leads(self, w: _Walk, buf: Buf, index) -> bool:
        """Whether no load of the nest is ahead of this one, so that each line is asked for once."""
        loads = [e.info for e in w.nest.loads() if e.kind == "load" and e.info[0].root is buf.root]
        return flat_index(buf, index).const == max(flat_index(b, i).const for b, i, _ in loads)

    def _fetch(self, w: _Walk, block: Block, buf: Buf, index, p: Point) -> None:
        """Asks for the line that a later step loads; addresses behind the end do not fault."""
        flat = flat_index(buf, index)
        offset = sum(flat.coefficient(d) * o for d, o in p.items()) + w.nest.fetch[buf.root]
        _, address = self.text.affine(block, flat, offset)
        block.lines.append(f"memref.prefetch {buf.root.name}[{address}], read, locality<2>, data : {memref(buf)}")

    def _load_word(self, block: Block, buf: Buf, index, p: Point, el: str) -> Ssa:
        """One element that spans several of the buffer it reinterprets."""
        small = storage_el(buf.root.dtype)
        count = BITS[el] // BITS[small]
        flat = flat_index(buf, index) * count
        _, address = self.text.affine(block, flat, sum(flat.coefficient(d) * o for d, o in p.items()))
        v = self.text.put(block, f"vector.load {buf.root.name}[{address}] : {memref(buf)}, vector<{count}x{small}>")
        word = self.text.put(block, f"vector.bitcast {v} : vector<{count}x{small}> to vector<1x{el}>")
        return Ssa(self.text.put(block, f"vector.extract {word}[0] : {el} from vector<1x{el}>"), el, 0)

    def _guarded_address(self, w: _Walk, block: Block, buf: Buf, index, p: Point, lanes: int) -> tuple[str, list[Ssa]]:
        """Flat address with axes clamped into the buffer; axes along the vector dimension get lane masks instead."""
        vector, masks, total = w.sched.vector if lanes else None, [], None
        if any(n == 0 for n in buf.shape):
            return self.text.index(0), masks
        for i, extent, stride in zip(index, buf.shape, buf.strides):
            offset = sum(i.coefficient(d) * o for d, o in p.items())
            _, name = self.text.affine(block, i, offset)
            if not self._axis_is_safe(w, i, extent):
                if vector and i.coefficient(vector):
                    masks.append(self._range(w, block, (i, 0, extent), p, lanes))
                else:
                    name = self.text.put(block, f"arith.maxsi {name}, {self.text.index(0)} : index")
                    name = self.text.put(block, f"arith.minsi {name}, {self.text.index(extent - 1)} : index")
            if stride != 1:
                name = self.text.put(block, f"arith.muli {name}, {self.text.index(stride)} : index")
            total = name if total is None else self.text.put(block, f"arith.addi {total}, {name} : index")
        return total or self.text.index(0), masks

    def _gather(self, w: _Walk, block: Block, e: Expr, p: Point, tail: Tail | None, lanes: int, accs) -> Ssa:
        """Axes given by index expressions (already clamped); the others are affine."""
        buf, index = e.info
        el, m, name = storage_el(buf.dtype), memref(buf), buf.root.name
        lanes = max([lanes, *(self._value(w, block, a, p, tail, accs).lanes for a in e.args)])
        if lanes and self._is_run(w, e):
            return self._gather_run(w, block, e, p, tail, lanes, accs)
        b, args, total = self.text.builder(block, lanes), iter(e.args), None
        for i, extent, stride in zip(index, buf.shape, buf.strides):
            if i is None:
                part = self._wide(b, self._value(w, block, next(args), p, tail, accs), lanes)
            else:
                part = self._index(w, block, i, p, lanes, "i64")
                if not self._axis_is_safe(w, i, extent):
                    part = b.max(b.min(part, b.c(max(extent - 1, 0), "i64")), b.c(0, "i64"))
            part = b.mul(part, b.c(stride, "i64"))
            total = part if total is None else b.add(total, part)
        if math.prod(buf.shape) == 0:
            return b.c(0, compute_el(buf.dtype))
        if not lanes:
            address = self.text.put(block, f"arith.index_cast {total.name} : i64 to index")
            return b.from_storage(Ssa(self.text.put(block, f"memref.load {name}[{address}] : {m}"), el, 0), buf.dtype)
        live = self._tail_mask(tail or Tail(lanes), lanes)
        t = f"vector<{lanes}x{el}>"
        start, zero = self.text.index(0), b.c(0, el).name
        v = self.text.put(block, f"vector.gather {name}[{start}] [{total.name}], {live.name}, {zero} : {m}, "
                          f"{total.type}, {live.type}, {t} into {t}")
        return b.from_storage(Ssa(v, el, lanes), buf.dtype)


    def _is_run(self, w: _Walk, e: Expr) -> bool:
        """Whether a vector of a gather is contiguous: only affine axes move along it, and by one element."""
        buf, index = e.info
        vector = w.sched.vector
        affine = [i for i in index if i is not None]
        return (buf.size > 0 and not any(vector in a.symbols for a in e.args) and flat_coefficient(buf, index, vector) == 1
                and all(self._axis_is_safe(w, i, n) for i, n in zip(index, buf.shape) if i is not None) and bool(affine))

    def _gather_run(self, w: _Walk, block: Block, e: Expr, p: Point, tail: Tail | None, lanes: int, accs) -> Ssa:
        """A row of a table: one address, contiguous elements."""
        buf, index = e.info
        el, m, args = storage_el(buf.dtype), memref(buf), iter(e.args)
        affine, address = Affine(), None
        for i, stride in zip(index, buf.strides):
            if i is not None:
                affine = affine + i * stride
                continue
            part = self._value(w, block, next(args), p, tail, accs)
            part = self.text.put(block, f"arith.index_cast {part.name} : {part.el} to index")
            part = self.text.put(block, f"arith.muli {part}, {self.text.index(stride)} : index")
            address = part if address is None else self.text.put(block, f"arith.addi {address}, {part} : index")
        _, start = self.text.affine(block, affine, sum(affine.coefficient(d) * o for d, o in p.items()))
        address = self.text.put(block, f"arith.addi {address}, {start} : index")
        b, t = self.text.builder(block, lanes), f"vector<{lanes}x{el}>"
        if tail is None:
            v = self.text.put(block, f"vector.load {buf.root.name}[{address}] : {m}, {t}")
        else:
            live, zero = self._tail_mask(tail, lanes), b.c(0, el)
            v = self.text.put(block, f"vector.maskedload {buf.root.name}[{address}], {live.name}, {zero.name} : {m}, "
                              f"{live.type}, {t} into {t}")
        return b.from_storage(Ssa(v, el, lanes), buf.dtype)


def _run_length(trips: int, terms: int, limit: int) -> int:
    """Trips of one run: all, or a part of them such that sums of runs, runs of runs and so on have `limit` terms at most.

    Runs of equal length are preferred.
    """
    run = max(limit // terms, 1)
    if trips <= run:
        return trips
    while run * limit < trips:
        run *= limit
    parts = -(-trips // run)
    parts = next((p for p in range(parts, 2 * parts) if trips % p == 0), parts)
    return -(-trips // parts)


def _is_rounded(r: Reduction) -> bool:
    return r.op in ("sum", "dot", "dot_bf16") and compute_el(r.dtype) in ("f32", "f64")


def memref(buf: Buf) -> str:
    """Type of the flat memref that holds a buffer."""
    root = buf.root
    return f"memref<{max(root.size, 1)}x{storage_el(root.dtype)}>"
