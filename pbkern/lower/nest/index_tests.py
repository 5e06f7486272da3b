"""Statements -> statements with index tests decided where they can be, and nests cut where a test changes.

A padded or updated array is a select on index ranges. Inside a block most of these tests always
hold: with the bounds of loop dimensions and grid indices they fold away. Where a test depends on
one dimension alone, the nest is cut at the boundary, so that the interior runs without masks and
only thin edges differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from pbkern.core.affine import Affine

from .addresses import is_written
from .ir import Expr, For, If, Nest, Pool, Stmt, While

BOOL = np.dtype(bool)
Bounds = Mapping[str, tuple[int, int]]  # symbol -> (smallest, largest)
Interval = tuple[int, int]
FAR = 2**31 - 1
# A nest of fewer points is not worth several copies of its code.
MIN_POINTS = 512
MAX_PIECES = 9
# Vectors of a row that is so long that it counts where they start.
LONG = 16

# comparison of a - b with zero -> (low, high): true where low <= a - b < high
COMPARISONS = {"lt": (-FAR, 0), "le": (-FAR, 1), "gt": (1, FAR), "ge": (0, FAR), "eq": (0, 1)}


def _products(x: Interval, y: Interval) -> Interval:
    ends = [a * b for a in x for b in y]
    return min(ends), max(ends)


def _quotients(x: Interval, y: Interval) -> Interval | None:
    return (x[0] // y[1], x[1] // y[0]) if x[0] >= 0 and y[0] > 0 else None


def _remainders(x: Interval, y: Interval) -> Interval | None:
    return (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None


# Operation -> (smallest, largest) result of operands between theirs, None where that is not known.
INTERVALS = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _products,
    "div": _quotients,
    "rem": _remainders,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "convert_element_type": lambda x: x,
}


def decide_index_tests(stmts: list[Stmt], pool: Pool, bounds: Bounds, cut_bytes: int) -> list[Stmt]:
    """Folds tests and cuts nests, inner statements too.

    `bounds` of runtime symbols that are known; `cut_bytes`: see lower/build_options.py.
    """
    out: list[Stmt] = []
    for s in stmts:
        match s:
            case Nest():
                out += [
                    simplified(piece, pool, bounds)
                    for piece in _cut(simplified(s, pool, bounds), pool, cut_bytes)
                ]
            case If(index=i, branches=bs):
                out.append(If(i, [decide_index_tests(b, pool, bounds, cut_bytes) for b in bs]))
            case For(counter=c, trips=t, body=b):
                inner = {**bounds, c: (0, t - 1)} if isinstance(t, int) else bounds
                out.append(For(c, t, decide_index_tests(b, pool, inner, cut_bytes)))
            case While(condition=c, predicate=p, body=b):
                condition, body = (decide_index_tests(x, pool, bounds, cut_bytes) for x in (c, b))
                out.append(While(condition, p, body))
            case _:
                out.append(s)
    return out


def interval(a: Affine, bounds: Bounds) -> tuple[int, int] | None:
    """(smallest, largest) value, or None if a symbol is unbounded."""
    low = high = a.const
    for s, c in a.terms:
        if s not in bounds:
            return None
        ends = (c * bounds[s][0], c * bounds[s][1])
        low, high = low + min(ends), high + max(ends)
    return low, high


# ---------------------------------------------------------------- folding


def simplified(n: Nest, pool: Pool, bounds: Bounds, assumed: Iterable[Expr] = ()) -> Nest:
    """The nest with its tests folded; `assumed` hold at all of its points."""
    points = {**bounds, **{d: (0, max(size - 1, 0)) for d, size in n.dims.items()}}
    fold = Folder(pool, {**bounds, **{d: (0, max(size - 1, 0)) for d, size in n.extents().items()}})
    stored = Folder(pool, points)
    for test in assumed:
        fold.assume(test)
    n = n.mapped(fold)
    writes = [replace(w, guard=w.guard and not stored.inside(w.buf, w.index)) for w in n.writes]
    writes = [
        w if w.mask is None or not _is(w.mask, True) else replace(w, mask=None) for w in writes
    ]
    return replace(n, writes=writes)


def _moved(end: int, by: int) -> int:
    """The end of a range, which stays where it is none."""
    return end if abs(end) >= FAR else end + by


def _holds(dtype: np.dtype, found: tuple[int, int]) -> bool:
    info = np.iinfo(dtype)
    return info.min <= found[0] and found[1] <= info.max


def _is(e: Expr, value: bool) -> bool:
    return e.kind == "const" and e.dtype == BOOL and bool(e.info) is value


class Folder:
    """Rewrites an expression with what is known about its symbols."""

    def __init__(self, pool: Pool, bounds: Bounds):
        self.pool, self.bounds = pool, bounds
        self._assumed: dict[Affine, tuple[int, int]] = {}  # what varies -> low <= it < high
        self._holding: set[Expr] = set()
        self._intervals: dict[Expr, Interval | None] = {}
        self._rewrite = pool.rewriter(self._replace)

    def assume(self, test: Expr) -> None:
        """From now on, folds as is right wherever `test` holds."""
        self._holding.add(test)
        if test.kind == "op" and test.info.primitive == "and":
            for part in test.args:
                self.assume(part)
        elif test.kind == "range":
            a, low, high = test.info
            before = self._assumed.get(a.linear(), (-FAR, FAR))
            found = _moved(low, -a.const), _moved(high, -a.const)
            self._assumed[a.linear()] = max(before[0], found[0]), min(before[1], found[1])
        self._rewrite = self.pool.rewriter(self._replace)

    def __call__(self, e: Expr) -> Expr:
        return self._rewrite(e)

    def inside(self, buf, index) -> bool:
        """Whether every index is certainly in the buffer."""
        for i, extent in zip(index, buf.shape):
            if i is not None and not _is(self._range(i, 0, extent), True):
                return False
        return True

    def _bool(self, value: bool) -> Expr:
        return self.pool.make("const", BOOL, np.bool_(value))

    def _replace(self, e: Expr) -> Expr | None:
        if e in self._holding and e.kind == "op":
            return self._bool(True)
        if e.kind == "range":
            return self._range(*e.info)
        if e.kind == "load" and e.info[2] and self.inside(e.info[0], e.info[1]):
            return self.pool.make("load", e.dtype, (e.info[0], e.info[1], False))
        if e.kind == "gather":
            return self._gather(e)
        if e.kind != "op":
            return None
        name = e.info.primitive
        if name in COMPARISONS and e.args[0].dtype != BOOL:
            return self._comparison(name, *e.args)
        if name in ("and", "or") and e.dtype == BOOL:
            return self._logic(name, *e.args)
        if name == "ne" and e.args[0].dtype == BOOL and all(a.kind == "const" for a in e.args):
            return self._bool(bool(e.args[0].info) is not bool(e.args[1].info))
        if name == "not" and e.dtype == BOOL and e.args[0].kind == "const":
            return self._bool(not e.args[0].info)
        if name == "select_n" and e.args[0].dtype == BOOL:
            return self._select(e, *e.args)
        if name in ("max", "min"):
            return self._extreme(name, *e.args)
        if name == "convert_element_type":
            return self._convert(e.args[0], e.dtype)
        if name == "add":
            return self._sum(e)
        return None

    def values_of(self, e: Expr) -> Interval | None:
        """(smallest, largest) value of an integer expression that cannot have wrapped; None where it is not known."""
        if e not in self._intervals:
            found = self._found_interval(e) if e.dtype.kind in "iu" else None
            self._intervals[e] = found if found is not None and _holds(e.dtype, found) else None
        return self._intervals[e]

    def _found_interval(self, e: Expr) -> Interval | None:
        if e.kind == "const":
            return int(e.info), int(e.info)
        if e.kind == "index":
            return interval(e.info, self.bounds)
        rule = INTERVALS.get(e.info.primitive) if e.kind == "op" and len(e.args) <= 2 else None
        if rule is None:
            return int(np.iinfo(e.dtype).min), int(np.iinfo(e.dtype).max)
        parts = [self.values_of(a) for a in e.args]
        return rule(*parts) if None not in parts else None

    def _extreme(self, name: str, x: Expr, y: Expr) -> Expr | None:
        a, b = self.values_of(x), self.values_of(y)
        if a is None or b is None:
            return None
        larger, smaller = (x, y) if name == "max" else (y, x)
        if a[0] >= b[1]:
            return larger
        return smaller if b[0] >= a[1] else None

    def _convert(self, x: Expr, dtype: np.dtype) -> Expr | None:
        found = self.values_of(x) if x.kind == "index" else None
        if found is None or dtype.kind not in "iu" or not _holds(dtype, found):
            return None
        return self.pool.make("index", dtype, x.info)

    def _sum(self, e: Expr) -> Expr | None:
        """An index plus what can only be one number."""
        if self.values_of(e) is None:
            return None
        for x, y in (e.args, e.args[::-1]):
            low, high = self.values_of(y)
            if x.kind == "index" and low == high:
                return self.pool.make("index", e.dtype, x.info + low)
        return None

    def _gather(self, e: Expr) -> Expr | None:
        """Axes along which the index is affine and certainly inside are addressed by it; a load where all are."""
        buf, axes = e.info
        args, left, located = iter(e.args), [], []
        for axis, extent in zip(axes, buf.shape):
            if axis is None:
                arg = next(args)
                found = self.values_of(arg) if arg.kind in ("index", "const") else None
                if found is not None and found[0] >= 0 and found[1] < extent:
                    axis = arg.info if arg.kind == "index" else Affine((), int(arg.info))
                else:
                    left.append(arg)
            located.append(axis)
        if len(left) == len(e.args):
            return None
        if left:
            return self.pool.make("gather", e.dtype, (buf, tuple(located)), tuple(left))
        return self.pool.make("load", e.dtype, (buf, tuple(located), False))

    def _select(self, e: Expr, test: Expr, *cases: Expr) -> Expr | None:
        if test.kind == "const":
            return cases[int(test.info)]
        return test if e.dtype == BOOL and _is(cases[0], False) and _is(cases[1], True) else None

    def _range(self, a: Affine, low: int, high: int) -> Expr:
        found = interval(a, self.bounds) or (-FAR, FAR)
        start, end = self._assumed.get(a.linear(), (-FAR, FAR))
        smallest, largest = (
            max(found[0], _moved(start, a.const)),
            min(found[1], _moved(end, a.const) - 1),
        )
        if low <= smallest and largest < high:
            return self._bool(True)
        if largest < low or smallest >= high:
            return self._bool(False)
        return self.pool.make("range", BOOL, (a, low, high))

    def _comparison(self, name: str, x: Expr, y: Expr) -> Expr | None:
        if x.dtype.kind not in "iu":
            return None
        low, high = COMPARISONS[name]
        found = self.values_of(x), self.values_of(y)
        if None not in found:
            smallest, largest = found[0][0] - found[1][1], found[0][1] - found[1][0]
            if (low == -FAR or low <= smallest) and (high == FAR or largest < high):
                return self._bool(True)
            if low != -FAR and largest < low or high != FAR and smallest >= high:
                return self._bool(False)
        if (
            any(a.kind not in ("index", "const") for a in (x, y))
            or x.dtype.kind != "i"
            or x.dtype.itemsize < 4
        ):
            return None
        a, b = (e.info if e.kind == "index" else Affine((), int(e.info)) for e in (x, y))
        d = a - b
        low = low if low == -FAR else low - d.const
        high = high if high == FAR else high - d.const
        return self._range(d.linear(), max(low, -FAR), min(high, FAR))

    def _logic(self, name: str, x: Expr, y: Expr) -> Expr | None:
        absorbing = name == "or"
        for a, b in ((x, y), (y, x)):
            if _is(a, absorbing):
                return self._bool(absorbing)
            if _is(a, not absorbing):
                return b
        if (
            x.kind == y.kind == "range"
            and name == "and"
            and x.info[0].linear() == y.info[0].linear()
        ):
            # One interval from two, both measured from the same expression.
            base = x.info[0].linear()
            ends = [
                (max(low - a.const, -FAR), min(high - a.const, FAR))
                for a, low, high in (x.info, y.info)
            ]
            return self._range(base, max(e[0] for e in ends), min(e[1] for e in ends))
        return None


# ---------------------------------------------------------------- cutting


def _cut(n: Nest, pool: Pool, cut_bytes: int) -> list[Nest]:
    """Pieces of the nest between the boundaries of its tests."""
    if n.ordered or math.prod(n.dims.values()) < MIN_POINTS or _carries_between_points(n):
        return [n]
    pieces = [n]
    for d in list(n.dims):
        if d in n.rdims:
            continue
        cuts = _boundaries(n, d, cut_bytes)
        if cuts and len(pieces) * (len(cuts) + 1) <= MAX_PIECES:
            edges = [0, *cuts, n.dims[d]]
            pieces = [
                _piece(p, d, low, high, pool) for p in pieces for low, high in zip(edges, edges[1:])
            ]
    return pieces


def _carries_between_points(n: Nest) -> bool:
    """Whether one point may read what another writes: then the order of points matters."""
    written = {w.buf.root: w for w in n.writes}
    return any(is_written(e, n) and e.info[1] != written[e.info[0].root].index for e in n.loads())


def _boundaries(n: Nest, d: str, cut_bytes: int) -> list[int]:
    """Places where tests on `d` alone change, if few."""
    cuts: set[int] = set()
    for e in n.nodes():
        if e.kind == "range" and e.symbols == {d} and abs(e.info[0].coefficient(d)) == 1:
            a, low, high = e.info
            if a.coefficient(d) == 1:
                cuts |= {low - a.const, high - a.const}
            else:
                cuts |= {a.const - low + 1, a.const - high + 1}
    inner = sorted(
        {end for c in cuts if 0 < c < n.dims[d] for end in _around(n, d, c, cut_bytes)}
        - {0, n.dims[d]}
    )
    return inner if len(inner) <= 4 else []


def _around(n: Nest, d: str, cut: int, cut_bytes: int) -> tuple[int, ...]:
    """The ends of the vector that a cut divides, where results are long rows along `d`: those between start at a vector."""
    lanes = max(cut_bytes // max(w.buf.dtype.itemsize for w in n.writes), 1)
    starts = {
        w.index[-1].const % lanes for w in n.writes if w.index and w.index[-1].coefficient(d) == 1
    }
    if len(starts) != 1 or n.dims[d] < LONG * lanes:
        return (cut,)
    (start,) = starts
    low = (cut + start) // lanes * lanes - start
    return (cut,) if low == cut else (max(low, 0), min(low + lanes, n.dims[d]))


def _piece(n: Nest, d: str, low: int, high: int, pool: Pool) -> Nest:
    place = {d: Affine.symbol(d) + low if high - low > 1 else Affine((), low)}
    rename = pool.renamer(place)
    return Nest(
        {k: (high - low if k == d else size) for k, size in n.dims.items()},
        n.rdims,
        [r.mapped(rename) for r in n.reductions],
        [w.mapped(rename, index=tuple(i.substitute(place.get) for i in w.index)) for w in n.writes],
        n.ordered,
        n.at,
    )
