"""Statements of nests on NumPy arrays: the oracle between a kernel's body and what a target emits.

A nest runs over all of its points at once where no point reads what another one writes, else point
by point, in the order of its dimensions, those that are reduced innermost. A point reads all that
it reads before it stores. What is unspecified is poison, as in dsl/interpret.py: scratch before it
is written, and guarded loads outside their buffer. An access without a guard that is outside raises
InternalError. A copy stores when it is waited for, as late as the program allows; whoever touches
its target before that is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import InternalError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise_row import rounded
from pbkern.dsl.interpret import poison
from pbkern.lower.nest.ir import Accumulator, Const, Gather, IndexValue, InRange, Load, Op, Shifted

from . import numpy_ops, reductions
from .async_copies import (
    CopiesUnderWay,
    CopyUnderWay,
    ProductsUnderWay,
    ProductUnderWay,
    copied,
)
from .ir import (
    AsyncCopy,
    AsyncProduct,
    Buf,
    Expr,
    For,
    If,
    Let,
    Nest,
    Prefetch,
    Reduction,
    Sort,
    Stmt,
    Store,
    Trace,
    Wait,
    While,
)
from .tiles.tiling import Tiling

# trace(site, values of the buffers that it hands over)
Tracer = Callable[[int, list[np.ndarray]], None]


@dataclass
class NestMemory:
    """Contents of root buffers.

    Scratch that is not there yet is made when it is first touched, full of poison.
    """

    arrays: dict[Buf, np.ndarray] = field(default_factory=dict)  # flat
    copies: CopiesUnderWay = field(default_factory=CopiesUnderWay)
    products: ProductsUnderWay = field(default_factory=ProductsUnderWay)

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


def run(stmts: Sequence[Stmt], memory: NestMemory, symbols: dict[str, int], trace: Tracer) -> None:
    """Runs statements in order. `symbols`: values of grid indices; Lets and counters are added."""
    for stmt in stmts:
        match stmt:
            case Nest():
                _run_nest(stmt, memory, symbols)
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
                _sort(stmt, memory)
            case Trace(site=site, buffers=buffers):
                trace(site, [memory.read(buffer) for buffer in buffers])
            case AsyncCopy(body=body):
                memory.copies.groups.append([])
                for nest in body:
                    _begin(nest, memory, dict(symbols))
            case AsyncProduct(body=body):
                memory.products.begins = True
                run(body, memory, symbols, trace)
                memory.products.begins = False
                begun = [
                    ProductUnderWay.of(nest, symbols) for nest in body if isinstance(nest, Nest)
                ]
                memory.products.groups.append(begun)
            case Wait(groups=groups, products=True):
                done = max(len(memory.products.groups) - groups, 0)
                del memory.products.groups[:done]
            case Wait(groups=groups):
                while len(memory.copies.groups) > groups:
                    for copy in memory.copies.groups.pop(0):
                        _end(copy, memory)
            case Prefetch():
                pass  # changes nothing


def _begin(nest: Stmt, memory: NestMemory, symbols: dict[str, int]) -> None:
    assert isinstance(nest, Nest)
    copy = CopyUnderWay(nest, symbols, *_copied(nest, memory, symbols))
    memory.copies.begin(copy)
    memory.products.touch(nest.stores[0].buf, copy.places, "a copy to", is_store=True)
    memory.copies.groups[-1].append(copy)


def _end(copy: CopyUnderWay, memory: NestMemory) -> None:
    places, values = _copied(copy.nest, memory, copy.symbols)
    memory.copies.end(copy, values)
    memory.flat(copy.nest.stores[0].buf)[places] = values


def _copied(
    nest: Nest, memory: NestMemory, symbols: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(places that a copy stores to, what it stores there)."""
    points, source = _Points(memory, symbols, _axes(nest)), copied(nest)
    if source is None:
        raise InternalError("nest: a copy computes", why=str(nest))
    load, tests = source
    live = np.asarray(True)
    for test in tests:
        live = live & points.value(test)
    if (live & ~_inside(load.buf, [points.affine(place, {}) for place in load.index])).any():
        raise InternalError(
            f"nest: a copy reads outside of {load.buf.name}, where it has to store zeros",
            why=str(nest),
        )
    ((places, values),) = _stored(nest.stores, points)
    return places, rounded(values, nest.stores[0].buf.dtype)


def _sort(sort: Sort, memory: NestMemory) -> None:
    """Stable, by the first keys; NaN last, -0 equal to 0."""
    keys = [_rising(memory.read(buffer)) for buffer in sort.buffers[: sort.num_keys]]
    lines, length = sort.buffers[0].shape
    orders = np.lexsort(keys[::-1], axis=-1) if length else np.zeros((lines, 0), np.int64)
    for buffer in sort.buffers:
        memory.flat(buffer)[:] = np.take_along_axis(memory.read(buffer), orders, -1).reshape(-1)


def _rising(key: np.ndarray) -> np.ndarray:
    """Numbers in the order of the keys, integers for floats: comparisons of floats depend on the processor's mode."""
    register = numpy_ops.register_dtype(key.dtype)
    if register.kind != "f":
        return rounded(key, register)
    bits = key.view(f"i{key.dtype.itemsize}")
    largest = np.iinfo(bits.dtype).max
    infinity = np.array(np.inf, key.dtype).view(bits.dtype)
    size = bits & largest
    bits = np.where(size == 0, 0, np.where(size > infinity, largest, bits))
    return np.where(bits < 0, bits ^ largest, bits)


# ---------------------------------------------------------------- expressions at points


class _Points:
    """Points of a nest: values of its dimensions, as arrays that broadcast against each other."""

    def __init__(
        self,
        memory: NestMemory,
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

    def affine(self, index: Affine, moved: Mapping[str, int]) -> np.ndarray:
        total: np.ndarray | np.integer = np.int64(index.const)
        for symbol, coefficient in index.terms:
            total = total + coefficient * (
                self.dims[symbol] + moved.get(symbol, 0)
                if symbol in self.dims
                else np.int64(self.symbols[symbol])
            )
        return np.asarray(total)

    def value(self, expr: Expr, moved: Mapping[str, int] | None = None) -> np.ndarray:
        """Register values of an expression; `moved`: how far from the points it is taken, by dimension."""
        moved = moved or {}
        key = (id(expr), tuple(sorted(moved.items())))
        if key not in self.memo:
            self.memo[key] = self._value(expr, moved)
        return self.memo[key]

    def _value(self, expr: Expr, moved: Mapping[str, int]) -> np.ndarray:
        dtype = numpy_ops.register_dtype(expr.dtype)
        match expr:
            case Const():
                return np.asarray(expr.value).astype(dtype)
            case IndexValue():
                return self.affine(expr.affine, moved).astype(dtype)
            case InRange():
                at = self.affine(expr.affine, moved)
                return (expr.low <= at) & (at < expr.high)
            case Load():
                buf, index, guard = expr.buf, expr.index, expr.guard
                return self._load(
                    buf, [self.affine(position, moved) for position in index], guard
                ).astype(dtype)
            case Gather():
                return self._gather(expr, moved).astype(dtype)
            case Accumulator():
                return self.accumulators[expr.number]
            case Shifted():
                there = dict(moved)
                for dim, distance in expr.moves:
                    there[dim] = there.get(dim, 0) + distance
                return self.value(expr.args[0], there)
            case Op():
                return numpy_ops.apply(expr.info, [self.value(arg, moved) for arg in expr.args])
        raise InternalError(f"nest: no value of {type(expr).__name__}")

    def _load(self, buf: Buf, index: Sequence[np.ndarray], guard: bool) -> np.ndarray:
        inside = _inside(buf, index)
        if not guard and not inside.all():
            raise InternalError(f"nest: a load of {buf} outside it")
        if buf.size == 0:
            return np.full(inside.shape, poison(buf.dtype), buf.dtype)
        ends = zip(index, buf.shape, _bounded(buf))
        flat = _flat(
            buf,
            [np.clip(at, 0, size - 1) if bounded else at for at, size, bounded in ends],
        )
        if self.memory.copies.contents:
            places = np.broadcast_to(flat, inside.shape)[inside]
            self.memory.copies.touch(buf, places, "a load of")
        self.memory.products.touch(buf, flat, "a load of", is_store=False)
        elements = self.memory.flat(buf)[flat]
        return elements if inside.all() else np.where(inside, elements, poison(buf.dtype))

    def _gather(self, expr: Gather, moved: Mapping[str, int]) -> np.ndarray:
        buf, index = expr.access
        args = iter(expr.args)
        places = [
            self.value(next(args), moved) if position is None else self.affine(position, moved)
            for position in index
        ]
        if buf.size == 0:
            return np.zeros(np.broadcast_shapes(*(place.shape for place in places)), buf.dtype)
        ends = zip(places, buf.shape, _bounded(buf))
        flat = _flat(
            buf, [np.clip(at, 0, size - 1) if bounded else at for at, size, bounded in ends]
        )
        self.memory.copies.touch(buf, flat, "a load of")
        return self.memory.flat(buf)[flat]

    def places(self, store: Store) -> list[np.ndarray]:
        return [self.affine(position, {}) for position in store.index]


def _bounded(buf: Buf) -> list[bool]:
    """Per axis whether places have to lie within its size: not along stages."""
    return [axis > 0 or not buf.circular for axis in range(len(buf.shape))]


def _inside(buf: Buf, index: Sequence[np.ndarray]) -> np.ndarray:
    inside = np.asarray(True)
    for position, size, bounded in zip(index, buf.shape, _bounded(buf)):
        inside = inside & ((position >= 0) & (position < size) | (not bounded))
    return inside


def _flat(buf: Buf, index: Sequence[np.ndarray]) -> np.ndarray:
    flat = np.asarray(0)
    for position, size, stride, bounded in zip(index, buf.shape, buf.strides, _bounded(buf)):
        place = position.astype(np.int64)
        flat = flat + (place if bounded else place % size) * stride
    return flat


# ---------------------------------------------------------------- nests


def _run_nest(nest: Nest, memory: NestMemory, symbols: Mapping[str, int]) -> None:
    free = [dim for dim in nest.dims if dim not in nest.rdims]
    if any(nest.dims[dim] == 0 for dim in free):
        return
    axes = _axes(nest)
    if not _meets_itself(nest, memory, symbols, axes):
        _run_points(nest, memory, symbols, axes)
        return
    run = (
        _run_in_order if any(store.inner for store in nest.stores) and nest.rdims else _run_points
    )  # one point alone meets nothing
    for at in itertools.product(*(range(nest.dims[dim]) for dim in free)):
        run(
            nest,
            memory,
            symbols,
            axes | {dim: np.full([1] * len(axes), position) for dim, position in zip(free, at)},
        )


def _axes(nest: Nest) -> dict[str, np.ndarray]:
    """Values of each dimension, along an axis of its own."""
    return {
        dim: np.arange(size).reshape([-1 if k == at else 1 for k in range(len(nest.dims))])
        for at, (dim, size) in enumerate(nest.dims.items())
    }


def _run_points(
    nest: Nest, memory: NestMemory, symbols: Mapping[str, int], axes: Mapping[str, np.ndarray]
) -> None:
    """All points of `axes` at once."""
    shape = tuple(axis.size for axis in axes.values())
    reduced = tuple(k for k, axis in enumerate(axes) if axis in nest.rdims)
    if 0 in shape:  # nothing is reduced
        axes = {
            dim: axis if axis.size else np.zeros([1] * len(axes), int) for dim, axis in axes.items()
        }
        accumulators = [reductions.start(reduction) for reduction in nest.reductions]
    else:
        before = _Points(memory, symbols, axes)
        reduce = reductions.accumulated if nest.ordered else reductions.reduced
        accumulators = [
            reduce(reduction, _read(nest, reduction, before), reduced, shape)
            for reduction in nest.reductions
        ]
    if 0 not in shape:
        _write(
            [store for store in nest.stores if store.inner],
            _Points(memory, symbols, axes, accumulators),
        )
    places = {
        dim: np.zeros([1] * len(axes), int) if dim in nest.rdims else axis
        for dim, axis in axes.items()
    }
    _write(
        [store for store in nest.stores if not store.inner],
        _Points(memory, symbols, places, accumulators),
    )


def _read(nest: Nest, reduction: Reduction, points: _Points) -> list[np.ndarray]:
    """Operands of a reduction at points; of a matrix instruction the part that it reads."""
    values = [points.value(arg) for arg in reduction.args]
    if not isinstance(nest.by, Tiling) or not reduction.is_product:
        return values
    return [nest.by.instruction.as_read(value) for value in values]


def _run_in_order(
    nest: Nest, memory: NestMemory, symbols: Mapping[str, int], axes: Mapping[str, np.ndarray]
) -> None:
    """One point of the free dimensions of a nest, the reduced ones step by step."""
    accumulators = [reductions.start(reduction) for reduction in nest.reductions]
    if any(reduction.is_search for reduction in nest.reductions):
        raise InternalError(
            "nest: a search whose points depend on each other", at=nest.at, why=str(nest)
        )
    one = (1,) * len(axes)
    for at in itertools.product(*(range(nest.dims[rdim]) for rdim in nest.rdims)):
        here = dict(axes) | {rdim: np.full(one, position) for rdim, position in zip(nest.rdims, at)}
        point = _Points(memory, symbols, here)
        steps = [
            reductions.reduced(reduction, [point.value(arg) for arg in reduction.args], (), one)
            for reduction in nest.reductions
        ]
        accumulators = [
            reductions.joined(reduction, accumulator, step)
            for reduction, accumulator, step in zip(nest.reductions, accumulators, steps)
        ]
        _write(
            [store for store in nest.stores if store.inner],
            _Points(memory, symbols, here, accumulators),
        )
    _write(
        [store for store in nest.stores if not store.inner],
        _Points(memory, symbols, axes, accumulators),
    )


def _write(stores: Sequence[Store], at: _Points) -> None:
    """Stores where masks hold and, with a guard, where places are inside.

    All is read before the first store.
    """
    for store, (flat, value) in zip(stores, _stored(stores, at)):
        at.memory.copies.touch(store.buf, flat, "a store to")
        at.memory.products.touch(store.buf, flat, "a store to", is_store=True)
        at.memory.flat(store.buf)[flat] = rounded(value, store.buf.dtype)


def _stored(stores: Sequence[Store], at: _Points) -> list[list[np.ndarray]]:
    """[places in the buffer, values that are stored there] of each store."""
    shape = (
        tuple(np.broadcast_shapes(*(points.shape for points in at.dims.values())))
        if at.dims
        else ()
    )
    ready = []
    for store in stores:
        index = at.places(store)
        mask = np.asarray(True) if store.mask is None else at.value(store.mask)
        inside = _inside(store.buf, index)
        if not store.guard and (mask & ~inside).any():
            raise InternalError(f"nest: a store to {store.buf} outside it")
        live = np.broadcast_to(mask & inside, shape)
        ready.append(
            [
                np.broadcast_to(array, shape)[live]
                for array in (_flat(store.buf, index), at.value(store.value))
            ]
        )
    return ready


# ---------------------------------------------------------------- do points meet?


def _meets_itself(
    nest: Nest, memory: NestMemory, symbols: Mapping[str, int], axes: Mapping[str, np.ndarray]
) -> bool:
    """Whether some point may touch what another point stores, so that their order matters."""
    at = _Points(memory, symbols, axes)
    stored: dict[Buf, list[Store]] = {}
    for store in nest.stores:
        stored.setdefault(store.buf.root, []).append(store)

    def is_own(store: Store, buf: Buf, index: tuple) -> bool:
        """Whether an access is, at each point, to the element that it stores at that point and no other."""
        if buf is not store.buf or index != store.index or nest.moves():
            return False
        points = {
            dim: size
            for dim, size in nest.dims.items()
            if size > 1 and (store.inner or dim not in nest.rdims)
        }
        alone = {
            next(iter(moving))
            for position in store.index
            if len(moving := position.symbols & points.keys()) == 1
        }
        return points.keys() <= alone or _elements(buf, at.places(store)).size == math.prod(
            points.values()
        )

    def meet(store: Store, buf: Buf, index: tuple) -> bool:
        if buf.dtype != store.buf.dtype or None in index or nest.moves():
            return True
        places = _elements(buf, [at.affine(position, {}) for position in index])
        return bool(np.intersect1d(places, _elements(store.buf, at.places(store))).size)

    loads = [
        (store, *load.access) for load in nest.loads() for store in stored.get(load.buf.root, ())
    ]
    pairs = [
        (first, second.buf, second.index)
        for stores in stored.values()
        for first, second in itertools.combinations(stores, 2)
    ]
    return any(not is_own(*access) and meet(*access) for access in loads + pairs)


def _elements(buf: Buf, index: Sequence[np.ndarray]) -> np.ndarray:
    """Places inside a buffer, each once."""
    inside, flat = np.broadcast_arrays(_inside(buf, index), _flat(buf, index))
    return np.unique(flat[inside])
