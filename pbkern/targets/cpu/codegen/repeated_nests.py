"""Nests of a kernel that differ in their buffers alone, and in where they begin in them, are one function that is called.

A perceptron's layers, or the cases of a body at the ends of arrays, repeat nests. They are found before
anything is written, so that one text is written, and compiled, for all of them. A function is passed its
arrays, the place in each from which on the nest counts, and what other symbols its expressions have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import replace

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.addresses import flat_index
from pbkern.lower.nest.ir import (
    UNWRITTEN_PARAMS,
    Accumulator,
    Buf,
    Const,
    Expr,
    Gather,
    IndexValue,
    InRange,
    Load,
    Nest,
    Op,
    Pool,
    Shifted,
    Stmt,
    every,
)
from pbkern.targets.cpu.emit.tile_products import is_tile_product
from pbkern.targets.cpu.schedule.nest_schedule import (
    NestSchedule,
    final_schedule,
    overwritten_by,
    prefetched_by,
    scheduled,
)

# Fewest points of a nest that is called: beside them the call, 5 to 10 ns, takes less than a hundredth.
LEAST_POINTS = 8192
# Fewest nests that are worth a function.
LEAST_NESTS = 2
# Fewest operations of a step that is worth a function, whose frame takes MLIR and LLVM some time as well.
LEAST_OPERATIONS = 24

Index = Sequence[Affine | None]


@dataclass(frozen=True)
class NestForm:
    """A nest apart from its buffers and its place in them.

    Attributes:
      key: equal for nests that one function computes.
      nest: the one that was looked at.
      roots: whole buffers, in the order in which the function takes them.
      starts: of some of them, the first place: what symbols from outside add to all places in it, in
        elements.
      symbols: other symbols from outside.
    """

    key: Hashable
    nest: Nest
    roots: tuple[Buf, ...]
    starts: dict[Buf, Affine]
    symbols: tuple[str, ...]

    def template(self, names: dict[Buf, str], starts: dict[Buf, str], pool: Pool) -> Nest:
        """The nest over buffers of these names, from places on whose symbols are given."""
        roots = {root: replace(root, name=name) for root, name in names.items()}
        views: dict[Buf, Buf] = dict(roots)

        def view(buf: Buf) -> Buf:
            if buf not in views:
                views[buf] = replace(buf, name=names[buf.root], storage=roots[buf.root])
            return views[buf]

        def place(buf: Buf, index: tuple) -> tuple:
            if buf.root not in starts:
                return index
            *first, last = (self._inside(position) for position in index)
            return (*first, last + Affine.symbol(starts[buf.root]))

        def moved(expr: Expr) -> Expr | None:
            if not isinstance(expr, Load | Gather):
                return None
            buf, index = expr.access
            return pool.with_access(expr, view(buf), place(buf, index))

        change = pool.rewriter(moved)
        moved_nest = replace(
            self.nest,
            reductions=tuple(reduction.mapped(change) for reduction in self.nest.reductions),
            stores=tuple(
                store.mapped(change, buf=view(store.buf), index=place(store.buf, store.index))
                for store in self.nest.stores
            ),
        )
        return scheduled(
            moved_nest,
            prefetched={roots[root]: ahead for root, ahead in prefetched_by(self.nest).items()},
            overwritten=frozenset(roots[root] for root in overwritten_by(self.nest)),
        )

    def _inside(self, position: Affine) -> Affine:
        return position - _outside(position, self.nest)


def repeated_forms(stmts: Iterable[Stmt], passable: Collection[Buf]) -> dict[int, NestForm]:
    """id of a nest -> its form, of nests that are worth a function since others have the same form.

    passable: arrays of which no two share memory.
    """
    large = [stmt for stmt in every(list(stmts)) if isinstance(stmt, Nest) and _is_large(stmt)]
    if len(large) < LEAST_NESTS:
        return {}
    forms = {
        id(nest): nest_form for nest in large if (nest_form := form(nest, passable)) is not None
    }
    count = Counter(nest_form.key for nest_form in forms.values())
    return {at: nest_form for at, nest_form in forms.items() if count[nest_form.key] >= LEAST_NESTS}


def _is_large(nest: Nest) -> bool:
    if math.prod(nest.dims.values()) < LEAST_POINTS or is_tile_product(nest):
        return False
    schedule = final_schedule(nest)
    steps = len(nest.nodes()) + len(nest.reductions) + len(nest.stores)
    return schedule.tile * steps >= LEAST_OPERATIONS


def form(nest: Nest, passable: Collection[Buf]) -> NestForm | None:
    """The form of a nest; None for one that touches other buffers than those, or scalars from outside."""
    touched: dict[Buf, list[tuple[Buf, Index, bool]]] = {}
    for node in nest.nodes():
        if isinstance(node, Load | Gather):
            guarded = not isinstance(node, Load) or node.guard
            touched.setdefault(node.buf.root, []).append((*node.access, guarded))
    for store in nest.stores:
        touched.setdefault(store.buf.root, []).append((store.buf, store.index, store.guard))
    if not touched.keys() <= set(passable):
        return None
    starts = {
        root: start
        for root, accesses in touched.items()
        if (start := _start(accesses, nest)) is not None
    }
    reader = _Reader(nest, starts, tuple(touched))
    key = reader.key()
    return (
        None if key is None else NestForm(key, nest, tuple(touched), starts, tuple(reader.symbols))
    )


def _outside(position: Affine, nest: Nest) -> Affine:
    """The part of a place that the nest's dimensions do not change."""
    return Affine(tuple(term for term in position.terms if term[0] not in nest.dims), 0)


def _start(accesses: list[tuple[Buf, Index, bool]], nest: Nest) -> Affine | None:
    """Start of the one place at which a nest touches a buffer, as symbols from outside make it, in elements.

    None where an index may be outside of the buffer, for it is compared by itself, and where there are
    several places: where lines begin decides whether these share vectors.
    """
    (buf, index, guarded), *later = accesses
    if guarded or not buf.shape or any(other != (buf, index, False) for other in later):
        return None
    return flat_index(buf, [_outside(position, nest) for position in index if position is not None])


class _Reader:
    """Reads a nest with names by order of appearance. symbols: those from outside that expressions have."""

    def __init__(self, nest: Nest, starts: dict[Buf, Affine], roots: tuple[Buf, ...]):
        self.nest, self.starts = nest, starts
        self.dims = {dim: number for number, dim in enumerate(nest.dims)}
        self.roots = {root: number for number, root in enumerate(roots)}
        self.symbols: dict[str, int] = {}

    def key(self) -> Hashable | None:
        nest = self.nest
        numbers: dict[int, int] = {}
        nodes: list[tuple] = []
        for node in nest.nodes():
            facts = self._node(node)
            if facts is None:
                return None
            numbers[id(node)] = len(nodes)
            nodes.append((type(node), node.dtype, facts, *(numbers[id(arg)] for arg in node.args)))
        reductions = tuple(
            (
                reduction.op,
                reduction.dtype,
                reduction.by and reduction.by.name,
                *(numbers[id(arg)] for arg in reduction.args),
            )
            for reduction in nest.reductions
        )
        stores = tuple(
            (
                self._access(store.buf, store.index),
                numbers[id(store.value)],
                store.inner,
                store.guard,
                None if store.mask is None else numbers[id(store.mask)],
            )
            for store in nest.stores
        )
        return (
            tuple(nest.dims.values()),
            tuple(self.dims[dim] for dim in nest.rdims),
            nest.ordered,
            nest.by,
            self._schedule(final_schedule(nest)),
            tuple((self.roots[root], ahead) for root, ahead in prefetched_by(nest).items()),
            frozenset(self.roots[root] for root in overwritten_by(nest)),
            tuple(nodes),
            reductions,
            stores,
            tuple(map(self._whole, self.roots)),
        )

    def _whole(self, root: Buf) -> Hashable:
        """All of a whole buffer that code may depend on. Scratch begins with a line, by which several places share vectors."""
        arena = None if root in self.starts else root.arena
        return root.dtype, root.step, root.space, root.layout, arena

    def _schedule(self, schedule: NestSchedule) -> Hashable:
        def number(dim: str | None) -> int | None:
            return None if dim is None else self.dims[dim]

        return (
            replace(
                schedule, vector=None, jam={}, order=(), transpose=None, batched_rows=None, instruction_dims=()
            ).differences(),
            number(schedule.vector),
            tuple((self.dims[dim], count) for dim, count in schedule.jam.items()),
            tuple(map(number, schedule.order)),
            number(schedule.transpose),
            number(schedule.batched_rows),
            tuple(map(number, schedule.instruction_dims)),
        )  # fmt: skip

    def _node(self, node: Expr) -> Hashable | None:
        """All that a node has beside its type and its operands."""
        match node:
            case Const():
                return node.value.tobytes()
            case IndexValue():
                return self._place(node.affine)
            case InRange():
                return self._place(node.affine), node.low, node.high
            case Load():
                return self._access(node.buf, node.index), node.guard
            case Gather():
                return self._access(node.buf, node.index)
            case Op():
                params = (
                    (name, repr(value))
                    for name, value in node.info.params.items()
                    if name not in UNWRITTEN_PARAMS
                )
                return node.info.primitive, node.info.in_dtypes, tuple(params)
            case Accumulator():
                return node.number
            case Shifted():
                return tuple((self.dims[dim], by) for dim, by in node.moves)
        return None

    def _access(self, buf: Buf, index: Index) -> Hashable:
        """The places that an access reads or writes, of its part of a buffer."""
        moves = buf.root in self.starts
        shape = buf.shape[1:] if moves else buf.shape
        places = tuple(
            None if position is None else self._place(position, inside=moves) for position in index
        )
        return self.roots[buf.root], buf is buf.root, shape, buf.dtype, buf.step, places

    def _place(self, affine: Affine, *, inside: bool = False) -> Hashable:
        terms = []
        for symbol, coefficient in affine.terms:
            if symbol in self.dims:
                terms.append((True, self.dims[symbol], coefficient))
            elif not inside:
                number = self.symbols.setdefault(symbol, len(self.symbols))
                terms.append((False, number, coefficient))
        return tuple(sorted(terms)), affine.const
