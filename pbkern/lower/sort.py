"""Sort statement -> text: a stable bottom-up merge sort of each line, keys compared as JAX does.

Floats: NaN last, -0 equal to 0. Lines are contiguous; `spare` holds one line of each operand.
Where only first elements are read, selection.py finds them.
"""

from __future__ import annotations

from ..affine import Affine
from .builder import Value as Ssa
from .nest import Sort
from .order import below
from .places import memref
from .selection import Selection, head_length
from .text import Block, Text


def emit_sort(text: Text, block: Block, s: Sort) -> None:
    """Appends the loops over lines and merge widths to `block`."""
    lines, length = s.buffers[0].shape
    if lines == 0 or length < 2:
        return

    head = head_length(s)

    def line(inner: Block, _) -> list:
        _, base = text.affine(inner, Affine.symbol("%line") * length)
        if head is None:
            _sorted(text, inner, s, base, length, length)
            return []

        def sort_head(b: Block, count: int | str) -> None:
            _sorted(text, b, s, base, head, count)

        Selection(text, s, base, head, sort_head).emit(inner)
        return []

    text.loop(block, "%line", 0, lines, 1, line)


def _sorted(text: Text, block: Block, s: Sort, base: str, length: int, count: int | str) -> None:
    """Sorts the first `count` elements of a line, which are `length` at most: a loop over merge widths."""
    one, n = text.index(1), count if isinstance(count, str) else text.index(count)
    width, after, twice, step = text.name(), text.name(), text.name(), Block(block)
    step.lines.append(f"{twice} = arith.addi {width}, {width} : index")
    _pass(text, step, s, base, (width, twice), n)
    head = f"{after} = scf.for {text.name()} = {text.index(0)} to {text.index((length - 1).bit_length())} step {one}"
    block.lines += [f"{head} iter_args({width} = {one}) -> (index) {{", *step.lines, f"scf.yield {twice} : index", "}"]


def _pass(text: Text, block: Block, s: Sort, base: str, widths: tuple[str, str], n: str) -> None:
    """Merges neighbouring sorted runs of widths[0] into the spare line, then copies it back. widths[1]: twice as much."""
    one, (width, twice) = text.index(1), widths

    b, low = Block(block), text.name()
    mid = text.put(b, f"arith.minsi {text.put(b, f'arith.addi {low}, {width} : index')}, {n} : index")
    high = text.put(b, f"arith.minsi {text.put(b, f'arith.addi {low}, {twice} : index')}, {n} : index")
    i, j, out = text.name(), text.name(), text.name()
    step = Block(b)
    take_left = _take_left(text, step, s, base, i, j, mid, high)
    source = text.put(step, f"arith.select {take_left}, {i}, {j} : index")
    at = text.put(step, f"arith.addi {base}, {source} : index")
    for buf, spare in zip(s.buffers, s.spare):
        v = text.put(step, f"memref.load {buf.root.name}[{at}] : {memref(buf)}")
        step.lines.append(f"memref.store {v}, {spare.name}[{out}] : {memref(spare)}")
    i1 = text.put(step, f"arith.addi {i}, {one} : index")
    j1 = text.put(step, f"arith.addi {j}, {one} : index")
    i2 = text.put(step, f"arith.select {take_left}, {i1}, {i} : index")
    j2 = text.put(step, f"arith.select {take_left}, {j}, {j1} : index")
    name = text.name()
    head = f"{name}:2 = scf.for {out} = {low} to {high} step {one}"
    b.lines += [f"{head} iter_args({i} = {low}, {j} = {mid}) -> (index, index) {{",
                *step.lines, f"scf.yield {i2}, {j2} : index, index", "}"]
    block.lines += [f"scf.for {low} = {text.index(0)} to {n} step {twice} {{", *b.lines, "}"]

    def copy(b: Block, _) -> list:
        _, k = text.affine(b, Affine.symbol("%copy"))
        at = text.put(b, f"arith.addi {base}, {k} : index")
        for buf, spare in zip(s.buffers, s.spare):
            v = text.put(b, f"memref.load {spare.name}[{k}] : {memref(spare)}")
            b.lines.append(f"memref.store {v}, {buf.root.name}[{at}] : {memref(buf)}")
        return []

    text.loop(block, "%copy", 0, n, 1, copy)


def _take_left(text: Text, block: Block, s: Sort, base: str, i: str, j: str, mid: str, high: str) -> str:
    """i < mid and (j >= high or not right < left), reading only inside the line."""
    b = text.builder(block, 0)
    last = text.index(s.buffers[0].shape[1] - 1)
    left = text.put(block, f"arith.addi {base}, {text.put(block, f'arith.minsi {i}, {last} : index')} : index")
    right = text.put(block, f"arith.addi {base}, {text.put(block, f'arith.minsi {j}, {last} : index')} : index")
    less = below(text, block, s, right, left)
    has_left = Ssa(text.put(block, f"arith.cmpi slt, {i}, {mid} : index"), "i1", 0)
    no_right = Ssa(text.put(block, f"arith.cmpi sge, {j}, {high} : index"), "i1", 0)
    return b.and_(has_left, b.or_(no_right, b.not_(Ssa(less, "i1", 0)))).name
