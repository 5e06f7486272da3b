"""Several points of a nest per thread: its own small nest, whose expressions share what points have in common.

    for i, j: acc += a[i, k] * b[k, j]      ->      for i, j: acc0 += a[i, k] * b[k, j],     acc1 += a[i, k] * b[k, j + n],
                                                             acc2 += a[i + m, k] * b[k, j],  acc3 += a[i + m, k] * b[k, j + n]

Points lie far apart, so that lanes still read neighbours; where they store whole vectors of 16
bytes, side by side. The last ones along a dimension may lie outside: their place is kept inside,
and nothing is stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Buf, Expr, Nest, Reduction, Write, nodes

BOOL = np.dtype(bool)
LOWEST = -(1 << 40)
VECTOR_BYTES = 16
# Threads that whole vectors must leave with work: those of a warp.
FEWEST_LANES = 32
# Accumulators of one thread: they are in registers, of which there are 255.
MOST_POINTS = 32
# A load and its address, in multiply-adds.
LOAD_COST = 2.0


@dataclass(frozen=True)
class Tile:
    """Points of one thread along one dimension.

    Attributes:
      size: of the dimension. count: points. beside: whether they lie side by side.
    """

    dim: str
    size: int
    count: int
    beside: bool = False

    @property
    def steps(self) -> int:
        """Threads' places along the dimension."""
        return -(-self.size // self.count)

    def place(self, u: int) -> Affine:
        """Point number u at the thread's place."""
        if self.beside:
            return Affine.symbol(self.dim, self.count) + u
        return Affine.symbol(self.dim) + u * self.steps

    def may_lie_outside(self, u: int) -> bool:
        return self.place(u).evaluate({self.dim: self.steps - 1}) >= self.size

    def kept(self, u: int) -> str:
        """Symbol of the place of such a point, kept inside."""
        return f"{self.dim}@{u}"


def tiles(nest: Nest, free: Mapping[str, int], threads: int) -> tuple[Tile, ...]:
    """Number of points that a thread takes, by dimension; none where that leaves threads without work."""
    points = int(np.prod(list(free.values()), dtype=np.int64))
    if nest.ordered or nest.moves() or any(w.inner for w in nest.writes) and nest.rdims:
        return ()
    if nest.rdims:
        return _shared_operands(nest, free, points, threads)
    return _whole_vectors(nest, free, points)


def _shared_operands(
    nest: Nest, free: Mapping[str, int], points: int, threads: int
) -> tuple[Tile, ...]:
    """Along the dimensions along which loads of a reduction are the same: such that all threads
    together take the fewest instructions for a term.
    """
    terms = [
        e for e in Nest({}, reductions=nest.reductions).nodes() if e.kind in ("load", "gather")
    ]
    along = [d for d, n in free.items() if n > 1 and any(d not in e.symbols for e in terms)]
    along = sorted(along, key=lambda d: -free[d])[:2]

    def cost(counts: tuple[int, ...]) -> float:
        chosen, each = dict(zip(along, counts)), math.prod(counts)
        places = math.prod(-(-n // chosen.get(d, 1)) for d, n in free.items())
        loads = sum(math.prod(c for d, c in chosen.items() if d in e.symbols) for e in terms)
        return -(-places // threads) * (each * len(nest.reductions) + LOAD_COST * loads)

    options = [
        c
        for c in itertools.product(*((1, 2, 4, 8) for _ in along))
        if math.prod(c) * len(nest.reductions) <= MOST_POINTS
        and all(n <= free[d] for d, n in zip(along, c))
    ]
    if nest_rewrites(nest):  # a point that lies outside would read what another thread stores
        options = [c for c in options if all(free[d] % n == 0 for d, n in zip(along, c))]
    best = min(options, key=lambda c: (cost(c), c))
    return tuple(Tile(d, free[d], c) for d, c in zip(along, best) if c > 1)


def nest_rewrites(nest: Nest, but: Buf | None = None) -> bool:
    """Whether it reads, anywhere, an array that it writes, other than a certain root buffer."""
    written = {w.buf.root for w in nest.writes} - {but}
    return any(e.info[0].root in written for e in nest.loads())


def accepts(nest: Nest, chosen: Sequence[Tile], kept: Buf) -> bool:
    """Whether a nest may be tiled so, although its own choice may be another; `kept` is a root buffer in registers."""
    if chosen and (
        nest.ordered or nest.moves() or any(w.inner for w in nest.writes) and nest.rdims
    ):
        return False
    if any(t.may_lie_outside(t.count - 1) for t in chosen) and nest_rewrites(nest, kept):
        return False
    sizes = [b.dtype.itemsize for b in _buffers(nest) if b.root is not kept]
    for t in chosen:
        if t.beside and (
            max(sizes, default=0) * t.count > VECTOR_BYTES
            or not _is_whole(nest, t.dim, t.count, kept)
        ):
            return False
    return True


def _whole_vectors(nest: Nest, free: Mapping[str, int], points: int) -> tuple[Tile, ...]:
    """Along the dimension along which all accesses are the same or whole vectors, at multiples of their size."""
    sizes = {w.buf.dtype.itemsize for w in nest.writes} | {
        e.info[0].dtype.itemsize for e in nest.loads()
    }
    if not sizes or 0 in sizes:
        return ()
    count = VECTOR_BYTES // max(sizes)
    if len({w.inner for w in nest.writes}) > 1:
        return ()
    for d, n in free.items():
        if (
            count > 1
            and n % count == 0
            and points >= count * FEWEST_LANES
            and _is_whole(nest, d, count)
        ):
            return (Tile(d, n, count, beside=True),)
    return ()


def whole_terms(nest: Nest, d: str) -> int:
    """Number of neighbours along a reduced dimension that a thread may load as whole vectors; 1 if it may not."""
    terms = nodes([e for r in nest.reductions for e in r.args])
    loads = [e for e in terms if e.kind in ("load", "gather") and d in e.symbols]
    if not loads or nest.ordered or nest.moves() or any(w.inner for w in nest.writes):
        return 1
    if any(e.kind == "gather" or e.info[2] for e in loads):
        return 1
    sizes = [e.info[0].dtype.itemsize for e in loads]
    count = VECTOR_BYTES // max(sizes) if min(sizes) else 1
    flats = [flat_index(e.info[0], e.info[1]) for e in loads]
    return count if nest.dims[d] % count == 0 and all(_is_along(f, d, count) for f in flats) else 1


def terms_beside(nest: Nest, d: str, count: int, context: NestContext) -> list[list[Reduction]]:
    """The reductions at each of `count` neighbours; the dimension counts such groups of them."""
    places = [context.pool.renamer({d: Affine.symbol(d, count) + u}) for u in range(count)]
    return [[r.mapped(at) for r in nest.reductions] for at in places]


def _is_along(flat: Affine, d: str, count: int) -> bool:
    return (
        flat.coefficient(d) == 1
        and flat.const % count == 0
        and all(c % count == 0 for s, c in flat.terms if s != d)
    )


def _buffers(nest: Nest) -> list[Buf]:
    return [e.info[0] for e in nest.loads()] + [w.buf for w in nest.writes]


def _is_whole(nest: Nest, d: str, count: int, but: Buf | None = None) -> bool:
    accesses = [(e.info[0], e.info[1]) for e in nest.loads() if d in e.symbols] + [
        (w.buf, w.index) for w in nest.writes
    ]
    if any(e.kind == "gather" and d in e.symbols for e in nest.loads()):
        return False
    if any(w.guard for w in nest.writes) or any(
        e.kind == "load" and e.info[2] for e in nest.loads()
    ):
        return False
    return all(_is_along(flat_index(b, i), d, count) for b, i in accesses if b.root is not but)


def renamed_points(chosen: Sequence[Tile]) -> Iterator[dict[str, Affine]]:
    """Per point of a thread, its place along the tiled dimensions; kept inside where it may lie outside."""
    for at in itertools.product(*(range(t.count) for t in chosen)):
        yield {
            t.dim: Affine.symbol(t.kept(u)) if t.may_lie_outside(u) else t.place(u)
            for t, u in zip(chosen, at)
        }


def tiled(nest: Nest, chosen: Sequence[Tile], context: NestContext) -> Nest:
    """The nest of one thread's points: dimensions count places."""
    if not chosen:
        return nest
    reductions, writes, width = [], [], len(nest.reductions)
    numbers = itertools.product(*(range(t.count) for t in chosen))
    for n, (at, dims) in enumerate(zip(numbers, renamed_points(chosen))):
        masks = [
            context.pool.make("range", BOOL, (t.place(u), LOWEST, t.size))
            for t, u in zip(chosen, at)
            if t.may_lie_outside(u)
        ]

        def accumulators(x: Expr, n: int = n) -> Expr | None:
            return (
                context.pool.make("acc", x.dtype, x.info + n * width)
                if x.kind == "acc" and n
                else None
            )

        renamed = context.pool.renamer(dims)
        numbered = context.pool.rewriter(accumulators)
        reductions += [r.mapped(renamed) for r in nest.reductions]

        def moved(x: Expr, f: Callable = renamed, g: Callable = numbered) -> Expr:
            return g(f(x))

        writes += [_moved(w.mapped(moved), dims, masks, context) for w in nest.writes]
    sizes = {t.dim: t.steps for t in chosen}
    kept = {t.kept(u): t.size for t in chosen for u in range(t.count) if t.may_lie_outside(u)}
    stepped = {d: sizes.get(d, n) for d, n in nest.dims.items()} | kept
    return replace(nest, dims=stepped, reductions=reductions, writes=writes)


def _moved(
    w: Write, dims: Mapping[str, Affine], masks: Sequence[Expr], context: NestContext
) -> Write:
    for m in masks:
        w = replace(w, mask=m if w.mask is None else context.op("and", BOOL, w.mask, m))
    return replace(w, index=tuple(i.substitute(dims.get) for i in w.index))
