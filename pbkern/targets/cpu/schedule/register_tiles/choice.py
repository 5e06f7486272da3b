"""Nest -> its schedule: the vector dimension, then the tile that suits it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pbkern.lower.nest.ir import Expr, Gather, Nest, Op
from pbkern.targets.cpu.machines.machine import WIDE_VECTORS, Vectors
from pbkern.targets.cpu.schedule.interleaved_access import joint_stores
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule, overwritten_by
from pbkern.targets.cpu.schedule.register_transpose import transposed_dim
from pbkern.targets.cpu.schedule.vector_dimension import register_bits, score

from .along_reductions import batched, reduction_tile
from .along_results import result_tile
from .elementwise import elementwise_tile, is_serial
from .prices import is_product, product_cycles
from .steps import in_squares, untiled

# Nodes of straight-line code per loop body: beyond this, compile time and instruction cache lose
# more than jamming gains.
MAX_POINT_NODES = 420
# An epilogue runs once per register tile: a narrower tile would cost the whole reduction more.
MAX_TILE_NODES = 1200
# Nodes of straight-line code per loop body of such chains.
MAX_SERIAL_NODES = 900
# Elements in a row at a computed place from which on rows are copied by vectors. Measured on Zen 4, one thread, pixels of
# 3, 8, 16 and 31 float32 channels that jax.image.resize picks: 0.49, 1.02, 0.19 and 1.34 ms by vectors with a mask for what
# is left, 0.29, 0.97, 0.18 and 1.14 element by element, of which LLVM makes vectors without masks.
FEWEST_GATHERED = 32
# Halves in such a row from which on vectors copy them, where they fill one.
FEWEST_HALVES = 4
# Lanes of the shortest vectors that instructions for products of words take.
FEWEST_WORDS = 4


def smallest_tile(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """The schedule with one vector per step; the same where its tile is of that size, or where others rely on it."""
    if (
        overwritten_by(nest)
        or sched.fixed
        or sched.transpose
        or sched.batched_rows
        or sched.tile == 1
    ):
        return sched
    return replace(sched, unroll=1, jam={}, cut_as=sched.tile)


def choose(nest: Nest, vectors: Vectors = WIDE_VECTORS, reassociate: bool = True) -> NestSchedule:
    """The schedule of one nest, which remembers it.

    Without `reassociate`, sums of floats are added up in the order of their elements.
    """
    question = "schedule", vectors, reassociate
    if question not in nest.answers:
        nest.answers[question] = _chosen(nest, vectors, reassociate)
    return nest.answers[question]


def _chosen(nest: Nest, vectors: Vectors, reassociate: bool) -> NestSchedule:
    live = [dim for dim, size in nest.dims.items() if size > 1]
    scores = {dim: score(nest, dim, reassociate, vectors.registers) for dim in live}
    best = max(live, key=lambda dim: (scores[dim], list(nest.dims).index(dim)), default=None)
    if best is None or scores[best] <= 0 or nest.dims[best] < 2 or _gathers_few(nest, best):
        return NestSchedule(order=tuple(nest.dims))
    schedule = along(nest, best, vectors)
    if not is_product(nest) or best not in nest.rdims:
        return schedule
    # Both operands may be contiguous along a short reduced dimension: few lanes, which are then
    # added to one another.
    alternatives = [
        along(nest, dim, vectors) for dim in live if scores[dim] > 0 and dim not in nest.rdims
    ]
    return min([schedule, *alternatives], key=lambda sched: product_cycles(nest, sched))


def _gathers_few(nest: Nest, vector: str) -> bool:
    """Whether a nest copies rows of few elements from computed places, of a type and number of which LLVM makes vectors.

    It makes none of float16, which fill vectors where their number is a power of two. Measured on Zen 3, pixels of 2, 4, 8 and
    16 channels: 0.120, 0.158, 0.256 and 0.467 ms element by element, 0.151, 0.152, 0.156 and 0.213 by vectors.
    """
    size = nest.dims[vector]
    fills = size >= FEWEST_HALVES and size & (size - 1) == 0
    is_half = all(store.buf.dtype == np.float16 for store in nest.stores)
    return (
        size < FEWEST_GATHERED
        and not nest.reductions
        and not (is_half and fills)
        and all(isinstance(_unconverted(store.value), Gather) for store in nest.stores)
    )


def _unconverted(expr: Expr) -> Expr:
    while isinstance(expr, Op) and expr.info.primitive == "convert_element_type":
        (expr,) = expr.args
    return expr


def along(nest: Nest, vector: str, vectors: Vectors) -> NestSchedule:
    """The schedule with vectors along one dimension."""
    full = max(vectors.bits // register_bits(nest, vector), 2)
    lanes = min(full, 1 << (nest.dims[vector] - 1).bit_length())
    sched = untiled(nest, vector, lanes, vectors)
    transposed = transposed_dim(nest, vector) if nest.rdims else None
    if transposed is not None:
        sched = in_squares(sched, *transposed)
    elif nest.reductions and vector in nest.rdims:
        sched = batched(nest, reduction_tile(nest, sched), full)
    elif nest.reductions and nest.rdims:
        sched = result_tile(nest, sched, vectors, math.prod(nest.dims.values()))
    else:
        sched = elementwise_tile(nest, sched)
    return _capped(nest, sched)


def contraction_tile(
    nest: Nest,
    vector: str,
    vectors: Vectors,
    fills: bool = False,
    whole: Nest | None = None,
    has_far_rows: bool = True,
) -> tuple[int, NestSchedule]:
    """(columns per register tile, fixed schedule) of a contraction with vectors along `vector`.

    Args:
      nest: the contraction, or the part of it that one panel has.
      vector: a dimension of its results.
      vectors: registers of the machine.
      fills: whether the first tile of rows reads the operand along the vectors where it is, which is far, and packs it.
      whole: the contraction of which the nest is a part.
      has_far_rows: whether rows of the operand that is broadcast come from where its array is.
    """
    full = max(vectors.bits // register_bits(nest), 2)
    fewest = FEWEST_WORDS if any(reduction.by is not None for reduction in nest.reductions) else 1
    lanes = min(full, max(1 << (nest.dims[vector] - 1).bit_length(), fewest))
    sched = untiled(nest, vector, lanes, vectors)
    products = math.prod((whole or nest).dims.values())
    sched = _capped(nest, result_tile(nest, sched, vectors, products, fills, has_far_rows))
    return sched.lanes * sched.unroll, replace(sched, fixed=True)


def _capped(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """A smaller tile where the code of a step would be too long."""
    if sched.transpose is not None or joint_stores(nest, sched.along)[1]:
        return sched
    nodes = max(len(nest.nodes()), 1)
    limit = (
        MAX_TILE_NODES
        if any(reduction.is_product for reduction in nest.reductions)
        else MAX_SERIAL_NODES
        if is_serial(nest)
        else MAX_POINT_NODES
    )
    while math.prod(sched.jam.values()) * sched.unroll * nodes > limit:
        if sched.unroll > 1:
            sched = replace(sched, unroll=sched.unroll // 2)
        elif any(count > 1 for count in sched.jam.values()):
            jam = {dim: max(count // 2, 1) for dim, count in sched.jam.items()}
            sched = replace(sched, jam=jam)
        else:
            break
    return sched
