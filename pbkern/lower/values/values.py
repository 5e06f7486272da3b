"""Values of a body while nests are built: what can be pulled at an index, and what needs a nest of its own.

A `Lazy` value is an index map or an elementwise operation: pulling it at an index pulls its
operands and emits no code by itself. A `Contract` value (reduction, contraction, cumulative op) has
an iteration space of its own. A `Stored` value lives in a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TypeVar

import numpy as np

from pbkern.core.affine import Affine
from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.nest.ir import Buf, Expr, Pool

Index = tuple[Affine, ...]
ZERO: Affine = Affine()
# Vector operations per element of a select on index tests: nests are cut at them
# (lower/nest/conditions/index_tests.py), few points pay.
TEST_COST = 0.4


class Value:
    """Base: shape and dtype of an array-valued SSA name of the body."""

    shape: tuple[int, ...]
    dtype: np.dtype
    cost: float = 0.0

    @property
    def ins(self) -> Sequence[Value]:
        return ()


SomeValue = TypeVar("SomeValue", bound=Value)


@dataclass(eq=False)
class Stored(Value):
    """Contents of `buf` at positions `index(ix)`; `guard` if those may be outside it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    buf: Buf
    place: Callable[[Index], Index]
    guard: bool = False

    def at(self, pool: Pool, ix: Index, guard: bool) -> Expr:
        return pool.load(self.dtype, self.buf, self.place(ix), self.guard or guard)


@dataclass(eq=False)
class Literal(Value):
    """One scalar in every position."""

    shape: tuple[int, ...]
    dtype: np.dtype
    scalar: object

    def at(self, pool: Pool, ix: Index, guard: bool) -> Expr:
        return pool.const(self.dtype, np.asarray(self.scalar, self.dtype)[()])


@dataclass(eq=False)
class Lazy(Value):
    """combine(pool, ix, operands pulled at route(ix)).

    guard: routes may leave the operands' bounds; is_view: an index map of one operand; index_only:
    a function of its index and of grid indices, which costs almost nothing because nests are cut
    where such a test changes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    operands: tuple[Value, ...]
    route: Callable[[Index], Sequence[Index]]
    combine: Callable[[Pool, Index, list[Expr]], Expr]
    cost: float = 0.0
    guard: bool = False
    is_view: bool = False
    index_only: bool = False

    @property
    def ins(self) -> Sequence[Value]:
        return self.operands


@dataclass(eq=False)
class Windowed(Lazy):
    """The first operand with the second one in its place at `offsets`: stored over the first operand, only that window is."""

    offsets: Index = ()


@dataclass(eq=False)
class Contract(Value):
    """A reduction with its own space.

    dims: (name, size) of every dimension; rdims: the reduced ones; out: index of the result per
    axis of `shape`; operands at `routes`; `op` as in nest.Reduction. `ordered` (cumulative): the
    result is written at every point.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    dims: tuple[tuple[str, int], ...]
    rdims: tuple[str, ...]
    out: Index
    operands: tuple[Value, ...]
    routes: tuple[Index, ...]
    op: str
    acc_dtype: np.dtype
    ordered: bool = False
    index_arg: Affine | None = None  # argmax / argmin: position along the reduced axis
    at_line: str | None = None

    @property
    def ins(self) -> Sequence[Value]:
        return self.operands


@dataclass(eq=False)
class Opaque(Value):
    """Made by a statement of its own (sort, gather with windows, reinterpretation): `make(builder) -> Stored`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    operands: tuple[Value, ...]
    make: Callable[..., Stored]
    needs_buffers: bool = True  # operands must be Stored contiguously before `make` runs
    takes_target: bool = False  # make(..., target=) may write where the value is wanted
    # there also over its first operand, which it stores before it reads the others
    over_first: bool = False

    @property
    def ins(self) -> Sequence[Value]:
        return self.operands


@dataclass(eq=False)
class Joined(Opaque):
    """A concatenation along `axis`.

    Where it is one of its operands, such as at a constant position, it needs no memory.
    """

    axis: int = 0

    def part(self, ix: Index, extents: Mapping[str, int]) -> tuple[Value, Index] | None:
        """(operand, index of it) where all positions along the axis are in one; symbols have `extents`."""
        at = ix[self.axis]
        if not at.symbols <= extents.keys():
            return None
        low, high = at.bounds(extents.__getitem__)
        start = 0
        for operand in self.operands:
            end = start + operand.shape[self.axis]
            if start <= low and high < end:
                return operand, (*ix[: self.axis], at - start, *ix[self.axis + 1 :])
            start = end
        return None  # in several, or in the halo of a guarded access


@dataclass
class ValueRequests:
    """Who asks for a value: distinct (root, index) pairs, and whether it must be in memory."""

    places: set = field(default_factory=set)
    forced: bool = False


def is_index_only(value: Value) -> bool:
    return isinstance(value, Literal) or (isinstance(value, Lazy) and value.index_only)


def dims_index(dims: Sequence[tuple[str, int]]) -> Index:
    return tuple(Affine.symbol(dim) if size > 1 else ZERO for dim, size in dims)


__all__ = [
    "TEST_COST",
    "ZERO",
    "Contract",
    "Index",
    "Joined",
    "Lazy",
    "Literal",
    "Opaque",
    "SomeValue",
    "Stored",
    "Value",
    "ValueRequests",
    "dims_index",
    "is_index_only",
]
