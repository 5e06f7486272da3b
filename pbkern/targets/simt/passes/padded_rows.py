"""Scratch whose rows, and products whose depth, no tile fits -> the same with more points, which hold and add zeros.

nest [i<64, j<40, k<64*]                       nest [i<64, j<64, k<64*]
  acc0 dot= q[i, k], keys[j, k]                  acc0 dot= q[i, k], keys[j, k]?
  s[i, j] = acc0  (after)             ->         s[i, j] = select(j < 40, acc0, 0)  (after)
nest [i<64, j<40*]                             nest [i<64, j<64*]
  acc0 max= s[i, j]                              acc0 max= select(j < 40, s[i, j], -inf)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pbkern.core.affine import Affine
from pbkern.lower.nest import effects
from pbkern.lower.nest.edit.relocate import relocated
from pbkern.lower.nest.ir import (
    BOOL,
    Buf,
    Expr,
    Load,
    Nest,
    Reduction,
    Stmt,
    Store,
    bodies,
    every,
    with_nests,
)
from pbkern.lower.nest.reductions import REDUCTIONS

from .products import Context, matrix_product, power_of_two


def whole_rows(stmts: Sequence[Stmt], context: Context) -> list[Stmt]:
    """The statements with rows of scratch between products, and sums of products, as long as whole instructions of a tile."""
    leaves = [stmt for stmt in every(stmts) if not bodies(stmt)]
    nests = [stmt for stmt in leaves if isinstance(stmt, Nest)]
    depths = {id(nest): depth for nest in nests if (depth := _depth(nest, context))}
    units = {unit for _, unit in depths.values()}
    if len(units) != 1:
        return list(stmts)
    (unit,) = units
    elsewhere = effects.touched([stmt for stmt in leaves if not isinstance(stmt, Nest)])
    lasting = context.persistent - context.fresh
    longer: dict[Buf, Buf] = {}
    for buf in {store.buf for nest in nests for store in nest.stores}:
        size = buf.shape[-1] if buf.shape else 1
        length = power_of_two(size, unit)
        is_own = buf.arena and buf.storage is None and buf not in elsewhere | lasting
        rows = [nest for nest in nests if buf in effects.touched([nest])]
        if is_own and 1 < size < length and all(_row(nest, buf) for nest in rows):
            longer[buf] = dataclasses.replace(buf, shape=(*buf.shape[:-1], length))

    def changed(nest: Nest) -> list[Nest]:
        rows = {
            _row(nest, buf): longer[buf].shape[-1]
            for buf in effects.touched([nest])
            if buf in longer
        }
        if id(nest) in depths:
            dim, _ = depths[id(nest)]
            length = power_of_two(nest.dims[dim], unit)
            rows |= {dim: length} if nest.dims[dim] < length else {}
        return [_grown(nest, rows, longer, context)] if rows else [nest]

    return with_nests(stmts, changed)


def _depth(nest: Nest, context: Context) -> tuple[str, int] | None:
    """(the dimension that a product of one tile sums over, how much of it an instruction takes); None of other nests."""
    product = matrix_product(nest, context)
    if product is None or not product.is_one_tile or nest.rdims != (product.depth,):
        return None
    return product.depth, product.instruction.shape[-1]


def _row(nest: Nest, buf: Buf) -> str:
    """The dimension along which a nest goes over the rows of scratch, all of each; "" if it does something else."""
    accesses = [load for load in nest.loads() if load.buf.root is buf]
    places = {access.index[-1] for access in (*accesses, *nest.stores) if access.buf.root is buf}
    dims = {dim for dim, size in nest.dims.items() if size == buf.shape[-1]}
    ways = {dim for dim in dims if places == {Affine.symbol(dim)}}
    is_plain = all(isinstance(load, Load) and not load.guard for load in accesses)
    if not is_plain or nest.ordered or nest.moves() or not nest.dims:
        return ""
    return min(ways, default="")


def _grown(
    nest: Nest, rows: Mapping[str, int], longer: Mapping[Buf, Buf], context: Context
) -> Nest:
    """The nest over longer rows: what it stores to them behind their ends is zero, what it adds there changes nothing."""
    tests = {dim: context.pool.in_range(Affine.symbol(dim), 0, nest.dims[dim]) for dim in rows}

    def inside(expr: Expr, other: float, dims: Sequence[str]) -> Expr:
        for dim in dims:
            expr = context.select(tests[dim], expr, context.const(other, expr.dtype))
        return expr

    reduced = [dim for dim in rows if dim in nest.rdims]
    free = [dim for dim in rows if dim not in nest.rdims]

    def term(reduction: Reduction) -> Reduction:
        def masked(arg: Expr) -> Expr:
            is_zero = reduction.is_product and isinstance(arg, Load) and arg.buf in longer
            # Of the type that is compared: a search for places has another one.
            nothing = REDUCTIONS[reduction.op].identity(arg.dtype)
            return arg if is_zero else inside(arg, nothing, reduced)

        return reduction.mapped(masked)

    def stored(store: Store) -> Store:
        dims = [dim for dim in rows if store.inner or dim in free]
        if store.buf in longer:
            return dataclasses.replace(store, value=inside(store.value, 0, dims))
        mask = store.mask
        for dim in dims:
            mask = tests[dim] if mask is None else context.op("and", BOOL, mask, tests[dim])
        return dataclasses.replace(store, mask=mask, guard=store.guard or bool(dims))

    def outside(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.buf in longer or rows.keys().isdisjoint(node.symbols):
            return None
        return context.pool.load(node.dtype, *node.access, True)

    guarded = nest.mapped(context.pool.rewriter(outside))
    larger = dataclasses.replace(
        guarded,
        dims={**nest.dims, **rows},
        reductions=tuple(map(term, guarded.reductions)),
        stores=tuple(map(stored, guarded.stores)),
    )
    (moved,) = relocated([larger], longer.get, context.pool)
    return moved
