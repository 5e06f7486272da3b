"""Which buffers statements read and write, and whether two statements may change places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pbkern.core.lazy_dataclass import dataclass

from .ir import (
    AsyncCopy,
    AsyncProduct,
    Buf,
    Gather,
    Let,
    Load,
    Nest,
    Prefetch,
    Sort,
    Stmt,
    Store,
    Trace,
    Wait,
    every,
    nodes,
)


def accessed(stmt: Stmt) -> Iterator[Buf]:
    """Buffers that a statement itself reads or writes, as it names them."""
    match stmt:
        case Nest():
            yield from (load.buf for load in stmt.loads())
            yield from (store.buf for store in stmt.stores)
        case Let(value=value):
            yield from (node.buf for node in nodes([value]) if isinstance(node, Load | Gather))
        case Sort(buffers=buffers, spare=spare):
            yield from (*buffers, *spare)
        case Trace(buffers=buffers):
            yield from buffers


def touched(stmts: Sequence[Stmt]) -> set[Buf]:
    """Root buffers that statements read or write, inner ones too."""
    prefetched = {stmt.buf for stmt in every(stmts) if isinstance(stmt, Prefetch)}
    return read(stmts) | written(stmts) | prefetched


def read(stmts: Sequence[Stmt]) -> set[Buf]:
    """Root buffers that statements read, inner ones too."""
    roots: set[Buf] = set()
    for stmt in every(stmts):
        match stmt:
            case Nest():
                roots |= {load.buf.root for load in stmt.loads()}
            case Let(value=value):
                loads = (node for node in nodes([value]) if isinstance(node, Load | Gather))
                roots |= {load.buf.root for load in loads}
            case Sort(buffers=buffers, spare=spare):
                roots |= {buf.root for buf in (*buffers, *spare)}
            case Trace(buffers=buffers):
                roots |= {buffer.root for buffer in buffers}
    return roots


def written(stmts: Sequence[Stmt]) -> set[Buf]:
    """Root buffers that statements write, inner ones too."""
    roots: set[Buf] = set()
    for stmt in every(stmts):
        match stmt:
            case Nest():
                roots |= {store.buf.root for store in stmt.stores}
            case Sort(buffers=buffers, spare=spare):
                roots |= {buf.root for buf in (*buffers, *spare)}
    return roots


@dataclass(frozen=True)
class Effects:
    """Root buffers that statements write, and all that they touch; whether they begin or wait for copies."""

    written: frozenset[Buf] = frozenset()
    touched: frozenset[Buf] = frozenset()
    is_timed: bool = False

    @staticmethod
    def of(*stmts: Stmt) -> Effects:
        timed = any(isinstance(stmt, AsyncCopy | AsyncProduct | Wait) for stmt in every(stmts))
        return Effects(frozenset(written(stmts)), frozenset(touched(stmts)), timed)

    def commute(self, other: Effects) -> bool:
        """Whether two lists of statements mean the same in either order: neither writes what the other touches."""
        return not (self.is_timed or other.is_timed) and not (
            self.written & other.touched or other.written & self.touched
        )


def reads_other_points(nest: Nest) -> bool:
    """Whether a point may read what another point of the nest stores."""
    stored: dict[Buf, list[Store]] = {}
    for store in nest.stores:
        stored.setdefault(store.buf.root, []).append(store)
    return any(
        not apart_from(*load.access, store) and not is_at_its_point(nest, load, store)
        for load in nest.loads()
        for store in stored.get(load.buf.root, ())
    )


def is_at_its_point(nest: Nest, expr: Load | Gather, store: Store) -> bool:
    """Whether a load reads, at each point of a nest, the element that is stored there and at no other point."""
    buf, index = expr.access
    stored_dims = {position.terms[0][0] for position in store.index if len(position.terms) == 1}
    return (
        isinstance(expr, Load)
        and buf is store.buf
        and index == store.index
        and stored_dims >= {dim for dim, size in nest.dims.items() if size > 1}
    )


def apart_from(buf: Buf, index: tuple, store: Store) -> bool:
    """Whether an access and a store are at different constants along an axis."""
    return buf is store.buf and any(
        position is not None and position.is_const and j.is_const and position.const != j.const
        for position, j in zip(index, store.index)
    )
