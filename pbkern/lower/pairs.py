"""Contraction of bfloat16 or narrow integer operands -> products of pairs, one instruction for two multiply-adds.

Before -> after:  acc += a[m, k] * b[k, n]   ->   acc += pair(a[m, 2k:2k+2]) . pair(b[2k:2k+2, n])
A pair is a 32-bit word, the lower half first. The operand along the vectors is interleaved while it is packed.

bfloat16 (AVX512-BF16 vdpbf16ps): the operand that is broadcast is read as words in place. Accumulation is in float32; the
instruction flushes subnormals (Intel SDM, VDPBF16PS). int8, uint8 and int16 with sums in int32 (AVX512-VNNI vpdpwssd): both
operands become pairs of int16; sums wrap as those of single products do.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..affine import Affine
from . import arena
from .flat import flat_index
from .nest import Buf, Expr, Nest, Reduction, Stmt, Write
from .strips import inside

UINT16, UINT32, INT32 = np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.int32)
BFLOAT16, INT16 = "dot_bf16", "dot_i16"
NARROW = ("int8", "uint8", "int16")
# Elements of unequal rows that keep them from falling into one cache set; more products than these fill no panel.
PADDING, MAX_DEPTH = 16, 8192
# Points that must share an element before its pair is worth making.
MIN_REUSE = 8


def pair_products(nest: Nest, moving: Expr, still: Expr, builder, options) -> tuple[list[Stmt], Nest, Expr] | None:
    """(statements before, nest over pairs, its operand to be packed), or None if the operands do not allow it."""
    r, k = nest.reductions[0], _depth(nest)
    if k is None or nest.dims[k] % 2:
        return None
    if options.bf16_pairs and r.dtype == np.float32 and _is_plain_bfloat16(moving) and _is_plain_bfloat16(still):
        broadcast = _words_in_place(still, k, builder)
        return broadcast and ([], *_over_pairs(nest, BFLOAT16, k, moving, _interleaved(moving, k, builder), still, broadcast))
    if options.int16_pairs and r.dtype == INT32 and _is_narrow_integer(moving) and _is_narrow_integer(still):
        copy, broadcast = _staged_words(nest, still, k, builder)
        return [copy], *_over_pairs(nest, INT16, k, moving, _integer_pair(moving, k, builder), still, broadcast)
    return None


def _depth(nest: Nest) -> str | None:
    return next((d for d in reversed(nest.rdims) if nest.dims[d] > 1), None)


def _over_pairs(nest: Nest, op: str, k: str, moving: Expr, packed: Expr, still: Expr, broadcast: Expr) -> tuple[Nest, Expr]:
    r = nest.reductions[0]
    args = tuple(broadcast if a is still else packed for a in r.args)
    dims = {d: n // 2 if d == k else n for d, n in nest.dims.items()}
    return Nest(dims, nest.rdims, [Reduction(op, args, r.dtype)], list(nest.writes), nest.ordered, nest.at), packed


# ---------------------------------------------------------------- bfloat16


def _words_in_place(still: Expr, k: str, builder) -> Expr | None:
    """The pair at 2k, read as one word, if pairs start at even places."""
    flat = flat_index(*still.info[:2])
    rest = flat - Affine.symbol(k, flat.coefficient(k))
    if flat.coefficient(k) != 1 or rest.const % 2 or any(c % 2 for _, c in rest.terms):
        return None
    words = Buf(f"{still.info[0].name}.words", (max(still.info[0].root.size // 2, 1),), INT32, storage=still.info[0].root)
    half = Affine.make({s: c // 2 for s, c in rest.terms}, rest.const // 2) + Affine.symbol(k)
    return builder.pool.make("load", INT32, (words, (half,), False))


def _is_plain_bfloat16(e: Expr) -> bool:
    return e.kind == "load" and not e.info[2] and e.info[0].dtype.name == "bfloat16" and e.info[0].root.dtype.name == "bfloat16"


def _interleaved(moving: Expr, k: str, builder) -> Expr:
    """moving[2k] in the lower half of a word, moving[2k + 1] in the upper one."""
    buf, pool = moving.info[0], builder.pool
    bits = Buf(f"{buf.name}.bits", buf.shape, UINT16, storage=buf)
    halves = []
    for offset in (0, 1):
        index = tuple(i.substitute({k: Affine.symbol(k, 2) + offset}.get) for i in moving.info[1])
        e = pool.make("load", UINT16, (bits, index, False))
        halves.append(builder.op("convert_element_type", UINT32, e, params={"new_dtype": UINT32}))
    upper = builder.op("shift_left", UINT32, halves[1], builder.const(16, UINT32))
    return builder.op("or", UINT32, halves[0], upper)


# ---------------------------------------------------------------- narrow integers


def _is_narrow_integer(e: Expr) -> bool:
    """A conversion of a load of int8, uint8 or int16 to int32."""
    return (e.kind == "op" and e.info.primitive == "convert_element_type" and e.dtype == INT32 and e.args[0].kind == "load"
            and e.args[0].dtype.name in NARROW)


def _integer_pair(e: Expr, k: str, builder) -> Expr:
    """e[2k] in the lower half of a word, e[2k + 1] in the upper one, both as int16."""
    low, high = (builder.pool.rename(e, {k: Affine.symbol(k, 2) + offset}) for offset in (0, 1))
    low = builder.op("and", INT32, low, builder.const(0xFFFF, INT32))
    return builder.op("or", INT32, low, builder.op("shift_left", INT32, high, builder.const(16, INT32)))


def _staged_words(nest: Nest, still: Expr, k: str, builder) -> tuple[Nest, Expr]:
    """A copy of the broadcast operand as words, and the word at its place."""
    dims = {d: n // 2 if d == k else n for d, n in nest.dims.items() if d in still.symbols and d != k} | {k: nest.dims[k] // 2}
    *rows, depth = dims.values()
    buf = builder.new_buffer((*rows, depth + PADDING), INT32).buf
    index = tuple(map(Affine.symbol, dims))
    copy = Nest(dims, writes=[Write(buf, index, _integer_pair(still, k, builder))], at=nest.at)
    return copy, builder.pool.make("load", INT32, (buf, index, False))


def read_narrow(stmts: list[Stmt], builder, kept: set[Buf]) -> list[Stmt]:
    """Statements whose products of converted integers read those where they come from, not from wide copies; inner ones too.

    `kept`: buffers that are touched around `stmts`, or keep their values between programs.
    """
    stmts = inside(stmts, kept, lambda body, others: read_narrow(body, builder, others))
    stmts = [part for s in stmts for part in _apart(s)]
    copies = {w.buf: w for s in stmts if (w := _conversion(s)) is not None and w.buf not in kept}
    written = arena.written(stmts)
    copies = {b: w for b, w in copies.items() if w.value.args[0].info[0].root not in written and _writers(stmts, b) == 1}
    out = [_from_source(s, copies, builder) for s in stmts]
    read = [s for s in out if _conversion(s) is None or _conversion(s).buf not in copies]
    unread = copies.keys() - arena.touched(read)
    return [s for s in out if _conversion(s) is None or _conversion(s).buf not in unread]


def _apart(s: Stmt) -> list[Stmt]:
    """Conversions of one nest as a nest each: those of operands of one shape have been merged."""
    parts = [replace(s, writes=[w]) for w in s.writes] if isinstance(s, Nest) else []
    return parts if len(parts) > 1 and all(_conversion(p) is not None for p in parts) else [s]


def _writers(stmts: list[Stmt], buf: Buf) -> int:
    return sum(buf in arena.written([s]) for s in stmts)


def _conversion(s: Stmt) -> Write | None:
    """The only effect of a nest: a scratch buffer with narrow integers, widened, at plain places."""
    if not isinstance(s, Nest) or s.reductions or len(s.writes) != 1:
        return None
    (w,) = s.writes
    plain = not w.guard and w.mask is None and w.buf.arena and w.buf.storage is None and _is_narrow_integer(w.value)
    symbols = [i.terms[0][0] for i in w.index if i.terms == ((*i.symbols, 1),) and not i.const]
    whole = len(set(symbols)) == len(w.index) == len(s.dims) and tuple(map(s.dims.get, symbols)) == w.buf.shape
    return w if plain and whole else None


def _from_source(s: Stmt, copies: dict[Buf, Write], builder) -> Stmt:
    if not isinstance(s, Nest) or len(s.reductions) != 1 or s.reductions[0].op != "dot" or s.reductions[0].dtype != INT32:
        return s
    args, k = s.reductions[0].args, _depth(s)
    if not all(e.kind == "load" and e.info[0] in copies and not e.info[2] for e in args):
        return s
    if k is None or s.dims[k] % 2 or not 16 <= s.dims[k] <= MAX_DEPTH:
        return s
    if any(_points_per_element(s, e) < MIN_REUSE for e in args):
        return s

    def source(e: Expr) -> Expr:
        w = copies[e.info[0]]
        return builder.pool.rename(w.value, {i.terms[0][0]: at for i, at in zip(w.index, e.info[1])})

    return replace(s, reductions=[replace(s.reductions[0], args=tuple(map(source, args)))])


def _points_per_element(nest: Nest, e: Expr) -> int:
    return math.prod(n for d, n in nest.dims.items() if d not in nest.rdims and d not in e.symbols)
