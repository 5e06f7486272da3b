"""Statements -> place of every scratch buffer in a task's arena. Buffers that are never alive together share bytes.

A buffer lives from the first to the last top-level statement that touches it; what a loop touches lives through the loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from .nest import Buf, Fetch, For, If, Let, Nest, Sort, Stmt, Trace, While, Write, bodies

ALIGNMENT = 64


def padded_bytes(b: Buf) -> int:
    """Bytes of a buffer in the arena."""
    size = max(b.size, 1) * max(b.dtype.itemsize, 1)
    return -(-size // ALIGNMENT) * ALIGNMENT


def place(stmts: list[Stmt], start: int, fixed: Iterable[Buf] = ()) -> tuple[dict[Buf, int], int]:
    """(byte offset of each arena buffer that `stmts` touch, end of the last), from byte `start` on.

    `fixed` buffers have their place already.
    """
    lives: dict[Buf, tuple[int, int]] = {}
    for at, s in enumerate(stmts):
        for b in touched([s]):
            if b.arena and b not in fixed:
                lives[b] = (lives.get(b, (at, at))[0], at)
    placed: dict[Buf, int] = {}
    end = start
    # By name at last: sets of buffers have no order that another process would repeat.
    for b in sorted(lives, key=lambda b: (-padded_bytes(b), lives[b], b.name)):
        first, last = lives[b]
        taken = sorted((placed[o], placed[o] + padded_bytes(o)) for o in placed
                       if lives[o][0] <= last and first <= lives[o][1])
        at = start
        for low, high in taken:
            if at + padded_bytes(b) <= low:
                break
            at = max(at, high)
        placed[b] = at
        end = max(end, at + padded_bytes(b))
    return placed, end


def touched(stmts: list[Stmt]) -> set[Buf]:
    """Root buffers that statements read or write, inner ones too."""
    found: set[Buf] = set()
    for s in stmts:
        match s:
            case Nest():
                found |= {e.info[0].root for e in s.loads()} | {w.buf.root for w in s.writes}
            case Let(value=v):
                found |= {e.info[0].root for e in _nodes(v) if e.kind in ("load", "gather")}
            case If(branches=branches):
                for b in branches:
                    found |= touched(b)
            case For(body=body):
                found |= touched(body)
            case While(condition=c, body=body):
                found |= touched(c) | touched(body)
            case Sort(buffers=buffers, spare=spare):
                found |= {b.root for b in (*buffers, *spare)}
            case Fetch(buf=b):
                found.add(b.root)
            case Trace(buffers=buffers):
                found |= {b.root for b in buffers}
    return found


def read(stmts: list[Stmt]) -> set[Buf]:
    """Root buffers that statements read, inner ones too."""
    found: set[Buf] = set()
    for s in stmts:
        match s:
            case Nest():
                found |= {e.info[0].root for e in s.loads()}
            case Let(value=v):
                found |= {e.info[0].root for e in _nodes(v) if e.kind in ("load", "gather")}
            case Sort(buffers=buffers, spare=spare):
                found |= {b.root for b in (*buffers, *spare)}
            case Trace(buffers=buffers):
                found |= {b.root for b in buffers}
        for inner in bodies(s):
            found |= read(inner)
    return found


def written(stmts: list[Stmt]) -> set[Buf]:
    """Root buffers that statements write, inner ones too."""
    found: set[Buf] = set()
    for s in stmts:
        match s:
            case Nest():
                found |= {w.buf.root for w in s.writes}
            case If(branches=branches):
                found |= written([s for b in branches for s in b])
            case For(body=body):
                found |= written(body)
            case While(condition=c, body=body):
                found |= written([*c, *body])
            case Sort(buffers=buffers, spare=spare):
                found |= {b.root for b in (*buffers, *spare)}
    return found


def _nodes(e) -> list:
    """Every distinct node of an expression."""
    return Nest({}, writes=[Write(Buf("", (), e.dtype), (), e)]).nodes()
