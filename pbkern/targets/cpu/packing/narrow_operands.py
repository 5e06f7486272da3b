"""Wide copies of narrow integers that contractions read -> the narrow ones, widened where they are read.

    t[i] = int32(x[i]);  acc += t[m, k] * u[k, n]     ->     acc += int32(x[m, k]) * int32(w[k, n])

The products then find operands of 8 or 16 bits (pair_products.py, quad_products.py), and scratch
takes a quarter or half of the bytes. Scratch that is more than a copy, such as padded rows of a
convolution or activations that are quantised on the way, stays, but narrow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest import scratch
from pbkern.lower.nest.ir import Buf, Expr, Nest, Stmt, Write, bodies, every, with_bodies
from pbkern.targets.cpu.locality.strip_mining import inside

from .pair_products import NARROW, depth_dim, is_narrow_integer

INT32 = np.dtype(np.int32)
# More products than these fill no panel; fewer are not worth words.
MIN_DEPTH, MAX_DEPTH = 16, 8192
# Points that must share an element before its word is worth making.
MIN_REUSE = 8


def sink_widening_casts(stmts: list[Stmt], context, kept: set[Buf]) -> list[Stmt]:
    """Statements whose products of converted integers read narrow ones, where they come from if they are copies.

    `kept`: buffers that are touched around `stmts`, or keep their values between programs.
    """
    narrow = _narrow_scratch(stmts, kept)
    if not narrow:
        return stmts
    return _without_copies(_stored_narrow(stmts, _WidenedPairs(narrow, context)), context, kept)


# ---------------------------------------------------------------- scratch of narrow integers


def _narrow_scratch(stmts: list[Stmt], kept: set[Buf]) -> dict[Buf, np.dtype]:
    """Scratch that only holds widened integers of one type, where that makes both operands of some product narrow."""
    nests = [s for s in every(stmts) if isinstance(s, Nest)]
    found: dict[Buf, set[str]] = {}
    for w in (w for n in nests for w in n.writes):
        if w.buf.root.arena and w.buf.root.dtype == INT32 and w.buf.root not in kept:
            found.setdefault(w.buf.root, set()).add(_narrow_type(w))
    types = {
        b: np.dtype(next(iter(names)))
        for b, names in found.items()
        if len(names) == 1 and names <= set(NARROW)
    }
    views = {b.root for n in nests for b in _other_accesses(n)} | _touched_by_others(stmts)
    types = {b: t for b, t in types.items() if b not in views}
    read = set().union(*(_operands(n) for n in nests if _suits(n, types)))
    return {b: t for b, t in types.items() if b in read}


def _narrow_type(w: Write) -> str:
    """The type that a written value is widened from."""
    widened = w.value.kind == "op" and w.value.info.primitive == "convert_element_type"
    return w.value.args[0].dtype.name if widened else ""


def _other_accesses(nest: Nest) -> list[Buf]:
    """Buffers that are accessed other than by loads and stores of 32-bit integers."""
    loads = [e.info[0] for e in nest.loads() if e.kind == "gather" or e.info[0].dtype != INT32]
    return loads + [w.buf for w in nest.writes if w.buf.dtype != INT32]


def _touched_by_others(stmts: list[Stmt]) -> set[Buf]:
    """Root buffers that statements other than nests touch."""
    found: set[Buf] = set()
    for s in stmts:
        inner = bodies(s)
        found |= set().union(*map(_touched_by_others, inner)) if inner else set()
        if not inner and not isinstance(s, Nest):
            found |= scratch.touched([s])
    return found


def _operands(nest: Nest) -> set[Buf]:
    return {e.info[0].root for r in nest.reductions for e in r.args if e.kind == "load"}


def _suits(s: Nest, narrow: dict[Buf, np.dtype]) -> bool:
    """Whether a nest is a product of enough narrow integers, once `narrow` scratch is."""
    if len(s.reductions) != 1 or s.reductions[0].op != "dot" or s.reductions[0].dtype != INT32:
        return False
    args = s.reductions[0].args
    if not all(is_narrow_integer(e) or e.kind == "load" and e.info[0].root in narrow for e in args):
        return False
    inner = [
        d for d in s.rdims if s.dims[d] > 1
    ]  # one alone need not be divided (pairs.in_whole_words)
    along = (
        inner if len(inner) == 1 else [depth_dim(s, e, 2) for e in args]
    )  # either may be the broadcast one
    depths = [s.dims[k] for k in along if k is not None]
    return any(MIN_DEPTH <= n <= MAX_DEPTH for n in depths) and all(
        s.reuse(e) >= MIN_REUSE for e in args
    )


class _WidenedPairs:
    """Narrow buffers in place of wide ones, and of views of them."""

    def __init__(self, types: dict[Buf, np.dtype], context):
        self.types, self.context, self.made = types, context, dict[Buf, Buf]()

    def of(self, buf: Buf) -> Buf:
        if buf not in self.made:
            if buf.storage is None:
                self.made[buf] = self.context.new_buffer(buf.shape, self.types[buf])
            else:
                self.made[buf] = replace(
                    buf, dtype=self.types[buf.root], storage=self.of(buf.storage)
                )
        return self.made[buf]


def _stored_narrow(stmts: list[Stmt], pairs: _WidenedPairs) -> list[Stmt]:
    context = pairs.context

    def widened(e: Expr) -> Expr | None:
        if e.kind != "load" or e.info[0].root not in pairs.types:
            return None
        buf = pairs.of(e.info[0])
        load = context.pool.make("load", buf.dtype, (buf, *e.info[1:]))
        return context.op("convert_element_type", INT32, load, params={"new_dtype": INT32})

    rewrite = context.pool.rewriter(widened)

    def written(w: Write) -> Write:
        if w.buf.root not in pairs.types:
            return w.mapped(rewrite)
        return replace(w, value=w.value.args[0]).mapped(rewrite, buf=pairs.of(w.buf))

    def stored(s: Stmt) -> Stmt:
        if not isinstance(s, Nest):
            return with_bodies(s, lambda body: list(map(stored, body)))
        reductions = [r.mapped(rewrite) for r in s.reductions]
        return replace(s, reductions=reductions, writes=list(map(written, s.writes)))

    return list(map(stored, stmts))


# ---------------------------------------------------------------- copies


def _without_copies(stmts: list[Stmt], context, kept: set[Buf]) -> list[Stmt]:
    """Products read narrow integers where they come from, not copies of them."""
    stmts = inside(stmts, kept, lambda body, others: _without_copies(body, context, others))
    stmts = [part for s in stmts for part in _apart(s)]
    copies = {w.buf: w for s in stmts if (w := _copy(s)) is not None and w.buf not in kept}
    written = scratch.written(stmts)
    copies = {
        b: w
        for b, w in copies.items()
        if w.value.info[0].root not in written and _writers(stmts, b) == 1
    }
    out = [_from_source(s, copies, context) for s in stmts]
    read = [s for s in out if (w := _copy(s)) is None or w.buf not in copies]
    unread = copies.keys() - scratch.touched(read)
    return [s for s in out if (w := _copy(s)) is None or w.buf not in unread]


def _apart(s: Stmt) -> list[Stmt]:
    """Copies of one nest as a nest each: those of operands of one shape have been merged."""
    parts: list[Stmt] = [replace(s, writes=[w]) for w in s.writes] if isinstance(s, Nest) else []
    return parts if len(parts) > 1 and all(_copy(p) is not None for p in parts) else [s]


def _writers(stmts: list[Stmt], buf: Buf) -> int:
    return sum(buf in scratch.written([s]) for s in stmts)


def _copy(s: Stmt) -> Write | None:
    """The only effect of a nest: a scratch buffer with elements of another buffer, at plain places."""
    if not isinstance(s, Nest) or s.reductions or len(s.writes) != 1:
        return None
    (w,) = s.writes
    plain = (
        not w.guard
        and w.mask is None
        and w.buf.arena
        and w.buf.storage is None
        and w.value.kind == "load"
    )
    if not plain or w.value.dtype.name not in NARROW:
        return None
    axes = {i: n for i, n in zip(w.index, w.buf.shape) if n > 1}
    whole = axes == {Affine.symbol(d): n for d, n in s.dims.items() if n > 1}
    known = w.value.symbols & s.dims.keys() <= frozenset().union(*(i.symbols for i in w.index))
    return w if whole and known else None


def _from_source(s: Stmt, copies: dict[Buf, Write], context) -> Stmt:
    if not isinstance(s, Nest) or not _suits(s, {}):
        return s

    def source(e: Expr) -> Expr | None:
        if e.kind != "load" or e.info[0] not in copies or e.info[2]:
            return None
        w = copies[e.info[0]]
        return context.pool.rename(
            w.value, {i.terms[0][0]: at for i, at in zip(w.index, e.info[1]) if i.terms}
        )

    args = tuple(context.pool.rewrite(e, source) for e in s.reductions[0].args)
    return replace(s, reductions=[replace(s.reductions[0], args=args)])
