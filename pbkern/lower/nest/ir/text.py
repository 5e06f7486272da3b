"""Statements as text, which lower/nest/parse.py reads back."""

from __future__ import annotations

from collections.abc import Sequence

from .expressions import nodes
from .naming import name_shared
from .statements import (
    AsyncCopy,
    AsyncProduct,
    For,
    If,
    Let,
    Nest,
    Prefetch,
    Sort,
    Stmt,
    Trace,
    Wait,
    While,
)


def show(stmts: Sequence[Stmt], indent: str = "") -> str:
    """Readable text of a statement list."""
    rows: list[str] = []
    for stmt in stmts:
        match stmt:
            case Nest():
                rows += [indent + line for line in str(stmt).splitlines()]
            case Let(name=n, value=v):
                names = name_shared(nodes([v]), rows, indent)
                rows.append(f"{indent}let {n} = {v.text(names)}")
            case If(index=i, branches=bs):
                for n, b in enumerate(bs):
                    rows += [f"{indent}case {i} == {n}:", show(b, indent + "  ")]
            case For(counter=c, trips=t, body=b):
                rows += [f"{indent}for {c} < {t}:", show(b, indent + "  ")]
            case While(condition=c, predicate=p, body=b):
                rows += [
                    f"{indent}while {p}:",
                    show(c, indent + "    "),
                    f"{indent}do:",
                    show(b, indent + "  "),
                ]
            case AsyncCopy(body=b):
                rows += [f"{indent}async:", show(b, indent + "  ")]
            case AsyncProduct(body=b):
                rows += [f"{indent}async product:", show(b, indent + "  ")]
            case Wait(groups=n, products=of_products):
                rows.append(f"{indent}wait {n}{' of products' if of_products else ''}")
            case Trace(site=k, buffers=bufs):
                rows.append(f"{indent}trace {k}: {', '.join(buf.name for buf in bufs)}")
            case Prefetch(buf=b, index=i, count=n):
                rows.append(f"{indent}prefetch {n} of {b.name}[{', '.join(map(str, i))}]")
            case Sort(buffers=bufs, spare=spare, num_keys=k, first=n):
                which = f", first {n}" if n < bufs[0].shape[1] else ""
                beside = f" spare {', '.join(buf.name for buf in spare)}" if spare else ""
                buffers = ", ".join(buf.name for buf in bufs)
                rows.append(f"{indent}sort {buffers}{beside} by {k}{which}")
    return "\n".join(row for row in rows if row)
