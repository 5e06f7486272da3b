"""The first elements of sorted lines without sorting the lines: top_k.

The head of a line holds candidates. Once it is sorted, its element `first - 1` is a bound: what
follows in the line and is below joins the candidates, and when the head is full, it is sorted again
and keeps its first elements. Equal elements keep their order, because later ones are not below.
Most elements of long lines are passed over as vectors, one comparison each; in the worst case,
lines in reverse, a head is sorted for every three quarters of a head.
"""

from __future__ import annotations

from collections.abc import Callable

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.mlir.element_types import storage_el
from pbkern.lower.mlir.key_order import compare, compared, rising
from pbkern.lower.mlir.operation import for_syntax
from pbkern.lower.mlir.ops import Ssa
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Buf, Sort
from pbkern.targets.cpu.emit.addressing import memref

# Elements that are compared with the bound at once. Source: not recorded.
COMPARED_AT_ONCE = 16


@dataclass(frozen=True)
class Selection:
    """Emits the selection for the line that starts at address `base`.

    head: length of its head; sort_head(block, n) appends a sort of the first n elements, a number
    or the name of one.
    """

    text: Text
    sort: Sort
    base: str
    head: int
    sort_head: Callable[[Block, int | str], None]

    def emit(self, block: Block) -> None:
        length, index = self.sort.buffers[0].shape[1], self.text.index
        vectors = self.head + (length - self.head) // COMPARED_AT_ONCE * COMPARED_AT_ONCE
        self.sort_head(block, self.head)
        count = self._loop(
            block,
            (index(self.head), index(vectors)),
            COMPARED_AT_ONCE,
            index(self.sort.first),
            self._chunk,
        )
        count = self._loop(block, (index(vectors), index(length)), 1, count, self._element)
        self.sort_head(block, count)

    def _loop(
        self,
        block: Block,
        span: tuple[str, str],
        step: int,
        count: str,
        body: Callable[[Block, str, str], str],
    ) -> str:
        """scf.for over a span that carries the number of candidates: body(block, position, number) -> number."""
        inner, at, carried, name = (
            Block(block),
            self.text.name(),
            self.text.name(),
            self.text.name(),
        )
        after = body(inner, at, carried)
        inner.add("scf.yield", (after,), "index")
        block.add(
            "scf.for",
            (at, *span, self.text.index(step), carried, count),
            "",
            for_syntax(["index"]),
            regions=(inner,),
            result=name,
            arguments=(at, carried),
        )
        return name

    def _chunk(self, block: Block, at: str, count: str) -> str:
        """A vector of elements: one by one only where some may be below the bound, by their first keys."""
        inner, name = Block(block), self.text.name()
        end = self.text.put(inner, "arith.addi", (at, self.text.index(COMPARED_AT_ONCE)), "index")
        count_after = self._loop(inner, (at, end), 1, count, self._element)
        inner.add("scf.yield", (count_after,), "index")
        other = Block(block)
        other.add("scf.yield", (count,), "index")
        block.add(
            "scf.if",
            (self._some_below(block, at),),
            "",
            " %s -> (index)",
            regions=(inner, other),
            result=name,
        )
        return name

    def _some_below(self, block: Block, at: str) -> str:
        """Whether the first key of one of some elements is below the bound's, or equal where there are more keys.

        COMPARED_AT_ONCE elements start at `at`.
        """
        text, buf = self.text, self.sort.buffers[0]
        el, b = storage_el(buf.dtype), text.builder(block, COMPARED_AT_ONCE)
        place = (buf.root.name, self._address(block, at))
        loaded = text.load_vector(block, place, memref(buf), el, COMPARED_AT_ONCE)
        bound = text.put(block, "memref.load", (buf.root.name, self._bound(block)), memref(buf))
        spread = b.broadcast(Ssa(bound, el, 0))
        x, y = (rising(b, vector, buf.dtype) for vector in (loaded, spread))
        less, equal = compare(b, x, y)
        return b.any(b.or_(less, equal) if self.sort.num_keys > 1 else less).name

    def _element(self, block: Block, at: str, count: str) -> str:
        """One element: written behind the candidates, and counted if it is below the bound."""
        text, source, target = self.text, self._address(block, at), self._address(block, count)
        is_below = self._is_below(block, source, self._bound(block))
        for buf in (
            self.sort.buffers
        ):  # nothing needs what is behind the candidates and not behind the element
            value = text.put(block, "memref.load", (buf.root.name, source), memref(buf))
            block.add("memref.store", (value, buf.root.name, target), memref(buf))
        more = text.put(block, "arith.addi", (count, text.index(1)), "index")
        number = text.put(block, "arith.select", (is_below, more, count), "index")
        full = text.put(
            block, "arith.cmpi", (number, text.index(self.head)), "index", " eq, %s, %s"
        )
        text.when(block, full, lambda inner: self.sort_head(inner, self.head))
        return text.put(block, "arith.select", (full, text.index(self.sort.first), number), "index")

    def _is_below(self, block: Block, x: str, y: str) -> str:
        """Whether the element at address x comes before that at y."""
        b, text = self.text.builder(block, 0), self.text

        def key(buf: Buf, at: str) -> Ssa:
            stored = text.put(block, "memref.load", (buf.root.name, at), memref(buf))
            return rising(b, Ssa(stored, storage_el(buf.dtype), 0), buf.dtype)

        keys = self.sort.buffers[: self.sort.num_keys]
        return compared(b, ((key(buf, x), key(buf, y)) for buf in keys))[0].name

    def _address(self, block: Block, position: str) -> str:
        return self.text.put(block, "arith.addi", (self.base, position), "index")

    def _bound(self, block: Block) -> str:
        """Address of the last element that is wanted, once the head is sorted."""
        return self._address(block, self.text.index(self.sort.first - 1))
