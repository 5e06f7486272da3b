"""Sort statement -> text: a stable bottom-up merge sort of each line, keys compared as JAX does.

Floats: NaN last, -0 equal to 0. Lines are contiguous; `spare` holds one line of each operand.
"""

from __future__ import annotations

from ..affine import Affine
from .builder import Value as Ssa
from .builder import storage_el
from .nest import Sort
from .places import memref
from .text import Block, Text


def emit_sort(text: Text, block: Block, s: Sort) -> None:
    """Appends the loops over lines and merge widths to `block`."""
    lines, length = s.buffers[0].shape
    if lines == 0 or length < 2:
        return

    def line(inner: Block, _) -> list:
        _, base = text.affine(inner, Affine.symbol("%line") * length)
        width = 1
        while width < length:
            _pass(text, inner, s, base, width, length)
            width *= 2
        return []

    text.loop(block, "%line", 0, lines, 1, line)


def _pass(text: Text, block: Block, s: Sort, base: str, width: int, length: int) -> None:
    """Merges neighbouring sorted runs of `width` into the spare line, then copies it back."""
    one, n = text.index(1), text.index(length)

    def runs(b: Block, _) -> list:
        _, low = text.affine(b, Affine.symbol("%run"))
        mid = text.put(b, f"arith.minsi {text.put(b, f'arith.addi {low}, {text.index(width)} : index')}, {n} : index")
        high = text.put(b, f"arith.minsi {text.put(b, f'arith.addi {low}, {text.index(2 * width)} : index')}, {n} : index")
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
        return []

    text.loop(block, "%run", 0, length, 2 * width, runs)

    def copy(b: Block, _) -> list:
        _, k = text.affine(b, Affine.symbol("%copy"))
        at = text.put(b, f"arith.addi {base}, {k} : index")
        for buf, spare in zip(s.buffers, s.spare):
            v = text.put(b, f"memref.load {spare.name}[{k}] : {memref(spare)}")
            b.lines.append(f"memref.store {v}, {buf.root.name}[{at}] : {memref(buf)}")
        return []

    text.loop(block, "%copy", 0, length, 1, copy)


def _take_left(text: Text, block: Block, s: Sort, base: str, i: str, j: str, mid: str, high: str) -> str:
    """i < mid and (j >= high or not right < left), reading only inside the line."""
    b = text.builder(block, 0)
    last = text.index(s.buffers[0].shape[1] - 1)
    left = text.put(block, f"arith.addi {base}, {text.put(block, f'arith.minsi {i}, {last} : index')} : index")
    right = text.put(block, f"arith.addi {base}, {text.put(block, f'arith.minsi {j}, {last} : index')} : index")
    less = equal = None
    for buf in s.buffers[: s.num_keys]:
        x, y = (b.from_storage(Ssa(text.put(block, f"memref.load {buf.root.name}[{at}] : {memref(buf)}"),
                                   storage_el(buf.dtype), 0), buf.dtype) for at in (right, left))
        lt, eq = _compare(b, x, y, buf.dtype.kind == "u")
        less = lt if less is None else b.or_(less, b.and_(equal, lt))
        equal = eq if equal is None else b.and_(equal, eq)
    has_left = Ssa(text.put(block, f"arith.cmpi slt, {i}, {mid} : index"), "i1", 0)
    no_right = Ssa(text.put(block, f"arith.cmpi sge, {j}, {high} : index"), "i1", 0)
    return b.and_(has_left, b.or_(no_right, b.not_(less))).name


def _compare(b, x: Ssa, y: Ssa, unsigned: bool) -> tuple[Ssa, Ssa]:
    """(x < y, x == y) with NaN above every number and equal to itself."""
    if x.el == "i1":
        x, y, unsigned = b.int_resize(x, "i8", unsigned=True), b.int_resize(y, "i8", unsigned=True), True
    less, equal = b.cmp("lt", x, y, unsigned=unsigned), b.cmp("eq", x, y)
    if x.el in ("f32", "f64"):
        nan_x, nan_y = b.is_nan(x), b.is_nan(y)
        less = b.or_(less, b.and_(nan_y, b.not_(nan_x)))
        equal = b.or_(equal, b.and_(nan_x, nan_y))
    return less, equal
