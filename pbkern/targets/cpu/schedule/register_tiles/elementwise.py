"""Tiles of nests without reductions: vectors in a step, rows of stencils, points of long chains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pbkern.lower.mlir.element_types import BITS, compute_el, storage_el
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Gather, Load, Nest, Op, Shifted
from pbkern.targets.cpu.math.op_cycles import COST
from pbkern.targets.cpu.schedule.interleaved_access import joint_stores
from pbkern.targets.cpu.schedule.nest_schedule import NestSchedule
from pbkern.targets.cpu.schedule.register_transpose import transposed_dim
from pbkern.targets.cpu.schedule.vector_dimension import WIDEST_VECTOR_BITS, register_bits

from .steps import in_squares, vectors_along

# Points in a step of chains whose operations wait for one another. Measured on Zen 4, ten steps of Newton's method: 0.85
# ms with 4 points, 0.70 with 8; of an iterated polynomial 0.57 and 0.53.
SERIAL_POINTS = 8
# Operations above one another from which a point is such a chain: points of shorter ones are under way together anyway.
SERIAL_HEIGHT = 32
# Most vector operations of such a chain for each of its height. Source: not recorded.
SERIAL_WORK = 3.0
# Vector operations of a point beyond which two points, and beyond twice as many one, are enough in
# a step.
LONG_CHAIN_OPERATIONS = 150.0
# Registers from which one vector in a step is enough, where a point has functions of SINES alone that branch. LLVM schedules
# up to a branch, so that points follow one another, however many a step has; with few registers, each reads constants
# again. Measured on one thread of Zen 4, 256 x 512 points, with one vector and with four in a step: sine 50 and 50 us, sine
# times cosine 55 and 56, Box-Muller 82 and 84, tangent 104 and 104; as x86-64-v3 63 and 61, 90 and 91, 208 and 193, 153 and
# 152. The first call takes 0.5 to 0.8 times as long.
ONE_IS_ENOUGH = 32
# Operations of such a point from which two vectors in a step are enough, with fewer registers. Source: not recorded.
FEW_OPS = 12
# Operations of such a point from which one vector in a step is enough. Source: not recorded.
MANY_OPS = 40
SINES = frozenset(("sin", "cos", "tan"))
# Remainders of 32-bit integers take 1.15 times as long with one vector in a step as with four, of 8-bit ones 1.35 (Zen 4).
BRANCHING = SINES | {"rem"}
# Steps of a row from which a longer last vector, of which more is masked out, is worth fewer instructions. Not measured.
LONG_ROW_STEPS = 2
# Rows of results that share what they load and convert: outer products. 1000 x 1001 float16 on one thread of Zen 4: 72 us row
# by row, 56 with 4 rows, 52 with 8; bfloat16 124 and 103 with 8.
SHARED_ROWS = 8
# Bytes of the largest results whose rows do so. 8 MB 276 -> 195 us, 40 MB, which go past the caches, 1.9 -> 2.4 ms (Zen 4).
SHARED_ROWS_BYTES = 12 << 20
# Vector operations of a point that are few beside its conversions: with AVX-512 two vectors of float16 results are joined for
# one store where there are more. One thread of Zen 4, 1,001,000 elements: clip(x) * 3 takes 90 us apart, 100 joined; an outer
# product 72 and 77; log1p(x * x) 410 and 352.
LITTLE_WORK = 8.0
# Rows of a stencil that a step takes; twice as many where it computes many more than it keeps.
STENCIL_ROWS = 4


def elementwise_tile(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """Several vectors per step, or several rows where loads overlap, are transposed, or are stored together."""
    _, joint = joint_stores(nest, sched.along)
    if joint:
        return replace(sched, jam=joint)
    transposed = transposed_dim(nest, sched.along)
    if transposed is not None:
        sched = in_squares(sched, *transposed)
        return replace(sched, jam={transposed[0]: sched.lanes})
    dim = _stencil_dim(nest, sched.along)
    if dim is not None:
        rows = STENCIL_ROWS if _halo(nest, dim) <= STENCIL_ROWS // 2 else 2 * STENCIL_ROWS
        return replace(sched, jam={dim: min(rows, nest.dims[dim])})
    points = min(_points_in_turn(nest, sched.registers), vectors_along(nest, sched))
    shared = _dimension_of_shared_rows(nest, sched.along)
    if shared is not None:
        return replace(sched, jam={shared: SHARED_ROWS}, unroll=points)
    is_long = vectors_along(nest, sched) >= LONG_ROW_STEPS * points
    if (
        points > 1
        and is_long
        and not _splits_halves(nest, sched)
        and _stores_narrow(nest, sched.along)
    ):
        return replace(sched, lanes=2 * sched.lanes, unroll=points // 2)
    return replace(sched, unroll=points)


def _dimension_of_shared_rows(nest: Nest, vector: str) -> str | None:
    """A dimension whose points load the same elements along the vectors, which are converted to a wider type.

    Those of several points are converted once.
    """
    loads = [load for load in nest.loads() if vector in load.symbols]
    if (
        not loads
        or _work(nest) > LITTLE_WORK
        or any(
            isinstance(load, Gather)
            or BITS[storage_el(load.buf.dtype)] >= BITS[compute_el(load.buf.dtype)]
            for load in loads
        )
    ):
        return None
    stored = {store.buf.root for store in nest.stores}
    if any(buf.size * buf.dtype.itemsize > SHARED_ROWS_BYTES for buf in stored):
        return None
    return next(
        (
            dim
            for dim, size in reversed([*nest.dims.items()])
            if dim != vector
            and size >= SHARED_ROWS
            and not any(dim in load.symbols for load in loads)
            and all(flat_coefficient(store.buf, store.index, dim) for store in nest.stores)
        ),
        None,
    )


def _splits_halves(nest: Nest, sched: NestSchedule) -> bool:
    """Whether float16 results of little work are better stored by each vector, half as wide as the widest, than by two."""
    is_widest = sched.lanes * register_bits(nest, sched.along) == WIDEST_VECTOR_BITS
    return (
        is_widest
        and _work(nest) <= LITTLE_WORK
        and all(store.buf.dtype == np.float16 for store in nest.stores)
    )


def _stores_narrow(nest: Nest, vector: str) -> bool:
    """Whether two vectors of what is computed end in one of results, which are narrower, and loads are of whole vectors.

    Two registers are narrowed to one and stored together by fewer instructions than each by itself. Measured on Zen 4 with
    AVX2: exp of 2,000,000 bfloat16 1.23 ms, so 1.02; (3 x + y) / 4 of bytes in 16 bits 0.163 and 0.142 ms.
    """
    stored = max(BITS[storage_el(store.buf.dtype)] for store in nest.stores)
    if 2 * stored > register_bits(nest, vector):
        return False
    steps = [flat_coefficient(store.buf, store.index, vector) for store in nest.stores]
    for node in nest.nodes():
        if isinstance(node, Shifted) or any(
            isinstance(node, Gather) and vector in arg.symbols for arg in node.args
        ):
            return False
        if isinstance(node, Load | Gather):
            steps.append(flat_coefficient(node.buf, node.index, vector))
    return all(step in (0, 1) for step in steps)


def _points_in_turn(nest: Nest, registers: int) -> int:
    """Vectors per step, on a processor with so many registers.

    Several are under way together, if their operations are interleaved
    (targets/cpu/emit/interleave_chains.py).
    """
    ops = _primitives(nest)
    if BRANCHING.intersection(ops):
        if registers >= ONE_IS_ENOUGH and branches_at_sines(nest):
            return 1
        return 4 if len(ops) < FEW_OPS else 2 if len(ops) < MANY_OPS else 1
    if is_serial(nest):
        return SERIAL_POINTS
    work = _work(nest)
    return 4 if work < LONG_CHAIN_OPERATIONS else 2 if work < 2 * LONG_CHAIN_OPERATIONS else 1


def branches_at_sines(nest: Nest) -> bool:
    """Whether points branch, and at functions of SINES alone."""
    branching = BRANCHING.intersection(_primitives(nest))
    return bool(branching) and SINES.issuperset(branching)


def _primitives(nest: Nest) -> list[str]:
    return [node.info.primitive for node in nest.nodes() if isinstance(node, Op)]


def _work(nest: Nest) -> float:
    """Vector operations of a point."""
    return sum(COST[primitive] for primitive in _primitives(nest))


def is_serial(nest: Nest) -> bool:
    """Whether points are long chains of operations that wait for one another."""
    ops = _primitives(nest)
    height = max((store.value.height for store in nest.stores), default=0)
    return (
        height >= SERIAL_HEIGHT
        and not nest.rdims
        and not BRANCHING.intersection(ops)
        and _work(nest) <= SERIAL_WORK * height
    )


def _halo(nest: Nest, dim: str) -> int:
    """Counts the points that are computed besides, for values that are taken at a distance."""
    return max(
        (
            distance
            for node in nest.nodes()
            if isinstance(node, Shifted)
            for moved_dim, distance in node.moves
            if moved_dim == dim
        ),
        default=0,
    )


def _stencil_dim(nest: Nest, vector: str) -> str | None:
    """A dimension along which several loads of one buffer overlap at different offsets."""
    offsets: dict = {}
    for node in nest.loads():
        if isinstance(node, Load):
            flat = tuple(i.linear() for i in node.index)
            offsets.setdefault((id(node.buf), flat), set()).add(tuple(i.const for i in node.index))
    best: str | None = None
    for shifted in nest.nodes():
        if isinstance(shifted, Shifted):
            for moved_dim, distance in shifted.moves:
                best = moved_dim if moved_dim != vector and distance else best
    for (_, flat), seen in offsets.items():
        if len(seen) < 3:
            continue
        for axis, linear in enumerate(flat):
            if len({offset[axis] for offset in seen}) > 1:
                for dim, size in nest.dims.items():
                    if (
                        dim != vector
                        and linear.coefficient(dim)
                        and size > 1
                        and dim not in nest.rdims
                    ):
                        best = dim
    return best
