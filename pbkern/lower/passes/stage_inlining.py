"""Nests that feed another's neighbouring points -> one nest that keeps what they make in registers.

    for i: t[i] = a[i] + b[i]                         for i:  t = a[i] + b[i]
    for i: o[i] = t[i] * t[i + 1] * t[i + 2]    ->            o[i] = t * (t at i + 1) * (t at i + 2)

Rows of images are read from memory while they are computed on, instead of before or after that:
that matters more than the stores and loads of `t`. Along the vector dimension every value is
computed once (on CPUs by targets/cpu/schedule/sliding_windows.py); along others, points of one step share
them, and neighbouring steps compute those between them again. Sums over a few elements are written
out, also before a sum over all points: a loss over rows of ten reads each row once. A stage whose ends other nests fill, as
those of padding do, is taken into its reader between the ends (strips/interior_stages.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.collapse_dims import collapse
from pbkern.lower.nest.edit.inline import inlined
from pbkern.lower.nest.effects import Effects
from pbkern.lower.nest.ir import Buf, Gather, Load, Nest, Shifted, Stmt, nodes

from .strips.interior_stages import filled_by_several, find_interior
from .strips.strip_mining import inside
from .unroll_small_dims import sums_as_expressions


@dataclass(frozen=True)
class InlineStages:
    """Takes nests into their only reader, where that is less work."""

    fewest_points: int = threshold(32, "points of a nest whose sums are written out")
    most_terms: int = threshold(25, "terms of a sum that is written out: bounds code size")
    most_nodes: int = threshold(400, "operations of a nest that holds a stage: bounds code size")
    # Registers that overflow are not counted in full.
    time_at_distances: float = threshold(
        0.8, "time, relative to before, up to which values are taken at distances"
    )
    most_pieces: int = threshold(
        8, "nests that fill a stage whose ends are made apart: bounds what is looked at"
    )
    time_between_ends: float = threshold(
        1.0,
        "the same for stages whose ends are made apart. Two padded convolutions of 4096 x 4096, of which the first is along "
        "columns (estimated 0.82) or rows (0.98): 8.2 and 7.2 ms, joined 4.5 and 4.0. One thread of a Zen 4, 27 November 2026",
    )
    far_vector_cycles: float = threshold(
        6.0, "cycles in which a core moves a vector to or from memory"
    )

    def __call__(self, stmts: Sequence[Stmt], context: NestContext) -> list[Stmt]:
        return _Inliner(context, self).all(stmts, {buf.root for buf in context.persistent})


class _Inliner:
    """The pass over one kernel's statements.

    A nest with a stage inside is compared again before it takes in the next stage. Its collapsed form and its cycles are
    remembered, by the identity of the nest.
    """

    def __init__(self, context: NestContext, limits: InlineStages) -> None:
        self.context, self.pool, self.policy = context, context.pool, context.policy
        self.limits = limits
        self._collapsed_nests: dict[int, tuple[Nest, Nest]] = {}
        self._cycles_of: dict[tuple[int, bool], float] = {}

    def all(self, stmts: Sequence[Stmt], live: set[Buf]) -> list[Stmt]:
        """A list of statements and those inside them; others touch `live`."""
        joined = self._join_all(self._parted(inside(stmts, live, self.all), live), live)
        return [
            self._written_out(stmt) if isinstance(stmt, Nest) and self._has_windows(stmt) else stmt
            for stmt in joined
        ]

    def _parted(self, stmts: list[Stmt], live: set[Buf]) -> list[Stmt]:
        """The statements with padded stages inside their readers, but for the ends of rows."""
        filled = filled_by_several(stmts, live, self.limits.most_pieces)
        if not filled:
            return stmts
        used, at = [Effects.of(stmt) for stmt in stmts], len(stmts) - 1
        while at > 0:
            lanes, most = self._lanes(stmts[at]), self.limits.time_between_ends
            interior = find_interior(stmts, at, used, filled, self.context, lanes)
            nest = interior and self._pair(interior.maker, interior.reader, most)
            if interior and nest:
                before = [stmt for k, stmt in enumerate(stmts[:at]) if k not in interior.writers]
                stmts = [*before, *interior.ends, nest, *stmts[at + 1 :]]
                used, at = [Effects.of(stmt) for stmt in stmts], len(before)
            at -= 1
        return stmts

    def _lanes(self, stmt: Stmt) -> int:
        return self.policy.lanes(stmt) if isinstance(stmt, Nest) else 1

    def _join_all(self, stmts: Sequence[Stmt], live: set[Buf]) -> list[Stmt]:
        body = _InliningBody(stmts, live)
        for at in range(len(stmts) - 1, 0, -1):
            while (pair := self._joined(body, at)) is not None:
                first, nest = pair
                body.replace(first, None)
                body.replace(at, nest)
        return [stmt for stmt in body.stmts if stmt is not None]

    def _written_out(self, nest: Nest) -> Nest:
        """A nest of sums over a few elements as one of expressions."""
        return sums_as_expressions(
            nest,
            self.context,
            self.limits.most_terms,
            self.limits.most_nodes,
            self.limits.fewest_points,
        )

    def _joined(self, body: _InliningBody, at: int) -> tuple[int, Nest] | None:
        """(position of a nest, the one at `at` with it inside)."""
        reader = body.stmts[at]
        if not isinstance(reader, Nest):
            return None
        read = {load.buf.root for load in reader.loads()}
        for first in range(at - 1, -1, -1):
            maker = body.stmts[first]
            if (
                isinstance(maker, Nest)
                and read & body.effects[first].written
                and body.can_move(first, at)
            ):
                nest = self._pair(maker, reader, self.limits.time_at_distances)
                if nest is not None:
                    return first, nest
        return None

    def _pair(self, maker: Nest, reader: Nest, most: float) -> Nest | None:
        """The reader with the maker inside, if that can be and is less work; `most`: time with values taken at distances."""
        if self._has_long_rows(maker) or self._has_long_rows(reader):
            return None
        before = maker, reader
        maker, reader = self._written_out(maker), self._written_out(reader)
        if reader.rdims and not (_adds_all(reader) and self._is_short(before[0])):
            return None
        nest = inlined(maker, reader, self.pool)
        if nest is None or len(nest.nodes()) > self.limits.most_nodes:
            return None
        return nest if self._is_less_work(nest, *before, most) else None

    def _is_short(self, nest: Nest) -> bool:
        """Whether the reduced elements of a nest fill less than a vector as they are: written out, vectors hold results."""
        return math.prod(nest.dims[rdim] for rdim in nest.rdims) < self.policy.lanes(nest)

    def _has_long_rows(self, nest: Nest) -> bool:
        """Whether the reduced elements of a nest are rows of a vector and more: written out, each would be loaded by itself."""
        results = nest.dims.keys() - set(nest.rdims)
        is_along_rows = any(
            flat_coefficient(load.buf, load.index, rdim) == 1
            for load in nest.loads()
            if isinstance(load, Load) and load.symbols & results
            for rdim in nest.rdims
        )
        return is_along_rows and not self._is_short(nest) and not self._has_windows(nest)

    def _has_windows(self, nest: Nest) -> bool:
        """Whether reduced elements are neighbours where results are, too: in windows that overlap, or are short."""
        indices = [i for load in nest.loads() if isinstance(load, Load) for i in load.index]
        windows = [
            index
            for index in indices
            if index.symbols & set(nest.rdims)
            and index.symbols & (nest.dims.keys() - set(nest.rdims))
        ]
        return any(_overlap(index, nest) for index in windows) or bool(
            windows and self._is_short(nest)
        )

    def _is_less_work(self, nest: Nest, maker: Nest, reader: Nest, most: float) -> bool:
        """Whether joining pays: at no distance, as soon as it is not more work; else on the way from memory to memory.

        Stages that pass on what the caches hold gain nothing but longer code.
        """
        far = any(self.policy.is_far(load.buf) for load in maker.loads()) and any(
            self.policy.is_far(store.buf) for store in reader.stores
        )
        distances = nest.moves()
        if distances and nest.rdims:
            return False
        joined = self._collapsed(nest)
        vector = self.policy.vector_dimension(joined)
        if vector is None or not _streams(joined, vector) or (distances and not far):
            return False
        apart = self._cycles(maker, far) + self._cycles(reader, far)
        return self._cycles(nest, far) < apart * (most if distances else 1.0)

    def _cycles(self, nest: Nest, far: bool) -> float:
        collapsed = self._collapsed(self._written_out(nest))
        key = id(collapsed), far
        if key not in self._cycles_of:
            self._cycles_of[key] = self.policy.cycles(
                collapsed, self.limits.far_vector_cycles if far else 0.0
            )
        return self._cycles_of[key]

    def _collapsed(self, nest: Nest) -> Nest:
        _, collapsed = self._collapsed_nests.get(id(nest), (None, None))
        if collapsed is None:
            collapsed = collapse(nest, self.pool, self.context.aliases)
            self._collapsed_nests[id(nest)] = nest, collapsed
        return collapsed


def _overlap(index: Affine, nest: Nest) -> bool:
    """Whether results that are neighbours along an index reduce some of the same elements."""
    reach = sum(
        abs(times) * (nest.dims[dim] - 1) for dim, times in index.terms if dim in nest.rdims
    )
    return reach >= min(
        abs(times) for dim, times in index.terms if dim in nest.dims and dim not in nest.rdims
    )


def _adds_all(nest: Nest) -> bool:
    """Whether a nest makes single numbers of all points, other than by products."""
    live = {dim for dim, size in nest.dims.items() if size > 1}
    return (
        live <= set(nest.rdims)
        and not any(store.inner for store in nest.stores)
        and not any(reduction.is_product for reduction in nest.reductions)
    )


class _InliningBody:
    """Statements of a list, None where one is gone, and the root buffers that each touches and writes."""

    def __init__(self, stmts: Sequence[Stmt], live: set[Buf]):
        self.stmts: list[Stmt | None] = list(stmts)
        self.live = live
        self.effects = [Effects.of(stmt) for stmt in stmts]
        self.users = Counter(buf for effect in self.effects for buf in effect.touched)

    def replace(self, at: int, stmt: Stmt | None) -> None:
        self.users.subtract(self.effects[at].touched)
        self.stmts[at] = stmt
        self.effects[at] = Effects.of(*([stmt] if stmt else []))
        self.users.update(self.effects[at].touched)

    def can_move(self, first: int, at: int) -> bool:
        """Whether only the statement at `at` uses what the one at `first` stores, and reads the same there as here."""
        written, user = self.effects[first].written, self.effects[at]
        if any(
            not buf.arena or buf in self.live or self.users[buf] != 2 or buf not in user.touched
            for buf in written
        ):
            return False
        read = self.effects[first].touched - written
        return not any(read & effect.written for effect in self.effects[first + 1 : at + 1])


def _streams(nest: Nest, vector: str) -> bool:
    """Whether vectors of what is taken at a distance are whole ones."""
    for node in nodes(moved.args[0] for moved in nest.nodes() if isinstance(moved, Shifted)):
        if isinstance(node, Gather) or (
            isinstance(node, Load) and flat_coefficient(node.buf, node.index, vector) not in (0, 1)
        ):
            return False
    return True
