"""A stage whose ends nests of their own fill, and its reader -> strips at the ends, and one stage and its reader between.

    t[0] = 0                                              as before, but for
    for i < 100: t[i + 1] = a[i] * b                      the first 16 and the last 4 elements of o
    t[101] = 0                                      ->
    for i < 100: o[i] = t[i] + t[i + 1] + t[i + 2]        for i < 82: u[i] = a[i + 15] * b
                                                          for i < 80: o[i + 16] = u[i] + u[i + 1] + u[i + 2]

A convolution of a padded convolution is such a reader. Between the ends the reader can compute the stage where it reads
it (stage_inlining.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.part import part
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.effects import Effects
from pbkern.lower.nest.ir import Buf, Load, Nest, Pool, Stmt


@dataclass(frozen=True)
class Interior:
    """Nests in place of a reader, at position `at` of a list, and of the `writers` of what it reads.

    ends: those for both ends; maker, reader: those for all between.
    """

    at: int
    writers: tuple[int, ...]
    ends: tuple[Nest, ...]
    maker: Nest
    reader: Nest


@dataclass(frozen=True)
class _Piece:
    """A nest that stores the places low .. high - 1 along an axis of a buffer, which it walks by a dimension."""

    nest: Nest
    dim: str
    low: int
    high: int

    def within(self, low: int, high: int, pool: Pool) -> Nest | None:
        """The part of the nest that stores places low .. high - 1."""
        start, end = max(low, self.low), min(high, self.high)
        if start >= end:
            return None
        return part(self.nest, self.dim, Affine((), start - self.low), end - start, pool)


def find_interior(
    stmts: Sequence[Stmt],
    at: int,
    used: Sequence[Effects],
    filled: set[Buf],
    context: NestContext,
    lanes: int,
) -> Interior | None:
    """The first of some buffers that a nest reads at several places, and that several nests fill; its ends are whole vectors.

    used: buffers that each statement reads and writes; filled: scratch that several nests fill.
    """
    reader = stmts[at]
    if not isinstance(reader, Nest) or reader.rdims or reader.ordered or reader.moves():
        return None
    if used[at].written & {load.buf.root for load in reader.loads()}:
        return None
    for buf in dict.fromkeys(load.buf for load in reader.loads() if load.buf in filled):
        writers = [k for k, effect in enumerate(used) if buf in effect.written]
        if _may_move(used, buf, writers, at):
            interior = _interior(stmts, at, buf, writers, context, lanes)
            if interior is not None:
                return interior
    return None


def filled_by_several(stmts: Sequence[Stmt], live: set[Buf], most: int) -> set[Buf]:
    """Scratch that several nests store to, at most so many; others touch `live`."""
    times = Counter(store.buf for stmt in stmts if isinstance(stmt, Nest) for store in stmt.stores)
    return {
        buf
        for buf, count in times.items()
        if 1 < count <= most and buf.arena and buf.storage is None and buf not in live
    }


def _may_move(used: Sequence[Effects], buf: Buf, writers: list[int], at: int) -> bool:
    """Whether the writers and the reader alone touch a buffer, and the writers may run where the reader is."""
    if [k for k, effect in enumerate(used) if buf in effect.touched] != [*writers, at]:
        return False
    for k in writers:
        read = used[k].touched - {buf}
        if used[k].written != {buf} or any(
            read & effect.written for effect in used[k + 1 : at + 1]
        ):
            return False
    return True


def _interior(
    stmts: Sequence[Stmt],
    at: int,
    buf: Buf,
    writers: list[int],
    context: NestContext,
    lanes: int,
) -> Interior | None:
    reader, pool = stmts[at], context.pool
    nests = [nest for nest in (stmts[k] for k in writers) if isinstance(nest, Nest)]
    if len(nests) < len(writers) or not isinstance(reader, Nest):
        return None
    for axis in range(len(buf.shape)):
        pieces = [_piece(nest, buf, axis) for nest in nests]
        known = sorted((piece for piece in pieces if piece is not None), key=lambda x: x.low)
        walk = _walk(reader, buf, axis)
        if len(known) < len(nests) or walk is None or not _follow_one_another(known, buf, axis):
            continue
        dim, first, last = walk
        size = reader.dims[dim]
        middle = max(known, key=lambda piece: piece.high - piece.low)
        low = -(-max(middle.low - first, 0) // lanes) * lanes
        high = max(min(middle.high - last, size), 0) // lanes * lanes
        if high - low < size // 2:
            return None
        ends = [
            nest
            for start, end in ((0, low), (high, size))
            if start < end
            for nest in (
                *(piece.within(start + first, end + last, pool) for piece in known),
                part(reader, dim, Affine((), start), end - start, pool),
            )
            if nest is not None
        ]
        maker = middle.within(low + first, high + last, pool)
        assert maker is not None
        shape = list(buf.shape)
        shape[axis] = high - low + last - first
        near = context.new_buffer(shape, buf.dtype)

        start = low + first

        def moved(_: Buf, index: tuple, axis: int = axis, start: int = start) -> tuple:
            return (*index[:axis], index[axis] - start, *index[axis + 1 :])

        between = [maker, part(reader, dim, Affine((), low), high - low, pool)]
        maker, inner = relocated(between, {buf: near}.get, pool, moved)
        return Interior(at, tuple(writers), tuple(ends), maker, inner)
    return None


def _piece(nest: Nest, buf: Buf, axis: int) -> _Piece | None:
    """The places along an axis that a nest stores, without conditions, at all places of the other axes."""
    if nest.rdims or nest.ordered or nest.moves() or len(nest.stores) != 1:
        return None
    (store,) = nest.stores
    if store.buf is not buf or store.guard or store.mask is not None or not store.inner:
        return None
    for k, (position, extent) in enumerate(zip(store.index, buf.shape)):
        if k != axis and not _is_whole(position, extent, nest):
            return None
    position = store.index[axis]
    if len(position.terms) != 1 or position.terms[0][0] not in nest.dims:
        return None
    ((dim, step),) = position.terms
    if step != 1 or any(dim in place.symbols for k, place in enumerate(store.index) if k != axis):
        return None
    return _Piece(nest, dim, position.const, position.const + nest.dims[dim])


def _is_whole(position: Affine, extent: int, nest: Nest) -> bool:
    if extent == 1:
        return position == Affine()
    return (
        len(position.terms) == 1
        and position == Affine.symbol(position.terms[0][0])
        and nest.dims.get(position.terms[0][0]) == extent
    )


def _follow_one_another(pieces: Sequence[_Piece], buf: Buf, axis: int) -> bool:
    """Whether pieces have every place of an axis once."""
    ends = [0, *(piece.high for piece in pieces)]
    return all(end == piece.low for end, piece in zip(ends, pieces)) and ends[-1] == buf.shape[axis]


def _walk(reader: Nest, buf: Buf, axis: int) -> tuple[str, int, int] | None:
    """(dimension, first and last distance) at which a nest reads a buffer along an axis, if it is at several."""
    places = set()
    for load in reader.loads():
        if load.buf.root is buf:
            if not isinstance(load, Load) or load.buf is not buf or load.guard:
                return None
            places.add(load.index[axis])
    terms = {place.terms for place in places}
    if len(places) < 2 or len(terms) != 1:
        return None
    (term,) = terms
    if len(term) != 1 or term[0][1] != 1 or term[0][0] not in reader.dims:
        return None
    distances = [place.const for place in places]
    return term[0][0], min(distances), max(distances)
