"""Ref effects of a body: reads become stored values, writes become store items in program order.

Integer arrays as indices that are affine (lower/values/affine_index_arrays.py) are slices. Others
read through gathers and write in a loop over their elements, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from jax.extend import core as jex

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.primitives.ref_access import GatheredIndex, Range, ref_access
from pbkern.lower.nest.conditions.index_tests import BOOL, interval
from pbkern.lower.nest.ir import Expr, For, If, Let, Nest, Pool, Stmt, Store
from pbkern.lower.values.affine_index_arrays import (
    AffineArray,
    affine_array,
    are_distinct,
    row_steps,
)
from pbkern.lower.values.dynamic_strides import Steps, steps_along
from pbkern.lower.values.items import ControlItem, RefView, StoreItem
from pbkern.lower.values.rule_builder import RuleBuilder
from pbkern.lower.values.values import ZERO, Index, Lazy, Literal, Stored, Value, dims_index

from .elementwise import always

# Rows of fewer elements are stored one by one.
SHORTEST_STORED_ROW = 4


@dataclass
class _Place:
    """Place of an access: index of the value -> index of the Ref.

    Of the axes with index arrays, `runs` have affine ones, which are a position like any other;
    `gathers` the others.
    """

    shape: tuple[int, ...]
    offsets: list[Affine]
    strides: list[int | None]  # None: the axis takes no dimension of the value
    runs: dict[int, AffineArray]
    gathers: dict[int, Value]
    gather_at: int  # first dimension of the value that runs along the gathered elements
    gather_shape: tuple[int, ...]

    def split(self, ix: Index) -> tuple[Index, Index]:
        """(position among gathered elements, the rest)."""
        low, high = self.gather_at, self.gather_at + len(self.gather_shape)
        return ix[low:high], ix[:low] + ix[high:]

    def __call__(self, ix: Index) -> Index:
        """Index of the Ref; gathered axes at 0."""
        gathered, direct = self.split(ix)
        rest = iter(direct)
        index = [
            offset if stride is None else offset + next(rest) * stride
            for offset, stride in zip(self.offsets, self.strides)
        ]
        for axis, array in self.runs.items():
            index[axis] = array.at(gathered)
        return tuple(index)


def access(builder: RuleBuilder, eqn, env: dict) -> None:
    """get, swap, addupdate, masked_load, masked_store."""
    acc = ref_access(eqn)
    ref = builder.refs[acc.ref]
    mask = None if acc.mask is None else builder.read(env, acc.mask)
    masked = mask is not None
    place = _place(builder, env, acc.indices, ref.shape, mask, stores=acc.kind != "load")
    guard = ref.guard or (masked and not _is_in_bounds(builder, acc.indices, place, ref.shape))
    if mask is not None and not place.gathers and always(builder, mask):
        mask = None
    if (
        eqn.outvars
    ):  # of a store: the elements before, as a lazy value that costs nothing unless it is used
        value = _load(builder, ref, place, guard)
        if mask is not None and acc.kind == "load":
            other = Literal((), ref.dtype, 0) if acc.other is None else builder.read(env, acc.other)
            value = builder.new(_masked(builder, mask, value, other, place.shape))
        env[eqn.outvars[0]] = value
    if acc.value is None:  # a load
        return
    value = _broadcast(builder, builder.read(env, acc.value), place.shape)
    mask = None if mask is None else _broadcast(builder, mask, place.shape)
    if place.gathers:
        _scatter(builder, eqn, ref, place, value, mask, guard, acc.kind == "add")
    else:
        _store(builder, eqn, ref, place, value, mask, guard, acc.kind == "add")


def in_bounds(builder: RuleBuilder, ref: RefView, axis: int) -> Value:
    """Which positions of a block along `axis` are inside its array."""
    ref = ref.copied or ref
    buf_axis = ref.axes.index(axis)
    base, extent = ref.offsets[buf_axis], ref.buf.shape[buf_axis]

    def combine(pool: Pool, ix: Index, xs) -> Expr:
        return pool.in_range(base + ix[0], 0, extent)

    if not ref.guard:
        return builder.new(Literal((ref.shape[axis],), BOOL, True))
    return builder.new(Lazy((ref.shape[axis],), BOOL, (), lambda ix: (), combine, cost=1.0))


def _place(
    builder: RuleBuilder, env: dict, indices, ref_shape, mask: Value | None, stores: bool
) -> _Place:
    masked = mask is not None
    offsets: list[Affine] = []
    strides: list[int | None] = []
    shape: list[int] = []
    gathers: dict[int, Value] = {}
    first, split, seen_range = None, False, False
    for axis, (index, extent) in enumerate(zip(indices, ref_shape)):
        if isinstance(index, Range):
            reach = (index.size - 1) * index.stride + 1 if index.size else 0
            offsets.append(_start(builder, env, index.start, None if masked else extent - reach))
            strides.append(index.stride)
            shape.append(index.size)
            seen_range = first is not None
            continue
        strides.append(None)
        split |= seen_range and first is not None
        if isinstance(index, GatheredIndex):
            gathers[axis] = (
                builder.read(env, index.at)
                if isinstance(index.at, jex.Var)
                else _constant(index.at)
            )
            offsets.append(ZERO)
        else:
            offsets.append(_start(builder, env, index.at, None if masked else extent - 1))
        first = len(shape) if first is None else first
    gather_shape = next(iter(gathers.values())).shape if gathers else ()
    at = 0 if split or first is None else first
    shape[at:at] = gather_shape
    runs = _runs(builder, gathers, ref_shape, mask, tuple(shape) == tuple(gather_shape), stores)
    gathers = {axis: array for axis, array in gathers.items() if axis not in runs}
    for gather in gathers.values():
        row_steps(builder, gather)  # before it is decided what is stored
    return _Place(tuple(shape), offsets, strides, runs, gathers, at, tuple(gather_shape))


def _is_in_bounds(builder: RuleBuilder, indices, place: _Place, shape) -> bool:
    """Whether an access certainly stays inside the Ref, whatever grid indices and counters are."""
    for index, offset, extent in zip(indices, place.offsets, shape):
        reach = (index.size - 1) * index.stride if isinstance(index, Range) else 0
        bounds = None if isinstance(index, GatheredIndex) else interval(offset, builder.bounds)
        if bounds is None or bounds[0] < 0 or bounds[1] + reach >= extent:
            return False
    return True


def _runs(
    builder: RuleBuilder,
    gathers: dict[int, Value],
    ref_shape,
    mask: Value | None,
    covers: bool,
    stores: bool,
) -> dict[int, AffineArray]:
    """Axes whose indices are affine and need not be clamped.

    Stores go to distinct elements, as else the last one stays.
    """
    if not gathers:
        return {}
    shape = next(iter(gathers.values())).shape
    given = mask if covers else None  # the mask's dimensions are those of the index arrays
    affine_axes = {
        axis: array
        for axis, gather in gathers.items()
        if (array := affine_array(builder, gather, given)) is not None
    }
    if mask is None:
        affine_axes = {
            axis: affine for axis, affine in affine_axes.items() if affine.inside(ref_shape[axis])
        }
    if (
        stores
        and len(affine_axes) == len(gathers)
        and not are_distinct(list(affine_axes.values()), shape)
    ):
        return {}
    return {axis: affine.evaluated(builder) for axis, affine in affine_axes.items()}


def _constant(values) -> Value:
    array = np.asarray(values)
    if array.size and (array == array.ravel()[0]).all():
        return Literal(array.shape, array.dtype, array.ravel()[0])
    raise AssertionError("constant index arrays are inputs of a kernel")


def _start(builder: RuleBuilder, env: dict, start, clamp: int | None) -> Affine:
    """A static or dynamic start.

    Dynamic ones are clamped so that the slice stays inside the block, as lax.dynamic_slice does;
    masked accesses drop outside elements instead.
    """
    if isinstance(start, (int, np.integer)):
        return Affine((), int(start))
    return builder.index_symbol(builder.read(env, start), clamp)


def _load(builder: RuleBuilder, ref: RefView, place: _Place, guard: bool) -> Value:
    if not place.gathers:
        return builder.new(
            Stored(place.shape, ref.dtype, ref.buf, lambda ix: ref.place(place(ix)), guard)
        )
    whole = builder.new(Stored(ref.shape, ref.dtype, ref.buf, ref.place, guard))
    axes = list(place.gathers)

    def route(ix: Index):
        # The Ref is an operand so that order of effects sees it; its elements are read in
        # `combine`.
        return [(ZERO,) * len(ref.shape), *(place.split(ix)[0] for _ in axes)]

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        return builder.gather_expr(
            whole, list(place(ix)), dict(zip(axes, xs[1:])), (1,) * len(ref.shape), None
        )

    return builder.new(
        Lazy(place.shape, ref.dtype, (whole, *place.gathers.values()), route, combine, cost=8.0)
    )


def _store(
    builder: RuleBuilder,
    eqn,
    ref: RefView,
    place: _Place,
    value: Value,
    mask: Value | None,
    guard: bool,
    add: bool,
) -> None:
    target: Callable[[Index], Index] = lambda ix: ref.place(place(ix))
    if add:
        value = _sum(builder, Stored(place.shape, ref.dtype, ref.buf, target, guard), value)
    builder.items.append(
        StoreItem(ref.buf, place.shape, target, value, mask, guard, at=builder.line(eqn))
    )


def _scatter(
    builder: RuleBuilder,
    eqn,
    ref: RefView,
    place: _Place,
    value: Value,
    mask: Value | None,
    guard: bool,
    add: bool,
) -> None:
    """for each gathered element: evaluate its indices, then store that slice of the value."""

    def run() -> None:
        scatter = _Scatter(builder, ref, place, value, mask, guard, add, builder.line(eqn))
        builder.stmts += scatter.statements()

    uses = (value, *place.gathers.values()) + (() if mask is None else (mask,))
    builder.append_control(ControlItem(uses, frozenset({ref.buf}), run), [])


@dataclass
class _Scatter:
    """Stores through index arrays: rows that are runs as vectors, others element by element."""

    builder: RuleBuilder
    ref: RefView
    place: _Place
    value: Value
    mask: Value | None
    guard: bool
    add: bool
    line: str | None

    def statements(self) -> list[Stmt]:
        counters = [(self.builder.names("%i"), size) for size in self.place.gather_shape]
        at = dims_index(counters)
        body: list[Stmt] = self._elements(at, counters[-1:])
        if counters and counters[-1][1] >= SHORTEST_STORED_ROW:
            steps = self._even_steps(at, counters[-1][0])
            if steps is not None:
                body = self._row(at, *counters[-1], steps, body)
        for name, count in reversed(counters[:-1]):
            body = [For(name, count, tuple(body))]
        return body

    def _elements(self, at: Index, counters: list[tuple[str, int]]) -> list[Stmt]:
        """for the last counter: each element by itself, in order."""
        names = {axis: self.builder.names("%s") for axis in self.place.gathers}
        body: list[Stmt] = [Let(names[axis], self._index(axis, at)) for axis in names]
        body.append(self._nest(at, [], {axis: Affine.symbol(name) for axis, name in names.items()}))
        for name, size in counters:
            body = [For(name, size, tuple(body))]
        return body

    def _index(self, axis: int, at: Index) -> Expr:
        return self.builder.clamped(
            self.builder.pull(self.place.gathers[axis], at), self.ref.shape[axis] - 1
        )

    def _nest(self, at: Index, dims: list[tuple[str, int]], axes: dict[int, Affine]) -> Nest:
        """Stores the slices of the value at the gathered positions `at`, whose indices are `axes`."""
        place, low = self.place, self.place.gather_at
        rest = [
            (self.builder.names("d"), size)
            for size in place.shape[:low] + place.shape[low + len(place.gather_shape) :]
        ]
        ix = dims_index(rest)
        full = ix[:low] + at + ix[low:]
        index = self.ref.place(tuple(axes.get(k, i) for k, i in enumerate(place(full))))
        expr = self.builder.pull(self.value, full, None)
        if self.add:
            old = self.builder.pool.load(self.ref.dtype, self.ref.buf, index, self.guard)
            expr = self.builder.op("add", self.ref.dtype, old, expr)
        mask = None if self.mask is None else self.builder.pull(self.mask, full)
        store = Store(self.ref.buf, index, expr, True, self.guard, mask)
        return Nest(dict(rest[:low] + dims + rest[low:]), stores=(store,), at=self.line)

    # ---- rows

    def _even_steps(self, at: Index, counter: str) -> dict[int, tuple[int, Steps]] | None:
        """Axis -> (step, what could bend it) if the indices move evenly along the last counter unless their bends show.

        Elements are then distinct. None if they do not.
        """
        even: dict[int, tuple[int, Steps]] = {}
        for axis in self.place.gathers:
            steps = steps_along(self._index(axis, at), counter)
            if steps.step is None:
                return None
            even[axis] = steps.step, steps
        return even if any(step for step, _ in even.values()) else None

    def _row(
        self,
        at: Index,
        counter: str,
        length: int,
        even: dict[int, tuple[int, Steps]],
        elements: Sequence[Stmt],
    ) -> list[Stmt]:
        """If the row is a run: one nest; otherwise `elements`."""
        lets: list[Stmt] = []
        axes, tests = {}, []
        dim = self.builder.names("d")
        for axis, (step, steps) in even.items():
            index = self._index(axis, at)
            first, last = (
                self.builder.pool.rename(index, {counter: Affine((), position)})
                for position in (0, length - 1)
            )
            name = self.builder.names("%s")
            lets.append(Let(name, first))
            axes[axis] = Affine.symbol(name) + Affine.symbol(dim, step)
            distance = self.builder.const(step * (length - 1), index.dtype)
            tests.append(
                self.builder.op(
                    "eq", BOOL, self.builder.op("sub", index.dtype, last, first), distance
                )
            )
            for choice in steps.choices:
                ends = [
                    self.builder.pool.rename(choice, {counter: Affine((), position)})
                    for position in (0, length - 1)
                ]
                tests.append(self.builder.op("eq", BOOL, *ends))
        test = functools.reduce(
            lambda left, right: self.builder.op("and", BOOL, left, right), tests
        )
        is_run = self.builder.names("%s")
        lets.append(Let(is_run, self.builder.clamped(test, 1)))
        nest = self._nest((*at[:-1], Affine.symbol(dim)), [(dim, length)], axes)
        return [*lets, If(is_run, (tuple(elements), (nest,)))]


def _masked(builder: RuleBuilder, mask: Value, stored: Value, other: Value, shape) -> Lazy:
    def route(ix: Index):
        return [_fit(ix, operand.shape) for operand in (mask, stored, other)]

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        return builder.select(xs[0], xs[1], xs[2])

    return Lazy(shape, stored.dtype, (mask, stored, other), route, combine, cost=1.0)


def _sum(builder, old: Value, new: Value) -> Lazy:
    builder.new(old)

    def combine(pool: Pool, ix: Index, xs: list[Expr]) -> Expr:
        return builder.op("add", old.dtype, *xs)

    return builder.new(
        Lazy(old.shape, old.dtype, (old, new), lambda ix: (ix, ix), combine, cost=1.0)
    )


def _fit(ix: Index, shape) -> Index:
    """Index of an operand that broadcasts (rank 0, or size-1 dimensions)."""
    return (
        tuple(position if size != 1 else ZERO for position, size in zip(ix, shape)) if shape else ()
    )


def _broadcast(builder, value: Value, shape) -> Value:
    if value.shape == shape:
        return value
    if isinstance(value, Literal):
        return Literal(shape, value.dtype, value.scalar)
    lead = len(shape) - len(value.shape)
    return builder.new(
        Lazy(
            shape,
            value.dtype,
            (value,),
            lambda ix: (_fit(ix[lead:], value.shape),),
            lambda pool, ix, xs: xs[0],
            is_view=True,
        )
    )
