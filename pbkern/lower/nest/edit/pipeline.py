"""A loop that copies and then computes -> one whose copies run some steps ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.async_copies import is_mask
from pbkern.lower.nest.conditions.index_tests import UNBOUNDED, simplified
from pbkern.lower.nest.ir import (
    INT32,
    AsyncCopy,
    AsyncProduct,
    Buf,
    Expr,
    For,
    If,
    Let,
    Load,
    Nest,
    Stmt,
    Store,
    Wait,
)
from pbkern.lower.nest.tiles.chunking import Chunking

from .grow import guarded
from .relocate import relocated
from .rename import renamed

# Bytes that a thread keeps as it has loaded them while a step computes: 16 of 128 registers, of which sums and operands
# take 88.
MOST_BYTES_AHEAD = 64
# Steps of a loop from which on threads load the last step once more where no step follows. Registers that one branch alone
# loads are set to zero in the other one, 16 instructions of a step.
FEWEST_STEPS_TO_LOAD_AGAIN = 64


def pipelined(
    loop: For,
    stages: int,
    copies: Sequence[Nest],
    is_async: Callable[[Nest], bool],
    context: Any,
    products: bool = False,
    under_way: int = 0,
) -> list[Stmt]:
    """The loop with its copies `stages - 1` steps ahead, into buffers of as many stages.

        for %o < n:                            for %s < 2:                                        stages 3
          nest [k<32]                            async:
            t[k] = a[32*%o + k]                    nest [k<32]
          nest [k<32*]                               t[%s, k] = a[32*%s + k]
            acc0 sum= t[k]                       for %o < n:
            c[0] = c[0] + acc0  (after)   ->       wait 1
                                                   async:
                                                     nest [k<32]
                                                       t[%o + 2, k] = a[32*%o + k + 64]
                                                   nest [k<32*]
                                                     acc0 sum= t[%o, k]
                                                     c[0] = c[0] + acc0  (after)
                                                 wait 0

    `under_way`: steps for which a stage is kept behind its own. Copies of as many steps less are under way; where that leaves
    none, each step waits for its own.

    `copies`: statements of the loop's body, of one store each. Threads make those that are not async: they load into
    registers before a product, and store that behind it; behind the last step they do neither.

    products: the rest of the body is one product that the device makes by itself; copies begin behind it. With one `under_way`
    when the next one begins, copies are one step less ahead:

        for %o < n:
          wait 1
          async product: (step %o)
          async: (copies of step %o + 2)                   stages 4
          wait 1 of products
        wait 0
        wait 0 of products

    A loop of no more steps than stages makes all copies before it, and waits once. One whose number of steps the program
    computes may have none, and then copies nothing.

    Lets of the body that copies depend on are computed for their steps as well, what they load behind the last one being
    anything.

    Legal where the rest of the body reads what the copies store in the same step, nothing else touches their buffers,
    nothing in the loop stores to what they read, and what they read for steps behind the last one is masked.
    """
    is_short = isinstance(loop.trips, int) and loop.trips <= stages
    stages = int(loop.trips) if is_short else stages
    ring = _StagedCopies.of(loop, copies, stages, context)
    now = Affine.symbol(loop.counter)
    late = [copy for copy in copies if is_async(copy)]
    threads = [copy for copy in copies if copy not in late]
    distance = stages - 1 - under_way
    readers = [stmt for stmt in loop.body if stmt not in copies]
    rest = ring.relocated(readers, now)
    if not (distance or is_short):
        heads, at_now = ring.at_step(now)
        step: list[Stmt] = [*heads, *map(at_now, threads)]
        step += [AsyncCopy(tuple(map(at_now, late))), Wait(0)] if late else []
        return [replace(loop, body=(*step, *rest))]
    first, ahead = context.names("%s"), now + distance
    heads, at_first = ring.at_step(Affine.symbol(first))
    before: list[Stmt] = [*heads, *(at_first(ring.within(copy)) for copy in threads)]
    heads, at_ahead = ring.at_step(ahead)
    moving = {loop.counter, *(head.name for head in heads)}
    wait: list[Stmt] = []
    begin: list[Stmt] = [*heads]
    if late:
        before.append(AsyncCopy(tuple(map(at_first, late))))
        wait = [Wait(distance - 1)]
        begin.append(AsyncCopy(tuple(map(at_ahead, late))))
    halves = [_in_two(at_ahead(ring.within(copy)), moving, context) for copy in threads]
    ends: list[Stmt] = [Wait(0, products=True)] if products and (under_way or is_short) else []
    if products:
        heads_here = [stmt for stmt in rest if isinstance(stmt, Let)]
        nests = tuple(stmt for stmt in rest if not isinstance(stmt, Let))
        rest = [*heads_here, AsyncProduct(nests)]
    if is_short:
        waits = [Wait(0)] if late else []
        return [For(first, stages, tuple(before)), *waits, replace(loop, body=tuple(rest)), *ends]
    behind: list[Stmt] = [Wait(under_way, products=True)] if products else rest
    step = [*rest, *begin] if products else [*begin]
    step += _around(behind, halves, ahead, loop, context)
    ahead_of_all: list[Stmt] = [For(first, distance, tuple(before))]
    if isinstance(loop.trips, str):
        name, trips = context.names("%n"), context.pool.index(INT32, Affine.symbol(loop.trips))
        fewer = context.op("min", INT32, trips, context.const(distance, INT32))
        ahead_of_all = [Let(name, fewer), For(first, name, tuple(before))]
    return [
        *ahead_of_all,
        For(loop.counter, loop.trips, (*wait, *step)),
        *([Wait(0)] if late else []),
        *ends,
    ]


@dataclass(frozen=True)
class _StagedCopies:
    """Buffers of several stages, in place of those that copies of a loop's steps store to.

    Attributes:
      loop: the loop.
      lets: those of its body that copies depend on, in their order.
      buffers: buffer of one stage -> that of all.
      context: of the nests.
    """

    loop: For
    lets: tuple[Let, ...]
    buffers: Mapping[Buf, Buf]
    context: Any

    @classmethod
    def of(cls, loop: For, copies: Sequence[Nest], stages: int, context: Any) -> _StagedCopies:
        stored = [copy.stores[0].buf for copy in copies]
        buffers = {buf: replace(buf, shape=(stages, *buf.shape), circular=True) for buf in stored}
        lets: list[Let] = []
        read = frozenset().union(*map(symbols_of, copies))
        for stmt in reversed(loop.body):
            if isinstance(stmt, Let) and stmt.name in read:
                lets.insert(0, stmt)
                read |= stmt.value.symbols
        return cls(loop, tuple(lets), buffers, context)

    def relocated(self, stmts: Sequence[Stmt], step: Affine) -> list[Stmt]:
        """Statements that read and store the stage of a step."""
        stage = lambda _, index: (step, *index)
        return relocated(stmts, self.buffers.get, self.context.pool, stage)

    def within(self, copy: Nest) -> Nest:
        """A copy of the loop's own steps, simplified for these."""
        if not isinstance(self.loop.trips, int):
            return simplified(copy, self.context.pool, self.context.bounds)
        steps = {self.loop.counter: (0, self.loop.trips - 1)}
        return simplified(copy, self.context.pool, self.context.bounds | steps)

    def at_step(self, step: Affine) -> tuple[list[Let], Callable[[Nest], Nest]]:
        """(Lets of another step, a function that takes copies to that step)."""
        pool = self.context.pool
        places, heads = {self.loop.counter: step}, []
        for let in self.lets:
            value = guarded(pool.renamer(dict(places))(let.value), pool)
            heads.append(Let(self.context.names("%q"), value))
            places[let.name] = Affine.symbol(heads[-1].name)

        def at(nest: Nest) -> Nest:
            (moved,) = self.relocated([renamed(nest, places, nest.dims, pool)], step)
            assert isinstance(moved, Nest), "a copy is a nest"
            return moved

        return heads, at


def _around(
    rest: Sequence[Stmt],
    halves: Sequence[tuple[Nest, Nest]],
    ahead: Affine,
    loop: For,
    context: Any,
) -> list[Stmt]:
    """Puts the halves of threads' copies around what a step computes; they are made for steps of the loop alone.

    Each copy is on its way during other products: registers hold what one of them has loaded at a time.
    """
    if not halves:
        return list(rest)
    is_counted = isinstance(loop.trips, int)
    place = ahead if is_counted else ahead - Affine.symbol(str(loop.trips))
    ends = (0, loop.trips) if is_counted else (-UNBOUNDED, 0)
    is_step, name = context.pool.in_range(place, *ends), context.names("%n")
    test = Let(
        name, context.op("convert_element_type", INT32, is_step, params={"new_dtype": INT32})
    )
    products = [at for at, stmt in enumerate(rest) if _is_product(stmt)] or [0]
    starts = [products[number * len(products) // len(halves)] for number in range(len(halves))]
    out: list[Stmt] = [test, *rest[: starts[0]]]
    again = isinstance(loop.trips, int) and loop.trips >= FEWEST_STEPS_TO_LOAD_AGAIN
    last = context.names("%q")
    if again:
        index = context.pool.index(INT32, ahead)
        out.insert(
            1, Let(last, context.op("min", INT32, index, context.const(int(loop.trips) - 1, INT32)))
        )
    for (load, store), start, end in zip(halves, starts, [*starts[1:], len(rest)]):
        loads: list[Stmt] = []
        if load.stores and again:
            step = {loop.counter: Affine.symbol(last) - ahead.const}
            loads = [renamed(load, step, load.dims, context.pool)]
        elif load.stores:
            none = tuple(replace(one, value=context.const(0, one.buf.dtype)) for one in load.stores)
            loads = [If(name, ((replace(load, stores=none),), (load,)))]
        out += [*loads, *rest[start:end], If(name, ((), (store,)))]
    return out


def _is_product(stmt: Stmt) -> bool:
    return isinstance(stmt, Nest) and any(reduction.is_product for reduction in stmt.reductions)


def symbols_of(nest: Nest) -> frozenset[str]:
    """Symbols of all that a nest computes."""
    return frozenset().union(*(expr.symbols for expr in nest.expressions()))


def _in_two(copy: Nest, moving: Collection[str], context: Any) -> tuple[Nest, Nest]:
    """(the nest that loads what a copy stores, the nest that computes and stores it).

    `moving`: symbols of the loop's step. What steps load stays as it is until it has arrived, if a thread has registers
    for that; else what is made of it stays.
    """
    (store,) = copy.stores
    (_, *shape), (_, *index) = store.buf.shape, store.index  # without the stage
    pool = context.pool

    def held(expr: Expr, dtype: np.dtype) -> tuple[Store, Load]:
        scratch = context.new_buffer(shape, dtype)
        buf: Buf = replace(scratch, space="registers", layout=copy.by)
        return Store(buf, tuple(index), expr), pool.load(dtype, buf, tuple(index))

    loads = [load for load in copy.loads() if not load.symbols.isdisjoint(moving)]
    points = math.prod(shape) // (copy.by.threads if isinstance(copy.by, Chunking) else 1)
    if points * sum(load.buf.dtype.itemsize for load in loads) > MOST_BYTES_AHEAD:
        first, value = held(store.value, store.buf.dtype)
        return replace(copy, stores=(first,)), replace(copy, stores=(replace(store, value=value),))
    readers: dict[Expr, list[Expr]] = {}
    for node in copy.nodes():
        for arg in node.args:
            readers.setdefault(arg, []).append(node)

    def with_masks(expr: Expr) -> Expr:
        """A load with the masks that its one reader puts on it."""
        (reader, *more) = readers.get(expr) or [expr]
        is_masked = not more and is_mask(reader) and reader.args[-1] is expr
        return with_masks(reader) if is_masked else expr

    halves = {value: held(value, load.buf.dtype) for load in loads for value in (with_masks(load),)}
    rest = pool.rewrite(store.value, lambda node: halves[node][1] if node in halves else None)
    return (
        replace(copy, stores=tuple(first for first, _ in halves.values())),
        replace(copy, stores=(replace(store, value=rest),)),
    )
