"""Sort statement -> text, by the way of sorting that takes least for its lines: targets/costs/sorts.py."""

from __future__ import annotations

from pbkern.core.affine import Affine
from pbkern.lower.mlir.text import Block, Text
from pbkern.lower.nest.ir import Sort
from pbkern.targets.costs.sorts import head_length, is_network

from .radix_sort import RadixLine
from .side_by_side import LineNetwork
from .top_k import Selection


def emit_sort(text: Text, block: Block, sort: Sort, *, wide_minima: bool) -> None:
    """Appends what sorts the lines to `block`; wide_minima: the machine has minima of 64-bit integers."""
    lines, length = sort.buffers[0].shape
    dtypes = [buffer.dtype for buffer in sort.buffers]
    if not lines or length < 2:
        return
    if is_network(lines, length, dtypes, sort.num_keys, sort.first):
        LineNetwork(text, sort, wide_minima).emit(block)
        return
    head = head_length(length, sort.first)

    def line(inner: Block, _) -> list:
        _, base = text.affine(inner, Affine.symbol("%line") * length)
        if head is None:
            RadixLine(text, sort, base, length).sort(inner, length)
        else:
            Selection(text, sort, base, head, RadixLine(text, sort, base, head).sort).emit(inner)
        return []

    text.loop(block, "%line", 0, lines, 1, line)
