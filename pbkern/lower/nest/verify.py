"""Statements -> InternalError where they break the rules of lower/nest/ir.py."""

from __future__ import annotations

from collections.abc import Sequence

from pbkern.core.errors import InternalError

from .ir import Accumulator, Buf, For, Gather, If, Let, Nest, Prefetch, Stmt, While, show


def verify(stmts: Sequence[Stmt], symbols: frozenset[str] = frozenset()) -> None:
    """Checks ranks, known symbols and static bounds of unguarded accesses. Raises InternalError."""
    known = set(symbols)
    for stmt in stmts:
        match stmt:
            case Nest():
                _verify_nest(stmt, known)
            case Let(name=n, value=v):
                if not v.symbols <= known:
                    raise InternalError(
                        f"nest: unknown symbols {sorted(v.symbols - known)} in let {n}"
                    )
                known.add(n)
            case Prefetch(index=index):
                if not all(position.symbols <= known for position in index):
                    raise InternalError(f"nest: unknown symbols in {show([stmt])}")
            case If(branches=bs):
                for b in bs:
                    verify(b, frozenset(known))
            case For(counter=c, body=b):
                verify(b, frozenset(known | {c}))
            case While(condition=c, body=b):
                verify(c, frozenset(known))
                verify(b, frozenset(known))


def _verify_nest(nest: Nest, known: set[str]) -> None:
    symbols, reaches = known | nest.dims.keys(), nest.reaches()
    if nest.reductions and not nest.rdims:
        raise InternalError(
            "nest: reductions without a reduced dimension", at=nest.at, why=str(nest)
        )

    def check(buf: Buf, index: tuple, guard: bool, what: str, reach: dict[str, int]) -> None:
        if len(index) != len(buf.shape):
            raise InternalError(
                f"nest: {what} {buf} with {len(index)} indices", at=nest.at, why=str(nest)
            )
        for position, extent in zip(index, buf.shape):
            if position is None:
                continue
            if not position.symbols <= symbols:
                raise InternalError(
                    f"nest: unknown symbols {sorted(position.symbols - symbols)}",
                    at=nest.at,
                    why=str(nest),
                )
            if not guard and position.symbols <= nest.dims.keys():
                low, high = position.bounds(lambda dim: nest.dims[dim] + reach.get(dim, 0))
                if (low < 0 or high >= extent) and all(nest.dims.values()):
                    raise InternalError(
                        f"nest: {what} {buf} at {position}, outside 0..{extent - 1}",
                        at=nest.at,
                        why=str(nest),
                    )

    for load in nest.loads():
        guard = isinstance(load, Gather) or load.guard  # gathers clamp
        check(load.buf, load.index, guard, "load of", reaches.get(id(load), {}))
    for store in nest.stores:
        check(store.buf, store.index, store.guard, "store to", {})
        if (
            store.inner
            and nest.rdims
            and not nest.ordered
            and any(isinstance(node, Accumulator) for node in Nest({}, stores=(store,)).nodes())
        ):
            raise InternalError(
                "nest: an inner write uses an unfinished accumulator", at=nest.at, why=str(nest)
            )
