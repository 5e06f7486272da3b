"""Sort statements: one thread sorts a line of up to LONGEST_THREAD_LINE elements by insertion, all threads merge a longer one.

Runs of 1, 2, 4, ... elements are sorted. To merge two neighbours, every element finds its place in
both together by a binary search in the other run: one of the second run goes behind all that are
not greater, one of the first before all that are not less. Equal elements keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pbkern.core.affine import Affine
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.key_order import compared, rising
from pbkern.lower.mlir.operation import Operation
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.ir import Buf, Sort
from pbkern.targets.simt.options import LONGEST_THREAD_LINE

from .expressions import Expressions

THREAD = "%tid"


def emit_sort(
    expressions: Expressions,
    block: Block,
    sort: Sort,
    threads: int,
    barrier: Callable[[Block], None],
) -> None:
    """Appends a Sort. Threads have met before it, and have not behind it."""
    lines, length = sort.buffers[0].shape
    if lines == 0 or length < 2:
        return
    if length <= LONGEST_THREAD_LINE:
        _Strided(expressions, threads).loop(
            block, lines, lambda inner, line: _insertion(expressions, inner, sort, line, length)
        )
        return

    def one(inner: Block, _: object) -> list:
        _merge_line(expressions, inner, sort, length, threads, barrier)
        return []

    expressions.text.loop(block, "%line", 0, lines, 1, one)


class _Strided:
    """fill(block, k) for k in 0 .. count - 1, divided among threads."""

    def __init__(self, expressions: Expressions, threads: int):
        self.text, self.threads = expressions.text, threads

    def loop(self, block: Block, count: int, fill: Callable[[Block, str], None]) -> None:
        text = self.text

        def step(inner: Block, _) -> list:
            _, element = text.affine(
                inner, Affine.symbol("%round", self.threads) + Affine.symbol(THREAD)
            )
            if count % self.threads:
                text.when(
                    inner,
                    text.put(inner, f"arith.cmpi ult, {element}, {text.index(count)} : index"),
                    lambda x: fill(x, element),
                )
            else:
                fill(inner, element)
            return []

        text.loop(block, "%round", 0, -(-count // self.threads), 1, step)


def _below(
    expressions: Expressions,
    block: Block,
    bufs: Sequence[Buf],
    x: str,
    other: Sequence[Buf],
    y: str,
) -> tuple[str, str]:
    """(whether the element at x of one set of keys is less than that at y of another, whether it is equal)."""
    b = expressions.builder(block)

    def key(buf: Buf, at: str) -> Ssa:
        return rising(b, expressions.load_stored(block, buf, at), buf.dtype)

    less, equal = compared(b, ((key(buf, x), key(second, y)) for buf, second in zip(bufs, other)))
    return less.name, equal.name


def _insertion(expressions: Expressions, block: Block, sort: Sort, line: str, length: int) -> None:
    """One line by one thread: each element moves down past the greater ones before it."""
    text = expressions.text
    start = text.put(block, f"arith.muli {line}, {text.index(length)} : index")

    def outer(body: Block, _) -> list:
        last = text.put(body, f"arith.addi {start}, {_named(text, body, '%at')} : index")
        before, after = Block(body), Block(body)
        here = text.name()
        is_after = text.put(before, f"arith.cmpi ugt, {here}, {start} : index")
        inner, other = Block(before), Block(before)
        below = text.put(inner, f"arith.subi {here}, {text.index(1)} : index")
        less, _equal = _below(
            expressions,
            inner,
            sort.buffers[: sort.num_keys],
            here,
            sort.buffers[: sort.num_keys],
            below,
        )
        none = text.put(other, "arith.constant false")
        go = text.either(before, is_after, inner, Ssa(less, "i1", 0), other, Ssa(none, "i1", 0))
        before.add(f"scf.condition({go}) {here} : index")
        at = text.name()
        down = text.put(after, f"arith.subi {at}, {text.index(1)} : index")
        for buf in sort.buffers:
            x, y = (
                expressions.load_stored(after, buf, at),
                expressions.load_stored(after, buf, down),
            )
            expressions.store_stored(after, buf, at, y)
            expressions.store_stored(after, buf, down, x)
        after.add(f"scf.yield {down} : index")
        # The block of the second region has the place as its argument.
        after.operations.insert(0, _block_argument(at))
        body.add(
            f"{text.name()} = scf.while ({here} = {last}) : (index) -> index",
            before,
            after,
            words=("", "do"),
        )
        return []

    text.loop(block, "%at", 1, length, 1, outer)


def _block_argument(name: str) -> Operation:
    return Operation(f"^bb0({name}: index):")


def _named(text, block: Block, symbol: str) -> str:
    return text.affine(block, Affine.symbol(symbol))[1]


def _merge_line(
    expressions: Expressions,
    block: Block,
    sort: Sort,
    length: int,
    threads: int,
    barrier: Callable[[Block], None],
) -> None:
    """One line by all threads: passes over runs of doubling length, from the operands to the spare lines and back."""
    text, strided = expressions.text, _Strided(expressions, threads)
    base = text.put(
        block, f"arith.muli {_named(text, block, '%line')}, {text.index(length)} : index"
    )
    run, here, there = 1, (sort.buffers, base), (sort.spare, text.index(0))
    while run < length:

        def place(
            inner: Block, element: str, here: tuple = here, there: tuple = there, run: int = run
        ) -> None:
            _place(expressions, inner, sort, here, there, element, run, length)

        strided.loop(block, length, place)
        barrier(block)
        here, there, run = there, here, 2 * run
    if here[0] is sort.spare:

        def back(inner: Block, element: str) -> None:
            to = text.put(inner, f"arith.addi {base}, {element} : index")
            for spare, buf in zip(sort.spare, sort.buffers):
                expressions.store_stored(
                    inner, buf, to, expressions.load_stored(inner, spare, element)
                )

        strided.loop(block, length, back)
        barrier(block)


def _place(
    expressions: Expressions,
    block: Block,
    sort: Sort,
    here,
    there,
    element: str,
    run: int,
    length: int,
) -> None:
    """Element element of a line goes to its place in its run and the neighbour's together."""
    mlir_text, (bufs, base), (others, other_base) = expressions.text, here, there
    put = lambda text: mlir_text.put(block, text)
    number = put(f"arith.divui {element}, {mlir_text.index(run)} : index")
    is_second = put(
        f"arith.cmpi ne, {put(f'arith.andi {number}, {mlir_text.index(1)} : index')}, {mlir_text.index(0)} : index"
    )
    mine = put(f"arith.muli {number}, {mlir_text.index(run)} : index")
    before = put(f"arith.subi {mine}, {mlir_text.index(run)} : index")
    after = put(
        f"arith.minui {put(f'arith.addi {mine}, {mlir_text.index(run)} : index')}, {mlir_text.index(length)} : index"
    )
    end = put(
        f"arith.minui {put(f'arith.addi {after}, {mlir_text.index(run)} : index')}, {mlir_text.index(length)} : index"
    )
    low = put(f"arith.select {is_second}, {before}, {after} : index")
    high = put(f"arith.select {is_second}, {mine}, {end} : index")
    own, steps, keys = (
        put(f"arith.addi {base}, {element} : index"),
        run.bit_length(),
        bufs[: sort.num_keys],
    )
    lo, hi, name, inner = mlir_text.name(), mlir_text.name(), mlir_text.name(), Block(block)
    put_in = lambda text: mlir_text.put(inner, text)
    open_ = put_in(f"arith.cmpi ult, {lo}, {hi} : index")
    middle = put_in(
        f"arith.shrui {put_in(f'arith.addi {lo}, {hi} : index')}, {mlir_text.index(1)} : index"
    )
    safe = put_in(f"arith.minui {middle}, {mlir_text.index(length - 1)} : index")
    at = put_in(f"arith.addi {base}, {safe} : index")
    less, equal = _below(
        expressions, inner, keys, at, keys, own
    )  # does the other run's element come before mine?
    not_after = put_in(f"arith.ori {less}, {put_in(f'arith.andi {equal}, {is_second} : i1')} : i1")
    go_up = put_in(f"arith.andi {open_}, {not_after} : i1")
    yes = mlir_text.const("arith.constant true")
    go_down = put_in(f"arith.andi {open_}, {put_in(f'arith.xori {not_after}, {yes} : i1')} : i1")
    new_lo = put_in(
        f"arith.select {go_up}, {put_in(f'arith.addi {middle}, {mlir_text.index(1)} : index')}, {lo} : index"
    )
    new_hi = put_in(f"arith.select {go_down}, {middle}, {hi} : index")
    inner.add(f"scf.yield {new_lo}, {new_hi} : index, index")
    block.add(
        f"{name}:2 = scf.for {mlir_text.name()} = {mlir_text.index(0)} to {mlir_text.index(steps)} step {mlir_text.index(1)} "
        f"iter_args({lo} = {low}, {hi} = {high}) -> (index, index)",
        inner,
    )
    passed = put(f"arith.subi {name}#0, {low} : index")
    first = put(f"arith.select {is_second}, {before}, {mine} : index")
    inside = put(f"arith.subi {element}, {mine} : index")
    ahead = put(f"arith.addi {passed}, {inside} : index")
    place = put(f"arith.addi {other_base}, {put(f'arith.addi {first}, {ahead} : index')} : index")
    for buf, other in zip(bufs, others):
        value = expressions.load_stored(block, buf, own)
        expressions.store_stored(block, other, place, Ssa(value.name, storage_el(buf.dtype), 0))
