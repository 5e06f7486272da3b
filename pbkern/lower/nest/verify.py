"""Statements -> InternalError where they break the rules of lower/nest/ir.py."""

from __future__ import annotations

from pbkern.core.errors import InternalError

from .ir import Buf, Fetch, For, If, Let, Nest, Stmt, While, show


def verify(stmts: list[Stmt], symbols: frozenset[str] = frozenset()) -> None:
    """Checks ranks, known symbols and static bounds of unguarded accesses. Raises InternalError."""
    known = set(symbols)
    for s in stmts:
        match s:
            case Nest():
                _verify_nest(s, known)
            case Let(name=n, value=v):
                if not v.symbols <= known:
                    raise InternalError(
                        f"nest: unknown symbols {sorted(v.symbols - known)} in let {n}"
                    )
                known.add(n)
            case Fetch(index=index):
                if not all(i.symbols <= known for i in index):
                    raise InternalError(f"nest: unknown symbols in {show([s])}")
            case If(branches=bs):
                for b in bs:
                    verify(b, frozenset(known))
            case For(counter=c, body=b):
                verify(b, frozenset(known | {c}))
            case While(condition=c, body=b):
                verify(c, frozenset(known))
                verify(b, frozenset(known))


def _verify_nest(n: Nest, known: set[str]) -> None:
    symbols, reaches = known | n.dims.keys(), n.reaches()
    if n.reductions and not n.rdims:
        raise InternalError("nest: reductions without a reduced dimension", at=n.at, why=str(n))

    def check(buf: Buf, index: tuple, guard: bool, what: str, reach: dict[str, int]) -> None:
        if len(index) != len(buf.shape):
            raise InternalError(
                f"nest: {what} {buf} with {len(index)} indices", at=n.at, why=str(n)
            )
        for i, extent in zip(index, buf.shape):
            if i is None:
                continue
            if not i.symbols <= symbols:
                raise InternalError(
                    f"nest: unknown symbols {sorted(i.symbols - symbols)}", at=n.at, why=str(n)
                )
            if not guard and i.symbols <= n.dims.keys():
                low, high = i.bounds(lambda d: n.dims[d] + reach.get(d, 0))
                if (low < 0 or high >= extent) and all(n.dims.values()):
                    raise InternalError(
                        f"nest: {what} {buf} at {i}, outside 0..{extent - 1}", at=n.at, why=str(n)
                    )

    for e in n.loads():
        guard = e.kind == "gather" or e.info[2]  # gathers clamp
        check(e.info[0], e.info[1], guard, "load of", reaches.get(id(e), {}))
    for w in n.writes:
        check(w.buf, w.index, w.guard, "store to", {})
        if (
            w.inner
            and n.rdims
            and not n.ordered
            and any(e.kind == "acc" for e in Nest({}, writes=[w]).nodes())
        ):
            raise InternalError(
                "nest: an inner write uses an unfinished accumulator", at=n.at, why=str(n)
            )
