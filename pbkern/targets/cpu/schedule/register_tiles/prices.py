"""Cycles of tiles of products."""

from __future__ import annotations

import math

from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, Gather, Load, Nest, nodes
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule

from .steps import vectors_along

# Multiply-adds that are under way at once; two begin in a cycle. Source: not recorded.
PRODUCTS_UNDER_WAY = 8
# Cycles that a step of a loop costs beside its multiply-adds. Source: not recorded.
STEP_CYCLES = 0.35
# Cycles of adding up a vector's lanes by itself. Source: not recorded.
LANE_SUM_CYCLES = 10
# Cycles of adding up a vector's lanes together with those of other rows. Source: not recorded.
JOINT_LANE_SUM_CYCLES = 3
# Additions of products to one accumulator in a row, where accumulators are few
# (targets/cpu/emit/reductions/accumulators.py).
LONGEST_CHAIN_OF_FEW_PRODUCTS = 256


def is_product(nest: Nest) -> bool:
    """Whether the nest is one sum of products."""
    return (
        len(nest.reductions) == 1
        and nest.reductions[0].is_plain_product
        and bool(nest.rdims)
        and not nest.ordered
    )


def product_cycles(nest: Nest, sched: NestSchedule, packed: Expr | None = None) -> float:
    """Cycles of a sum of products, by the model of its tiles: multiply-adds and loads, and what becomes of the sums.

    `packed`: an operand whose vectors are contiguous, copied or not.
    """
    if sched.vector is None:
        return math.prod(nest.dims.values())
    operands, lanes = nest.reductions[0].args, sched.lanes

    def loads(expr: Expr, tile: dict[str, int], vectors: int) -> int:
        points = math.prod(size for dim, size in tile.items() if dim in expr.symbols)
        if sched.vector not in expr.symbols:
            return points
        return points * vectors * (1 if expr is packed else _accesses(expr, sched))

    def step(tile: dict[str, int], vectors: int) -> float:
        products = math.prod(tile.values()) * vectors
        return (
            max(
                products,
                sum(loads(operand, tile, vectors) for operand in operands),
                PRODUCTS_UNDER_WAY if products < PRODUCTS_UNDER_WAY else 0,
            )
            / 2
            + STEP_CYCLES
        )

    def tiled(jam: list[tuple[str, int]], tile: dict[str, int]) -> float:
        if not jam:
            return tiled_cycles(
                vectors_along(nest, sched), sched.unroll, lambda width: step(tile, width)
            )
        (jam_dim, count), *rest = jam
        return tiled_cycles(
            nest.dims[jam_dim], count, lambda rows: tiled(rest, tile | {jam_dim: rows})
        )

    looped = math.prod(
        size for dim, size in nest.dims.items() if dim != sched.vector and dim not in sched.jam
    )
    sums = math.prod(size for dim, size in nest.dims.items() if dim not in nest.rdims)
    if sched.vector in nest.rdims:
        return looped * tiled([*sched.jam.items()], {}) + sums * (
            JOINT_LANE_SUM_CYCLES if sched.batched_rows else LANE_SUM_CYCLES
        )
    stores = max(
        (
            1 if flat_coefficient(store.buf, store.index, sched.vector) == 1 else lanes
            for store in nest.stores
        ),
        default=1,
    )
    vectors = sums // nest.dims[sched.vector] * vectors_along(nest, sched)
    return looped * tiled([*sched.jam.items()], {}) + vectors * stores


def _accesses(expr: Expr, sched: NestSchedule) -> int:
    """Loads that make one vector of an operand: one, if its elements are neighbours, else one for each and one to add it."""
    inside = [
        node
        for node in nodes([expr])
        if isinstance(node, Load | Gather) and sched.vector in node.symbols
    ]
    if sched.transpose:
        return 2 + sched.lanes.bit_length()
    neighbours = (flat_coefficient(x.buf, x.index, sched.along) == 1 for x in inside)
    return max((1 if near else 2 * sched.lanes for near in neighbours), default=1)


def tiled_cycles(size: int, tile: int, cost) -> float:
    full, rest = divmod(size, tile)
    return full * cost(tile) + (cost(rest) if rest else 0.0)


def step_cycles(rows: int, vectors: int, is_near: bool = True) -> float:
    """Cycles of one reduction step of a tile: two FMAs and two loads per cycle, plus loop overhead; FMA latency 4.

    `is_near`: whether the rows that are broadcast stay in the first cache. Loads of those that evict one another go to
    the second one.
    """
    products, loads = rows * vectors, rows if is_near else 2 * rows
    return (
        max(products, loads + vectors, PRODUCTS_UNDER_WAY if products < PRODUCTS_UNDER_WAY else 0)
        / 2
        + STEP_CYCLES
    )
