"""A loop that copies and then computes -> one whose copies run some steps ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pbkern.core.affine import Affine
from pbkern.lower.nest.ir import AsyncCopy, AsyncProduct, Buf, For, Nest, Stmt, Store, Wait

from .relocate import relocated
from .rename import renamed


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

    `copies`: statements of the loop's body, of one store each. Threads make those that are not async: they load into
    registers where the others begin, and store it behind what the step computes.

    products: the rest of the body is one product that the device makes by itself; copies begin behind it. With one `under_way`
    when the next one begins, copies are one step less ahead:

        for %o < n:
          wait 1
          async product: (step %o)
          async: (copies of step %o + 2)                   stages 4
          wait 1 of products
        wait 0
        wait 0 of products

    A loop of no more steps than stages makes all copies before it, and waits once.

    Legal where the rest of the body reads what the copies store in the same step, nothing else touches their buffers,
    nothing in the loop stores to what they read, and what they read for steps behind the last one is masked.
    """
    is_short = isinstance(loop.trips, int) and loop.trips <= stages
    stages = int(loop.trips) if is_short else stages
    rings = {
        copy.stores[0].buf: replace(
            copy.stores[0].buf, shape=(stages, *copy.stores[0].buf.shape), circular=True
        )
        for copy in copies
    }
    pool, now = context.pool, Affine.symbol(loop.counter)

    def at(nest: Nest, step: Affine) -> Nest:
        """A copy of another step, to buffers with stages."""
        there = renamed(nest, {loop.counter: step}, nest.dims, pool)
        (moved,) = relocated([there], rings.get, pool, lambda _, index: (step, *index))
        return moved

    late = [copy for copy in copies if is_async(copy)]
    threads = [copy for copy in copies if copy not in late]
    distance = stages - 1 - under_way
    first, ahead = context.names("%s"), now + distance
    before: list[Stmt] = [at(copy, Affine.symbol(first)) for copy in threads]
    wait: list[Stmt] = []
    begin: list[Stmt] = []
    behind: list[Stmt] = []
    if late:
        before.append(AsyncCopy(tuple(at(copy, Affine.symbol(first)) for copy in late)))
        wait = [Wait(distance - 1)]
        begin = [AsyncCopy(tuple(at(copy, ahead) for copy in late))]
    for copy in threads:
        load, store = _in_two(at(copy, ahead), context)
        begin.append(load)
        behind.append(store)
    readers = [stmt for stmt in loop.body if stmt not in copies]
    rest = relocated(readers, rings.get, pool, lambda _, index: (now, *index))
    ends: list[Stmt] = [Wait(0, products=True)] if products and (under_way or is_short) else []
    rest = [AsyncProduct(tuple(rest))] if products else rest
    if is_short:
        waits = [Wait(0)] if late else []
        return [For(first, stages, tuple(before)), *waits, replace(loop, body=tuple(rest)), *ends]
    step = (*rest, *begin, Wait(under_way, products=True)) if products else (*begin, *rest)
    return [
        For(first, distance, tuple(before)),
        For(loop.counter, loop.trips, (*wait, *step, *behind)),
        *([Wait(0)] if late else []),
        *ends,
    ]


def _in_two(copy: Nest, context: Any) -> tuple[Nest, Nest]:
    """(the nest that loads what a copy stores, the nest that stores it)."""
    (store,) = copy.stores
    index = tuple(map(Affine.symbol, copy.dims))
    scratch = context.new_buffer(tuple(copy.dims.values()), store.buf.dtype)
    buf: Buf = replace(scratch, space="registers")
    loaded = replace(store, value=context.pool.load(buf.dtype, buf, index))
    return (
        replace(copy, stores=(Store(buf, index, store.value),)),
        replace(copy, stores=(loaded,)),
    )
