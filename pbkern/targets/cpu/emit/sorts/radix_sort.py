"""Sort statement -> text: a stable radix sort of each line, from the least significant digit of the last key on.

Keys become unsigned integers that rise as the keys do. A pass counts how often each digit occurs,
which tells where its elements begin, and moves elements there in order, from one half of the
scratch buffers to the other; what all elements have in common takes no pass. Integers that nothing
travels with are read off their keys at the end; else places travel with the keys, and tell where
operands are read. Source: Knuth, The Art
of Computer Programming 3, algorithm 5.2.5R.

Floats: NaN last, -0 equal to 0 (key_order.py).
"""

from __future__ import annotations

from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.key_order import risen, rising
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Buf, Sort
from pbkern.targets.costs.sorts import digit_bits, key_bits
from pbkern.targets.cpu.emit.addressing import memref
from pbkern.targets.cpu.sorting import key_lanes, word_dtype, word_dtypes


class RadixLine:
    """Sorts the elements from address `base` on, at most `length` of them.

    In scratch they start at `source`: from 0, or from `length`.
    """

    def __init__(self, text: Text, s: Sort, base: str, length: int):
        self.text, self.s, self.base, self.length = text, s, base, length
        dtypes = [buffer.dtype for buffer in s.buffers]
        widths = len(word_dtypes(dtypes, s.num_keys))
        self.counts, self.words = s.spare[0], s.spare[1 : 1 + widths]
        spare = s.spare[1 + widths :]
        self.places, self.spare = spare[0] if spare else None, spare[1:]
        self.count: int | str = length

    def sort(self, block: Block, count: int | str) -> None:
        """Sorts the first `count` elements, a number or the name of one."""
        self.count = count
        source = self.text.index(0)
        last = self.s.num_keys - 1
        for n in range(last, -1, -1):
            self._make_keys(block, n, source, first=n == last)
            source = self._sort_by(block, n, source)
        self._write(block, source)

    # ------------------------------------------------------------------ memory

    def _load(self, block: Block, buf: Buf, at: str) -> Ssa:
        load = self.text.put(block, "memref.load", (buf.root.name, at), memref(buf))
        return Ssa(load, storage_el(buf.root.dtype), 0)

    def _store(self, block: Block, buf: Buf, at: str, value: Ssa) -> None:
        block.add("memref.store", (value.name, buf.root.name, at), memref(buf))

    def _each(self, block: Block, count: int | str, fill, carried=()) -> list[Ssa]:
        """`fill(inner block, index, carried)` for every index below `count`."""

        def body(inner: Block, values: list[Ssa]) -> list[Ssa]:
            at = inner.lookup("%at")[1]
            return fill(inner, self.text.index(at) if isinstance(at, int) else at, values) or []

        return self.text.loop(block, "%at", 0, count, 1, body, list(carried))

    def _plus(self, block: Block, *terms: str) -> str:
        total = terms[0]
        for term in terms[1:]:
            total = self.text.put(block, "arith.addi", (total, term), "index")
        return total

    def _as_index(self, block: Block, value: Ssa) -> str:
        return self.text.put(block, "arith.index_castui", (value.name,), f"{value.el} to index")

    def _as_count(self, block: Block, index: str) -> Ssa:
        return Ssa(self.text.put(block, "arith.index_cast", (index,), "index to i32"), "i32", 0)

    # ------------------------------------------------------------------ keys

    def _word(self, key_index: int) -> Buf:
        wanted = word_dtype(self.s.buffers[key_index].dtype)
        return next(word for word in self.words if word.dtype == wanted)

    def _make_keys(self, block: Block, key_index: int, source: str, *, first: bool) -> None:
        """Words of key `key_index` in the order so far."""
        buf, word = self.s.buffers[key_index], self._word(key_index)

        def fill(inner: Block, i: str, _):
            at = self._plus(inner, source, i)
            place = i if first else self._as_index(inner, self._place_of(inner, at))
            b = self.text.builder(inner, 0)
            key = rising(b, self._load(inner, buf, self._plus(inner, self.base, place)), buf.dtype)
            key = b.int_resize(key, f"i{8 * word.dtype.itemsize}", unsigned=True)
            self._store(inner, word, at, key)
            if first and self.places is not None:
                self._store(inner, self.places, at, self._as_count(inner, i))

        self._each(block, self.count, fill)

    # ------------------------------------------------------------------ passes

    def _sort_by(self, block: Block, key_index: int, source: str) -> str:
        """Sorts by key `key_index`; returns where the elements are then."""
        bits = key_bits(self.s.buffers[key_index].dtype)
        digit = digit_bits(self.length, bits)
        if digit is None:
            self._rank(block, key_index, source)
            return self._move(
                block, key_index, source, lambda inner, i, _: self._load(inner, self.counts, i)
            )
        results = self.text.loop(
            block,
            f"%shift{key_index}",
            0,
            bits,
            digit,
            lambda inner, carried: [
                self._pass(
                    inner, key_index, digit, inner.lookup(f"%shift{key_index}")[1], carried[0].name
                )
            ],
            [Ssa(source, "index", 0)],
        )
        return results[0].name

    def _pass(self, block: Block, key_index: int, digit: int, shift: str | int, source: str) -> Ssa:
        """One pass over the digit from bit `shift` on."""
        word, values = self._word(key_index), 1 << digit
        el = f"i{8 * word.dtype.itemsize}"
        shift = self.text.index(shift) if isinstance(shift, int) else shift
        amount = Ssa(self.text.put(block, "arith.index_cast", (shift,), f"index to {el}"), el, 0)
        zero, one = self._count(0), self._count(1)

        def digit_of(inner: Block, key: Ssa) -> str:
            ops = self.text.builder(inner, 0)
            return self._as_index(inner, ops.and_(ops.shr(key, amount), ops.c(values - 1, el)))

        def bump(inner: Block, i: str, _):
            digit_value = digit_of(inner, self._load(inner, word, self._plus(inner, source, i)))
            self._store(
                inner,
                self.counts,
                digit_value,
                self.text.builder(inner, 0).add(self._load(inner, self.counts, digit_value), one),
            )

        def begin(inner: Block, i: str, place):
            count = self._load(inner, self.counts, i)
            self._store(inner, self.counts, i, place[0])
            return [self.text.builder(inner, 0).add(place[0], count)]

        def next_place(inner: Block, _, key: Ssa) -> Ssa:
            digit_value = digit_of(inner, key)
            place = self._load(inner, self.counts, digit_value)
            self._store(
                inner, self.counts, digit_value, self.text.builder(inner, 0).add(place, one)
            )
            return place

        self._each(block, values, lambda inner, i, _: self._store(inner, self.counts, i, zero))
        self._each(block, self.count, bump)
        common = self._load(block, self.counts, digit_of(block, self._load(block, word, source)))
        count = self.text.index(self.count) if isinstance(self.count, int) else self.count
        all_equal = self.text.builder(block, 0).cmp("eq", common, self._as_count(block, count))
        moved, stayed = Block(block), Block(block)
        self._each(moved, values, begin, [zero])
        target = Ssa(self._move(moved, key_index, source, next_place), "index", 0)
        return Ssa(
            self.text.either(block, all_equal.name, stayed, Ssa(source, "index", 0), moved, target),
            "index",
            0,
        )

    def _count(self, value: int) -> Ssa:
        return Ssa(self.text.const(str(value), "i32"), "i32", 0)

    def _rank(self, block: Block, key_index: int, source: str) -> None:
        """Writes how many keys go before each: those that are smaller, and of equal ones those further left."""
        word, lanes = self._word(key_index), key_lanes(self.s.buffers[key_index].dtype)
        el = f"i{8 * word.dtype.itemsize}"
        places = range(0, self.length, lanes)
        ops = self.text.builder(block, lanes)
        starts = [self._plus(block, source, self.text.index(first)) for first in places]
        vectors = [
            self.text.load_vector(block, (word.root.name, at), memref(word), el, lanes)
            for at in starts
        ]
        numbers = [
            self.text.const(f"dense<{[*range(first, first + lanes)]}>", f"vector<{lanes}xi32>")
            for first in places
        ]

        def compare(body: Block, i: str, ranks):
            inner = self.text.builder(body, lanes)
            key = inner.broadcast(self._load(body, word, self._plus(body, source, i)))
            number = inner.broadcast(self._as_count(body, i))
            ranks_after = []
            for rank, vector, lanes_of_vector in zip(ranks, vectors, numbers):
                smaller = inner.cmp("lt", key, vector, unsigned=True)
                further_left = inner.cmp("lt", number, Ssa(lanes_of_vector, "i32", lanes))
                before = inner.or_(smaller, inner.and_(inner.cmp("eq", key, vector), further_left))
                ranks_after.append(inner.add(rank, inner.int_resize(before, "i32", unsigned=True)))
            return ranks_after

        ranks = self._each(block, self.count, compare, [ops.c(0, "i32") for _ in places])
        for place, rank in zip(places, ranks):
            at = self.text.index(place)
            self.text.store_vector(block, rank, (self.counts.root.name, at), memref(self.counts))

    def _move(self, block: Block, key_index: int, source: str, place_of) -> str:
        """Moves words and places to the other half, from the first element on to the places that `place_of` tells."""
        word = self._word(key_index)
        target = self.text.put(block, "arith.subi", (self.text.index(self.length), source), "index")

        def move(inner: Block, i: str, _):
            at = self._plus(inner, source, i)
            key = self._load(inner, word, at)
            to = self._plus(inner, target, self._as_index(inner, place_of(inner, i, key)))
            self._store(inner, word, to, key)
            if self.places is not None:
                self._store(inner, self.places, to, self._load(inner, self.places, at))

        self._each(block, self.count, move)
        return target

    # ------------------------------------------------------------------ results

    def _place_of(self, block: Block, at: str):
        """Place of scratch where the element that is in order was before; not kept for the only pass over one key."""
        assert self.places is not None
        return self._load(block, self.places, at)

    def _write(self, block: Block, source: str) -> None:
        """Puts the elements that are read in their places: the first `count`; there are no fewer."""
        if self.places is None:
            (buf,) = self.s.buffers

            def read_off(inner: Block, i: str, _):
                word = self._load(inner, self._word(0), self._plus(inner, source, i))
                self._store(
                    inner,
                    buf,
                    self._plus(inner, self.base, i),
                    risen(self.text.builder(inner, 0), word, buf.dtype),
                )

            self._each(block, self.s.first, read_off)
            return
        for buf, spare in zip(self.s.buffers, self.spare):

            def keep(inner: Block, i: str, _, buf=buf, spare=spare):
                self._store(
                    inner, spare, i, self._load(inner, buf, self._plus(inner, self.base, i))
                )

            def pick(inner: Block, i: str, _, buf=buf, spare=spare):
                place = self._as_index(inner, self._place_of(inner, self._plus(inner, source, i)))
                self._store(
                    inner, buf, self._plus(inner, self.base, i), self._load(inner, spare, place)
                )

            self._each(block, self.count, keep)
            self._each(block, self.s.first, pick)
