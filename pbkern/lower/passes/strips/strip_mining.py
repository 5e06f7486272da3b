"""Runs of nests that walk one dimension in step -> loops over strips of it; each holds all nests, one after the other.

    for all k: s[k] = ...                      for each strip:  s = ..., m' = max(m', s)
    m = max s[k]                               m = max m'
    for all k: p[k] = f(s[k], m)       ->      for each strip:  p = f(s, m), l' += p
    l = sum p[k]                               l = sum l'

A reduction along the dimension keeps its state between strips in memory, one value per lane; what
reads its result waits for another loop. Over many strips, sums keep what rounding loses as well.
Scratch that one loop alone touches holds one strip. masked_strips.py says when this pays, a
target for its caches (targets/cpu/locality/cache_blocking.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, replace

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.passes import threshold
from pbkern.lower.nest import effects
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.edit.rename import renamed
from pbkern.lower.nest.edit.unroll import single_term, with_results
from pbkern.lower.nest.ir import (
    Buf,
    Expr,
    For,
    Nest,
    Reduction,
    Stmt,
    Store,
    bodies,
    with_bodies,
)
from pbkern.lower.nest.reductions import REDUCTIONS

# Reductions whose states of strips are joined.
JOINS = ("sum", "dot", "max", "min")


@dataclass(frozen=True)
class RunLimits:
    """Thresholds of passes over runs of nests."""

    longest_run: int = threshold(
        64,
        "nests of a run: finding out what they share takes time with the square of their number",
    )


@dataclass(frozen=True)
class StripLimits(RunLimits):
    """Thresholds of passes that cut runs into strips."""

    many_strips: int = threshold(
        32,
        "strips beyond which sums keep what rounding loses: sums over more would round off visibly more than sums of "
        "sums do",
    )


def inside(
    stmts: Sequence[Stmt],
    elsewhere: set[Buf],
    cut: Callable[[Sequence[Stmt], set[Buf]], list[Stmt]],
) -> list[Stmt]:
    """Statements with `cut` applied to the lists inside them, which is told what others touch."""
    out = []
    touched = [effects.touched([stmt]) for stmt in stmts]
    times = Counter(buf for buffers in touched for buf in buffers)
    for outer_stmt, mine in zip(stmts, touched):
        around = (
            elsewhere.union(buf for buf, time in times.items() if time > (buf in mine))
            if bodies(outer_stmt)
            else elsewhere
        )

        def change(
            body: Sequence[Stmt], stmt: Stmt = outer_stmt, around: set = around
        ) -> list[Stmt]:
            siblings = (effects.touched(other) for other in bodies(stmt) if other is not body)
            return cut(body, around.union(*siblings))

        out.append(with_bodies(outer_stmt, change))
    return out


def runs(stmts: Sequence[Stmt], longest: int) -> Iterator[tuple[int, int]]:
    """[low, high) of neighbouring nests, from two to `longest`; all read at the indices of their loads."""
    low = 0
    for at in range(len(stmts) + 1):
        nest = stmts[at] if at < len(stmts) else None
        ends = not isinstance(nest, Nest) or nest.moves()
        if ends or at - low == longest:
            if at - low >= 2:
                yield low, at
            low = at + 1 if ends else at


def with_runs_changed(
    stmts: Sequence[Stmt],
    elsewhere: set[Buf],
    longest: int,
    change: Callable[[list[Nest], set[Buf]], Sequence[Stmt] | None],
) -> list[Stmt]:
    """Statements with runs of nests changed, inner ones too; `elsewhere`: what others touch, or what is kept.

    change(run, what all but the run touch) gives the statements in its place; None keeps it.
    """
    out = inside(
        stmts, elsewhere, lambda body, around: with_runs_changed(body, around, longest, change)
    )
    ranges = list(runs(out, longest))
    touched = [effects.touched([stmt]) for stmt in out] if ranges else []
    times = Counter(buf for buffers in touched for buf in buffers)
    for low, high in reversed(ranges):
        mine = Counter(buf for buffers in touched[low:high] for buf in buffers)
        elsewhere_too = elsewhere.union(buf for buf, time in times.items() if time > mine[buf])
        changed = change(nests_of(out[low:high]), elsewhere_too)
        if changed is not None:
            out[low:high] = changed
    return out


def nests_of(stmts: Sequence[Stmt]) -> list[Nest]:
    """The statements of a run, which are nests."""
    nests = [stmt for stmt in stmts if isinstance(stmt, Nest)]
    assert len(nests) == len(stmts)
    return nests


def even_part(length: int, size: int) -> int:
    """A length that divides the size, if there is one nearby."""
    return next((n for n in range(length, length // 2, -1) if size % n == 0), length)


# ---------------------------------------------------------------- which nests take part


Access = tuple[Buf, tuple, bool]  # buffer, index, whether it is a write


class NestRun(list[Nest]):
    """Neighbouring nests. accesses: those of each nest; touching: root buffer -> (position, access) of all."""

    def __init__(self, nests: Iterable[Nest]):
        super().__init__(nests)
        self.accesses = [list(accesses(nest)) for nest in self]
        self.touching: dict[Buf, list[tuple[int, Access]]] = {}
        for at, touched in enumerate(self.accesses):
            for access in touched:
                self.touching.setdefault(access[0].root, []).append((at, access))
        self._shared = {
            buf
            for buf, places in self.touching.items()
            if len({at for at, _ in places}) > 1 and any(written for _, (_, _, written) in places)
        }

    def shares(self, buf: Buf) -> bool:
        """Whether several nests touch a buffer and some nest writes it."""
        return buf.root in self._shared


@dataclass
class Chain:
    """Nests of a run that walk one dimension in step.

    dims: position in the run -> the nest's name of the dimension; size: its length; axes: where it is in what they write
    for each other; stays: whether that keeps its places, so that it may have several writers and start anywhere.
    """

    run: NestRun
    dims: dict[int, str]
    size: int
    stays: bool = False
    axes: dict[Buf, int] = field(default_factory=dict)

    @staticmethod
    def find(run: NestRun, seeds: dict[int, str], stays: bool = False) -> Chain | None:
        """Follows what nests write from the seeds.

        None where some access is not at the very index of the dimension, or reductions of strips
        cannot be joined.
        """
        sizes = {run[at].dims[seed] for at, seed in seeds.items()}
        if len(sizes) != 1 or any(run[at].ordered for at in seeds):
            return None
        chain, followed = Chain(run, dict(seeds), sizes.pop(), stays), -1
        while followed != len(chain.dims):
            followed = len(chain.dims)
            for at, dim in list(chain.dims.items()):
                if dim in run[at].rdims and any(
                    reduction.op not in JOINS for reduction in run[at].reductions
                ):
                    return None
                for buf, index, written in run.accesses[at]:
                    if not any(
                        position is not None and dim in position.symbols for position in index
                    ):
                        if written and dim not in run[at].rdims:
                            return None  # every strip would write it
                    elif (
                        buf not in chain.axes
                        and run.shares(buf)
                        and not chain._take(buf, index, dim)
                    ):
                        return None
        return chain

    def _take(self, buf: Buf, index: tuple, dim: str) -> bool:
        """Takes in every nest that touches `buf`, if each walks it at its own name of the dimension and one writes it."""
        walk = walk_of(index, dim)
        if walk is None or (walk[1] != Affine() and not self.stays):
            return False
        axis, writers = walk[0], 0
        self.axes[buf] = axis
        for at, (other, i, written) in self.run.touching[buf.root]:
            nest = self.run[at]
            walked = (
                i[axis].symbols & nest.dims.keys() if other is buf and i[axis] is not None else ()
            )
            dim = next(iter(walked), "")
            if (
                len(walked) != 1
                or nest.dims[dim] != self.size
                or nest.ordered
                or walk_of(i, dim) != walk
            ):
                return False
            if self.dims.setdefault(at, dim) != dim:
                return False
            writers += written
        return writers == 1 or self.stays

    def groups(self) -> list[list[int] | Nest]:
        """Runs of chain nests that can share a loop: none reads what another reduces."""
        groups: list[list[int] | Nest] = []
        for at, nest in enumerate(self.run):
            if at not in self.dims:
                groups.append(nest)
            elif groups and isinstance(groups[-1], list) and not self._waits(at, groups[-1]):
                groups[-1].append(at)
            else:
                groups.append([at])
        return groups

    def _waits(self, at: int, group: list[int]) -> bool:
        """Whether the nest at a position reads, before all strips are done, what nests of a group reduce."""
        nest = self.run[at]
        results = {
            store.buf.root
            for member in group
            for store in self.run[member].stores
            if not store.inner and self._reduces(member)
        }
        inner = Nest(
            {},
            reductions=nest.reductions,
            stores=tuple(store for store in nest.stores if store.inner),
        )
        return any(
            buf.root in results for buf, _, _ in accesses(inner if self._reduces(at) else nest)
        )

    def _reduces(self, at: int) -> bool:
        return self.dims[at] in self.run[at].rdims


def accesses(nest: Nest) -> Iterator[Access]:
    """Every access."""
    for load in nest.loads():
        yield load.buf, load.index, False
    for store in nest.stores:
        yield store.buf, store.index, True


def walk_of(index: tuple, dim: str) -> tuple[int, Affine] | None:
    """(the one axis that is walked by `dim` step by step, where it starts); None if there is no such axis."""
    axes = [
        k for k, position in enumerate(index) if position is not None and dim in position.symbols
    ]
    if len(axes) != 1 or index[axes[0]].coefficient(dim) != 1:
        return None
    return axes[0], index[axes[0]] - Affine.symbol(dim)


def axis_of(index: tuple, dim: str) -> int | None:
    """The one axis that is walked by `dim` alone, step by step from 0."""
    walk = walk_of(index, dim)
    return walk[0] if walk is not None and walk[1] == Affine() else None


# ---------------------------------------------------------------- the loops


@dataclass(frozen=True)
class Trips:
    """Which strips a loop walks: the first, how many, and whether it takes the rest, if strips leave one.

    Numbers or names of Lets. all_live: an expression that says whether nothing is left out; None:
    it is known.
    """

    first: Affine
    count: str | int
    rest: str | int
    all_live: Expr | None = None


class StripMinedLoop:
    """Statements of a run whose chain is cut into strips of `length`.

    `elsewhere`: buffers that others touch too.

    many: strips beyond which sums keep what rounding loses.
    """

    def __init__(self, chain: Chain, length: int, elsewhere: set[Buf], context, many: int):
        self.run, self.chain, self.length, self.elsewhere = chain.run, chain, length, elsewhere
        self.context, self.pool, self.many = context, context.pool, many
        self.full, self.rest = divmod(chain.size, length)
        self.out: list[Stmt] = []

    def statements(self) -> list[Stmt]:
        for group in self.chain.groups():
            if isinstance(group, Nest):
                self.out.append(group)
            else:
                self._emit(group)
        return self.out

    def trips(self, group: list[int]) -> Trips:
        """All strips."""
        return Trips(Affine(), self.full, 1)

    def bodies(self, group: list[int], nests: list[Nest]) -> list[Nest]:
        """The nests of one loop as they are to be."""
        return nests

    def missed(self, at: int, number: int) -> Expr | None:
        """Contribution of strips that are left out to reduction number of nest `at`; None: nothing that changes it."""
        return None

    def _emit(self, group: list[int]) -> None:
        trips = self.trips(group)
        small = self._strip_buffers(group)
        nests = [_StripNest(self, at, small, trips) for at in group]
        for strip in nests:
            self.out += strip.before()
        counter = self.context.names("%i")
        start = (Affine.symbol(counter) + trips.first) * self.length
        self.out.append(
            For(
                counter,
                trips.count,
                (
                    *self.bodies(
                        group, [strip_nest.body(start, self.length) for strip_nest in nests]
                    ),
                ),
            )
        )
        if self.rest:
            start = Affine((), self.full * self.length)
            rest: list[Stmt] = [strip_nest.body(start, self.rest) for strip_nest in nests]
            self.out += (
                rest
                if trips.rest == 1
                else [For(self.context.names("%i"), trips.rest, tuple(rest))]
            )
        for strip in nests:
            self.out += strip.after()

    def _strip_buffers(self, group: list[int]) -> dict[Buf, Buf]:
        """Scratch that only this group touches, and fills before it reads, holds one strip."""
        buffers = {}
        inside = set(group)
        for buf, axis in self.chain.axes.items():
            if not buf.arena or buf.storage is not None or buf in self.elsewhere:
                continue
            users = [at for at, access in self.run.touching[buf.root] if access[0] is buf]
            if inside.issuperset(users) and fills(self.run[users[0]], buf):
                shape = (*buf.shape[:axis], self.length, *buf.shape[axis + 1 :])
                buffers[buf] = self.context.new_buffer(shape, buf.dtype)
        return buffers


def fills(nest: Nest, buf: Buf) -> bool:
    """Whether all that a nest knows of `buf` is what it writes: nothing of an earlier round shows."""
    return all(written for other, _, written in accesses(nest) if other is buf) and any(
        store.buf is buf and not store.guard and store.mask is None for store in nest.stores
    )


class _StripNest:
    """One nest of a chain: its state between strips, its form on a strip, and its results."""

    def __init__(self, strips: StripMinedLoop, at: int, small: dict[Buf, Buf], trips: Trips):
        self.nest, self.d, self.at = strips.run[at], strips.chain.dims[at], at
        self.strips, self.context, self.pool = strips, strips.context, strips.pool
        self.small, self.axes, self.trips = small, strips.chain.axes, trips
        self.states: list[Buf] = []
        self.lost: dict[int, Buf] = {}  # reduction -> what its state lacks, where that is kept
        self.reduces = self.d in self.nest.rdims
        self.outer = {
            dim: size for dim, size in self.nest.dims.items() if dim not in self.nest.rdims
        }
        self.lanes = self._lanes() if self.reduces else 0

    def _lanes(self) -> int:
        """Values per state: a vector where vectors run along the dimension, so that strips end without a horizontal step."""
        if any(reduction.is_product for reduction in self.nest.reductions):
            return 0
        policy = self.context.policy
        if policy.vector_dimension(self.nest) != self.d:
            return 0
        return min(policy.lanes(self.nest, self.d), self.strips.length)

    def _state_index(self, lane: Affine) -> tuple[Affine, ...]:
        return (*map(Affine.symbol, self.outer), *((lane,) if self.lanes else ()))

    def before(self) -> list[Stmt]:
        """The states' starting values: what a reduction has seen of the masked elements that are skipped."""
        if not self.reduces:
            return []
        lane = self.context.names("d")
        dims = self.outer | ({lane: self.lanes} if self.lanes else {})
        stores = []
        for k, reduction in enumerate(self.nest.reductions):
            buf, index = (
                self.context.new_buffer(tuple(dims.values()), reduction.dtype),
                self._state_index(Affine.symbol(lane)),
            )
            self.states.append(buf)
            start = self.context.const(
                REDUCTIONS[reduction.op].identity(reduction.dtype), reduction.dtype
            )
            missed = self.strips.missed(self.at, k)
            if missed is not None:
                start = self.context.select(self.trips.all_live, start, missed)
            stores.append(Store(buf, index, start))
            if self._keeps_lost(reduction):
                self.lost[k] = self.context.new_buffer(tuple(dims.values()), reduction.dtype)
                stores.append(Store(self.lost[k], index, self.context.const(0, reduction.dtype)))
        return [Nest(dims, stores=tuple(stores), at=self.nest.at)]

    def _keeps_lost(self, reduction: Reduction) -> bool:
        return (
            self.strips.full > self.strips.many
            and REDUCTIONS[reduction.op].primitive == "add"
            and reduction.dtype.name in ("float32", "float64")
        )

    def _load(self, buf: Buf, index: tuple[Affine, ...]) -> Expr:
        return self.pool.load(buf.dtype, buf, index, False)

    def _joined(self, number: int, index: tuple[Affine, ...]) -> Iterator[tuple[Buf, Expr]]:
        """Joins what is kept of reduction number with that of one strip more.

        What a sum loses: Knuth, TAOCP 2, 4.2.2, theorem B.
        """
        reduction, state = self.nest.reductions[number], self.states[number]

        def op(name: str, expr: Expr, y: Expr) -> Expr:
            return self.context.op(name, reduction.dtype, expr, y)

        before, strip = self._load(state, index), self.pool.accumulator(reduction.dtype, number)
        joined = op(REDUCTIONS[reduction.op].primitive, before, strip)
        if number in self.lost:
            added = op("sub", joined, before)
            lost = op("add", op("sub", before, op("sub", joined, added)), op("sub", strip, added))
            yield self.lost[number], op("add", self._load(self.lost[number], index), lost)
        yield state, joined

    def _final(self, number: int, index: tuple[Affine, ...]) -> Expr:
        """The state of reduction number, and what it lacks. Of infinite sums that is no number."""
        state = self._load(self.states[number], index)
        if number not in self.lost:
            return state
        lost, dtype = self._load(self.lost[number], index), state.dtype
        finite = self.context.op("eq", np.dtype(bool), lost, lost)
        return self.context.select(finite, self.context.op("add", dtype, state, lost), state)

    def body(self, start: Affine, size: int) -> Nest:
        """The nest on elements start .. start + size - 1."""
        lane, step = self.context.names("d"), self.context.names("d")
        rdims = tuple(step if rdim == self.d else rdim for rdim in self.nest.rdims)
        if not self.lanes or size % self.lanes:
            return self._renamed(start, Affine.symbol(step), {step: size}, rdims, Affine())
        within = Affine.symbol(step, self.lanes) + Affine.symbol(lane)
        return self._renamed(
            start, within, {lane: self.lanes, step: size // self.lanes}, rdims, Affine.symbol(lane)
        )

    def _renamed(
        self,
        start: Affine,
        within: Affine,
        named: dict[str, int],
        rdims: tuple[str, ...],
        lane: Affine,
    ) -> Nest:
        def place(buf: Buf, index: tuple) -> tuple:
            """The index in a buffer of one strip."""
            axis = self.axes[buf]
            return *index[:axis], within, *index[axis + 1 :]

        dims: dict[str, int] = {}
        for dim, size in self.nest.dims.items():
            dims |= named if dim == self.d else {dim: size}
        inner = tuple(store for store in self.nest.stores if store.inner or not self.reduces)
        part = renamed(replace(self.nest, stores=inner), {self.d: start + within}, dims, self.pool)
        (strip,) = relocated([part], self.small.get, self.pool, place)
        stores = list(strip.stores)
        for k in range(len(self.states)):
            index = self._state_index(lane)
            stores += [
                Store(buf, index, value, inner=False) for buf, value in self._joined(k, index)
            ]
        strip = replace(strip, rdims=rdims, stores=tuple(stores))
        if not strip.reductions or any(dims[rdim] != 1 for rdim in rdims):
            return strip
        terms = [single_term(reduction, self.context) for reduction in strip.reductions]
        return with_results(replace(strip, rdims=()), terms, self.pool)

    def after(self) -> list[Stmt]:
        """The nest's results from the states."""
        if not self.reduces:
            return []
        lane = self.context.names("d")
        index = self._state_index(Affine.symbol(lane))
        states = [self._final(k, index) for k in range(len(self.states))]
        finals = [store for store in self.nest.stores if not store.inner]
        if self.lanes:
            reductions = [
                replace(reduction, args=(state,))
                for reduction, state in zip(self.nest.reductions, states)
            ]
            return [
                Nest(
                    self.outer | {lane: self.lanes},
                    (lane,),
                    tuple(reductions),
                    tuple(finals),
                    at=self.nest.at,
                )
            ]

        sums = replace(self.nest, dims=self.outer, rdims=(), stores=tuple(finals))
        return [with_results(sums, states, self.pool)]
