"""Statements of nests on NumPy arrays: the oracle between a kernel's body and what a target emits.

A nest runs over all of its points at once where no point reads what another one writes, else point
by point, in the order of its dimensions, those that are reduced innermost. A point reads all that
it reads before it stores. What is unspecified is poison, as in dsl/interpret.py: scratch before it
is written, and guarded loads outside their buffer. An access without a guard that is outside raises
InternalError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.dsl.interpret import poison

from . import numpy_ops, reductions
from .ir import Buf, Expr, Fetch, For, If, Let, Nest, Sort, Stmt, Trace, While, Write

# trace(site, values of the buffers that it hands over)
Tracer = Callable[[int, list[np.ndarray]], None]


@dataclass
class Memory:
    """Contents of root buffers.

    Scratch that is not there yet is made when it is first touched, full of poison.
    """

    arrays: dict[Buf, np.ndarray] = field(default_factory=dict)  # flat

    def flat(self, buf: Buf) -> np.ndarray:
        """The elements of a buffer, one after the other: changing them changes the memory."""
        root = buf.root
        if root not in self.arrays:
            if not root.arena:
                raise InternalError(f"nest: {root} has no contents")
            self.arrays[root] = np.full(max(root.size, 1), poison(root.dtype), root.dtype)
        return self.arrays[root].view(buf.dtype)[: buf.size]

    def read(self, buf: Buf) -> np.ndarray:
        """A copy of a buffer's contents."""
        return self.flat(buf).reshape(buf.shape).copy()


def run(stmts: Sequence[Stmt], memory: Memory, symbols: dict[str, int], trace: Tracer) -> None:
    """Runs statements in order. `symbols`: values of grid indices; Lets and counters are added."""
    for s in stmts:
        match s:
            case Nest():
                _run_nest(s, memory, symbols)
            case Let(name=name, value=e):
                symbols[name] = int(_Points(memory, symbols, {}).value(e))
            case If(index=index, branches=branches):
                run(
                    branches[min(max(symbols[index], 0), len(branches) - 1)], memory, symbols, trace
                )
            case For(counter=counter, trips=trips, body=body):
                for k in range(trips if isinstance(trips, int) else symbols[trips]):
                    symbols[counter] = k
                    run(body, memory, symbols, trace)
            case While(condition=condition, predicate=predicate, body=body):
                run(condition, memory, symbols, trace)
                while symbols[predicate] if predicate.startswith("%") else int(predicate):
                    run(body, memory, symbols, trace)
                    run(condition, memory, symbols, trace)
            case Sort():
                _sort(s, memory)
            case Trace(site=site, buffers=buffers):
                trace(site, [memory.read(b) for b in buffers])
            case Fetch():
                pass  # changes nothing


def _sort(s: Sort, memory: Memory) -> None:
    """Stable, by the first keys; NaN last, -0 equal to 0, subnormal numbers too."""
    keys: list[np.ndarray] = []
    for b in s.buffers[: s.num_keys]:
        key = numpy_ops.rounded(memory.read(b), numpy_ops.register_dtype(b.dtype))
        if key.dtype.kind == "f":
            small = np.abs(key) < np.finfo(key.dtype).tiny
            keys += [np.isnan(key), np.where(small, 0, key)]
        else:
            keys.append(key)
    lines, length = s.buffers[0].shape
    orders = np.lexsort(keys[::-1], axis=-1) if length else np.zeros((lines, 0), np.int64)
    for b in s.buffers:
        memory.flat(b)[:] = np.take_along_axis(memory.read(b), orders, -1).reshape(-1)


# ---------------------------------------------------------------- expressions at points


class _Points:
    """Points of a nest: values of its dimensions, as arrays that broadcast against each other."""

    def __init__(
        self,
        memory: Memory,
        symbols: Mapping[str, int],
        dims: Mapping[str, np.ndarray],
        accumulators: Sequence[np.ndarray] = (),
    ):
        self.memory, self.symbols, self.dims, self.accumulators = (
            memory,
            symbols,
            dims,
            accumulators,
        )
        self.memo: dict[tuple, np.ndarray] = {}

    def affine(self, a: Affine, moved: Mapping[str, int]) -> np.ndarray:
        found = np.int64(a.const)
        for s, c in a.terms:
            found = found + c * (
                self.dims[s] + moved.get(s, 0) if s in self.dims else np.int64(self.symbols[s])
            )
        return np.asarray(found)

    def value(self, e: Expr, moved: Mapping[str, int] | None = None) -> np.ndarray:
        """Register values of an expression; `moved`: how far from the points it is taken, by dimension."""
        moved = moved or {}
        key = (id(e), tuple(sorted(moved.items())))
        if key not in self.memo:
            self.memo[key] = self._value(e, moved)
        return self.memo[key]

    def _value(self, e: Expr, moved: Mapping[str, int]) -> np.ndarray:
        dtype = numpy_ops.register_dtype(e.dtype)
        match e.kind:
            case "const":
                return np.asarray(e.info).astype(dtype)
            case "index":
                return self.affine(e.info, moved).astype(dtype)
            case "range":
                a, low, high = e.info
                at = self.affine(a, moved)
                return (low <= at) & (at < high)
            case "load":
                buf, index, guard = e.info
                return self._load(buf, [self.affine(i, moved) for i in index], guard).astype(dtype)
            case "gather":
                return self._gather(e, moved).astype(dtype)
            case "acc":
                return self.accumulators[e.info]
            case "moved":
                there = dict(moved)
                for d, k in e.info:
                    there[d] = there.get(d, 0) + k
                return self.value(e.args[0], there)
        return numpy_ops.apply(e.info, [self.value(a, moved) for a in e.args])

    def _load(self, buf: Buf, index: Sequence[np.ndarray], guard: bool) -> np.ndarray:
        inside = _inside(buf, index)
        if not guard and not inside.all():
            raise InternalError(f"nest: a load of {buf} outside it")
        if buf.size == 0:
            return np.full(inside.shape, poison(buf.dtype), buf.dtype)
        found = self.memory.flat(buf)[
            _flat(buf, [np.clip(i, 0, n - 1) for i, n in zip(index, buf.shape)])
        ]
        return found if inside.all() else np.where(inside, found, poison(buf.dtype))

    def _gather(self, e: Expr, moved: Mapping[str, int]) -> np.ndarray:
        buf, index = e.info
        args = iter(e.args)
        places = [
            self.value(next(args), moved) if i is None else self.affine(i, moved) for i in index
        ]
        if buf.size == 0:
            return np.zeros(np.broadcast_shapes(*(p.shape for p in places)), buf.dtype)
        return self.memory.flat(buf)[
            _flat(buf, [np.clip(p, 0, n - 1) for p, n in zip(places, buf.shape)])
        ]

    def places(self, w: Write) -> list[np.ndarray]:
        return [self.affine(i, {}) for i in w.index]


def _inside(buf: Buf, index: Sequence[np.ndarray]) -> np.ndarray:
    inside = np.asarray(True)
    for i, n in zip(index, buf.shape):
        inside = inside & (i >= 0) & (i < n)
    return inside


def _flat(buf: Buf, index: Sequence[np.ndarray]) -> np.ndarray:
    found = np.asarray(0)
    for i, stride in zip(index, buf.strides):
        found = found + i.astype(np.int64) * stride
    return found


# ---------------------------------------------------------------- nests


def _run_nest(n: Nest, memory: Memory, symbols: Mapping[str, int]) -> None:
    free = [d for d in n.dims if d not in n.rdims]
    if any(n.dims[d] == 0 for d in free):
        return
    axes = {
        d: np.arange(size).reshape([-1 if k == at else 1 for k in range(len(n.dims))])
        for at, (d, size) in enumerate(n.dims.items())
    }
    if not _meets_itself(n, memory, symbols, axes):
        _run_points(n, memory, symbols, axes)
        return
    run = (
        _run_in_order if any(w.inner for w in n.writes) and n.rdims else _run_points
    )  # one point alone meets nothing
    for at in itertools.product(*(range(n.dims[d]) for d in free)):
        run(n, memory, symbols, axes | {d: np.full([1] * len(axes), k) for d, k in zip(free, at)})


def _run_points(
    n: Nest, memory: Memory, symbols: Mapping[str, int], axes: Mapping[str, np.ndarray]
) -> None:
    """All points of `axes` at once."""
    shape = tuple(a.size for a in axes.values())
    reduced = tuple(k for k, d in enumerate(axes) if d in n.rdims)
    if 0 in shape:  # nothing is reduced
        axes = {d: a if a.size else np.zeros([1] * len(axes), int) for d, a in axes.items()}
        accumulators = [
            np.asarray(reductions.IDENTITY[r.op](r.dtype)).astype(r.dtype) for r in n.reductions
        ]
    else:
        before = _Points(memory, symbols, axes)
        reduce = reductions.accumulated if n.ordered else reductions.reduced
        accumulators = [
            reduce(r, [before.value(e) for e in r.args], reduced, shape) for r in n.reductions
        ]
    if 0 not in shape:
        _write([w for w in n.writes if w.inner], _Points(memory, symbols, axes, accumulators))
    places = {d: np.zeros([1] * len(axes), int) if d in n.rdims else a for d, a in axes.items()}
    _write([w for w in n.writes if not w.inner], _Points(memory, symbols, places, accumulators))


def _run_in_order(
    n: Nest, memory: Memory, symbols: Mapping[str, int], axes: Mapping[str, np.ndarray]
) -> None:
    """One point of the free dimensions of a nest, the reduced ones step by step."""
    accumulators = [
        np.asarray(reductions.IDENTITY[r.op](r.dtype)).astype(r.dtype) for r in n.reductions
    ]
    if any(r.op in ("argmax", "argmin") for r in n.reductions):
        raise InternalError("nest: a search whose points depend on each other", at=n.at, why=str(n))
    one = (1,) * len(axes)
    for at in itertools.product(*(range(n.dims[d]) for d in n.rdims)):
        here = dict(axes) | {d: np.full(one, k) for d, k in zip(n.rdims, at)}
        point = _Points(memory, symbols, here)
        steps = [
            reductions.reduced(r, [point.value(e) for e in r.args], (), one) for r in n.reductions
        ]
        accumulators = [
            _joined(r.op, r.dtype, a, s) for r, a, s in zip(n.reductions, accumulators, steps)
        ]
        _write([w for w in n.writes if w.inner], _Points(memory, symbols, here, accumulators))
    _write([w for w in n.writes if not w.inner], _Points(memory, symbols, axes, accumulators))


def _joined(op: str, dtype: np.dtype, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    ufunc = reductions.UFUNCS["sum" if op == "dot" else op]
    if dtype.kind == "b":
        ufunc = reductions.ON_BOOLS.get(op, ufunc)
    with np.errstate(all="ignore"):
        return ufunc(x, y).astype(dtype)


def _write(writes: Sequence[Write], at: _Points) -> None:
    """Stores where masks hold and, with a guard, where places are inside.

    All is read before the first store.
    """
    shape = tuple(np.broadcast_shapes(*(a.shape for a in at.dims.values()))) if at.dims else ()
    ready = []
    for w in writes:
        index = at.places(w)
        mask = np.asarray(True) if w.mask is None else at.value(w.mask)
        inside = _inside(w.buf, index)
        if not w.guard and (mask & ~inside).any():
            raise InternalError(f"nest: a store to {w.buf} outside it")
        live = np.broadcast_to(mask & inside, shape)
        ready.append(
            [np.broadcast_to(a, shape)[live] for a in (_flat(w.buf, index), at.value(w.value))]
        )
    for w, (flat, value) in zip(writes, ready):
        at.memory.flat(w.buf)[flat] = numpy_ops.rounded(value, w.buf.dtype)


# ---------------------------------------------------------------- do points meet?


def _meets_itself(
    n: Nest, memory: Memory, symbols: Mapping[str, int], axes: Mapping[str, np.ndarray]
) -> bool:
    """Whether some point may touch what another point stores, so that their order matters."""
    at = _Points(memory, symbols, axes)
    stored: dict[Buf, list[Write]] = {}
    for w in n.writes:
        stored.setdefault(w.buf.root, []).append(w)

    def is_own(w: Write, buf: Buf, index: tuple) -> bool:
        """Whether an access is, at each point, to the element that the write stores at that point and no other."""
        if buf is not w.buf or index != w.index or n.moves():
            return False
        points = {
            d: size for d, size in n.dims.items() if size > 1 and (w.inner or d not in n.rdims)
        }
        alone = {next(iter(own)) for i in w.index if len(own := i.symbols & points.keys()) == 1}
        return points.keys() <= alone or _elements(buf, at.places(w)).size == math.prod(
            points.values()
        )

    def meet(w: Write, buf: Buf, index: tuple) -> bool:
        if buf.dtype != w.buf.dtype or None in index or n.moves():
            return True
        places = _elements(buf, [at.affine(i, {}) for i in index])
        return bool(np.intersect1d(places, _elements(w.buf, at.places(w))).size)

    loads = [(w, *e.info[:2]) for e in n.loads() for w in stored.get(e.info[0].root, ())]
    pairs = [
        (a, b.buf, b.index)
        for writes in stored.values()
        for a, b in itertools.combinations(writes, 2)
    ]
    return any(not is_own(*access) and meet(*access) for access in loads + pairs)


def _elements(buf: Buf, index: Sequence[np.ndarray]) -> np.ndarray:
    """Places inside a buffer, each once."""
    inside, flat = np.broadcast_arrays(_inside(buf, index), _flat(buf, index))
    return np.unique(flat[inside])
