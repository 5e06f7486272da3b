"""Sort statements: one thread sorts a line of up to LONGEST_THREAD_LINE elements by insertion, all threads merge a longer one.

Runs of 1, 2, 4, ... elements are sorted. To merge two neighbours, every element finds its place in
both together by a binary search in the other run: one of the second run goes behind all that are
not greater, one of the first before all that are not less. Equal elements keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pbkern.core.affine import Affine
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.key_order import compared, rising
from pbkern.lower.mlir.operation import Operation, for_syntax
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block, Text
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
                    text.put(
                        inner, "arith.cmpi", (element, text.index(count)), "index", " ult, %s, %s"
                    ),
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
    start = text.put(block, "arith.muli", (line, text.index(length)), "index")

    def outer(body: Block, _) -> list:
        last = text.put(body, "arith.addi", (start, _named(text, body, "%at")), "index")
        before, after = Block(body), Block(body)
        here = text.name()
        is_after = text.put(before, "arith.cmpi", (here, start), "index", " ugt, %s, %s")
        inner, other = Block(before), Block(before)
        below = text.put(inner, "arith.subi", (here, text.index(1)), "index")
        less, _equal = _below(
            expressions,
            inner,
            sort.buffers[: sort.num_keys],
            here,
            sort.buffers[: sort.num_keys],
            below,
        )
        none = text.put(other, "arith.constant", (), "", " false")
        go = text.either(before, is_after, inner, Ssa(less, "i1", 0), other, Ssa(none, "i1", 0))
        before.add("scf.condition", (go, here), "index", "(%s) %s")
        at = text.name()
        down = text.put(after, "arith.subi", (at, text.index(1)), "index")
        for buf in sort.buffers:
            x, y = (
                expressions.load_stored(after, buf, at),
                expressions.load_stored(after, buf, down),
            )
            expressions.store_stored(after, buf, at, y)
            expressions.store_stored(after, buf, down, x)
        after.add("scf.yield", (down,), "index")
        # The block of the second region has the place as its argument.
        after.operations.insert(0, _block_argument(at))
        body.add(
            "scf.while",
            (here, last),
            "(index) -> index",
            " (%s = %s)",
            regions=(before, after),
            result=text.name(),
            words=("", "do"),
        )
        return []

    text.loop(block, "%at", 1, length, 1, outer)


def _block_argument(name: str) -> Operation:
    return Operation("^bb0", (name,), "", "(%s: index):", arguments=(name,))


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
        block, "arith.muli", (_named(text, block, "%line"), text.index(length)), "index"
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
            to = text.put(inner, "arith.addi", (base, element), "index")
            for spare, buf in zip(sort.spare, sort.buffers):
                expressions.store_stored(
                    inner, buf, to, expressions.load_stored(inner, spare, element)
                )

        strided.loop(block, length, back)
        barrier(block)


class _RunPair(NamedTuple):
    """Two neighbouring runs that are merged, as places in a line, seen from an element of one of them.

    is_second: whether the element is in the second run; start: where its run starts; before: `run` places earlier;
    low, high: from where to where the other run is.
    """

    is_second: str
    start: str
    before: str
    low: str
    high: str


def _run_pair(text: Text, block: Block, element: str, run: int, length: int) -> _RunPair:
    put, length_of_run = partial(text.put, block), text.index(run)

    def end_of_run(start: str) -> str:
        end = put("arith.addi", (start, length_of_run), "index")
        return put("arith.minui", (end, text.index(length)), "index")

    number = put("arith.divui", (element, length_of_run), "index")
    parity = put("arith.andi", (number, text.index(1)), "index")
    is_second = put("arith.cmpi", (parity, text.index(0)), "index", " ne, %s, %s")
    start = put("arith.muli", (number, length_of_run), "index")
    before = put("arith.subi", (start, length_of_run), "index")
    after = end_of_run(start)
    end_after = end_of_run(after)
    low = put("arith.select", (is_second, before, after), "index")
    high = put("arith.select", (is_second, start, end_after), "index")
    return _RunPair(is_second, start, before, low, high)


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
    """An element of a line goes to its place in its run and the neighbour's together.

    here, there: (buffers, start of the line) that are read and written.
    """
    text, (buffers, base), (other_buffers, other_base) = expressions.text, here, there
    put = partial(text.put, block)
    pair = _run_pair(text, block, element, run, length)
    source = put("arith.addi", (base, element), "index")
    in_other = _binary_search(
        expressions, block, buffers[: sort.num_keys], base, source, pair, run, length
    )
    passed = put("arith.subi", (in_other, pair.low), "index")
    first = put("arith.select", (pair.is_second, pair.before, pair.start), "index")
    inside = put("arith.subi", (element, pair.start), "index")
    ahead = put("arith.addi", (passed, inside), "index")
    place = put("arith.addi", (other_base, put("arith.addi", (first, ahead), "index")), "index")
    for buf, other in zip(buffers, other_buffers):
        value = expressions.load_stored(block, buf, source)
        expressions.store_stored(block, other, place, Ssa(value.name, storage_el(buf.dtype), 0))


def _binary_search(
    expressions: Expressions,
    block: Block,
    keys: Sequence[Buf],
    base: str,
    source: str,
    pair: _RunPair,
    run: int,
    length: int,
) -> str:
    """The place in the other run before which the element at `source` belongs.

    Equal elements keep their order: those of the first run stay before those of the second.
    """
    text = expressions.text
    lo, hi, bounds, inner = text.name(), text.name(), text.name(), Block(block)
    put = partial(text.put, inner)
    is_open = put("arith.cmpi", (lo, hi), "index", " ult, %s, %s")
    middle = put("arith.shrui", (put("arith.addi", (lo, hi), "index"), text.index(1)), "index")
    safe = put("arith.minui", (middle, text.index(length - 1)), "index")
    at = put("arith.addi", (base, safe), "index")
    less, equal = _below(expressions, inner, keys, at, keys, source)
    comes_before = put("arith.ori", (less, put("arith.andi", (equal, pair.is_second), "i1")), "i1")
    go_up = put("arith.andi", (is_open, comes_before), "i1")
    yes = text.const("true")
    go_down = put("arith.andi", (is_open, put("arith.xori", (comes_before, yes), "i1")), "i1")
    above = put("arith.addi", (middle, text.index(1)), "index")
    new_lo = put("arith.select", (go_up, above, lo), "index")
    new_hi = put("arith.select", (go_down, middle, hi), "index")
    inner.add("scf.yield", (new_lo, new_hi), "index, index")
    counter = text.name()
    limits = (text.index(number) for number in (0, run.bit_length(), 1))
    block.add(
        "scf.for",
        (counter, *limits, lo, pair.low, hi, pair.high),
        "",
        for_syntax(["index", "index"]),
        regions=(inner,),
        result=bounds,
        count=2,
        arguments=(counter, lo, hi),
    )
    return f"{bounds}#0"
