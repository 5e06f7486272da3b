"""Nest -> nest with neighbouring dimensions joined where every access walks them as one.

rows x pixels x 3 channels becomes rows x (3 pixels): vectors run over the joined dimension and need no tail per pixel.
Before -> after:  out[i, j, c] = in[i, j + 1, c]   ->   out'[i, d] = in'[i, d + 3],   d = 3 j + c
"""

from __future__ import annotations

import itertools
import math

from pbkern.core.affine import Affine

from .addresses import flat_index
from .ir import Buf, Expr, Nest, Pool, Write

Access = tuple[Buf, tuple, bool]


class Aliases:
    """Buffers seen with a run of axes joined; one alias per buffer and run."""

    def __init__(self) -> None:
        self._made: dict = {}

    def joined(self, buf: Buf, low: int, high: int) -> Buf:
        key = (id(buf), low, high)
        if key not in self._made:
            shape = (*buf.shape[:low], math.prod(buf.shape[low : high + 1]), *buf.shape[high + 1 :])
            self._made[key] = Buf(
                f"{buf.name}.j{low}{high}", shape, buf.dtype, buf.arena, storage=buf
            )
        return self._made[key]


def collapse(nest: Nest, pool: Pool, aliases: Aliases) -> Nest:
    """Joins as many neighbouring dimensions as possible."""
    changed = True
    while changed:
        changed = False
        dims = list(nest.dims)
        for dim, b in itertools.pairwise(dims):
            if _joinable(nest, dim, b):
                nest, changed = _join(nest, dim, b, pool, aliases), True
                break
    return nest


def _joinable(nest: Nest, a: str, b: str) -> bool:
    if (
        (a in nest.rdims) != (b in nest.rdims)
        or nest.ordered
        or nest.dims[a] == 1
        or nest.dims[b] == 1
    ):
        return False
    if 0 in nest.dims.values():  # strides tell nothing
        return False
    size = nest.dims[b]
    for node in nest.nodes():
        if node.kind in ("index", "range") and not _counts_as_one(_counted(node), a, b, size):
            return False
        if node.kind == "moved" and any(dim == b for dim, _ in node.info):
            return False
        if node.kind == "gather" and any(
            i is not None and i.symbols & {a, b} for i in node.info[1]
        ):
            return False
        if node.kind == "load" and not _walks_as_one(nest, node.info, a, b, size):
            return False
    return all(
        _walks_as_one(nest, (write.buf, write.index, write.guard), a, b, size)
        for write in nest.writes
    )


def _counted(expr: Expr) -> Affine:
    """The integer that an index is, or that a test of a range asks for."""
    return expr.info if expr.kind == "index" else expr.info[0]


def _counts_as_one(affine: Affine, a: str, b: str, size: int) -> bool:
    return affine.coefficient(a) == affine.coefficient(b) * size


def _walks_as_one(nest: Nest, access: Access, a: str, b: str, size: int) -> bool:
    buf, index, guard = access
    if not _counts_as_one(flat_index(buf, index), a, b, size):
        return False
    axes = [k for k, position in enumerate(index) if position.symbols & {a, b}]
    if not axes:
        return True
    run = index[axes[0] : axes[-1] + 1]
    extents = buf.shape[axes[0] : axes[-1] + 1]
    # Joined axes lose their separate bounds: each must be inside whatever happens (or be the only
    # one, unguarded).
    return (
        (not guard and len(run) == 1)
        or all(_inside(nest, i, extent) for i, extent in zip(run, extents))
        or not guard
    )


def _inside(nest: Nest, affine: Affine, extent: int) -> bool:
    if not affine.symbols <= nest.dims.keys():
        return False
    low, high = affine.bounds(nest.dims.__getitem__)
    return low >= 0 and high < extent


def _join(nest: Nest, a: str, b: str, pool: Pool, aliases: Aliases) -> Nest:
    """Replaces a and b by one dimension, named b, of size |a| * |b|."""
    size = nest.dims[b]

    def access(buf: Buf, index: tuple) -> tuple[Buf, tuple]:
        axes = [k for k, i in enumerate(index) if i.symbols & {a, b}]
        if not axes:
            return buf, index
        low, high = axes[0], axes[-1]
        if high > low:
            flat = Affine()
            for position, n in zip(index[low : high + 1], buf.shape[low : high + 1]):
                flat = flat * n + position
            buf, index = aliases.joined(buf, low, high), (*index[:low], flat, *index[high + 1 :])
        joined = index[low]
        c = joined.coefficient(b)
        kept = Affine.make({s: k for s, k in joined.terms if s not in (a, b)}, joined.const)
        assert joined.coefficient(a) == c * size
        return buf, (*index[:low], kept + Affine.symbol(b, c), *index[low + 1 :])

    def replace(expr: Expr) -> Expr | None:
        if expr.kind == "moved":
            steps = tuple((b, k * size) if dim == a else (dim, k) for dim, k in expr.info)
            return pool.make("moved", expr.dtype, steps, expr.args)
        if expr.kind in ("index", "range"):
            counted = _counted(expr).substitute({a: Affine()}.get)
            return pool.make(
                expr.kind,
                expr.dtype,
                counted if expr.kind == "index" else (counted, *expr.info[1:]),
            )
        if expr.kind != "load":
            return None
        buf, index = access(expr.info[0], expr.info[1])
        return pool.make("load", expr.dtype, (buf, index, expr.info[2]))

    rewrite = pool.rewriter(replace)

    def write(w: Write) -> Write:
        buf, index = access(w.buf, w.index)
        return w.mapped(rewrite, buf=buf, index=index)

    dims = {dim: n * nest.dims[a] if dim == b else n for dim, n in nest.dims.items() if dim != a}
    return Nest(
        dims,
        tuple(rdim for rdim in nest.rdims if rdim != a),
        [reduction.mapped(rewrite) for reduction in nest.reductions],
        [write(w) for w in nest.writes],
        nest.ordered,
        nest.at,
        fetch=nest.fetch,
        over=nest.over,
    )
