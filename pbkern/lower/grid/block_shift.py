"""Ragged grids without masks: the last block of a dimension is moved back so that it ends at the array's edge.

Programs near the edge then compute some elements that their neighbour computes too, with the same
result. That is sound only for bodies that are functions of their inputs: whole outputs written
once, nothing read back, accumulated or kept; and what they store at a place must not depend on
where their block starts (position_dependence.py). And both programs must run the same code: what
rounds differently would make results depend on who stores last. So nothing is moved where a program
at the edge needs guards anyway, for an operand's halo, and variants without masks
(lower/passes/mask_versioning.py) are not for tests of moved blocks. Nor where much would be
multiplied twice: the last programs then compute what is inside (edge_variants.py). Every use of the
grid index g must be a multiple of the block: g * block becomes min(g * block, extent - block).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pbkern.core.affine import Affine
from pbkern.core.jaxprs.walks import equations
from pbkern.core.lazy_dataclass import dataclass
from pbkern.dsl.kernel import BlockMapping, Kernel, Squeezed
from pbkern.dsl.primitives.ref_access import Range, is_ref_access, ref_access
from pbkern.lower.nest.ir import Expr, Let, Nest, Pool, Prefetch, Stmt, with_bodies

from .position_dependence import depend_on_places_alone


class CannotShift(Exception):
    """The body uses a grid index otherwise than as a multiple of the block, or depends on where its block starts."""


@dataclass(frozen=True)
class Shift:
    """Start of a block: min(grid index * block, limit)."""

    block: int
    limit: int

    @property
    def divisor(self) -> int:
        """The largest number of which every start is a multiple."""
        return math.gcd(self.block, self.limit)


PREFIX = "%h"
# A part of an extent that bodies with products do not compute twice: their time is that of
# multiplying.
MOST_TWICE = 1 / 16
PRODUCTS = {"dot_general", "conv_general_dilated"}


def symbol(dim: int) -> str:
    return f"{PREFIX}{dim}"


def find(kernel: Kernel) -> dict[int, Shift]:
    """Grid dimensions whose last block can be moved back."""
    if kernel.aliases or not kernel.outputs or not is_function(kernel):
        return {}
    shifts = {axis: _shift(kernel, axis) for axis in range(len(kernel.grid))}
    return {dim: shift for dim, shift in shifts.items() if shift is not None}


def is_function(kernel: Kernel) -> bool:
    """Inputs are read, each output is written whole exactly once and never read; nothing is kept in scratch."""
    if kernel.scratch:
        return False
    refs = kernel.body.jaxpr.invars
    outputs = set(refs[len(kernel.inputs) :])
    used = {var for eqn in kernel.body.jaxpr.eqns for var in eqn.invars if not hasattr(var, "val")}
    written = []
    for eqn in kernel.body.jaxpr.eqns:
        if not is_ref_access(eqn):
            if eqn.primitive.name == "in_bounds" or any(
                var in refs for var in eqn.invars if not hasattr(var, "val")
            ):
                return False
            continue
        acc = ref_access(eqn)
        if acc.ref not in refs:
            return False  # memory of its own
        if acc.kind == "load" and acc.ref not in outputs:
            continue
        whole = all(
            isinstance(index, Range)
            and index.start == 0
            and index.stride == 1
            and index.size == size
            for index, size in zip(acc.indices, _shape(kernel, refs, acc.ref))
        )
        read_back = any(var in used for var in eqn.outvars)
        if (
            acc.kind != "store"
            or not whole
            or acc.mask is not None
            or read_back
            or acc.ref not in outputs
        ):
            return False
        written.append(acc.ref)
    return set(written) == outputs and len(written) == len(outputs)


def _shape(kernel: Kernel, refs, ref) -> tuple[int, ...]:
    return (*kernel.inputs, *kernel.outputs)[refs.index(ref)].ref_shape


def _shift(kernel: Kernel, axis: int) -> Shift | None:
    blocks = set()
    for output in kernel.outputs:
        axes = [
            k
            for k, position in enumerate(output.starts)
            if position is None or axis in position.symbols
        ]
        if (
            len(axes) != 1
            or output.starts[axes[0]] is None
            or isinstance(output.dims[axes[0]], Squeezed)
        ):
            return None
        start, size, extent = (
            output.starts[axes[0]],
            output.dims[axes[0]].size,
            output.array.shape[axes[0]],
        )
        if start != Affine.symbol(axis, size) or extent < size:
            return None
        blocks.add((size, extent))
    if len(blocks) != 1:
        return None
    ((size, extent),) = blocks
    twice = kernel.grid[axis] * size - extent
    if twice <= 0 or (
        twice > extent * MOST_TWICE
        and any(eqn.primitive.name in PRODUCTS for eqn in equations(kernel.body.jaxpr))
    ):
        return None
    starts = [
        position for mapping in (*kernel.inputs, *kernel.outputs) for position in mapping.starts
    ]
    if any(position is None or position.coefficient(axis) % size for position in starts):
        return None
    shift = Shift(size, extent - size)
    return (
        None
        if any(_crosses(operand, axis, shift, kernel.grid) for operand in kernel.inputs)
        else shift
    )


def _crosses(mapping: BlockMapping, axis: int, by: Shift, grid: tuple[int, ...]) -> bool:
    """Whether blocks of an operand reach over its ends along the dimension, wherever the program's own block is moved to."""
    for start, dim, extent in zip(mapping.starts, mapping.dims, mapping.array.shape):
        if start is None:
            return True  # as far as is known
        if axis in start.symbols:
            place = moved(start, {axis: by})
            low, high = place.bounds(
                lambda name: by.limit + 1 if name == symbol(axis) else grid[name]
            )
            if low < 0 or high + dim.size > extent:
                return True
    return False


def moved(affine: Affine, shifts: dict[int, Shift], grid_symbol=lambda dim: dim) -> Affine:
    """`affine` with grid symbols of shifted dimensions replaced by block starts. Raises CannotShift."""
    for dim, shift in shifts.items():
        coefficient = affine.coefficient(grid_symbol(dim))
        if coefficient % shift.block:
            raise CannotShift
        if coefficient:
            affine = (
                affine
                - Affine.symbol(grid_symbol(dim), coefficient)
                + Affine.symbol(symbol(dim), coefficient // shift.block)
            )
    return affine


def apply(stmts: Sequence[Stmt], pool: Pool, shifts: dict[int, Shift]) -> list[Stmt]:
    """Statements with program_id values moved likewise. Raises CannotShift."""
    symbols = {f"%g{shift}" for shift in shifts}

    def affine(position: Affine) -> Affine:
        return moved(position, shifts, lambda dim: f"%g{dim}")

    def expr(value: Expr) -> Expr:
        return (
            pool.rewrite(value, lambda x: pool.with_places(x, affine))
            if value.symbols & symbols
            else value
        )

    def nest(before: Nest) -> Nest:
        stores = [
            store.mapped(expr, index=tuple(map(affine, store.index))) for store in before.stores
        ]
        return Nest(
            before.dims,
            before.rdims,
            tuple(reduction.mapped(expr) for reduction in before.reductions),
            tuple(stores),
            before.ordered,
            before.at,
        )

    def all_of(stmts: Sequence[Stmt]) -> list[Stmt]:
        return [one(with_bodies(stmt, all_of)) for stmt in stmts]

    def one(stmt: Stmt) -> Stmt:
        match stmt:
            case Nest():
                return nest(stmt)
            case Let(name=n, value=v):
                return Let(n, expr(v))
            case Prefetch(buf=b, index=i, count=n):
                return Prefetch(b, tuple(map(affine, i)), n)
        return stmt

    out = all_of(stmts)
    if not all(depend_on_places_alone(out, symbol(shift)) for shift in shifts):
        raise CannotShift
    return out
