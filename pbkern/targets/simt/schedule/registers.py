"""Scratch -> registers: what a thread stores for itself alone needs no shared memory, and no barrier.

dealt       one thread has an element: every nest that touches the buffer has one element at each point, and the same thread
            takes that point, as the same one of its points, in all of these nests
replicated  every thread has the one element: the nest that stores it has one point, or sums over the whole block

Nests whose dimensions disagree are split alike, and dealt out as the one with the most work.
Buffers that other statements touch, that nests touch at other places, or that may be read before a
store, stay in memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pbkern.core.affine import Affine
from pbkern.lower.grid.scratch_resets import starts_overwritten
from pbkern.lower.kernel_nests import Case, KernelNests, Section
from pbkern.lower.nest import scratch
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.ir import Buf, Expr, Let, Nest, Stmt, bodies, every, nodes, with_bodies

from ..options import ThreadOptions
from .threads import Deal, deal, is_one_to_one, lane_weights
from .tiles import accepts, renamed_points

# Registers of 32 bits that one thread keeps. Of the 128 that it has (nvgpu/compile.py),
# accumulators take 32, addresses and operands others.
MOST_WORDS = 32
# Points of a thread are written out one after the other, since registers have no addresses: of
# nests that sum, and of others.
MOST_SUMS, MOST_STEPS = 2, 8
# Terms that every thread adds up by itself.
MOST_TERMS = 8

Axis = tuple[int, int]  # elements between neighbours, size


@dataclass
class Registers:
    """Values that lie in registers, and threads that compute them.

    Attributes:
      nests: the kernel's, dimensions split where nests have to agree. deals: by id of a nest.
      slots: root buffer -> the elements of it that each thread keeps, as a buffer.
    """

    nests: KernelNests
    deals: dict[int, Deal]
    slots: dict[Buf, Buf] = field(default_factory=dict)


def keep(nests: KernelNests) -> Registers:
    """Deals out all nests, and finds the scratch that lies in registers then."""
    return _Search(nests).found()


def in_slots(nest: Nest, dealt: Deal, slots: Mapping[Buf, Buf], context: NestContext) -> Nest:
    """The nest of a thread's points, its tiles written out, with its slots in the place of
    elements: slot `step * points of a step + number of the point`.
    """
    if not dealt.kept:
        return nest
    points = list(renamed_points(dealt.tiles))
    table = {
        (root, _moving(flat.substitute(dims.get), nest)): Affine.symbol("%step", len(points)) + n
        for root, flat in dealt.kept
        for n, dims in enumerate(points)
    }
    roots = {root for root, _ in dealt.kept}

    def slot(buf: Buf, index: Sequence[Affine]) -> tuple[Buf, tuple[Affine]]:
        return slots[buf.root], (table[buf.root, _moving(flat_index(buf, index), nest)],)

    def kept(x: Expr) -> Expr | None:
        if x.kind != "load" or x.info[0].root not in roots:
            return None
        return context.pool.make("load", x.dtype, (*slot(*x.info[:2]), False))

    found, writes = nest.mapped(context.pool.rewriter(kept)), []
    for w in found.writes:
        buf, index = slot(w.buf, w.index) if w.buf.root in roots else (w.buf, w.index)
        writes.append(replace(w, buf=buf, index=index))
    return replace(found, writes=writes)


class _Search:
    """State of one kernel's search. Nests are known by the id that they come with."""

    def __init__(self, nests: KernelNests):
        assert isinstance(nests.options, ThreadOptions)
        self.nests, self.options = nests, nests.options
        self.context: dict[int, NestContext] = {}
        self.now: dict[int, Nest] = {}  # as they are split
        self.deals: dict[int, Deal] = {}
        self.users: dict[Buf, dict[Hashable, list[Stmt]]] = {}
        self.fixed: set[int] = set()  # nests whose deal some buffer in registers relies on
        self.slots: dict[Buf, Buf] = {}
        for section in (nests.prologue, *nests.cases):
            for s in _leaves(section.statements):
                self._note(s, section)

    def _note(self, s: Stmt, section: Section) -> None:
        """A statement and what it touches: programs of one block hand on to each other what those
        of some cases store, and these are at the same ends of the parallel dimensions.
        """
        ends = (
            frozenset(section.variant.last & set(self.nests.parallel))
            if isinstance(section, Case)
            else None
        )
        for b in scratch.touched([s]):
            if b.arena:
                self.users.setdefault(b, {}).setdefault(ends, []).append(s)
        if isinstance(s, Nest):
            self.now[id(s)], self.context[id(s)] = s, section.context
            self.deals[id(s)] = self._deal(s)

    def _deal(self, nest: Nest) -> Deal:
        return deal(nest, self.options.threads, self.options.device.warp, self.options.contract)

    def found(self) -> Registers:
        candidates = [b for b in self.users if b not in self._maybe_unwritten()]
        self._replicate([b for b in candidates if b.size == 1])
        for b in sorted(candidates, key=lambda b: (-scratch.padded_bytes(b), b.name)):
            if b not in self.slots:
                self._try(b)
        deals: dict[int, Deal] = {}

        def changed(stmts: Sequence[Stmt]) -> list[Stmt]:
            found: list[Stmt] = []
            for s in stmts:
                if isinstance(s, Nest):
                    found.append(self.now[id(s)])
                    deals[id(found[-1])] = self.deals[id(s)]
                else:
                    found.append(with_bodies(s, changed))
            return found

        prologue = replace(
            self.nests.prologue, statements=tuple(changed(self.nests.prologue.statements))
        )
        cases = tuple(replace(c, statements=tuple(changed(c.statements))) for c in self.nests.cases)
        return Registers(replace(self.nests, prologue=prologue, cases=cases), deals, self.slots)

    def _maybe_unwritten(self) -> set[Buf]:
        """Scratch of the kernel that may be read before it is stored: in shared memory the simulator finds that."""
        kernel = self.nests.kernel
        return {b for n, b in enumerate(self.nests.scratch) if not starts_overwritten(kernel, n)}

    # ---------------------------------------------------------------- one element, which every
    # thread has

    def _replicate(self, candidates: list[Buf]) -> None:
        """The largest set of them such that each is stored only by nests that store to nothing else."""
        users = {b: [s for stmts in self.users[b].values() for s in stmts] for b in candidates}
        chosen = {b for b in candidates if all(_is_plain(s, b) for s in users[b])}
        nests = {id(s): s for b in chosen for s in users[b] if isinstance(s, Nest)}
        while True:
            bad = {
                w.buf.root
                for s in nests.values()
                if not self._is_for_everyone(s, chosen)
                for w in s.writes
            }
            if not bad & chosen:
                break
            chosen -= bad
        for b in chosen:
            self.slots[b] = b
        for key, s in nests.items():
            if any(w.buf.root in chosen for w in s.writes):
                self.deals[key] = self._for_everyone(s, self.deals[key])
                self.fixed.add(key)

    def _for_everyone(self, nest: Nest, d: Deal) -> Deal:
        """Deals a nest out to the whole block together, or to every thread for itself."""
        if d.team == self.options.threads:
            return replace(d, everyone=True)
        free, reduced = (
            tuple((x, n) for x, n in nest.dims.items() if (x in nest.rdims) is which)
            for which in (False, True)
        )
        return Deal(free, reduced, 1, d.threads, everyone=True)

    def _is_for_everyone(self, nest: Nest, chosen: set[Buf]) -> bool:
        mine = {w.buf.root for w in nest.writes}
        if not mine & chosen:
            return True  # only reads them
        d = self.deals[id(nest)]
        together = (
            d.team == self.options.threads
            or math.prod(nest.dims[x] for x in nest.rdims) <= MOST_TERMS
        )
        return (
            mine <= chosen
            and math.prod(n for x, n in nest.dims.items() if x not in nest.rdims) == 1
            and together
        )

    # ---------------------------------------------------------------- elements that have a thread
    # each

    def _try(self, b: Buf) -> None:
        """Deals out all nests that touch a buffer alike, if that can be done."""
        before = dict(self.now), dict(self.deals), set(self.fixed)
        models = [self._agreed(b, stmts) for stmts in self.users[b].values()]
        slots = [_slots(m) for m in models if m is not None]
        held = sum(_words(o) * s.size for o, s in self.slots.items())
        if len(slots) == len(models) and held + _words(b) * max(slots) <= MOST_WORDS:
            self.slots[b] = Buf(b.name, (max(slots),), b.dtype, arena=True)
        else:
            self.now, self.deals, self.fixed = before

    def _agreed(self, b: Buf, stmts: Sequence[Stmt]) -> Deal | None:
        """Deal in which all of these statements are dealt out now, as far as it concerns a buffer; None if they cannot be."""
        nests = [s for s in stmts if isinstance(s, Nest)]
        layouts = {id(s): _layout(self.now[id(s)], b) for s in nests}
        known = {key: found for key, found in layouts.items() if found is not None}
        if len(known) < len(stmts) or len({const for const, _ in known.values()}) > 1:
            return None
        axes = {key: tuple((c, n) for c, n, _ in found) for key, (_, found) in known.items()}
        fixed = [key for key in axes if key in self.fixed]
        for key in fixed or sorted(axes, key=lambda k: -len(axes[k])):
            runs = {k: _runs(known[k][1], axes[key]) for k in known}
            if all(
                r is not None and (k not in self.fixed or all(len(x) == 1 for x in r.values()))
                for k, r in runs.items()
            ):
                model = self._dealt_alike(
                    b, {k: r for k, r in runs.items() if r is not None}, fixed[:1]
                )
                if model is not None:
                    return model
        return None

    def _dealt_alike(
        self, b: Buf, runs: Mapping[int, Mapping[str, list[Axis]]], fixed: list[int]
    ) -> Deal | None:
        split: dict[int, tuple[Nest, dict[int, str]]] = {
            k: _split(self.now[k], r, self.context[k]) for k, r in runs.items()
        }
        leaders = fixed or sorted(split, key=lambda k: _work(split[k][0]), reverse=True)
        for leader in leaders:
            nest, names = split[leader]
            first = self.deals[leader] if fixed else self._deal(nest)
            for model in (
                first,
                replace(first, tiles=tuple(replace(t, beside=False) for t in first.tiles)),
            ):
                if fixed and model is not first:
                    continue
                deals = {k: self._like(model, names, nest, *split[k], b) for k in split}
                most = MOST_SUMS if any(n.rdims for n, _ in split.values()) else MOST_STEPS
                if self._keep_theirs(deals) and model.steps <= most:
                    self._settle(b, split, {k: d for k, d in deals.items() if d is not None})
                    return model
        return None

    def _keep_theirs(self, deals: Mapping[int, Deal | None]) -> bool:
        """Whether all nests have a deal, and those that other buffers rely on keep theirs."""
        for k, d in deals.items():
            if (
                d is None
                or k in self.fixed
                and replace(d, kept=()) != replace(self.deals[k], kept=())
            ):
                return False
        return True

    def _like(
        self,
        model: Deal,
        names: Mapping[int, str],
        leader: Nest,
        nest: Nest,
        mine: Mapping[int, str],
        b: Buf,
    ) -> Deal | None:
        """A nest dealt out as another one; `names`, `mine`: elements between neighbours -> dimension. None if it cannot be, or
        loses by it.
        """
        own = self._deal(nest)
        if model.team > 1 or model.alone or own.team > 1 or own.alone or model.everyone:
            return None
        to = {names[c]: mine[c] for c in names}
        lane = next(
            (to[d] for d in reversed([d for d, _ in model.free]) if leader.dims[d] > 1), None
        )
        weights = lane_weights(nest, [d for d in nest.dims if d not in nest.rdims], b)
        if lane is not None and weights[lane] < max(weights.values()):
            return None
        tiles = tuple(replace(t, dim=to[t.dim]) for t in model.tiles)
        if not accepts(nest, tiles, b):
            return None
        free = [(to[d], n) for d, n in model.free if d in to] + [
            (d, n) for d, n in nest.dims.items() if d not in nest.rdims and d not in to.values()
        ]
        reduced = tuple((d, nest.dims[d]) for d in nest.rdims)
        return Deal(tuple(free), reduced, 1, model.threads, tiles=tiles)

    def _settle(
        self, b: Buf, split: Mapping[int, tuple[Nest, dict[int, str]]], deals: Mapping[int, Deal]
    ) -> None:
        for k, (nest, _) in split.items():
            found = _layout(nest, b)
            assert found is not None
            const, axes = found
            flat = Affine.make({d: c for c, _, d in axes}, const)
            before = self.deals[k].kept if k in self.fixed else ()
            self.now[k], self.deals[k] = nest, replace(deals[k], kept=(*before, (b, flat)))
            self.fixed.add(k)


def _leaves(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    return (s for s in every(list(stmts)) if not bodies(s))


def _words(b: Buf) -> int:
    return -(-b.dtype.itemsize // 4)


def _slots(d: Deal) -> int:
    return d.steps * math.prod(t.count for t in d.tiles)


def _work(nest: Nest) -> tuple[bool, int]:
    return bool(nest.rdims), math.prod(nest.dims.values())


def _accesses(s: Stmt, root: Buf) -> list[tuple[Buf, Sequence[Affine | None], bool]]:
    """(buffer, indices, whether they may lie outside) of what a statement does to a root buffer."""
    found = nodes([s.value]) if isinstance(s, Let) else s.nodes() if isinstance(s, Nest) else []
    loads = [
        (e.info[0], e.info[1], e.kind == "gather" or bool(e.info[2]))
        for e in found
        if e.kind in ("load", "gather")
    ]
    stores = [(w.buf, w.index, w.guard) for w in s.writes] if isinstance(s, Nest) else []
    return [a for a in (*loads, *stores) if a[0].root is root]


def _is_plain(s: Stmt, root: Buf) -> bool:
    """Whether a statement only loads and stores elements that lie inside, as what they are."""
    if isinstance(s, Nest) and (s.ordered or s.moves()):
        return False
    return isinstance(s, Nest | Let) and all(
        b.dtype == root.dtype and not outside for b, _, outside in _accesses(s, root)
    )


def _layout(nest: Nest, root: Buf) -> tuple[int, tuple[tuple[int, int, str], ...]] | None:
    """(first element, (elements between neighbours, size, dimension) slowest first), if each point
    has its own element of the buffer, and no other.
    """
    if not _is_plain(nest, root) or nest.rdims and any(w.inner for w in nest.writes):
        return None
    flats = {_moving(flat_index(b, index), nest) for b, index, _ in _accesses(nest, root)}
    free = {d: n for d, n in nest.dims.items() if n > 1 and d not in nest.rdims}
    flat = flats.pop()
    if (
        flats
        or flat.symbols != free.keys()
        or not is_one_to_one((flat,), free)
        or any(c < 0 for _, c in flat.terms)
    ):
        return None
    return flat.const, tuple(sorted(((c, free[d], d) for d, c in flat.terms), reverse=True))


def _moving(flat: Affine, nest: Nest) -> Affine:
    """Without dimensions of one point."""
    return Affine(tuple((s, c) for s, c in flat.terms if nest.dims.get(s) != 1), flat.const)


def _runs(
    mine: Sequence[tuple[int, int, str]], target: Sequence[Axis]
) -> dict[str, list[Axis]] | None:
    """dimension -> the axes that it goes through, if all dimensions together go through all of the target's."""
    found: dict[str, list[Axis]] = {}
    rest = list(target)
    for c, n, d in mine:
        run: list[Axis] = []
        while rest and math.prod(size for _, size in run) < n:
            run.append(rest.pop(0))
        follow = all(a[0] == b[0] * b[1] for a, b in zip(run, run[1:]))
        if not follow or not run or run[-1][0] != c or math.prod(size for _, size in run) != n:
            return None
        found[d] = run
    return None if rest else found


def _split(
    nest: Nest, runs: Mapping[str, list[Axis]], context: NestContext
) -> tuple[Nest, dict[int, str]]:
    """(the nest with a dimension for each axis, elements between neighbours -> dimension).

    t[d]  for d < 12     ->     t[4 * i + j]  for i < 3, j < 4
    """
    names = {
        c: d if len(run) == 1 else context.names("d") for d, run in runs.items() for c, _ in run
    }
    places: dict[str, Affine] = {}
    dims: dict[str, int] = {}
    for d, n in nest.dims.items():
        run = runs.get(d, [])
        if len(run) < 2:
            dims[d] = n
            continue
        places[d] = Affine.make({names[c]: c // run[-1][0] for c, _ in run})
        dims |= {names[c]: size for c, size in run}
    if not places:
        return nest, names
    found = nest.mapped(context.pool.renamer(places))
    writes = [
        replace(w, index=tuple(i.substitute(places.get) for i in w.index)) for w in found.writes
    ]
    return replace(found, dims=dims, writes=writes), names
