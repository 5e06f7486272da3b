"""Order of effects: what a statement overwrites is stored elsewhere first, where it is still to be read.

Values are lazy: an expression may read a buffer long after the equation that it stands for.
`pending_reads.py` knows the uses that are still to come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pbkern.lower.nest.addresses import apart
from pbkern.lower.nest.ir import Buf, Gather, Load, Nest, Store
from pbkern.lower.values.draft import NestDraft

from . import materialise
from .items import StoreItem
from .values import Contract, Index, Opaque, Stored, Value, Windowed, dims_index


def _whereabouts(buf: Buf, index: Index) -> tuple:
    """Place where an element is stored.

    A result that shares an operand's array is another Buf with the same root.
    """
    return buf.root, buf.shape, buf.dtype, index


def protect(
    builder, written: set[Buf], direct: StoreItem | None = None, captured: Sequence[Value] = ()
) -> None:
    """Stores values elsewhere that are still to be read from buffers about to be written."""
    asked = [*captured, *builder.pending_reads.reading(written, builder.now)]
    if direct is not None:
        asked += _before_store(builder, direct, written)
    for value in map(builder.resolve, asked):
        if _reads(builder, value, written):
            builder.force(value)


def _before_store(builder, item: StoreItem, written: set[Buf]) -> Sequence[Value]:
    """Values that a statement needs of the buffer that it writes, where it writes over them before it has read them."""
    value = builder.resolve(item.value)
    if isinstance(value, Windowed) or (isinstance(value, Opaque) and value.over_first):
        first, *later = value.operands
        if not _conflicts(builder, dataclasses.replace(item, value=first), written):
            return [other for other in later if _reads(builder, other, written)]
    return materialise.uses(item) if _conflicts(builder, item, written) else ()


def _conflicts(builder, item: StoreItem, written: set[Buf]) -> bool:
    """Whether the statement reads the written buffer at another index than it writes, or before its sums are done."""
    value = builder.resolve(item.value)
    asked = [value] if item.mask is None else [value, builder.resolve(item.mask)]
    asked = [source for source in asked if _reads(builder, source, written)]
    if any(isinstance(source, (Contract, Opaque)) for source in asked):
        return True
    probe = dims_index([(f"@{k}", size) for k, size in enumerate(item.shape)])
    draft = NestDraft((f"@{k}", size) for k, size in enumerate(item.shape))
    index = item.place(probe)
    stores = [Store(item.buf, index, builder.pull(source, probe, draft)) for source in asked]
    nest = draft.nest(*stores)

    def read(inner: Nest) -> list[Load | Gather]:
        return [load for load in inner.loads() if load.buf.root in written]

    def meets(expr: Load) -> bool:
        buf, at, guard = expr.buf, expr.index, expr.guard
        known = buf is item.buf and not guard
        return _whereabouts(buf, at) != same and not (
            known and apart(at, nest.dims, index, nest.dims)
        )

    summed, same = read(Nest({}, reductions=nest.reductions)), _whereabouts(item.buf, index)
    return bool(summed) or any(isinstance(expr, Gather) or meets(expr) for expr in read(nest))


def is_stored_in(builder, value: Value, target: Stored) -> bool:
    """Whether `value` is what `target` holds, element by element."""
    value, probe = (
        builder.resolve(value),
        dims_index([(f"@{k}", size) for k, size in enumerate(target.shape)]),
    )
    if not isinstance(value, Stored) or value.shape != target.shape:
        return False
    return _whereabouts(value.buf, value.place(probe)) == _whereabouts(
        target.buf, target.place(probe)
    )


def _reads(builder, value: Value, bufs: set[Buf]) -> bool:
    seen: dict[int, Value] = {}
    waiting = [value]
    while waiting:
        x = builder.resolve(waiting.pop())
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if not isinstance(x, Stored):
            waiting += x.ins
        elif x.buf.root in bufs:
            return True
    return False
