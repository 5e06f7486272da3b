"""Statements of nests, what is inside them, and statements like others with parts of them changed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.tiles.chunking import Chunking
from pbkern.lower.nest.tiles.instructions import ProductInstruction
from pbkern.lower.nest.tiles.tiling import Tiling

from .buffers import Buf
from .expressions import Expr, Gather, Load, Shifted, nodes, typed
from .naming import name_shared


@dataclass(frozen=True, slots=True)
class Reduction:
    """accumulator = op(accumulator, args), computed `by` an instruction where that is decided.

    `dot` multiplies and adds; argmax and argmin take (value, index).

    `maxnum` is max without NaN, of zeros either one.
    """

    op: str
    args: tuple[Expr, ...]
    dtype: np.dtype
    by: ProductInstruction | None = None

    @property
    def is_product(self) -> bool:
        """Whether it sums products, by whatever instruction."""
        return self.op == "dot"

    @property
    def is_search(self) -> bool:
        """Whether it finds the index of the largest or smallest value."""
        return self.op in ("argmax", "argmin")

    @property
    def is_plain_product(self) -> bool:
        """Whether it sums products of operands as they are, not of words that hold several elements."""
        return self.op == "dot" and self.by is None

    def mapped(self, change: Callable[[Expr], Expr]) -> Reduction:
        """The reduction of changed operands."""
        return replace(self, args=tuple(map(change, self.args)))


@dataclass(frozen=True, slots=True)
class Store:
    """buf[index] = value.

    `inner` writes run at every point, others once the reduction dimensions are done.

    `mask` (an Expr) and `guard` (indices may be outside: such points are dropped) make it
    conditional.
    """

    buf: Buf
    index: tuple[Affine, ...]
    value: Expr
    inner: bool = True
    guard: bool = False
    mask: Expr | None = None

    def moved(self, places: Mapping[str, Affine], change: Callable[[Expr], Expr]) -> Store:
        """The store with symbols of its index replaced by places, its value and its mask changed."""
        index = tuple(position.substitute(places.get) for position in self.index)
        return self.mapped(change, index=index)

    def mapped(
        self,
        change: Callable[[Expr], Expr],
        *,
        buf: Buf | None = None,
        index: tuple[Affine, ...] | None = None,
        inner: bool | None = None,
    ) -> Store:
        """The write with its value and its mask changed, and with the fields that are given replaced."""
        return Store(
            self.buf if buf is None else buf,
            self.index if index is None else index,
            change(self.value),
            self.inner if inner is None else inner,
            self.guard,
            None if self.mask is None else change(self.mask),
        )


@dataclass(frozen=True)
class Nest:
    """for dims: update accumulators, store.

    `rdims` are reduced; `ordered` keeps them sequential (cumulative ops).

    A point reads all that its stores need before any of them stores: they may read what another one
    overwrites.

    `by`: which threads compute which points, the dimensions being rows, columns and depth of its
    tile; None: the target decides.
    """

    dims: Mapping[str, int]
    rdims: tuple[str, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    stores: tuple[Store, ...] = ()
    ordered: bool = False
    at: str | None = None
    by: Tiling | Chunking | None = None

    def expressions(self) -> list[Expr]:
        operands = [arg for reduction in self.reductions for arg in reduction.args]
        values = [store.value for store in self.stores]
        return operands + values + [store.mask for store in self.stores if store.mask is not None]

    def nodes(self) -> tuple[Expr, ...]:
        """Every distinct node, operands before users."""
        return self._nodes

    @functools.cached_property
    def _nodes(self) -> tuple[Expr, ...]:  # passes ask for it many times
        return tuple(nodes(self.expressions()))

    def note_nodes(self, known: Iterable[Expr]) -> None:
        """Remembers what `nodes` gives, where it is known from the nests that this one is made of."""
        self.__dict__["_nodes"] = tuple(known)

    def loads(self) -> tuple[Load | Gather, ...]:
        """Every distinct load."""
        return self._loads

    @functools.cached_property
    def _loads(self) -> tuple[Load | Gather, ...]:  # passes ask for it many times
        return tuple(node for node in self.nodes() if isinstance(node, Load | Gather))

    def roots_read(self) -> frozenset[Buf]:
        """The whole buffers that loads read from."""
        return self._roots_read

    @functools.cached_property
    def _roots_read(self) -> frozenset[Buf]:  # schedules ask for each store
        return frozenset(load.buf.root for load in self.loads())

    @functools.cached_property
    def answers(self) -> dict[Hashable, Any]:
        """Answers that targets remember, by their question: several passes ask the same of a nest that none changes."""
        return {}

    def mapped(self, change: Callable[[Expr], Expr]) -> Nest:
        """The nest with what it reduces, stores and masks changed."""
        return replace(
            self,
            reductions=tuple(reduction.mapped(change) for reduction in self.reductions),
            stores=tuple(store.mapped(change) for store in self.stores),
        )

    def reuse(self, expr: Expr) -> int:
        """Points of results that use one value of an expression."""
        return math.prod(
            size
            for dim, size in self.dims.items()
            if dim not in self.rdims and dim not in expr.symbols
        )

    def moves(self) -> bool:
        """Whether it takes values at a distance: what its loads read is not at their indices alone."""
        return any(isinstance(node, Shifted) for node in self.nodes())

    def reaches(self) -> dict[int, dict[str, int]]:
        """id of an expression -> how far from the nest's points, at most, it is taken, by dimension; {} if at them only."""
        reaches: dict[int, dict[str, int]] = {}
        for node in reversed(self.nodes()) if self.moves() else ():
            here = dict(reaches.get(id(node), {}))
            for dim, distance in node.moves if isinstance(node, Shifted) else ():
                here[dim] = here.get(dim, 0) + distance
            for arg in node.args:
                there = reaches.setdefault(id(arg), {})
                for dim, distance in here.items():
                    there[dim] = max(there.get(dim, 0), distance)
        return reaches

    def extents(self) -> dict[str, int]:
        """dimension -> number of places at which expressions are taken: the nest's points, and those at a distance."""
        far = list(self.reaches().values())
        return {
            dim: size + max((reach.get(dim, 0) for reach in far), default=0)
            for dim, size in self.dims.items()
        }

    def decisions(self) -> str:
        """Text of what a target has decided about the nest; a target's subclass says it."""
        return ""

    def __str__(self) -> str:
        in_order = self.rdims == tuple(dim for dim in self.dims if dim in self.rdims)
        rank = {dim: "*" if in_order else f"*{k}" for k, dim in enumerate(self.rdims)}
        head = ", ".join(f"{dim}<{size}{rank.get(dim, '')}" for dim, size in self.dims.items())
        ordered, by = " ordered" if self.ordered else "", f" by {self.by}" if self.by else ""
        rows = [f"nest [{head}]{ordered}{by}{self.decisions()}"]
        names = name_shared(self.nodes(), rows, "  ")
        rows += [
            f"  acc{k}{typed(reduction.dtype, reduction.args[0].dtype)} {reduction.op}"
            + (f" by {reduction.by.name}= " if reduction.by else "= ")
            + ", ".join(arg.text(names) for arg in reduction.args)
            for k, reduction in enumerate(self.reductions)
        ]
        for store in self.stores:
            tail = ("" if store.inner else "  (after)") + (
                f"  if {store.mask.text(names)}" if store.mask is not None else ""
            )
            target = (
                f"{store.buf.name}[{', '.join(map(str, store.index))}]{'?' if store.guard else ''}"
            )
            rows.append(f"  {target} = {store.value.text(names)}{tail}")
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Let:
    """A scalar evaluated here; its name may stand in index expressions."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class If:
    """Runs branches[clamp(index)]; `index` names an integer Let."""

    index: str
    branches: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class For:
    """for counter in 0 .. trips - 1; `trips` is an int or names a Let."""

    counter: str
    trips: int | str
    body: Block


@dataclass(frozen=True, slots=True)
class While:
    """Runs `condition` (which defines the Let `predicate`), then body and condition again while it is true."""

    condition: Block
    predicate: str
    body: Block


@dataclass(frozen=True, slots=True)
class Sort:
    """Sorts lines of equal length in place, stably, ascending by the first `num_keys` buffers.

    `buffers` are contiguous arrays [lines, length]; `spare` is what sort.scratch asks for. Of each
    line only the `first` elements are read.
    """

    buffers: tuple[Buf, ...]
    spare: tuple[Buf, ...]
    num_keys: int
    first: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Hands contiguous scratch buffers to the process that runs the kernel (lower/rules/debug_callbacks.py)."""

    site: int
    buffers: tuple[Buf, ...]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Asks for the cache lines of `count` elements from `index` on, which will be written.

    It may be outside the buffer.
    """

    buf: Buf
    index: tuple[Affine, ...]
    count: int


@dataclass(frozen=True, slots=True)
class AsyncCopy:
    """Begins copies that the device makes by itself, as one group; each is a nest of one store.

    What they store is there behind the Wait that waits for the group. Until then nobody may touch it,
    and nobody may change what they read.
    """

    body: Block


@dataclass(frozen=True, slots=True)
class AsyncProduct:
    """Begins products that the device makes by itself, as one group; each is a nest that adds to sums in registers.

    The sums are there behind the Wait that waits for the group. Until then only further products may touch them, and nobody
    may store to the tiles that the products read.
    """

    body: Block


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until at most the last `groups` groups of copies, or of products, are under way."""

    groups: int
    products: bool = False


Stmt = Nest | Let | If | For | While | Sort | Trace | Prefetch | AsyncCopy | AsyncProduct | Wait
# Statements that run one after the other, as a statement holds them.
Block = tuple[Stmt, ...]


def bodies(stmt: Stmt) -> tuple[Block, ...]:
    """The blocks inside a statement."""
    match stmt:
        case If(branches=branches):
            return branches
        case For(body=body) | AsyncCopy(body=body) | AsyncProduct(body=body):
            return (body,)
        case While(condition=condition, body=body):
            return (condition, body)
    return ()


def every(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    """All statements, inner ones too."""
    for stmt in stmts:
        yield stmt
        for inner in bodies(stmt):
            yield from every(inner)


def with_bodies(stmt: Stmt, change: Callable[[Block], Sequence[Stmt]]) -> Stmt:
    """The statement with each block inside it changed."""
    match stmt:
        case If():
            return replace(stmt, branches=tuple(tuple(change(block)) for block in stmt.branches))
        case For() | AsyncCopy() | AsyncProduct():
            return replace(stmt, body=tuple(change(stmt.body)))
        case While():
            condition = tuple(change(stmt.condition))
            return replace(stmt, condition=condition, body=tuple(change(stmt.body)))
    return stmt


def with_nests(stmts: Sequence[Stmt], change: Callable[[Nest], Sequence[Stmt]]) -> list[Stmt]:
    """The statements with others in the place of each nest, inner ones too."""
    out: list[Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, Nest):
            out += change(stmt)
        else:
            out.append(with_bodies(stmt, lambda block: with_nests(block, change)))
    return out
