"""Sort statements: one thread sorts a line of up to SHORT_LINE elements by insertion, all threads merge a longer one.

Runs of 1, 2, 4, ... elements are sorted. To merge two neighbours, every element finds its place in
both together by a binary search in the other run: one of the second run goes behind all that are
not greater, one of the first before all that are not less. Equal elements keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pbkern.core.affine import Affine
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.key_order import compared
from pbkern.lower.mlir.operation import Operation
from pbkern.lower.mlir.ops import Value as Ssa
from pbkern.lower.mlir.text import Block
from pbkern.lower.nest.ir import Buf, Sort

from ..options import SHORT_LINE
from .expressions import Expressions

THREAD = "%tid"


def emit_sort(
    e: Expressions, block: Block, s: Sort, threads: int, barrier: Callable[[Block], None]
) -> None:
    """Appends a Sort. Threads have met before it, and have not behind it."""
    lines, length = s.buffers[0].shape
    if lines == 0 or length < 2:
        return
    if length <= SHORT_LINE:
        _Strided(e, threads).loop(block, lines, lambda b, line: _insertion(e, b, s, line, length))
        return

    def one(b: Block, _: object) -> list:
        _merge_line(e, b, s, length, threads, barrier)
        return []

    e.text.loop(block, "%line", 0, lines, 1, one)


class _Strided:
    """fill(block, k) for k in 0 .. count - 1, dealt out to threads."""

    def __init__(self, e: Expressions, threads: int):
        self.text, self.threads = e.text, threads

    def loop(self, block: Block, count: int, fill: Callable[[Block, str], None]) -> None:
        t = self.text

        def step(b: Block, _) -> list:
            _, k = t.affine(b, Affine.symbol("%deal", self.threads) + Affine.symbol(THREAD))
            if count % self.threads:
                t.when(
                    b,
                    t.put(b, f"arith.cmpi ult, {k}, {t.index(count)} : index"),
                    lambda x: fill(x, k),
                )
            else:
                fill(b, k)
            return []

        t.loop(block, "%deal", 0, -(-count // self.threads), 1, step)


def _below(
    e: Expressions, block: Block, bufs: list[Buf], x: str, other: list[Buf], y: str
) -> tuple[str, str]:
    """(whether the element at x of one set of keys is less than that at y of another, whether it is equal)."""
    b = e.builder(block)

    def keys() -> Iterator[tuple[Ssa, Ssa, bool]]:
        for buf, second in zip(bufs, other):
            u, v = (
                b.from_storage(e.load_stored(block, a, at), a.dtype)
                for a, at in ((buf, x), (second, y))
            )
            yield u, v, buf.dtype.kind == "u"

    less, equal = compared(b, keys())
    return less.name, equal.name


def _insertion(e: Expressions, block: Block, s: Sort, line: str, length: int) -> None:
    """One line by one thread: each element moves down past the greater ones before it."""
    t = e.text
    start = t.put(block, f"arith.muli {line}, {t.index(length)} : index")

    def outer(b: Block, _) -> list:
        last = t.put(b, f"arith.addi {start}, {_named(t, b, '%at')} : index")
        before, after = Block(b), Block(b)
        here = t.name()
        k = t.put(before, f"arith.cmpi ugt, {here}, {start} : index")
        inner, other = Block(before), Block(before)
        below = t.put(inner, f"arith.subi {here}, {t.index(1)} : index")
        less, _equal = _below(
            e, inner, s.buffers[: s.num_keys], here, s.buffers[: s.num_keys], below
        )
        none = t.put(other, "arith.constant false")
        go = t.either(before, k, inner, Ssa(less, "i1", 0), other, Ssa(none, "i1", 0))
        before.add(f"scf.condition({go}) {here} : index")
        at = t.name()
        down = t.put(after, f"arith.subi {at}, {t.index(1)} : index")
        for buf in s.buffers:
            x, y = e.load_stored(after, buf, at), e.load_stored(after, buf, down)
            e.store_stored(after, buf, at, y)
            e.store_stored(after, buf, down, x)
        after.add(f"scf.yield {down} : index")
        # The block of the second region has the place as its argument.
        after.operations.insert(0, _block_argument(at))
        b.add(
            f"{t.name()} = scf.while ({here} = {last}) : (index) -> index",
            before,
            after,
            words=("", "do"),
        )
        return []

    t.loop(block, "%at", 1, length, 1, outer)


def _block_argument(name: str) -> Operation:
    return Operation(f"^bb0({name}: index):")


def _named(t, block: Block, symbol: str) -> str:
    return t.affine(block, Affine.symbol(symbol))[1]


def _merge_line(
    e: Expressions,
    block: Block,
    s: Sort,
    length: int,
    threads: int,
    barrier: Callable[[Block], None],
) -> None:
    """One line by all threads: passes over runs of doubling length, from the operands to the spare lines and back."""
    t, strided = e.text, _Strided(e, threads)
    base = t.put(block, f"arith.muli {_named(t, block, '%line')}, {t.index(length)} : index")
    run, here, there = 1, (s.buffers, base), (s.spare, t.index(0))
    while run < length:

        def place(
            b: Block, k: str, here: tuple = here, there: tuple = there, run: int = run
        ) -> None:
            _place(e, b, s, here, there, k, run, length)

        strided.loop(block, length, place)
        barrier(block)
        here, there, run = there, here, 2 * run
    if here[0] is s.spare:

        def back(b: Block, k: str) -> None:
            to = t.put(b, f"arith.addi {base}, {k} : index")
            for spare, buf in zip(s.spare, s.buffers):
                e.store_stored(b, buf, to, e.load_stored(b, spare, k))

        strided.loop(block, length, back)
        barrier(block)


def _place(
    e: Expressions, block: Block, s: Sort, here, there, k: str, run: int, length: int
) -> None:
    """Element k of a line goes to its place in its run and the neighbour's together."""
    t, (bufs, base), (others, other_base) = e.text, here, there
    put = lambda text: t.put(block, text)  # noqa: E731
    number = put(f"arith.divui {k}, {t.index(run)} : index")
    is_second = put(
        f"arith.cmpi ne, {put(f'arith.andi {number}, {t.index(1)} : index')}, {t.index(0)} : index"
    )
    mine = put(f"arith.muli {number}, {t.index(run)} : index")
    before = put(f"arith.subi {mine}, {t.index(run)} : index")
    after = put(
        f"arith.minui {put(f'arith.addi {mine}, {t.index(run)} : index')}, {t.index(length)} : index"
    )
    end = put(
        f"arith.minui {put(f'arith.addi {after}, {t.index(run)} : index')}, {t.index(length)} : index"
    )
    low = put(f"arith.select {is_second}, {before}, {after} : index")
    high = put(f"arith.select {is_second}, {mine}, {end} : index")
    own, steps, keys = put(f"arith.addi {base}, {k} : index"), run.bit_length(), bufs[: s.num_keys]
    lo, hi, name, inner = t.name(), t.name(), t.name(), Block(block)
    put_in = lambda text: t.put(inner, text)  # noqa: E731
    open_ = put_in(f"arith.cmpi ult, {lo}, {hi} : index")
    middle = put_in(f"arith.shrui {put_in(f'arith.addi {lo}, {hi} : index')}, {t.index(1)} : index")
    safe = put_in(f"arith.minui {middle}, {t.index(length - 1)} : index")
    at = put_in(f"arith.addi {base}, {safe} : index")
    less, equal = _below(
        e, inner, keys, at, keys, own
    )  # does the other run's element come before mine?
    not_after = put_in(f"arith.ori {less}, {put_in(f'arith.andi {equal}, {is_second} : i1')} : i1")
    go_up = put_in(f"arith.andi {open_}, {not_after} : i1")
    yes = t.const("arith.constant true")
    go_down = put_in(f"arith.andi {open_}, {put_in(f'arith.xori {not_after}, {yes} : i1')} : i1")
    new_lo = put_in(
        f"arith.select {go_up}, {put_in(f'arith.addi {middle}, {t.index(1)} : index')}, {lo} : index"
    )
    new_hi = put_in(f"arith.select {go_down}, {middle}, {hi} : index")
    inner.add(f"scf.yield {new_lo}, {new_hi} : index, index")
    block.add(
        f"{name}:2 = scf.for {t.name()} = {t.index(0)} to {t.index(steps)} step {t.index(1)} "
        f"iter_args({lo} = {low}, {hi} = {high}) -> (index, index)",
        inner,
    )
    passed = put(f"arith.subi {name}#0, {low} : index")
    first = put(f"arith.select {is_second}, {before}, {mine} : index")
    inside = put(f"arith.subi {k}, {mine} : index")
    ahead = put(f"arith.addi {passed}, {inside} : index")
    place = put(f"arith.addi {other_base}, {put(f'arith.addi {first}, {ahead} : index')} : index")
    for buf, other in zip(bufs, others):
        v = e.load_stored(block, buf, own)
        e.store_stored(block, other, place, Ssa(v.name, storage_el(buf.dtype), 0))
