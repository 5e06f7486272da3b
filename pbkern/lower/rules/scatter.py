"""scatter, scatter-add, ...: a loop combines updates with the operand.

The operand is stored where the result goes, then the loop takes the updates in order. One step of
the loop is one window: its start is computed, tested against the operand's bounds as `mode` says,
and the window is a nest of its own, vectors along its last dimension. Indices and updates are read
where they are needed, so that what makes them is computed there; those of windows of one element
are made in strips where the target asks for them:

    for i:  a[f(x[i])] += g(y[i])     ->     for each strip:  s[:] = f(x[strip]);  u[:] = g(y[strip])
                                                              for i:  a[s[i]] += u[i]

Windows whose elements lie apart, as of columns, become windows of one element where the target asks for that:

    for i:  a[:, x[i]] += y[:, i]     ->     for each row r:  for i:  a[r, x[i]] += y[r, i]
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.errors import UnsupportedOp
from pbkern.core.ops.scatter import ScatterForm, scatter_combines
from pbkern.lower.build_options import BuildOptions
from pbkern.lower.math import elementwise
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, For, If, Let, Load, Nest, Op, Prefetch, Stmt, Store, nodes
from pbkern.lower.values.store_hazards import is_stored_in
from pbkern.lower.values.values import ZERO, Index, Lazy, Opaque, Stored, Value, dims_index

BOOL = np.dtype(bool)
INDEX = np.dtype(np.int64)
# First elements of a long window that are prefetched; the processor prefetches the rest.
FETCHED_ELEMENTS = 256
# Updates from which a row of the result takes all of them before the next row. Not measured.
FEWEST_UPDATES_OF_ROWS = 16
# Bytes of the widest elements for which that pays, where updates are read and not computed. Measured on Zen 3, one thread, 700
# columns of 1,000 x 1,001, ms column by column and row by row: float16 2.0 and 1.35, float32 2.4 and 1.7, float64 2.8 and 3.4.
WIDEST_OF_ROWS = 4


def supports(eqn) -> str | None:
    """None if bodies can contain the scatter, else why not."""
    combine, dtype = scatter_combines(eqn), np.dtype(eqn.outvars[0].aval.dtype)
    if combine is None:
        return "it applies a function of its own to the elements"
    if combine != "set" and not elementwise.supports(combine, (dtype, dtype), dtype):
        return f"`{combine}` is not covered for {dtype.name}"
    return None


def scatter(builder, eqn, ins: list[Value]) -> Opaque:
    """Rule of the family. Raises UnsupportedOp."""
    reason = supports(eqn)
    if reason is not None:
        raise UnsupportedOp(
            f"`{eqn.primitive.name}` is not lowered",
            at=builder.line(eqn),
            why=reason,
            hint="leave this operation to XLA",
        )
    operand, indices, updates = ins
    columns = [builder.new(_column(indices, k)) for k in range(indices.shape[-1])]

    def make(
        inner_builder, operand: Value, updates: Value, *columns: Value, target: Stored | None = None
    ) -> Stored:
        result = target or inner_builder.new_buffer(operand.shape, operand.dtype)
        if not is_stored_in(inner_builder, operand, result):
            inner_builder.store_value(result, operand, lambda ix: ix)
        inner_builder.stmts += _ScatterWindows(
            inner_builder, eqn, result, columns, updates
        ).statements()
        return result

    return Opaque(
        operand.shape,
        operand.dtype,
        (operand, updates, *columns),
        make,
        needs_buffers=False,
        takes_target=True,
        over_first=True,
    )


def _column(indices: Value, k: int) -> Lazy:
    """Number `k` of every index vector."""
    return Lazy(
        indices.shape[:-1],
        indices.dtype,
        (indices,),
        lambda ix: ((*ix, Affine((), k)),),
        lambda pool, ix, xs: xs[0],
        is_view=True,
    )


class _ScatterWindows:
    """The windows that one scatter combines updates with, in the body being built."""

    def __init__(self, builder, eqn, result: Stored, columns: Sequence[Value], updates: Value):
        self.b, self.result, self.columns, self.updates = builder, result, columns, updates
        self.options: BuildOptions = builder.context.options
        self.form, self.clip = ScatterForm.of(eqn), "CLIP" in str(eqn.params["mode"])
        self.combine, self.line = scatter_combines(eqn), builder.line(eqn)
        self.counters = {
            loop: (builder.names("%i"), updates.shape[loop]) for loop in self.form.loops
        }
        self.dims = {
            dim: (builder.names("d"), updates.shape[dim]) for dim in self.form.windows.values()
        }
        if self.takes_elements():
            moved = {dim: (builder.names("%i"), size) for dim, (_, size) in self.dims.items()}
            self.counters, self.dims = moved | self.counters, {}

    def takes_elements(self) -> bool:
        """Whether loops over the elements of windows are around those over updates.

        That pays where the result is no near one, elements of windows lie apart in it, and updates do not follow one another
        along windows: a row of the result takes all its updates while it is near, and these are made in vectors.
        """
        nbytes = math.prod(self.result.shape) * self.result.dtype.itemsize
        windows = {dim: name for dim, (name, size) in self.dims.items() if size > 1}
        updates = math.prod(count for _, count in self.counters.values())
        if (
            not 0 < self.options.scatter_row_bytes <= nbytes
            or not windows
            or updates < FEWEST_UPDATES_OF_ROWS
            or self.form.windows.get(len(self.result.shape) - 1) in windows
        ):
            return False
        at = {**_symbols(self.counters), **_symbols(self.dims)}
        value = self.b.pull(self.updates, self.index_of(self.updates, at))
        if self.result.dtype.itemsize > WIDEST_OF_ROWS and not isinstance(value, Op):
            return False
        return not any(
            isinstance(load, Load) and flat_coefficient(load.buf, load.index, name) == 1
            for load in nodes([value])
            for name in windows.values()
        )

    def loops(self, at: dict[int, Affine]) -> tuple[Affine, ...]:
        """Position of an update among the indices."""
        return tuple(at[loop] for loop in self.form.loops)

    def starts(self, at: dict[int, Affine]) -> tuple[list[Stmt], dict[int, Affine]]:
        """(scalars to evaluate; where the window of the update at `at` starts, per dimension that indices choose)."""
        lets: list[Stmt] = []
        offsets = {}
        for dim, column in self.form.starts.items():
            start, name = self.b.pull(self.columns[column], self.loops(at)), self.b.names("%s")
            lets.append(
                Let(name, self.b.clamped(start, self.form.limits[dim]) if self.clip else start)
            )
            offsets[dim] = Affine.symbol(name)
        return lets, offsets

    def place(
        self, at: dict[int, Affine], offsets: dict[int, Affine], inside: dict[int, Affine]
    ) -> Index:
        """Index of the result's buffer at position `inside` a window."""

        def along(axis: int) -> Affine:
            if axis in self.form.batch:
                return at[self.form.loops[self.form.batch[axis]]]
            return offsets.get(axis, ZERO) + (
                (at | inside)[self.form.windows[axis]] if axis in self.form.windows else ZERO
            )

        return self.result.place(tuple(map(along, range(len(self.result.shape)))))

    def statements(self) -> list[Stmt]:
        """for each index vector: if its window is inside: result[window] = combine(result[window], update)."""
        at = _symbols(self.counters)
        if not self.counters:
            return self.step(at)
        *outer, (loop, (name, count)) = self.counters.items()
        last = self.b.const(count - 1, INDEX)
        strips = self.options.scatter_strip > 0
        operands = (
            [column for column in (*self.columns, self.updates) if self.is_made(column, at)]
            if strips
            else []
        )
        stmts: list[Stmt] = (
            self.in_strips(loop, operands)
            if operands and count > 1
            else [For(name, count, tuple(self.fetch(at, loop, last) + self.step(at)))]
        )
        for _, (name, count) in reversed(outer):
            stmts = [For(name, count, tuple(stmts))]
        return stmts

    def step(self, at: dict[int, Affine]) -> list[Stmt]:
        lets, offsets = self.starts(at)
        tests = [] if self.clip else [self.inside(dim, start) for dim, start in offsets.items()]
        return [*lets, *_under(self.b, tests, self.window(at, offsets))]

    def is_made(self, value: Value, at: dict[int, Affine]) -> bool:
        """Whether a value of the updates is more than read, and one element of it all that a window needs."""
        return math.prod(size for _, size in self.dims.values()) == 1 and isinstance(
            self.b.pull(value, self.index_of(value, at)), Op
        )

    def index_of(self, value: Value, at: dict[int, Affine]) -> Index:
        """Index of an update's elements in an index column or in the updates; of windows, the first one."""
        return (
            tuple(at.get(axis, ZERO) for axis in range(len(value.shape)))
            if value is self.updates
            else self.loops(at)
        )

    def in_strips(self, axis: int, operands: list[Value]) -> list[Stmt]:
        """The updates along `axis`; values in `operands` are stored strip by strip."""
        (_, length), name, size = (
            self.counters[axis],
            self.b.names("%i"),
            self.options.scatter_strip,
        )
        full, rest = divmod(length, size)
        stmts: list[Stmt] = (
            [For(name, full, tuple(self.strip(axis, operands, Affine.symbol(name, size), size)))]
            if full
            else []
        )
        return stmts + (self.strip(axis, operands, Affine((), full * size), rest) if rest else [])

    def strip(self, dim: int, operands: list[Value], start: Affine, size: int) -> list[Stmt]:
        builder, each, step = self.b, self.b.names("%i"), self.b.names("d")
        nests: list[Stmt] = []
        stored: dict[Value, Value] = {}
        at = _symbols(self.counters)
        for operand in operands:
            buf, axis = (
                builder.new_buffer((size,), operand.dtype).buf,
                dim if operand is self.updates else self.form.loops.index(dim),
            )
            stored[operand] = Stored(operand.shape, operand.dtype, buf, _along(axis, start))
            value = builder.pull(
                operand, self.index_of(operand, {**at, dim: start + Affine.symbol(step)})
            )
            nests.append(
                Nest(
                    {step: size}, stores=(Store(buf, (Affine.symbol(step),), value),), at=self.line
                )
            )
        near = copy.copy(self)
        near.columns, near.updates = (
            [stored.get(column, column) for column in self.columns],
            stored.get(self.updates, self.updates),
        )
        at, last = (
            {**at, dim: start + Affine.symbol(each)},
            builder.pool.index(INDEX, start + (size - 1)),
        )
        return [*nests, For(each, size, tuple(near.fetch(at, dim, last) + near.step(at)))]

    def inside(self, axis: int, start: Affine) -> Expr:
        """Whether 0 <= start <= limit: negative numbers are large ones without a sign."""
        unsigned = np.dtype(np.uint64)
        limit = self.b.const(self.form.limits[axis], unsigned)
        return self.b.op("le", BOOL, self.b.pool.index(unsigned, start), limit)

    def window(self, at: dict[int, Affine], offsets: dict[int, Affine]) -> Nest:
        builder, result, inside = self.b, self.result, _symbols(self.dims)
        index = self.place(at, offsets, inside)
        value = builder.pull(
            self.updates, tuple({**at, **inside}[axis] for axis in range(len(self.updates.shape)))
        )
        if self.combine != "set":
            old = builder.pool.load(result.dtype, result.buf, index, result.guard)
            value = builder.op(self.combine, result.dtype, old, value)
        store = Store(result.buf, index, value, guard=result.guard)
        return Nest(dict(self.dims.values()), stores=(store,), at=self.line)

    def fetch(self, at: dict[int, Affine], dim: int, last: Expr) -> list[Stmt]:
        """Prefetches the window some updates ahead along `dim`, of the `last` one at most.

        The processor looks only some instructions ahead itself.
        """
        ahead, nbytes = (
            self.options.fetch_ahead,
            math.prod(self.result.shape) * self.result.dtype.itemsize,
        )
        if not ahead or self.counters[dim][1] <= 4 * ahead or nbytes < self.options.fetch_bytes:
            return []
        name = self.b.names("%s")
        number = self.b.op("min", INDEX, self.b.pool.index(INDEX, at[dim] + ahead), last)
        later = {**at, dim: Affine.symbol(name)}
        lets, offsets = self.starts(later)
        # A window outside may be another program's: the first one is asked for instead, and is
        # near.
        for dim, start in () if self.clip else tuple(offsets.items()):
            here, symbol = self.b.pool.index(INDEX, start), self.b.names("%s")
            lets.append(
                Let(symbol, self.b.select(self.inside(dim, start), here, self.b.const(0, INDEX)))
            )
            offsets[dim] = Affine.symbol(symbol)
        row = self.updates.shape[-1] if len(self.updates.shape) - 1 in self.dims else 1
        first = self.place(later, offsets, dict.fromkeys(self.dims, ZERO))
        return [
            Let(name, number),
            *lets,
            Prefetch(self.result.buf, first, min(row, FETCHED_ELEMENTS)),
        ]


def _along(axis: int, start: Affine) -> Callable[[Index], Index]:
    """Index -> place in a line that holds what is at `start` along an axis, and behind."""
    return lambda ix: (ix[axis] - start,)


def _symbols(counters: dict[int, tuple[str, int]]) -> dict[int, Affine]:
    """Dimension -> the symbol that counts along it."""
    return dict(zip(counters, dims_index(list(counters.values()))))


def _under(builder, tests: list[Expr], nest: Nest) -> list[Stmt]:
    """`nest` where all tests hold."""
    if not tests:
        return [nest]
    name, test = (
        builder.names("%s"),
        functools.reduce(lambda x, y: builder.op("and", BOOL, x, y), tests),
    )
    return [Let(name, builder.clamped(test, None)), If(name, ((), (nest,)))]
