"""Statements -> statements: nests over equal spaces become one, operands of contractions are packed.

Merging keeps meaning because the later nest reads what the earlier one writes only at the very
point it is written, and depends on nothing in between.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from pbkern.core.affine import Affine
from pbkern.lower.nest import scratch
from pbkern.lower.nest.ir import MAX_HEIGHT, Buf, Expr, Nest, Pool, Stmt, Write, with_bodies

SINGLE = "one"  # a dimension of size 1
# Operations of one nest, and how many statements before it a nest may be merged with: what keeps
# the time for long bodies in proportion to their length. More operations than this fill no
# processor's window anyway.
MAX_NODES = 1500
MAX_DISTANCE = 64
# Dimensions of one nest that are paired in any order with those of another.
MOST_PERMUTED = 4


def without_unread(stmts: list[Stmt], kept: set[Buf]) -> list[Stmt]:
    """Without stores to scratch that nothing reads."""
    while True:
        dead = {b for b in scratch.written(stmts) if b.arena} - kept - scratch.read(stmts)
        if not dead:
            return stmts
        stmts = _without_writes(stmts, dead)


def _without_writes(stmts: list[Stmt], dead: set[Buf]) -> list[Stmt]:
    out = []
    for s in stmts:
        s = with_bodies(s, lambda inner: _without_writes(inner, dead))
        if isinstance(s, Nest) and any(w.buf.root in dead for w in s.writes):
            s = replace(s, writes=[w for w in s.writes if w.buf.root not in dead])
            if not s.writes:
                continue
        out.append(s)
    return out


def merge_all(stmts: list[Stmt], context) -> list[Stmt]:
    out: list[Stmt] = []
    effects: list[_Effects] = []  # of each of `out`
    for s in stmts:
        s = with_bodies(s, lambda inner: merge_all(inner, context))
        if isinstance(s, Nest):
            if any(n == 0 for d, n in s.dims.items() if d not in s.rdims):
                continue
            joined = _joined_before(out, effects, s, context.pool)
            if joined is not None:
                at, out[at] = joined
                effects[at] = _Effects.of(out[at])
                continue
        out.append(s)
        effects.append(_Effects.of(s))
    return out


@dataclass(frozen=True)
class _Effects:
    """Root buffers that a statement writes, and all that it touches."""

    written: set[Buf]
    touched: set[Buf]

    @staticmethod
    def of(s: Stmt) -> _Effects:
        return _Effects(scratch.written([s]), scratch.touched([s]))

    def commute(self, other: _Effects) -> bool:
        """Whether two statements mean the same in either order."""
        return not (self.written & other.touched or other.written & self.touched)


def _joined_before(
    before: list[Stmt], effects: list[_Effects], nest: Nest, pool: Pool
) -> tuple[int, Nest] | None:
    """(position, merged nest) of the last nest before that this one joins, past others that do not depend on it."""
    mine = _Effects.of(nest)
    for at in range(len(before) - 1, max(len(before) - MAX_DISTANCE, 0) - 1, -1):
        other = before[at]
        if not isinstance(other, Nest):
            return None
        merged = merge(other, nest, pool)
        if merged is not None:
            return at, merged
        if not mine.commute(effects[at]):
            return None
    return None


def merge(first: Nest, second: Nest, pool: Pool) -> Nest | None:
    """One nest that does both, or None."""
    if (
        first.ordered
        or second.ordered
        or any(r.op == "dot" for r in first.reductions + second.reductions)
    ):
        return None
    live = _matched(first, second)
    if live is None or max(len(n.nodes()) for n in (first, second)) > MAX_NODES:
        return None
    rename = {theirs: Affine.symbol(mine) for mine, theirs in live}
    rename |= {d: Affine() for d, n in second.dims.items() if n == 1}
    own = {d: Affine() for d, n in first.dims.items() if n == 1}
    rdims = {d for d in first.rdims if first.dims[d] > 1}
    theirs = {rename[d].terms[0][0] for d in second.rdims if second.dims[d] > 1}
    if first.reductions and (
        rdims != theirs if second.reductions else first.moves() or second.moves()
    ):
        return None
    second = _renamed(second, rename, pool)
    first = _renamed(first, own, pool)
    if not _independent(first, second) or _vector_conflict(first, second):
        return None
    merged = _joined(first, second, pool, tuple(rdims | theirs))
    if len(merged.nodes()) > MAX_NODES or _rereads(merged):  # what both compute counts once
        return None
    return (
        merged if max((e.height for e in merged.expressions()), default=0) <= MAX_HEIGHT else None
    )


def _matched(first: Nest, second: Nest) -> list[tuple[str, str]] | None:
    """Pairs of dimensions of one size.

    Where several orders are possible, that in which both read the same elements; in another order
    than their own they share a walk only for that: else one of them would go across its rows. A
    reduction over several dimensions keeps its order.
    """
    mine, theirs = ({d: n for d, n in nest.dims.items() if n > 1} for nest in (first, second))
    if list(mine.values()) == list(theirs.values()) and len(set(mine.values())) == len(mine):
        return list(zip(mine, theirs))
    fixed = any(sum(nest.dims[d] > 1 for d in nest.rdims) > 1 for nest in (first, second))
    orders = (
        [tuple(theirs)] if fixed or len(mine) > MOST_PERMUTED else itertools.permutations(theirs)
    )
    found = [
        list(zip(mine, order))
        for order in orders
        if [theirs[d] for d in order] == list(mine.values())
    ]
    if not found:
        return None
    shared = [_shared(first, second, pairs) for pairs in found]
    best = found[shared.index(max(shared))]
    return best if any(shared) or best == list(zip(mine, theirs)) else None


def _shared(first: Nest, second: Nest, pairs: list[tuple[str, str]]) -> int:
    """Counts loads of the second nest that are of what the first one loads or stores at the same point."""
    units = {d: Affine() for nest in (first, second) for d, n in nest.dims.items() if n == 1}
    renamed = units | {theirs: Affine.symbol(mine) for mine, theirs in pairs}

    def place(buf: Buf, index: tuple, names: dict[str, Affine]) -> tuple:
        return (buf, *(i if i is None else i.substitute(names.get) for i in index))

    mine = {place(e.info[0], e.info[1], units) for e in first.loads()} | {
        place(w.buf, w.index, units) for w in first.writes
    }
    return len(mine & {place(e.info[0], e.info[1], renamed) for e in second.loads()})


def _renamed(n: Nest, dims: dict, pool: Pool) -> Nest:
    if not dims:
        return n

    rename = pool.renamer(dims)

    def ix(index):
        return tuple(i.substitute(dims.get) for i in index)

    kept = {}
    for d, size in n.dims.items():
        if d not in dims:
            kept[d] = size
        elif dims[d].terms:
            kept[dims[d].terms[0][0]] = size
    rdims = tuple(
        dims[d].terms[0][0] if d in dims and dims[d].terms else d
        for d in n.rdims
        if d not in dims or dims[d].terms
    )
    return Nest(
        kept,
        rdims,
        [r.mapped(rename) for r in n.reductions],
        [w.mapped(rename, index=ix(w.index)) for w in n.writes],
        n.ordered,
        n.at,
    )


def _independent(first: Nest, second: Nest) -> bool:
    """The second reads the first's results only at the point that wrote them.

    It overwrites nothing that either reads, but for what the first's reductions take at that very
    point: they come before writes there.
    """
    made: dict[Buf, list[Write]] = {}
    for w in first.writes:
        made.setdefault(w.buf.root, []).append(w)
    for e in second.loads():
        if e.info[0].root in made and not _is_forwarded(first, made[e.info[0].root], e):
            return False
    overwritten = {w.buf.root for w in second.writes}
    places: dict[Buf, list[tuple[Buf, tuple]]] = {root: [] for root in overwritten}
    taken = Nest({}, reductions=first.reductions).loads()
    for buf, index in [(w.buf, w.index) for w in first.writes] + [
        e.info[:2] for e in Nest({}, writes=first.writes).loads()
    ]:
        if buf.root in overwritten:
            places[buf.root].append((buf, index))
    for mine in second.writes:
        if not all(_apart(buf, index, mine) for buf, index in places[mine.buf.root]):
            return False
        for e in taken:
            buf, index, *_ = e.info
            if (
                buf.root is mine.buf.root
                and not _apart(buf, index, mine)
                and not _at_its_point(first, e, mine)
            ):
                return False
    return True


def _at_its_point(nest: Nest, e: Expr, write: Write) -> bool:
    """Whether a load reads, at each point of a nest, the element that is written there and at no other point."""
    buf, index = e.info[:2]
    own = {i.terms[0][0] for i in write.index if len(i.terms) == 1}
    return (
        e.kind == "load" and buf is write.buf and index == write.index and own >= nest.dims.keys()
    )


def _is_forwarded(first: Nest, writes: list[Write], e: Expr) -> bool:
    """Whether a load gives what the first nest writes at the same point, by one of these to the same root."""
    buf, index = e.info[:2]
    found = [w for w in writes if not _apart(buf, index, w)]
    if len(found) != 1 or e.kind == "gather":
        return False
    (w,) = found
    whole = {d for i in w.index for d in i.symbols} >= first.dims.keys()
    return (
        buf is w.buf and index == w.index and w.inner and w.mask is None and not w.guard and whole
    )


def _apart(buf: Buf, index: tuple, write: Write) -> bool:
    """Whether an access and a write are at different constants along an axis."""
    return buf is write.buf and any(
        i is not None and i.is_const and j.is_const and i.const != j.const
        for i, j in zip(index, write.index)
    )


def _rereads(nest: Nest) -> bool:
    """Whether writes behind the reductions compute anew, of a single element, what a write before them has overwritten."""
    before = {w.buf.root for w in nest.writes if w.inner}
    return any(
        e.info[0].root in before
        for e in Nest({}, writes=[w for w in nest.writes if not w.inner]).loads()
    )


def _vector_conflict(first: Nest, second: Nest) -> bool:
    """Writes whose contiguous dimensions differ would make one of them a scatter."""

    def last(n: Nest) -> set:
        return {
            w.index[-1].terms[-1][0] for w in n.writes if w.inner and w.index and w.index[-1].terms
        }

    a, b = last(first), last(second)
    return bool(a and b and a != b)


def _joined(first: Nest, second: Nest, pool: Pool, rdims: tuple[str, ...]) -> Nest:
    values = {(w.buf, w.index): w.value for w in first.writes}
    base = len(first.reductions)

    def replace(e: Expr) -> Expr | None:
        if e.kind == "load" and e.info[:2] in values:
            return values[e.info[:2]]  # half precision keeps its register value (excess precision)
        if e.kind == "acc" and base:
            return pool.make("acc", e.dtype, e.info + base)
        return None

    rewrite = pool.rewriter(replace)
    reductions = first.reductions + [r.mapped(rewrite) for r in second.reductions]
    writes = list(first.writes) + [w.mapped(rewrite) for w in second.writes]
    dims = dict(first.dims)
    if reductions and not rdims:  # over single elements, whose dimensions renaming has dropped
        dims[SINGLE], rdims = 1, (SINGLE,)
    return Nest(
        dims, tuple(d for d in dims if d in rdims), reductions, writes, False, first.at or second.at
    )
