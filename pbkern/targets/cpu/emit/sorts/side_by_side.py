"""Sort statement -> text: as many lines side by side as a vector has lanes, in a network of exchanges.

Elements become words that are in order as signed integers are (targets/costs/sorts.py: WordLayout),
transposed to scratch, so that element i of all lines is one vector. A network exchanges elements i
and j of every line at once, by minima and maxima. Places in the last word make the sort stable, and
tell where operands are read; integers that nothing travels with are read off their words.
"""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import mlir_type, storage_el
from pbkern.lower.mlir.key_order import risen, rising
from pbkern.lower.mlir.ops import Builder, Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Buf, Sort
from pbkern.targets.costs.sorts import WordLayout, network_passes, word_layout
from pbkern.targets.cpu.emit.addressing import memref


@dataclass(frozen=True)
class LineNetwork:
    """Emits the sort of all lines of `sort`, whose scratch is one buffer of words, and a line of each operand.

    wide_minima: the machine has minima of 64-bit integers.
    """

    text: Text
    sort: Sort
    wide_minima: bool

    @property
    def layout(self) -> WordLayout:
        dtypes = [buffer.dtype for buffer in self.sort.buffers]
        return word_layout(self.length, dtypes, self.sort.num_keys)

    @property
    def length(self) -> int:
        return self.sort.buffers[0].shape[1]

    @property
    def words(self) -> Buf:
        return self.sort.spare[0]

    @property
    def spare(self) -> tuple[Buf, ...]:
        return self.sort.spare[1:]

    @property
    def el(self) -> str:
        """Type of a word."""
        return f"i{self.layout.bits}"

    def emit(self, block: Block) -> None:
        """Appends the loop over groups of lines."""
        lines, lanes = self.sort.buffers[0].shape[0], self.layout.lanes

        def group(inner: Block, _) -> list:
            first = self.text.named(inner.lookup("%line")[1])
            starts = self._line_starts(inner, first)
            self._make_words(inner, starts)
            for distance in network_passes(self.length):
                self._pass(inner, *distance)
            if self.spare:
                left = self.text.put(inner, "arith.subi", (self.text.index(lines), first), "index")
                operands = (left, self.text.index(lanes))
                count = self.text.put(inner, "arith.minsi", operands, "index")
                self._pick_lines(inner, first, count)
            else:
                self._read_words(inner, starts)
            return []

        self.text.loop(block, "%line", 0, lines, lanes, group)

    # ------------------------------------------------------------------ memory

    def _line_starts(self, block: Block, first: str) -> list[str]:
        """Address of each lane's line. Lanes behind the last line repeat that line."""
        lines, text = self.sort.buffers[0].shape[0], self.text
        last, length = text.index(lines - 1), text.index(self.length)
        starts = []
        for lane in range(self.layout.lanes):
            line = text.put(block, "arith.addi", (first, text.index(lane)), "index")
            line = text.put(block, "arith.minsi", (line, last), "index")
            starts.append(text.put(block, "arith.muli", (line, length), "index"))
        return starts

    def _word_address(self, block: Block, at: str, word: int) -> str:
        """Address of a vector of words; `at` counts words of one kind."""
        offset = word * self.length * self.layout.lanes
        return self.text.named(self.text.add_indices(block, offset, at))

    def _load_words(self, block: Block, at: str) -> list[Ssa]:
        kind, lanes = memref(self.words), self.layout.lanes
        return [
            self.text.load_vector(
                block,
                (self.words.root.name, self._word_address(block, at, k)),
                kind,
                self.el,
                lanes,
            )
            for k in range(len(self.layout.words))
        ]

    def _store_words(self, block: Block, at: str, words: Sequence[Ssa]) -> None:
        for k, word in enumerate(words):
            place = (self.words.root.name, self._word_address(block, at, k))
            self.text.store_vector(block, word, place, memref(self.words))

    def _load(self, block: Block, buf: Buf, at: str) -> str:
        return self.text.put(block, "memref.load", (buf.root.name, at), memref(buf))

    def _each(self, block: Block, symbol: str, count: int | str, fill) -> None:
        """`fill(inner block, index)` for every index below `count`."""

        def body(inner: Block, _) -> list[Ssa]:
            fill(inner, self.text.named(inner.lookup(symbol)[1]))
            return []

        self.text.loop(block, symbol, 0, count, 1, body)

    # ------------------------------------------------------------------ words

    def _make_words(self, block: Block, starts: list[str]) -> None:
        lanes, text = self.layout.lanes, self.text
        keys = self.sort.buffers[: self.sort.num_keys]

        def fill(inner: Block, i: str) -> None:
            b = text.builder(inner, lanes)
            fields = []
            for buf in keys:
                el = storage_el(buf.root.dtype)
                elements = tuple(
                    self._load(inner, buf, text.put(inner, "arith.addi", (start, i), "index"))
                    for start in starts
                )
                stored = text.put(inner, "vector.from_elements", elements, mlir_type(el, lanes))
                key = rising(b, Ssa(stored, el, lanes), buf.dtype)
                fields.append(b.int_resize(key, self.el, unsigned=True))
            if self.spare:
                place = text.put(inner, "arith.index_cast", (i,), f"index to {self.el}")
                fields.append(b.broadcast(Ssa(place, self.el, 0)))
            at = text.put(inner, "arith.muli", (i, text.index(lanes)), "index")
            self._store_words(inner, at, self._packed(b, fields))

        self._each(block, "%element", self.length, fill)

    def _packed(self, b: Builder, fields: list[Ssa]) -> list[Ssa]:
        """Fields side by side in words. The sign of a word without a spare bit is turned over."""
        words, rest = [], iter(fields)
        for widths in self.layout.words:
            word = next(rest)
            for width in widths[1:]:
                word = b.or_(b.shl(word, b.c(width, self.el)), next(rest))
            words.append(self._turned(b, word, sum(widths)))
        return words

    def _turned(self, b: Builder, word: Ssa, width: int) -> Ssa:
        """A word of `width` bits as a signed integer of the same order; the inverse as well."""
        full = width == self.layout.bits
        return b.xor(word, b.c(1 << (width - 1), self.el)) if full else word

    # ------------------------------------------------------------------ network

    def _pass(self, block: Block, p: int, r: int, d: int) -> None:
        """Exchanges places i and i + d, for those i below length - d with i & p == r: runs of p places."""
        text, lanes, end = self.text, self.layout.lanes, self.length - d
        complete = max(end - r, 0) // (2 * p) * 2 * p + r  # where runs that may be cut begin

        def run(inner: Block, start: str, count: int) -> None:
            def exchange(innermost: Block, _) -> list[Ssa]:
                offset = text.named(innermost.lookup("%within")[1])
                low = text.put(innermost, "arith.addi", (start, offset), "index")
                high = text.put(innermost, "arith.addi", (low, text.index(d * lanes)), "index")
                self._exchange(innermost, low, high)
                return []

            text.loop(inner, "%within", 0, count * lanes, lanes, exchange, unrolls=False)

        def whole(inner: Block, _) -> list[Ssa]:
            run(inner, text.named(inner.lookup("%run")[1]), p)
            return []

        text.loop(block, "%run", r * lanes, complete * lanes, 2 * p * lanes, whole, unrolls=False)
        run(block, text.index(complete * lanes), min(p, end - complete))

    def _exchange(self, block: Block, low: str, high: str) -> None:
        """Puts two vectors of elements in order, lane by lane."""
        b = self.text.builder(block, self.layout.lanes)
        lefts, rights = self._load_words(block, low), self._load_words(block, high)
        if len(lefts) == 1 and (self.layout.bits == 32 or self.wide_minima):
            smaller = [b.same("arith.minsi", lefts[0], rights[0])]
            larger = [b.same("arith.maxsi", lefts[0], rights[0])]
        else:
            swapped = b.cmp("lt", rights[-1], lefts[-1])
            for left, right in zip(lefts[-2::-1], rights[-2::-1]):
                equal = b.and_(b.cmp("eq", right, left), swapped)
                swapped = b.or_(b.cmp("lt", right, left), equal)
            # LLVM makes masked stores of values that are selected, which take long where memory
            # alone has masks; it makes none of differences.
            mask = b.cast("arith.extsi", swapped, self.el)
            changes = [b.and_(mask, b.xor(left, right)) for left, right in zip(lefts, rights)]
            smaller = [b.xor(left, change) for left, change in zip(lefts, changes)]
            larger = [b.xor(right, change) for right, change in zip(rights, changes)]
        self._store_words(block, low, smaller)
        self._store_words(block, high, larger)

    # ------------------------------------------------------------------ results

    def _read_words(self, block: Block, starts: list[str]) -> None:
        """Reads integers off their words."""
        (buf,), text, lanes = self.sort.buffers, self.text, self.layout.lanes
        ((width,),) = self.layout.words

        def fill(inner: Block, i: str) -> None:
            b = text.builder(inner, lanes)
            at = text.put(inner, "arith.muli", (i, text.index(lanes)), "index")
            (word,) = self._load_words(inner, at)
            value = risen(b, self._turned(b, word, width), buf.dtype)
            kind = f"{mlir_type(value.el)} from {value.type}"
            for lane, start in enumerate(starts):
                element = text.put(inner, "vector.extract", (value.name,), kind, f" %s[{lane}]")
                to = text.put(inner, "arith.addi", (start, i), "index")
                inner.add("memref.store", (element, buf.root.name, to), memref(buf))

        self._each(block, "%element", self.sort.first, fill)

    def _pick_lines(self, block: Block, first: str, count: str) -> None:
        """Reads each line's operands where the last words say."""
        text, lanes = self.text, self.layout.lanes
        place_mask = (1 << self.layout.words[-1][-1]) - 1

        def line(inner: Block, lane: str) -> None:
            number = text.put(inner, "arith.addi", (first, lane), "index")
            base = text.put(inner, "arith.muli", (number, text.index(self.length)), "index")

            def address(body: Block, i: str) -> str:
                return text.put(body, "arith.addi", (base, i), "index")

            def keep(body: Block, i: str) -> None:
                for buf, spare in zip(self.sort.buffers, self.spare):
                    value = self._load(body, buf, address(body, i))
                    body.add("memref.store", (value, spare.root.name, i), memref(spare))

            def pick(body: Block, i: str) -> None:
                at = text.put(body, "arith.muli", (i, text.index(lanes)), "index")
                at = text.put(body, "arith.addi", (at, lane), "index")
                at = self._word_address(body, at, len(self.layout.words) - 1)
                b = text.builder(body, 0)
                word = Ssa(self._load(body, self.words, at), self.el, 0)
                masked = b.and_(word, b.c(place_mask, self.el))
                place = text.put(body, "arith.index_castui", (masked.name,), f"{self.el} to index")
                for buf, spare in zip(self.sort.buffers, self.spare):
                    value = self._load(body, spare, place)
                    target = address(body, i)
                    body.add("memref.store", (value, buf.root.name, target), memref(buf))

            self._each(inner, "%element", self.length, keep)
            self._each(inner, "%element", self.sort.first, pick)

        self._each(block, "%lane", count, line)
