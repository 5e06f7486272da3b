"""Scratch -> registers: what a thread stores for itself alone needs no shared memory, and no barrier.

mapped      one thread has an element: every nest that touches the buffer has one element at each point, and the same thread
            takes that point, as the same one of its points, in all of these nests
replicated  every thread has the one element: the nest that stores it has one point, or sums over the whole block

Nests whose dimensions disagree are split alike, and mapped as the one with the most work.
Buffers that other statements touch, that nests touch at other places, or that may be read before a
store, stay in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.grid.scratch_resets import starts_overwritten
from pbkern.lower.kernel_nests import BodyCase, KernelNests, Section
from pbkern.lower.nest import effects, scratch
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.context import NestContext
from pbkern.lower.nest.edit.split import split
from pbkern.lower.nest.ir import (
    Buf,
    Expr,
    For,
    Gather,
    Let,
    Load,
    Nest,
    Stmt,
    While,
    bodies,
    nodes,
    with_bodies,
)
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.lower.nest.tiles.tiling import Tiling

from .policy import ThreadPolicy
from .threads import ThreadMapping, is_one_to_one, lane_weights
from .tiles import accepts, renamed_points
from .updates import Updates, updates_of

# Registers of 32 bits that one thread keeps. Of the 128 that it has (nvgpu/compile.py),
# accumulators take 32, addresses and operands others.
MOST_WORDS = 32
# Most points of a thread of nests that sum. Points are written out one after the other, since
# registers have no addresses. Source: not recorded.
MOST_SUMMING_POINTS = 2
# Most points of a thread of other nests. Source: not recorded.
MOST_THREAD_POINTS = 8
# Terms that every thread adds up by itself.
MOST_THREAD_TERMS = 8

Axis = tuple[int, int]  # elements between neighbours, size


@dataclass
class RegisterValues:
    """Values that lie in registers, and threads that compute them.

    Attributes:
      nests: the kernel's, dimensions split where nests have to agree. mappings: by id of a nest.
      slots: root buffer -> the elements of it that each thread keeps, as a buffer.
      updates: loops whose steps teams of threads take, by id. Their nests have no mapping.
    """

    nests: KernelNests
    mappings: dict[int, ThreadMapping]
    slots: dict[Buf, Buf] = field(default_factory=dict)
    updates: dict[int, Updates] = field(default_factory=dict)


def keep(nests: KernelNests) -> RegisterValues:
    """Maps all nests to threads, and finds the scratch that lies in registers then."""
    return _RegisterSearch(nests).values()


def in_slots(
    nest: Nest, mapping: ThreadMapping, slots: Mapping[Buf, Buf], context: NestContext
) -> Nest:
    """The nest of a thread's points, its tiles written out, with slots in place of elements.

    A slot is `step * points of a step + number of the point`.
    """
    if not mapping.in_registers:
        return nest
    points = list(renamed_points(mapping.tiles))
    table = {
        (root, _moving(flat.substitute(dims.get), nest)): Affine.symbol("%step", len(points)) + n
        for root, flat in mapping.in_registers
        for n, dims in enumerate(points)
    }
    roots = {root for root, _ in mapping.in_registers}

    def slot(buf: Buf, index: Sequence[Affine]) -> tuple[Buf, tuple[Affine]]:
        return slots[buf.root], (table[buf.root, _moving(flat_index(buf, index), nest)],)

    def from_slot(expr: Expr) -> Expr | None:
        if not isinstance(expr, Load) or expr.buf.root not in roots:
            return None
        return context.pool.load(expr.dtype, *slot(*expr.access), False)

    rewritten, stores = nest.mapped(context.pool.rewriter(from_slot)), []
    for store in rewritten.stores:
        buf, index = (
            slot(store.buf, store.index) if store.buf.root in roots else (store.buf, store.index)
        )
        stores.append(replace(store, buf=buf, index=index))
    return replace(rewritten, stores=tuple(stores))


class _RegisterSearch:
    """State of one kernel's search. Nests are known by the id that they come with."""

    def __init__(self, nests: KernelNests):
        policy = nests.options.policy
        assert isinstance(policy, ThreadPolicy)
        self.nests, self.policy = nests, policy
        self.context: dict[int, NestContext] = {}
        self.now: dict[int, Nest] = {}  # as they are split
        self.mappings: dict[int, ThreadMapping] = {}
        self.users: dict[Buf, dict[Hashable, list[Stmt]]] = {}
        self.fixed: set[int] = set()  # nests whose mapping some buffer in registers relies on
        self.slots: dict[Buf, Buf] = {}
        self.updates: dict[int, Updates] = {}
        for section in (nests.prologue, *nests.cases):
            for leaf in self._leaves(section.statements):
                self._note(leaf, section)

    def _leaves(self, stmts: Sequence[Stmt]) -> Iterator[Stmt]:
        """Statements that hold no others, and loops of updates."""
        for stmt in stmts:
            if (updates := updates_of(stmt, self.policy)) is not None:
                self.updates[id(stmt)] = updates
            elif bodies(stmt):
                yield from self._leaves([inner for body in bodies(stmt) for inner in body])
                continue
            yield stmt

    def _note(self, stmt: Stmt, section: Section) -> None:
        """Notes a statement and what it touches.

        Programs of one block hand on to each other what those of some cases store, and these are at
        the same ends of the parallel dimensions.
        """
        ends = (
            frozenset(section.variant.last & set(self.nests.parallel))
            if isinstance(section, BodyCase)
            else None
        )
        # By name: a set of buffers has no order that another process would repeat.
        for buf in sorted(effects.touched([stmt]), key=lambda touched: touched.name):
            if buf.arena:
                self.users.setdefault(buf, {}).setdefault(ends, []).append(stmt)
        if isinstance(stmt, Nest):
            self.now[id(stmt)], self.context[id(stmt)] = stmt, section.context
            self.mappings[id(stmt)] = self.policy.mapping(stmt)

    def values(self) -> RegisterValues:
        self.slots |= {
            buf: slots_of(buf)
            for buf in self.users
            if buf.layout is not None and buf.space == "registers"
        }
        candidates = [
            user
            for user in self.users
            if user not in self._maybe_unwritten()
            and user not in self.slots
            and user.space != "shared"
        ]
        self._replicate([buf for buf in candidates if buf.size == 1])
        for candidate in sorted(candidates, key=lambda buf: (-scratch.padded_bytes(buf), buf.name)):
            if candidate not in self.slots:
                self._try(candidate)
        mappings: dict[int, ThreadMapping] = {}

        def changed(stmts: Sequence[Stmt]) -> list[Stmt]:
            out: list[Stmt] = []
            for stmt in stmts:
                if isinstance(stmt, Nest):
                    out.append(self.now[id(stmt)])
                    mappings[id(out[-1])] = self.mappings[id(stmt)]
                else:
                    out.append(stmt if id(stmt) in self.updates else with_bodies(stmt, changed))
            return out

        prologue = replace(
            self.nests.prologue, statements=tuple(changed(self.nests.prologue.statements))
        )
        cases = tuple(
            replace(case, statements=tuple(changed(case.statements))) for case in self.nests.cases
        )
        return RegisterValues(
            replace(self.nests, prologue=prologue, cases=cases),
            mappings,
            self.slots,
            self.updates,
        )

    def _maybe_unwritten(self) -> set[Buf]:
        """Scratch of the kernel that may be read before it is stored: in shared memory the simulator finds that."""
        kernel = self.nests.kernel
        return {
            buf for n, buf in enumerate(self.nests.scratch) if not starts_overwritten(kernel, n)
        }

    # ---------------------------------------------------------------- one element, which every
    # thread has

    def _replicate(self, candidates: list[Buf]) -> None:
        """The largest set of them such that each is stored only by nests that store to nothing else."""
        users = {
            candidate: [stmt for stmts in self.users[candidate].values() for stmt in stmts]
            for candidate in candidates
        }
        chosen = {
            candidate
            for candidate in candidates
            if all(_is_plain(user, candidate) for user in users[candidate])
        }
        nests = {id(user): user for b in chosen for user in users[b] if isinstance(user, Nest)}
        while True:
            bad = {
                store.buf.root
                for user in nests.values()
                if not self._is_for_everyone(user, chosen)
                for store in user.stores
            }
            if not bad & chosen:
                break
            chosen -= bad
        self.slots |= {buf: buf for buf in candidates if buf in chosen}
        for key, nest in nests.items():
            if any(store.buf.root in chosen for store in nest.stores):
                self.mappings[key] = self._for_everyone(nest, self.mappings[key])
                self.fixed.add(key)

    def _for_everyone(self, nest: Nest, mapping: ThreadMapping) -> ThreadMapping:
        """Maps a nest to the whole block together, or to every thread for itself."""
        if mapping.team == self.policy.threads:
            return replace(mapping, everyone=True)
        free, reduced = (
            tuple((x, size) for x, size in nest.dims.items() if (x in nest.rdims) is which)
            for which in (False, True)
        )
        return ThreadMapping(free, reduced, 1, mapping.threads, everyone=True)

    def _is_for_everyone(self, nest: Nest, chosen: set[Buf]) -> bool:
        mine = {store.buf.root for store in nest.stores}
        if not mine & chosen:
            return True  # only reads them
        mapping = self.mappings[id(nest)]
        together = (
            mapping.team == self.policy.threads
            or math.prod(nest.dims[rdim] for rdim in nest.rdims) <= MOST_THREAD_TERMS
        )
        return (
            mine <= chosen
            and math.prod(size for dim, size in nest.dims.items() if dim not in nest.rdims) == 1
            and together
        )

    # ---------------------------------------------------------------- elements that have a thread
    # each

    def _try(self, buf: Buf) -> None:
        """Maps all nests that touch a buffer alike, if that can be done."""
        before = dict(self.now), dict(self.mappings), set(self.fixed)
        models = [self._agreed(buf, stmts) for stmts in self.users[buf].values()]
        slots = [_slots(model) for model in models if model is not None]
        held = sum(_words(offset) * slot.size for offset, slot in self.slots.items())
        fits = buf.space == "registers" or held + _words(buf) * max(slots, default=0) <= MOST_WORDS
        if len(slots) == len(models) and fits:
            self.slots[buf] = Buf(buf.name, (max(slots),), buf.dtype, arena=True)
        else:
            self.now, self.mappings, self.fixed = before

    def _agreed(self, buf: Buf, stmts: Sequence[Stmt]) -> ThreadMapping | None:
        """The mapping that all of these statements have now, as far as it concerns a buffer; None if they cannot be."""
        nests = [stmt for stmt in stmts if isinstance(stmt, Nest)]
        layouts = {id(nest): _layout(self.now[id(nest)], buf) for nest in nests}
        known = {key: layout for key, layout in layouts.items() if layout is not None}
        if len(known) < len(stmts) or len({const for const, _ in known.values()}) > 1:
            return None
        axes = {
            key: tuple((stride, size) for stride, size, _ in parts)
            for key, (_, parts) in known.items()
        }
        fixed = [key for key in axes if key in self.fixed]
        for key in fixed or sorted(axes, key=lambda axis: -len(axes[axis])):
            runs = {other: _runs(known[other][1], axes[key]) for other in known}
            if all(
                run is not None and (k not in self.fixed or all(len(x) == 1 for x in run.values()))
                for k, run in runs.items()
            ):
                model = self._dealt_alike(
                    buf, {k: run for k, run in runs.items() if run is not None}, fixed[:1]
                )
                if model is not None:
                    return model
        return None

    def _dealt_alike(
        self, buf: Buf, runs: Mapping[int, Mapping[str, list[Axis]]], fixed: list[int]
    ) -> ThreadMapping | None:
        split: dict[int, tuple[Nest, dict[int, str]]] = {
            k: _split(self.now[k], run, self.context[k]) for k, run in runs.items()
        }
        leaders = fixed or sorted(split, key=lambda key: _work(split[key][0]), reverse=True)
        for leader in leaders:
            nest, names = split[leader]
            usual = replace(self.policy.mapping(nest), sectors=None)  # threads have the same points
            first = self.mappings[leader] if fixed else usual
            for model in (
                first,
                replace(first, tiles=tuple(replace(tile, beside=False) for tile in first.tiles)),
            ):
                if fixed and model is not first:
                    continue
                mappings = {key: self._like(model, names, nest, *split[key], buf) for key in split}
                most = (
                    MOST_SUMMING_POINTS
                    if any(n.rdims for n, _ in split.values())
                    else MOST_THREAD_POINTS
                )
                fits = buf.space == "registers" or model.steps <= most
                if self._keep_theirs(mappings) and fits:
                    self._settle(
                        buf,
                        split,
                        {k: mapping for k, mapping in mappings.items() if mapping is not None},
                    )
                    return model
        return None

    def _keep_theirs(self, mappings: Mapping[int, ThreadMapping | None]) -> bool:
        """Whether all nests have a mapping, and those that other buffers rely on keep theirs."""
        for k, mapping in mappings.items():
            if mapping is None or (
                k in self.fixed
                and replace(mapping, in_registers=()) != replace(self.mappings[k], in_registers=())
            ):
                return False
        return True

    def _like(
        self,
        model: ThreadMapping,
        names: Mapping[int, str],
        leader: Nest,
        nest: Nest,
        mine: Mapping[int, str],
        buf: Buf,
    ) -> ThreadMapping | None:
        """A nest mapped as another one. None if it cannot be, or loses by it.

        `names`, `mine`: elements between neighbours -> dimension.
        """
        usual = self.policy.mapping(nest)
        if model.team > 1 or model.alone or usual.team > 1 or usual.alone or model.everyone:
            return None
        to = {names[name]: mine[name] for name in names}
        lane = next(
            (to[dim] for dim in reversed([dim for dim, _ in model.free]) if leader.dims[dim] > 1),
            None,
        )
        weights = lane_weights(nest, [dim for dim in nest.dims if dim not in nest.rdims], buf)
        if lane is not None and weights[lane] < max(weights.values()):
            return None
        tiles = tuple(replace(tile, dim=to[tile.dim]) for tile in model.tiles)
        if not accepts(nest, tiles, buf):
            return None
        free = [(to[dim], extent) for dim, extent in model.free if dim in to] + [
            (dim, size)
            for dim, size in nest.dims.items()
            if dim not in nest.rdims and dim not in to.values()
        ]
        reduced = tuple((rdim, nest.dims[rdim]) for rdim in nest.rdims)
        return ThreadMapping(tuple(free), reduced, 1, model.threads, tiles=tiles)

    def _settle(
        self,
        buf: Buf,
        split: Mapping[int, tuple[Nest, dict[int, str]]],
        mappings: Mapping[int, ThreadMapping],
    ) -> None:
        for k, (nest, _) in split.items():
            layout = _layout(nest, buf)
            assert layout is not None
            const, axes = layout
            flat = Affine.make({dim: stride for stride, _, dim in axes}, const)
            before = self.mappings[k].in_registers if k in self.fixed else ()
            self.now[k], self.mappings[k] = (
                nest,
                replace(mappings[k], in_registers=(*before, (buf, flat))),
            )
            self.fixed.add(k)


def live(
    stmts: Sequence[Stmt], words: Mapping[Buf, int], behind: frozenset[Buf] = frozenset()
) -> tuple[int, frozenset[Buf]]:
    """(most words of buffers that are alive between two statements, buffers that are read before they are stored).

    `behind`: those that are read behind the statements.
    """
    most, later = 0, behind
    for stmt in reversed(stmts):
        most = max(most, sum(words.get(buf, 0) for buf in later))
        if not bodies(stmt):
            later = later - effects.written([stmt]) | effects.read([stmt])
            continue
        ahead = later
        for _ in range(2 if isinstance(stmt, For | While) else 1):  # a step follows another one
            for block in bodies(stmt):
                inside, first = live(block, words, ahead)
                most, later = max(most, inside), later | first
            ahead = later
    return most, later


def slots_of(buf: Buf) -> Buf:
    """The elements of an array in registers that each thread holds by its layout, as a buffer."""
    assert isinstance(buf.layout, Tiling | Chunking)
    return Buf(buf.name, (buf.layout.held(buf.shape).size("register"),), buf.dtype, arena=True)


def _words(buf: Buf) -> int:
    return -(-buf.dtype.itemsize // 4)


def _slots(mapping: ThreadMapping) -> int:
    return mapping.steps * math.prod(tile.count for tile in mapping.tiles)


def _work(nest: Nest) -> tuple[bool, int]:
    return bool(nest.rdims), math.prod(nest.dims.values())


def _accesses(stmt: Stmt, root: Buf) -> list[tuple[Buf, Sequence[Affine | None], bool]]:
    """(buffer, indices, whether they may lie outside) of what a statement does to a root buffer."""
    expressions = (
        nodes([stmt.value])
        if isinstance(stmt, Let)
        else stmt.nodes()
        if isinstance(stmt, Nest)
        else []
    )
    loads = [
        (expr.buf, expr.index, isinstance(expr, Gather) or bool(expr.guard))
        for expr in expressions
        if isinstance(expr, Load | Gather)
    ]
    stores = (
        [(store.buf, store.index, store.guard) for store in stmt.stores]
        if isinstance(stmt, Nest)
        else []
    )
    return [access for access in (*loads, *stores) if access[0].root is root]


def _is_plain(stmt: Stmt, root: Buf) -> bool:
    """Whether a statement only loads and stores elements that lie inside, as what they are."""
    if isinstance(stmt, Nest) and (stmt.ordered or stmt.moves() or stmt.by is not None):
        return False
    return isinstance(stmt, Nest | Let) and all(
        buf.dtype == root.dtype and not outside for buf, _, outside in _accesses(stmt, root)
    )


def _layout(nest: Nest, root: Buf) -> tuple[int, tuple[tuple[int, int, str], ...]] | None:
    """(first element, (elements between neighbours, size, dimension) slowest first).

    None unless each point has its own element of the buffer, and no other.
    """
    if not _is_plain(nest, root) or (nest.rdims and any(store.inner for store in nest.stores)):
        return None
    flats = {_moving(flat_index(buf, index), nest) for buf, index, _ in _accesses(nest, root)}
    free = {dim: size for dim, size in nest.dims.items() if size > 1 and dim not in nest.rdims}
    flat = flats.pop()
    if (
        flats
        or flat.symbols != free.keys()
        or not is_one_to_one((flat,), free)
        or any(coeff < 0 for _, coeff in flat.terms)
    ):
        return None
    return flat.const, tuple(
        sorted(((coeff, free[dim], dim) for dim, coeff in flat.terms), reverse=True)
    )


def _moving(flat: Affine, nest: Nest) -> Affine:
    """Without dimensions of one point."""
    return Affine(
        tuple((symbol, coeff) for symbol, coeff in flat.terms if nest.dims.get(symbol) != 1),
        flat.const,
    )


def _runs(
    mine: Sequence[tuple[int, int, str]], target: Sequence[Axis]
) -> dict[str, list[Axis]] | None:
    """dimension -> the axes that it goes through, if all dimensions together go through all of the target's."""
    runs: dict[str, list[Axis]] = {}
    rest = list(target)
    for stride, extent, dim in mine:
        run: list[Axis] = []
        while rest and math.prod(size for _, size in run) < extent:
            run.append(rest.pop(0))
        follow = all(outer[0] == inner[0] * inner[1] for outer, inner in itertools.pairwise(run))
        if (
            not follow
            or not run
            or run[-1][0] != stride
            or math.prod(size for _, size in run) != extent
        ):
            return None
        runs[dim] = run
    return None if rest else runs


def _split(
    nest: Nest, runs: Mapping[str, list[Axis]], context: NestContext
) -> tuple[Nest, dict[int, str]]:
    """(the nest with a dimension for each axis, elements between neighbours -> dimension).

    t[d]  for d < 12     ->     t[4 * i + j]  for i < 3, j < 4
    """
    names = {
        stride: old_dim if len(run) == 1 else context.names("d")
        for old_dim, run in runs.items()
        for stride, _ in run
    }
    sizes = {
        dim: {names[stride]: size for stride, size in run}
        for dim, run in runs.items()
        if len(run) > 1
    }
    return split(nest, sizes, context.pool) if sizes else nest, names
