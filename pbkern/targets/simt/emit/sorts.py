"""Sort statements: one thread sorts a line of up to LONGEST_THREAD_LINE elements by insertion, all threads merge a longer one.

Runs of 1, 2, 4, ... elements are sorted. To merge two neighbours, every element finds its place in
both together by a binary search in the other run: one of the second run goes behind all that are
not greater, one of the first before all that are not less. Equal elements keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pbkern.core.affine import Affine
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.key_order import compared, rising
from pbkern.lower.mlir.operation import Operation, for_syntax
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
    mlir_text, (bufs, base), (other_bufs, other_base) = expressions.text, here, there
    put = partial(mlir_text.put, block)
    number = put("arith.divui", (element, mlir_text.index(run)), "index")
    is_second = put(
        "arith.cmpi",
        (put("arith.andi", (number, mlir_text.index(1)), "index"), mlir_text.index(0)),
        "index",
        " ne, %s, %s",
    )
    mine = put("arith.muli", (number, mlir_text.index(run)), "index")
    before = put("arith.subi", (mine, mlir_text.index(run)), "index")
    after = put(
        "arith.minui",
        (put("arith.addi", (mine, mlir_text.index(run)), "index"), mlir_text.index(length)),
        "index",
    )
    end = put(
        "arith.minui",
        (put("arith.addi", (after, mlir_text.index(run)), "index"), mlir_text.index(length)),
        "index",
    )
    low = put("arith.select", (is_second, before, after), "index")
    high = put("arith.select", (is_second, mine, end), "index")
    source, steps, keys = (
        put("arith.addi", (base, element), "index"),
        run.bit_length(),
        bufs[: sort.num_keys],
    )
    lo, hi, name, inner = mlir_text.name(), mlir_text.name(), mlir_text.name(), Block(block)
    put_in = partial(mlir_text.put, inner)
    open_ = put_in("arith.cmpi", (lo, hi), "index", " ult, %s, %s")
    middle = put_in(
        "arith.shrui", (put_in("arith.addi", (lo, hi), "index"), mlir_text.index(1)), "index"
    )
    safe = put_in("arith.minui", (middle, mlir_text.index(length - 1)), "index")
    at = put_in("arith.addi", (base, safe), "index")
    less, equal = _below(
        expressions, inner, keys, at, keys, source
    )  # does the other run's element come before mine?
    not_after = put_in("arith.ori", (less, put_in("arith.andi", (equal, is_second), "i1")), "i1")
    go_up = put_in("arith.andi", (open_, not_after), "i1")
    yes = mlir_text.const("true")
    go_down = put_in("arith.andi", (open_, put_in("arith.xori", (not_after, yes), "i1")), "i1")
    new_lo = put_in(
        "arith.select",
        (go_up, put_in("arith.addi", (middle, mlir_text.index(1)), "index"), lo),
        "index",
    )
    new_hi = put_in("arith.select", (go_down, middle, hi), "index")
    inner.add("scf.yield", (new_lo, new_hi), "index, index")
    counter = mlir_text.name()
    bounds = (mlir_text.index(number) for number in (0, steps, 1))
    block.add(
        "scf.for",
        (counter, *bounds, lo, low, hi, high),
        "",
        for_syntax(["index", "index"]),
        regions=(inner,),
        result=name,
        count=2,
        arguments=(counter, lo, hi),
    )
    passed = put("arith.subi", (f"{name}#0", low), "index")
    first = put("arith.select", (is_second, before, mine), "index")
    inside = put("arith.subi", (element, mine), "index")
    ahead = put("arith.addi", (passed, inside), "index")
    place = put("arith.addi", (other_base, put("arith.addi", (first, ahead), "index")), "index")
    for buf, other in zip(bufs, other_bufs):
        value = expressions.load_stored(block, buf, source)
        expressions.store_stored(block, other, place, Ssa(value.name, storage_el(buf.dtype), 0))
