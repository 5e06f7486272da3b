"""Costly values that two nests make of a staged element -> the first one stores them over the element.

    c[k] = x[i, k]                                 c[k] = x[i, k]
    s = sum exp(c[k] - m)                ->        s = sum exp(c[k] - m),  c[k] = exp(c[k] - m)
    y[i, k] = exp(c[k] - m) / s                    y[i, k] = c[k] / s

Shared memory holds no more than before, and each exponential of a softmax is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import UNMEASURED
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects
from pbkern.lower.nest.context import NestContext, reports
from pbkern.lower.nest.ir import Buf, Expr, Load, Nest, Op, Pool, Stmt, Store, nodes
from pbkern.lower.passes.strips.strip_mining import inside
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.schedule.threads import is_one_to_one

from .regions import terms


@dataclass(frozen=True)
class StoreCostlyValues:
    """Stores values of nests over staged elements that only they are made of, inner statements too."""

    least_price: float = threshold(
        8.0, "additions that a value costs to be worth a store to shared memory, and loads"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext[ThreadOptions]) -> list[Stmt]:
        return self._stored(stmts, context, {buf.root for buf in context.persistent})

    def _stored(
        self, stmts: Sequence[Stmt], context: NestContext, elsewhere: set[Buf]
    ) -> list[Stmt]:
        """A list of statements and those inside them; other statements touch `elsewhere`."""
        out = inside(stmts, elsewhere, lambda body, around: self._stored(body, context, around))
        for at in range(len(out)):
            for value, load in list(self._candidates(out[at])):
                if load.buf.root not in elsewhere:
                    out = _reused(out, at, value, load, context.pool) or out
        return out

    def _candidates(self, stmt: Stmt) -> Iterator[tuple[Expr, Load]]:
        """(a value at every point of a nest, the one staged element of which it is made), outer values first."""
        if not isinstance(stmt, Nest) or stmt.ordered or stmt.moves() or not stmt.reductions:
            return
        for value in reversed(nodes(terms(stmt))):
            loads = {node for node in nodes([value]) if isinstance(node, Load)}
            elements = [load for load in loads if _is_an_element_each(load, stmt)]
            if len(elements) == 1 and self._is_costly(value) and not reports(value):
                yield value, elements[0]

    def _is_costly(self, value: Expr) -> bool:
        operations = (node for node in nodes([value]) if isinstance(node, Op))
        price = sum(UNMEASURED[operation.info.primitive] for operation in operations)
        return isinstance(value, Op) and price >= self.least_price


def _is_an_element_each(load: Load, nest: Nest) -> bool:
    """Whether every point of a nest reads an element of its own, in scratch."""
    return (
        load.buf.arena
        and load.buf.storage is None
        and not load.guard
        and is_one_to_one(load.index, {dim: n for dim, n in nest.dims.items() if n > 1})
    )


def _reused(
    stmts: Sequence[Stmt], at: int, value: Expr, load: Load, pool: Pool
) -> list[Stmt] | None:
    """The statements with a value of the nest at `at` in place of the element; None where it may not be."""
    nest, buf = stmts[at], load.buf
    assert isinstance(nest, Nest)
    if value.dtype != buf.dtype or buf in effects.written([nest]):
        return None
    if any(other.buf.root is buf and other is not load for other in nest.loads()):
        return None
    if not any(buf in effects.written([stmt]) for stmt in stmts[:at]):
        return None  # a loop around them comes back to what is stored over
    read = {node.buf.root for node in nodes([value]) if isinstance(node, Load)} - {buf}
    out, readers, changed = list(stmts), 0, effects.written([nest])
    for later in range(at + 1, len(stmts)):
        stmt = stmts[later]
        if buf in effects.touched([stmt]):
            reader = _reading(stmt, nest, value, load, pool) if not read & changed else None
            if reader is None or read & effects.written([stmt]):
                return None
            out[later], readers = reader, readers + 1
        changed = changed | effects.written([stmt])
    out[at] = replace(nest, stores=(*nest.stores, Store(buf, load.index, value)))
    return out if readers else None


def _reading(stmt: Stmt, nest: Nest, value: Expr, load: Load, pool: Pool) -> Nest | None:
    """A statement that reads the value where it has made it of the element; None where it needs the element itself."""
    if not isinstance(stmt, Nest) or load.buf in effects.written([stmt]):
        return None
    other, *more = (node for node in stmt.loads() if node.buf.root is load.buf)
    if not isinstance(other, Load) or any(node.access != other.access for node in more):
        return None
    places = _places(load, nest, other, stmt)
    if places is None:
        return None
    whole = pool.renamer({dim: Affine() for dim, size in stmt.dims.items() if size == 1})
    wanted = whole(pool.rename(value, places))

    def reading(element: Expr) -> Nest:
        return stmt.mapped(pool.rewriter(lambda node: element if whole(node) is wanted else None))

    needs_element = load.buf in effects.touched([reading(pool.const(load.dtype, 0))])
    return None if needs_element else reading(other)


def _places(load: Load, nest: Nest, other: Load, stmt: Nest) -> dict[str, Affine] | None:
    """Dimension of the nest -> that of another one, or its one place; None unless both walk the buffer alike."""
    places: dict[str, Affine] = {dim: Affine() for dim, size in nest.dims.items() if size == 1}
    for mine, theirs in zip(load.index, other.index):
        pairs = [_steps(position, of) for position, of in ((mine, nest), (theirs, stmt))]
        if [step for step, _ in pairs[0]] != [step for step, _ in pairs[1]]:
            return None
        for (_, dim), (_, their_dim) in zip(*pairs):
            if nest.dims[dim] != stmt.dims[their_dim]:
                return None
            places[dim] = Affine.symbol(their_dim)
    return places if places.keys() == nest.dims.keys() else None


def _steps(position: Affine, nest: Nest) -> list[tuple[int, str]]:
    """(elements between neighbours, dimension) of those that have neighbours, in order."""
    return sorted((step, dim) for dim, step in position.terms if nest.dims.get(dim, 1) > 1)
