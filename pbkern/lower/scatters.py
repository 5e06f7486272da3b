"""scatter, scatter-add, ...: the operand is stored where the result goes, then a loop combines the updates with it, in order.

One step of the loop is one window: its start is computed, tested against the operand's bounds as `mode` says, and the
window is a nest of its own, vectors along its last dimension. Indices and updates are read where they are needed, so
that what makes them is computed there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..affine import Affine
from ..errors import UnsupportedOp
from ..jaxprs import scatter_combines
from . import elementwise
from .nest import Expr, For, If, Let, Nest, Stmt, Write
from .values import ZERO, Lazy, Opaque, Stored, Value, dims_index

BOOL = np.dtype(bool)


def supports(eqn) -> str | None:
    """None if bodies can contain the scatter, else why not."""
    combine, dtype = scatter_combines(eqn), np.dtype(eqn.outvars[0].aval.dtype)
    if combine is None:
        return "it applies a function of its own to the elements"
    if combine != "set" and not elementwise.supports(combine, (dtype, dtype), dtype):
        return f"`{combine}` is not covered for {dtype.name}"
    return None


@dataclass(frozen=True)
class _Form:
    """Which dimension of the updates, and which index, goes along each dimension of the operand.

    Attributes:
      loops: (dimension of the updates, extent) of those that choose a window.
      windows: dimension of the operand -> dimension of the updates; others are one element wide.
      batch: dimension of the operand -> dimension of the updates, for those that indices do not choose.
      starts: dimension of the operand -> position in an index vector.
    """

    loops: tuple[tuple[int, int], ...]
    windows: dict[int, int]
    batch: dict[int, int]
    starts: dict[int, int]

    @staticmethod
    def of(eqn) -> _Form:
        operand, _, updates = (a.aval.shape for a in eqn.invars)
        dn = eqn.params["dimension_numbers"]
        loops = [d for d in range(len(updates)) if d not in dn.update_window_dims]
        absent = (*dn.inserted_window_dims, *dn.operand_batching_dims)
        windows = zip((d for d in range(len(operand)) if d not in absent), dn.update_window_dims)
        batch = zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims)
        return _Form(tuple((d, updates[d]) for d in loops), {d: int(w) for d, w in windows},
                     {d: loops[k] for d, k in batch}, {d: k for k, d in enumerate(dn.scatter_dims_to_operand_dims)})


def scatter(builder, eqn, ins: list[Value]) -> Opaque:
    """Rule of the family. Raises UnsupportedOp."""
    reason = supports(eqn)
    if reason is not None:
        raise UnsupportedOp(f"`{eqn.primitive.name}` is not lowered", at=builder.line(eqn), why=reason,
                            hint="leave this operation to XLA")
    operand, indices, updates = ins
    columns = [builder.new(_column(indices, k)) for k in range(indices.shape[-1])]

    def make(b, operand: Value, updates: Value, *columns: Value, target: Stored | None = None) -> Stored:
        result = target or b.new_buffer(operand.shape, operand.dtype)
        b.store_value(result, operand, lambda ix: ix)
        _combine(b, eqn, result, columns, updates)
        return result

    return Opaque(operand.shape, operand.dtype, (operand, updates, *columns), make, needs_buffers=False, takes_target=True)


def _column(indices: Value, k: int) -> Lazy:
    """Number `k` of every index vector."""
    return Lazy(indices.shape[:-1], indices.dtype, (indices,), lambda ix: ((*ix, Affine((), k)),),
                lambda pool, ix, xs: xs[0], is_view=True)


def _combine(b, eqn, result: Stored, columns: Sequence[Value], updates: Value) -> None:
    """for each index vector: if its window lies inside: result[window] = combine(result[window], update)."""
    form, clip = _Form.of(eqn), "CLIP" in str(eqn.params["mode"])
    counters = {d: (b.names("%i"), n) for d, n in form.loops}
    dims = {d: (b.names("d"), updates.shape[d]) for d in form.windows.values()}
    place = {d: i for some in (counters, dims) for d, i in zip(some, dims_index(list(some.values())))}
    at = tuple(place[d] for d in counters)

    lets, tests, offsets = [], [], {}
    for d, k in form.starts.items():
        limit = result.shape[d] - (updates.shape[form.windows[d]] if d in form.windows else 1)
        start, name = b.pull(columns[k], at), b.names("%s")
        lets.append(Let(name, b.clamped(start, limit) if clip else start))
        offsets[d] = Affine.symbol(name)
        tests += [] if clip else [_is_at_most(b, offsets[d], limit)]

    def along(d: int) -> Affine:
        if d in form.batch:
            return place[form.batch[d]]
        return offsets.get(d, ZERO) + (place[form.windows[d]] if d in form.windows else ZERO)

    index = result.place(tuple(map(along, range(len(result.shape)))))
    value = b.pull(updates, tuple(place[d] for d in range(len(updates.shape))))
    combine = scatter_combines(eqn)
    if combine != "set":
        old = b.pool.make("load", result.dtype, (result.buf, index, result.guard))
        value = b.op(combine, result.dtype, old, value)
    nest = Nest(dict(dims.values()), writes=[Write(result.buf, index, value, guard=result.guard)], at=b.line(eqn))
    stmts = _under(b, lets, tests, nest)
    for name, n in reversed(counters.values()):
        stmts = [For(name, n, stmts)]
    b.stmts += stmts


def _is_at_most(b, start: Affine, limit: int) -> Expr:
    """0 <= start <= limit: negative numbers are large ones without a sign."""
    unsigned = np.dtype(np.uint64)
    return b.op("le", BOOL, b.pool.make("index", unsigned, start), b.const(limit, unsigned))


def _under(b, lets: list[Stmt], tests: list[Expr], nest: Nest) -> list[Stmt]:
    """`lets`, then `nest` where all tests hold."""
    if not tests:
        return [*lets, nest]
    name, test = b.names("%s"), functools.reduce(lambda x, y: b.op("and", BOOL, x, y), tests)
    return [*lets, Let(name, b.clamped(test, None)), If(name, [[], [nest]])]
