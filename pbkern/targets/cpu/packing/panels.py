"""Contraction nest -> statements that copy its operands into scratch first, where that pays.

The operand that varies along the vector dimension is packed panel by panel, [reduction][panel width], so that the
microkernel streams contiguous memory; this also transposes operands stored the other way round and evaluates producers
once (the prologue). The operand that is broadcast is copied where its rows would fall into one cache set (operand_copies.py).
Copies of small floats are float32: an element is converted once, not wherever it is read.
Source: Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication".
"""

from __future__ import annotations

import math
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Buf, Expr, For, Nest, Reduction, Stmt, Write, with_bodies
from pbkern.targets.cpu.locality.prefetch import is_far, rows_ahead
from pbkern.targets.cpu.machine import CONFLICT_BYTES
from pbkern.targets.cpu.schedule.register_tiles import NestSchedule, contraction_tile
from pbkern.targets.cpu.schedule.vector_dimension import register_bits

from .operand_copies import OperandCopies, copy_dtype, is_expensive, rows_conflict, stage
from .pair_products import PAIR, Words, in_whole_words, pair_products
from .quad_products import QUAD, quad_products
from .swap_operands import summed_in_scratch, swapped_operands

# Panels up to this size stay in the private cache beside the other operand's rows.
PANEL_BYTES = 512 << 10
# Points that must share an element before a panel, or a row, of it pays.
MIN_REUSE, MIN_ROW_REUSE = 24, 16
PADDING = 16
# Panels that are packed at once.
MAX_GROUP = 8
# Vectors along a reduction that are worth the sums across lanes at its end.
MIN_DEPTH = 8
# Columns that fill enough of a vector for a register tile; up to how many its broadcasts cost more than they bring: rows of
# the other operand are not copied for so few, and often fall into one cache set.
MIN_COLUMNS, FEW_COLUMNS = 8, 15
# Rows and columns of a register tile whose vectors run along the reduction. With 3 rows and 8 columns, whose copy fills two L1
# caches, x[8192, 2048] @ w[2048, 8] took 4.2 ms on one core, with these 3.2.
SIDE_BY_SIDE = 6, 4


def pack(nest: Nest, context, options, staged: OperandCopies, turn: bool = True) -> list[Stmt]:
    """The nest alone, or with copies of operands before it. `options`: LowerOptions; `turn`: vectors may be moved."""
    found = product_operands(nest)
    if found is not None and options.contract:  # lanes would be partial sums: only where sums may be reassociated
        vector, moving, still = found
        narrow = _along_reduction(*_in_pairs(nest, moving, still, context, options), vector, context, options.vector_bits)
        if narrow is not None:
            return narrow
    other = swapped_operands(nest, found and found[0], context, options, staged) if turn else None
    if other is not None:
        products, copy = other
        return [*_packed(products, context, options, staged), copy]
    if found is None:
        return [nest]
    vector, moving, still = found
    if nest.dims[vector] < MIN_COLUMNS:
        out = list[Stmt]()
        nest, _ = _stage_still(nest, still, True, context, out, staged)
        return [*out, nest]
    return _along_columns(nest, vector, moving, still, context, options, staged)


def _along_columns(nest: Nest, vector: str, moving: Expr, still: Expr, context, options, staged: OperandCopies) -> list[Stmt]:
    """A product with vectors along columns: of panels, in words or elements, or of operands where they are."""
    width, _ = contraction_tile(nest, vector, options.vector_bits)
    out, trial = list[Stmt](), OperandCopies(staged.written, dict(staged.copies))
    spread, apart = _stage_still(nest, still, False, context, out, trial)
    words = _in_words(spread, moving, apart, vector, width, context, options)
    if words is not None:
        staged.copies = trial.copies
        panels = _panels(words.nest, words.packed, vector, width, context, options.vector_bits, words.shift)
        return out + words.before + panels
    depth = math.prod(nest.dims[d] for d in nest.rdims)
    pays, fits = _panel_pays(nest, moving, vector, depth), depth * width * 4 <= PANEL_BYTES
    if pays and not fits and options.contract and not any(w.inner for w in nest.writes):
        products, copy = summed_in_scratch(nest, vector, context, options)
        return [*_packed(products, context, options, staged), copy]
    out = []
    nest, _ = _stage_still(nest, still, True, context, out, staged)
    if pays and fits:
        return out + _panels(nest, moving, vector, width, context, options.vector_bits)
    if out:
        nest.schedule = contraction_tile(nest, vector, options.vector_bits)[1]
    return [*out, nest]


def _packed(stmts: list[Stmt], context, options, staged: OperandCopies) -> list[Stmt]:
    """The statements with every product in them packed."""
    out = []
    for s in stmts:
        s = with_bodies(s, lambda inner: _packed(inner, context, options, staged))
        out += pack(s, context, options, staged, turn=False) if isinstance(s, Nest) and s.reductions else [s]
    return out


def _in_words(nest: Nest, moving: Expr, still: Expr, vector: str, width: int, context, options) -> Words | None:
    """The product over words of the most elements that suit its operands, if panels of them pay."""
    if nest.reuse(moving) < 4:
        return None
    for words, count in ((quad_products, QUAD), (pair_products, PAIR)):
        found = words(in_whole_words(nest, count, context), moving, still, context, options)
        if found is None or found.depth * width * 4 > PANEL_BYTES:
            continue
        if _panel_pays(found.nest, found.packed, vector, found.depth):
            return found
    return None


def product_operands(nest: Nest) -> tuple[str, Expr, Expr] | None:
    """(vector dimension, operand along it, the other one) of a single product worth a register tile."""
    if len(nest.reductions) != 1 or nest.reductions[0].op != "dot" or nest.ordered or not nest.writes:
        return None
    vector = _nearest_dim(nest)
    if vector is None:
        return None
    a, b = nest.reductions[0].args
    if (vector in a.symbols) == (vector in b.symbols):
        return None
    moving, still = (a, b) if vector in a.symbols else (b, a)
    if moving.kind not in ("load", "op") or moving.dtype.itemsize < 2:
        return None
    return vector, moving, still


def _in_pairs(nest: Nest, moving: Expr, still: Expr, context, options) -> tuple[Nest, Expr, Expr]:
    """A product and its operands, over words where `still` can be read so in place."""
    paired = pair_products(nest, moving, still, context, options) if still.dtype.name == "bfloat16" else None
    if paired is None:
        return nest, moving, still
    return paired.nest, paired.packed, paired.still


def _along_reduction(nest: Nest, moving: Expr, still: Expr, vector: str, context, vector_bits: int) -> list[Stmt] | None:
    """A product with few columns: vectors along the reduction, on the columns' transpose. None where that does not suit.

    Each row of the other operand, contiguous along the reduction, is then read once in whole vectors.
    """
    inner = [d for d in nest.rdims if nest.dims[d] > 1]
    lanes = vector_bits // register_bits(nest)
    if len(inner) != 1 or nest.dims[vector] > FEW_COLUMNS or nest.dims[inner[0]] < MIN_DEPTH * lanes or still.kind != "load":
        return None
    k, columns = inner[0], nest.dims[vector]
    plain = not still.info[2] and flat_coefficient(still.info[0], still.info[1], k) == 1
    mine, other = ([d for d in nest.dims if d in e.symbols and nest.dims[d] > 1] for e in (moving, still))
    batch, rows = [d for d in mine if d not in (vector, k)], [d for d in other if d not in mine]
    if not plain or len(rows) != 1 or k not in mine or not {k, *batch} <= set(other):
        return None
    transposed = moving
    copies: list[Stmt] = []
    for last in [[vector, k]] if moving.kind == "load" else [[k, vector], [vector, k]]:  # made along rows, then transposed
        sizes = {d: nest.dims[d] for d in [*batch, *last]}
        *outer, length = sizes.values()  # rows that do not fall into one cache set
        buf, index = context.new_buffer((*outer, length + PADDING), moving.dtype), tuple(map(Affine.symbol, sizes))
        copies.append(Nest(sizes, writes=[Write(buf, index, transposed)], at=nest.at))
        transposed = context.pool.make("load", moving.dtype, (buf, index, False))
    product = _replace_operand(nest, moving, transposed)
    jammed = -(-columns // -(-columns // SIDE_BY_SIDE[1]))
    jam = {vector: jammed, rows[0]: min(nest.dims[rows[0]], SIDE_BY_SIDE[0])}
    order = tuple(d for d in nest.dims if d != k)
    product.schedule = NestSchedule(lanes=lanes, vector=k, jam=jam, order=order)
    if is_far(still.info[0]):
        product.fetch = {still.info[0].root: jam[rows[0]] * abs(flat_coefficient(still.info[0], still.info[1], rows[0]))}
    return [*copies, product]


def _nearest_dim(nest: Nest) -> str | None:
    """The dimension along which results are contiguous, or else nearest to one another."""
    w = nest.writes[0]
    steps = {d: abs(flat_coefficient(w.buf, w.index, d)) for d, n in nest.dims.items() if n > 1 and d not in nest.rdims}
    return min((d for d, step in steps.items() if step), key=steps.__getitem__, default=None)


def _panel_pays(nest: Nest, moving: Expr, vector: str, depth: int) -> bool:
    if depth < 8 or not set(nest.rdims) & moving.symbols:
        return False
    if any(d not in moving.symbols and nest.dims[d] > 1 for d in nest.rdims):
        return False
    reuse = nest.reuse(moving)
    if moving.kind != "load":
        return reuse > 1
    if is_expensive(moving) and reuse >= MIN_REUSE:
        return True
    coefficient = flat_coefficient(moving.info[0], moving.info[1], vector)
    if coefficient != 1:
        return reuse >= 4
    step = max(_row_bytes(moving, d) for d in nest.rdims if nest.dims[d] > 1)
    return reuse >= MIN_REUSE and depth >= 128 and step >= CONFLICT_BYTES


def _row_bytes(load: Expr, dim: str) -> int:
    buf = load.info[0]
    return abs(flat_coefficient(buf, load.info[1], dim)) * buf.dtype.itemsize


def _stage_still(
    nest: Nest, still: Expr, converted: bool, context, out: list[Stmt], staged: OperandCopies
) -> tuple[Nest, Expr]:
    """The product with a copy of its broadcast operand, and that, where its rows collide in the cache, or, with `converted`,
    where reading it is expensive; else as they are."""
    if still.kind != "load":
        return nest, still
    reuse, dtype = nest.reuse(still), still.info[0].dtype
    pays = rows_conflict(nest, still, reuse) or converted and is_expensive(still) and reuse >= MIN_ROW_REUSE
    copy = stage(nest, still, copy_dtype(dtype) if converted else dtype, context, out, staged) if pays else None
    return (nest, still) if copy is None else (_replace_operand(nest, still, copy), copy)


def _replace_operand(nest: Nest, old: Expr, new: Expr) -> Nest:
    r = nest.reductions[0]
    args = tuple(new if a is old else a for a in r.args)
    return Nest(dict(nest.dims), nest.rdims, [Reduction(r.op, args, r.dtype)], list(nest.writes), nest.ordered, nest.at)


def _panels(
    nest: Nest, moving: Expr, vector: str, width: int, context, vector_bits: int, shift: Reduction | None = None
) -> list[Stmt]:
    """for batch..., for group of panels: pack the group, then the contraction over each; a last, narrower panel.

    `shift`: a reduction of packed elements that is subtracted from the results.
    """
    outer = [d for d in nest.dims if d in moving.symbols and d != vector and d not in nest.rdims and nest.dims[d] > 1]
    counters = {d: context.names("%i") for d in outer}
    full, rest = divmod(nest.dims[vector], width)
    panels = _Panels(nest, moving, vector, counters, context, vector_bits, shift)
    size = _group_size(moving, vector, full)
    stmts: list[Stmt] = []
    if full // size:
        group = context.names("%i")
        stmts.append(For(group, full // size, panels.group(Affine.symbol(group) * (size * width), size, width)))
    if full % size:
        stmts += panels.group(Affine((), full // size * size * width), full % size, width)
    if rest:
        stmts += panels.group(Affine((), full * width), 1, rest)
    for d in reversed(outer):
        stmts = [For(counters[d], nest.dims[d], stmts)]
    return stmts


def _group_size(moving: Expr, vector: str, full: int) -> int:
    """Panels that are packed at once: rows of one panel alone are a few lines, each of a page of its own."""
    steps = {flat_coefficient(e.info[0], e.info[1], vector) if e.kind == "load" else None for e in _loads(moving)}
    if steps - {0, 1} or full < 2:
        return 1
    return next((n for n in range(MAX_GROUP, MAX_GROUP // 2, -1) if full % n == 0), min(MAX_GROUP, full))


def _loads(e: Expr) -> list[Expr]:
    return Nest({}, reductions=[Reduction("dot", (e,), e.dtype)]).loads()


class _Panels:
    """The statements of one contraction's panels."""

    def __init__(
        self, nest: Nest, moving: Expr, vector: str, counters: dict[str, str], context, vector_bits: int,
        shift: Reduction | None,
    ):  # fmt: skip
        self.nest, self.moving, self.vector, self.counters, self.shift = nest, moving, vector, counters, shift
        self.context, self.pool, self.vector_bits = context, context.pool, vector_bits
        self.reduced = [d for d in nest.rdims if nest.dims[d] > 1]
        self.tile = 0  # vectors of a full panel's register tile; full panels come first

    def group(self, start: Affine, count: int, width: int) -> list[Stmt]:
        """Packs columns start .. start + count * width - 1 as `count` panels, then multiplies with each."""
        moving, sizes = self.moving, {d: self.nest.dims[d] for d in self.reduced}
        dtype = moving.dtype if moving.kind == "op" else moving.info[0].dtype
        buf: Buf = self.context.new_buffer((count, *sizes.values(), width), copy_dtype(dtype))
        panel, column = self.context.names("d"), self.context.names("d")
        at = Affine.symbol(panel) if count > 1 else Affine()
        place = self._renaming(start + at * width + Affine.symbol(column))
        copied = Write(buf, self._index(at, column), self.pool.rename(moving, place))
        dims = sizes | ({panel: count} if count > 1 else {}) | {column: width}
        copy = Nest(dims, writes=[copied], at=self.nest.at)
        copy.fetch = {b: n for e in copy.loads() if e.kind == "load" for b, n in rows_ahead(e, self.reduced[-1]).items()}
        before, shifts = [copy], None
        if self.shift is not None:
            sums, shifts = self._shifts(buf, count, width)
            before.append(sums)
        if count == 1:
            return [*before, self._product(buf, Affine(), start, width, shifts)]
        counter = self.context.names("%i")
        at = Affine.symbol(counter)
        return [*before, For(counter, count, [self._product(buf, at, start + at * width, width, shifts)])]

    def _shifts(self, buf: Buf, count: int, width: int) -> tuple[Nest, Buf]:
        """What is subtracted from the results, by panel and column."""
        panel, column = self.context.names("d"), self.context.names("d")
        at = Affine.symbol(panel) if count > 1 else Affine()
        packed = self.pool.make("load", self.moving.dtype, (buf, self._index(at, column), False))
        assert self.shift is not None
        r = replace(self.shift, args=tuple(packed if a is self.moving else a for a in self.shift.args))
        shifts = self.context.new_buffer((count, width), r.dtype)
        value = self.pool.make("acc", r.dtype, 0)
        write = Write(shifts, (at, Affine.symbol(column)), value, inner=False)
        dims = ({panel: count} if count > 1 else {}) | {column: width} | {d: self.nest.dims[d] for d in self.reduced}
        sums = Nest(dims, tuple(self.reduced), [r], [write], at=self.nest.at)
        sums.schedule = contraction_tile(sums, column, self.vector_bits)[1]
        return sums, shifts

    def _index(self, panel: Affine, column: str) -> tuple[Affine, ...]:
        return panel, *map(Affine.symbol, self.reduced), Affine.symbol(column)

    def _renaming(self, column: Affine) -> dict[str, Affine]:
        # Panels have no dimensions of one element.
        single: dict[str, Affine] = {d: Affine() for d in self.nest.rdims if self.nest.dims[d] == 1}
        return single | {d: Affine.symbol(c) for d, c in self.counters.items()} | {self.vector: column}

    def _product(self, buf: Buf, panel: Affine, start: Affine, width: int, shifts: Buf | None) -> Nest:
        nest, pool, column = self.nest, self.pool, self.context.names("d")
        rename = self._renaming(start + Affine.symbol(column))
        packed = pool.make("load", self.moving.dtype, (buf, self._index(panel, column), False))

        def shifted(e: Expr) -> Expr | None:
            if e.kind != "acc" or shifts is None:
                return None
            shift = pool.make("load", e.dtype, (shifts, (panel, Affine.symbol(column)), False))
            return self.context.op("sub", e.dtype, e, shift)

        def renamed(e: Expr) -> Expr:
            return pool.rewrite(pool.rename(e, rename), shifted)

        dims = {d: n for d, n in nest.dims.items() if d not in self.counters and d != self.vector and d not in nest.rdims}
        dims |= {column: width} | {d: nest.dims[d] for d in nest.rdims}
        r = nest.reductions[0]
        args = tuple(packed if a is self.moving else renamed(a) for a in r.args)
        writes = [w.mapped(renamed, index=tuple(i.substitute(rename.get) for i in w.index)) for w in nest.writes]
        product = Nest(dims, nest.rdims, [Reduction(r.op, args, r.dtype)], writes, nest.ordered, nest.at)
        product.schedule = contraction_tile(product, column, self.vector_bits)[1]
        product.schedule.cut_as = self.tile
        self.tile = product.schedule.tile
        return product
