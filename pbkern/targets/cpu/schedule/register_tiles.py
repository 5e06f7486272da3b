"""Nest -> how to walk it: vector dimension, lanes, unrolling and the register tile.

These are choices only; targets/cpu/emit/nests.py writes code.

The register tile of a contraction is found by a small search over (rows jammed, vectors unrolled)
with the cost of one reduction step: FMA throughput, load throughput, and what tails waste.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pbkern.core.machine import LINE_BYTES
from pbkern.lower.mlir.element_types import BITS, storage_el
from pbkern.lower.nest.addresses import flat_coefficient
from pbkern.lower.nest.ir import Expr, Gather, Load, Nest, Op, Shifted, nodes
from pbkern.lower.nest.reductions import per_accumulator
from pbkern.targets.costs.caches import fit
from pbkern.targets.cpu.machines.machine import WIDE_VECTORS, Vectors
from pbkern.targets.cpu.math.op_cycles import COST

from .cache_conflicts import rows_apart, stored_rows_apart
from .interleaved_access import joint_stores
from .nest_schedule import OPERAND_REGISTERS, NestSchedule, overwritten_by
from .prefetch import is_far
from .register_transpose import transposed_dim
from .short_rows import batched_rows
from .vector_dimension import is_long_point, register_bits, score

# Nodes of straight-line code per loop body: beyond this, compile time and instruction cache lose
# more than jamming gains.
MAX_POINT_NODES = 420
# An epilogue runs once per register tile: a narrower tile would cost the whole reduction more.
MAX_TILE_NODES = 1200
# Vectors that a sum over rows keeps, if it shares no operand. Of rows of 1 KB, parts of 512 B each
# were read 2.5 times as slowly from memory as whole ones.
MAX_COLUMN_VECTORS = 16
# Rows of the longest sum over rows that keeps FEW_COLUMN_VECTORS. Source: not recorded.
FEW_ROWS = 16
# Most vectors that a sum over few rows keeps: other operands in memory need registers as well, and
# rows are read side by side.
FEW_COLUMN_VECTORS = 8
# Points in a step of chains whose operations wait for one another. Measured on Zen 4, ten steps of Newton's method: 0.85
# ms with 4 points, 0.70 with 8; of an iterated polynomial 0.57 and 0.53.
SERIAL_POINTS = 8
# Operations above one another from which a point is such a chain: points of shorter ones are under way together anyway.
SERIAL_HEIGHT = 32
# Most vector operations of such a chain for each of its height. Source: not recorded.
SERIAL_WORK = 3.0
# Nodes of straight-line code per loop body of such chains.
MAX_SERIAL_NODES = 900
# Vector operations of a point beyond which two points, and beyond twice as many one, are enough in
# a step.
LONG_CHAIN_OPERATIONS = 150.0
# Operations of a point with functions that branch where an element is rare, from which two vectors
# in a step are enough. Source: not recorded.
FEW_OPS = 12
# Operations of such a point from which one vector in a step is enough. Source: not recorded.
MANY_OPS = 40
BRANCHING = frozenset(("sin", "cos", "tan", "rem"))
# Lanes of the shortest vectors that instructions for products of words take.
FEWEST_WORDS = 4
# Points along one side of a tile whose vectors run along the reduction, at most.
MOST_TILE_SIDE = 6
# Steps of a reduction whose wait for one another shows: of fewer, the processor's window holds
# those of several results.
LONG_WAIT = 64
# Multiply-adds that are under way at once; two begin in a cycle. Source: not recorded.
PRODUCTS_UNDER_WAY = 8
# Cycles that a reduction step waits for an element of a far row. Measured on Zen 4, 64 x 256 by 8000 x 256: 3.0 ms with
# tiles of 6 rows and 64 columns, 4.2 with 14 rows and 32 columns, which read the 8000 rows twice. Without this price, calls in
# turn: a @ b.T of 64 x 256 x 8000 3.0 -> 4.3 ms, of 32000 x 512 x 64 20.4 -> 22.4, a.T @ b of 4096 x 4096 x 64 25 -> 35; with
# 0.03 as with 0.1.
FAR_ROW_CYCLES = 0.1
# Cycles until a run of neighbouring lines of a far operand begins to come that the first tile of rows multiplies. Measured
# on Zen 4, one thread, float32, beside products of packed panels: 64 x 512 by 512 x 32768, from memory, with tiles of 22 x 1,
# 14 x 2, 8 x 3 and 6 x 4 vectors 25.8, 23.6, 22.6 and 22.4 ms, which is 26 and 7 for each line; of 512 x 4096, from the last
# cache, 13 and 3.5. This is between.
FAR_RUN_CYCLES = 20.0
# Cycles of each line of such a run, measured the same way; multiply-adds hide half a cycle per row.
FAR_LINE_CYCLES = 5.0
# Bytes of a cycle that tiles of rows get of vectors which the first cache does not hold. Measured on Zen 4 with AVX2, 9000 x
# 300 by 300 x 64: with tiles of 2 x 4 vectors, which take 32 bytes for each cycle of multiply-adds, 0.82 of the rate of XLA's
# code, with 4 x 3, which take 16, 0.89.
VECTOR_STREAM_BYTES = 20
# Cycles of a store whose line leaves the first cache for those of the tile's other rows. Measured on Zen 4, float32 results
# of 2,048 columns: 10 more cycles than with 2,080.
EVICTED_STORE_CYCLES = 10
# Cycles that a step of a loop costs beside its multiply-adds. Source: not recorded.
STEP_CYCLES = 0.35
# Cycles of adding up a vector's lanes by itself. Source: not recorded.
LANE_SUM_CYCLES = 10
# Cycles of adding up a vector's lanes together with those of other rows. Source: not recorded.
JOINT_LANE_SUM_CYCLES = 3
# Accumulators of the fewest rows that are added up in turns: fewer wait for one another.
FEWEST_ROWS = 4
# Vectors of a row that several rows at a time are added up of, at most.
FEW_VECTORS = 8
# Additions of products to one accumulator in a row, where accumulators are few
# (targets/cpu/emit/reductions/accumulators.py).
LONGEST_CHAIN_OF_FEW_PRODUCTS = 256
# The part of the time of a tile of one dimension's points at which another dimension's join it.
CLEARLY_LESS = 0.9
# Estimate of a tile relative to the least one, up to which the tile with the least code is taken in short products. Those of
# 64 to 1024 rows take the same time with 8 x 2 and with 11 x 2 vectors (Zen 4).
AS_QUICK = 1.03
# Multiply-adds of the smallest tile that is taken for its little code: those of smaller ones wait for one another where two
# begin in a cycle. Source: not recorded.
FEWEST_PRODUCTS = 12
# Steps of a row from which a longer last vector, of which more is masked out, is worth fewer instructions. Not measured.
LONG_ROW_STEPS = 2
# Tiles along the vectors from which the last one's partial vector counts no registers. Measured on Zen 4 with 16 registers:
# 131 x 77 x 1001 takes 0.243 ms with 3 x 3 vectors, which leave registers for it, 0.213 with 6 x 2, of which it needs more.
MANY_TILES = 16
# Registers of processors for which that was measured.
FEW_REGISTERS = 16
# Multiply-adds of a nest up to which its code costs more than its time.
SHORT_PRODUCT = 2**22


# Rows of a stencil that a step takes; twice as many where it computes many more than it keeps.
STENCIL_ROWS = 4


def column_vectors(registers: int) -> int:
    """Vectors that a sum over rows keeps, if it shares no operand."""
    return min(MAX_COLUMN_VECTORS, registers - OPERAND_REGISTERS)


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
    """The schedule of one nest.

    Without `reassociate`, sums of floats are added up in the order of their elements.
    """
    live = [dim for dim, size in nest.dims.items() if size > 1]
    scores = {dim: score(nest, dim, reassociate) for dim in live}
    best = max(live, key=lambda dim: (scores[dim], list(nest.dims).index(dim)), default=None)
    if best is None or scores[best] <= 0 or nest.dims[best] < 2:
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


def along(nest: Nest, vector: str, vectors: Vectors) -> NestSchedule:
    """The schedule with vectors along one dimension."""
    full = max(vectors.bits // register_bits(nest, vector), 2)
    lanes = min(full, 1 << (nest.dims[vector] - 1).bit_length())
    sched = _untiled(nest, vector, lanes, vectors)
    transposed = transposed_dim(nest, vector) if nest.rdims else None
    if transposed is not None:
        sched = _transposed(sched, *transposed)
    elif nest.reductions and vector in nest.rdims:
        sched = _batch_rows(nest, _tile_horizontal(nest, sched), full)
    elif nest.reductions and nest.rdims:
        sched = _tile_register(nest, sched, vectors, math.prod(nest.dims.values()))
    else:
        sched = _tile_elementwise(nest, sched)
    return _capped(nest, sched)


def _untiled(nest: Nest, vector: str, lanes: int, vectors: Vectors) -> NestSchedule:
    """One vector of a dimension per step."""
    order = tuple(dim for dim in nest.dims if dim != vector)
    return NestSchedule(lanes=lanes, vector=vector, order=order, registers=vectors.registers)


def _transposed(sched: NestSchedule, dim: str, step: int) -> NestSchedule:
    """Loads are contiguous along `dim`; squares of each element between, of which there are `step`, fill the registers."""
    most = sched.registers // 2 // step  # rows of a square, which is turned by halves
    return replace(sched, transpose=dim, lanes=min(sched.lanes, 1 << (most.bit_length() - 1)))


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
            return _tiled(_vectors(nest, sched), sched.unroll, lambda width: step(tile, width))
        (jam_dim, count), *rest = jam
        return _tiled(nest.dims[jam_dim], count, lambda rows: tiled(rest, tile | {jam_dim: rows}))

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
    vectors = sums // nest.dims[sched.vector] * _vectors(nest, sched)
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


def contraction_tile(
    nest: Nest, vector: str, vectors: Vectors, fills: bool = False, whole: Nest | None = None
) -> tuple[int, NestSchedule]:
    """(columns per register tile, fixed schedule) of a contraction with vectors along `vector`.

    Args:
      nest: the contraction, or the part of it that one panel has.
      vector: a dimension of its results.
      vectors: registers of the machine.
      fills: whether the first tile of rows reads the operand along the vectors where it is, which is far, and packs it.
      whole: the contraction of which the nest is a part.
    """
    full = max(vectors.bits // register_bits(nest), 2)
    fewest = FEWEST_WORDS if any(reduction.by is not None for reduction in nest.reductions) else 1
    lanes = min(full, max(1 << (nest.dims[vector] - 1).bit_length(), fewest))
    sched = _untiled(nest, vector, lanes, vectors)
    products = math.prod((whole or nest).dims.values())
    sched = _capped(nest, _tile_register(nest, sched, vectors, products, fills))
    return sched.lanes * sched.unroll, replace(sched, fixed=True)


def _vectors(nest: Nest, sched: NestSchedule) -> int:
    return -(-nest.dims[sched.along] // sched.lanes)


def _tile_elementwise(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """Several vectors per step, or several rows where loads overlap, are transposed, or are stored together."""
    _, joint = joint_stores(nest, sched.along)
    if joint:
        return replace(sched, jam=joint)
    transposed = transposed_dim(nest, sched.along)
    if transposed is not None:
        sched = _transposed(sched, *transposed)
        return replace(sched, jam={transposed[0]: sched.lanes})
    dim = _stencil_dim(nest, sched.along)
    if dim is not None:
        rows = STENCIL_ROWS if _halo(nest, dim) <= STENCIL_ROWS // 2 else 2 * STENCIL_ROWS
        return replace(sched, jam={dim: min(rows, nest.dims[dim])})
    points = min(_points_in_turn(nest), _vectors(nest, sched))
    is_long = _vectors(nest, sched) >= LONG_ROW_STEPS * points
    if points > 1 and is_long and _stores_narrow(nest, sched.along):
        return replace(sched, lanes=2 * sched.lanes, unroll=points // 2)
    return replace(sched, unroll=points)


def _stores_narrow(nest: Nest, vector: str) -> bool:
    """Whether two vectors of what is computed end in one of results, which are narrower, and loads are of whole vectors.

    Two registers are narrowed to one and stored together by fewer instructions than each by itself. Measured on Zen 4 with
    AVX2: exp of 2,000,000 bfloat16 1.23 ms, so 1.02; (3 x + y) / 4 of bytes in 16 bits 0.163 and 0.142 ms.
    """
    stored = max(BITS[storage_el(store.buf.dtype)] for store in nest.stores)
    if 2 * stored > register_bits(nest, vector):
        return False
    accesses = [(store.buf, store.index) for store in nest.stores]
    for node in nest.nodes():
        if isinstance(node, Gather | Shifted):
            return False
        if isinstance(node, Load):
            accesses.append(node.access)
    return all(flat_coefficient(buf, index, vector) in (0, 1) for buf, index in accesses)


def _points_in_turn(nest: Nest) -> int:
    """Vectors per step.

    Several are under way together, if their operations are interleaved
    (targets/cpu/emit/interleave_chains.py).
    """
    ops = [node.info.primitive for node in nest.nodes() if isinstance(node, Op)]
    if BRANCHING.intersection(ops):
        return 4 if len(ops) < FEW_OPS else 2 if len(ops) < MANY_OPS else 1
    if _is_serial(nest):
        return SERIAL_POINTS
    work = sum(COST[primitive] for primitive in ops)
    return 4 if work < LONG_CHAIN_OPERATIONS else 2 if work < 2 * LONG_CHAIN_OPERATIONS else 1


def _is_serial(nest: Nest) -> bool:
    """Whether points are long chains of operations that wait for one another."""
    ops = [node.info.primitive for node in nest.nodes() if isinstance(node, Op)]
    height = max((store.value.height for store in nest.stores), default=0)
    return (
        height >= SERIAL_HEIGHT
        and not nest.rdims
        and not BRANCHING.intersection(ops)
        and sum(COST[primitive] for primitive in ops) <= SERIAL_WORK * height
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


def _tile_horizontal(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """Vectors along a reduced dimension: several accumulators hide latency; rows share an operand where there is one."""
    vectors, count = _vectors(nest, sched), len(nest.reductions)
    unroll = max(1, min((2 if count <= 2 else 1) if is_long_point(nest) else 8 // count, vectors))
    rows = [dim for dim, size in nest.dims.items() if size > 1 and dim not in nest.rdims]
    shared = [
        row
        for row in rows
        if any(row not in load.symbols and sched.vector in load.symbols for load in nest.loads())
    ]
    near = _rows_in_registers(nest, sched, rows)
    if near is not None:
        jam = {near: nest.dims[near]} if nest.dims[near] > 1 else {}
        return replace(sched, jam=jam, unroll=1)
    if shared and any(reduction.is_plain_product for reduction in nest.reductions):
        jam = {shared[-1]: min(4, nest.dims[shared[-1]])}
        return _tile_both_sides(nest, replace(sched, jam=jam, unroll=min(4, vectors)))
    return replace(sched, unroll=unroll)


def _rows_in_registers(nest: Nest, sched: NestSchedule, rows: list[str]) -> str | None:
    """The dimension of a few sums of rows that memory has in turns, as parts of larger rows: an accumulator for each.

        a[row, i, :] for all rows, then a[row, i + 1, :] ..     ->     a[row, i, :] and a[row, i + 1, :], then the next row

    What is read follows one another, and lanes are added up once.
    """
    far = [rdim for rdim in nest.rdims if nest.dims[rdim] > 1 and rdim != sched.vector]
    if len(rows) != 1 or not far or nest.ordered:
        return None
    (row,) = rows
    points = nest.dims[row] * len(per_accumulator(nest.reductions, bool))
    inside = [
        abs(flat_coefficient(load.buf, load.index, row))
        < min(abs(flat_coefficient(load.buf, load.index, rdim)) for rdim in far)
        for load in nest.loads()
        if isinstance(load, Load) and sched.vector in load.symbols
    ]
    if not inside or not all(inside) or is_long_point(nest):
        return None
    return row if FEWEST_ROWS <= points <= sched.registers // 4 else None


def _batch_rows(nest: Nest, sched: NestSchedule, full: int) -> NestSchedule:
    """Short rows: as many as a vector has lanes end in one vector. `full`: lanes of a register.

    Values with their places are many operations to compare: those of half a register are found row
    by row.
    """
    rows = batched_rows(nest, sched.along)
    if rows is None or _vectors(nest, sched) > FEW_VECTORS or nest.dims[rows] < sched.lanes:
        return sched
    if sched.lanes == full or all(
        reduction.op not in ("argmax", "argmin") for reduction in nest.reductions
    ):
        return replace(sched, batched_rows=rows, jam={rows: sched.lanes}, unroll=1)
    return sched


def _tile_both_sides(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """A register tile of points; some share one operand, others the other one: gradients of a convolution's weights."""
    if len(nest.reductions) != 1:
        return sched
    left, right = (arg.symbols for arg in nest.reductions[0].args)
    free = [dim for dim, size in nest.dims.items() if size > 1 and dim not in nest.rdims]
    sides = [
        [dim for dim in free if dim in mine and dim not in other]
        for mine, other in ((left, right), (right, left))
    ]
    if not all(sides) or sched.vector not in left & right:
        return sched
    (left_dim, left_size), (right_dim, right_size) = (
        (side[-1], nest.dims[side[-1]]) for side in sides
    )
    tiles = [
        (i, j, unroll)
        for i in range(1, min(left_size, MOST_TILE_SIDE) + 1)
        for j in range(1, min(right_size, MOST_TILE_SIDE) + 1)
        for unroll in range(1, min(4, _vectors(nest, sched)) + 1)
        if i * j * unroll <= sched.accumulators - min(i, j)
    ]

    def cycles(tile: tuple[int, int, int]) -> float:
        i, j, unroll = tile
        step = lambda i, j, vectors: (
            max(
                i * j * vectors,
                (i + j) * vectors,
                PRODUCTS_UNDER_WAY if i * j * vectors < PRODUCTS_UNDER_WAY else 0,
            )
            / 2
            + STEP_CYCLES
        )
        return _tiled(
            left_size,
            i,
            lambda x: _tiled(
                right_size,
                j,
                lambda y: _tiled(
                    _vectors(nest, sched), unroll, lambda vectors: step(x, y, vectors)
                ),
            ),
        )

    i, j, unroll = min(tiles, key=cycles)
    jam = {dim: count for dim, count in ((left_dim, i), (right_dim, j)) if count > 1}
    return replace(sched, jam=jam, unroll=unroll)


def _tile_register(
    nest: Nest, sched: NestSchedule, core: Vectors, products: int, fills: bool = False
) -> NestSchedule:
    """Vectors along a result dimension, accumulators in registers over the reduction.

    `products`: multiply-adds of the nest, or of the product of which it is a part. `fills`: whether the first tile of rows
    reads the operand along the vectors where it is, which is far, and packs it.
    """
    vectors, count = _vectors(nest, sched), len(nest.reductions)
    pair = 2 if any(reduction.op in ("argmax", "argmin") for reduction in nest.reductions) else 1
    room = max(sched.accumulators // (count * pair), 1)
    jam = _jam_dim(nest, sched.along)
    if jam is None:
        few = math.prod(nest.dims[rdim] for rdim in nest.rdims) <= FEW_ROWS
        most = FEW_COLUMN_VECTORS if few else column_vectors(sched.registers)
        unroll = min(most, vectors, room)
        return _jam_chains(nest, replace(sched, unroll=unroll), room // unroll)
    rows, apart = nest.dims[jam], rows_apart(nest, jam, sched.along)
    stored_apart = stored_rows_apart(nest, jam)
    fetched = FAR_ROW_CYCLES if _has_far_rows(nest, sched.along) else 0
    evicted = EVICTED_STORE_CYCLES / max(math.prod(nest.dims[rdim] for rdim in nest.rdims), 1)

    def step(height: int, width: int) -> float:
        is_evicted = not fit(height + 1, stored_apart, core)
        return (
            max(
                _step_cycles(height, width, fit(height, apart, core)),
                _streamed_cycles(nest, sched, core, width),
            )
            + height * fetched
            + (height * width * evicted if is_evicted else 0)
        )

    def cycles(j: int, unroll: int) -> float:
        return (
            _tiled(vectors, unroll, lambda width: _wait_cycles(j, width)) if fills else 0
        ) + _tiled(
            rows, j, lambda height: _tiled(vectors, unroll, lambda width: step(height, width))
        )

    tiles = {
        (j, unroll): cycles(j, unroll)
        for unroll in range(1, min(4, vectors) + 1)
        for j in range(
            1,
            min(
                room // unroll,
                (sched.registers - _operand_registers(nest, sched, unroll)) // unroll - 1,
                rows,
            )
            + 1,
        )
    }
    quickest = min(tiles, key=lambda tile: tiles[tile])
    # Beside the quickest there are tiles that divide the nest, and need no second text for its edges.
    enough = min(math.prod(quickest), FEWEST_PRODUCTS)
    slower = AS_QUICK if products <= SHORT_PRODUCT else 1.0
    j, unroll = min(
        (
            tile
            for tile, estimate in tiles.items()
            if estimate <= tiles[quickest] * slower
            and math.prod(tile) >= enough
            and (tile[0] == rows or quickest[0] < rows)  # or the other operand is read once more
        ),
        key=lambda tile: (_bodies(rows, tile[0]) * _bodies(vectors, tile[1]), tiles[tile]),
    )
    cost = tiles[j, unroll]
    sched = replace(sched, unroll=unroll, jam={jam: j} if j > 1 else {})
    return _jam_second(nest, sched, jam, cost, room) if j == rows else sched


def _streamed_cycles(nest: Nest, sched: NestSchedule, core: Vectors, width: int) -> float:
    """Cycles of a reduction step in which a tile reads so many vectors from the second cache.

    0 where the first one holds its vectors of all steps, and for vectors of a whole line.
    """
    depth = math.prod(nest.dims[rdim] for rdim in nest.rdims)
    step = width * sched.lanes * (register_bits(nest, sched.along) // 8)
    is_near = depth * step <= core.l1_bytes
    return 0.0 if is_near or core.bits >= 8 * LINE_BYTES else step / VECTOR_STREAM_BYTES


def _wait_cycles(rows: int, vectors: int) -> float:
    """Cycles of a reduction step in which a tile waits for the far vectors that it multiplies and packs."""
    return max(FAR_RUN_CYCLES + (FAR_LINE_CYCLES - rows / 2) * vectors, 0.0)


def _has_far_rows(nest: Nest, vector: str) -> bool:
    """Whether the operand that lanes share comes from afar, again for each of the tile's columns."""
    return any(
        isinstance(arg, Load) and vector not in arg.symbols and is_far(arg.buf)
        for reduction in nest.reductions
        for arg in reduction.args
    )


def _jam_chains(nest: Nest, sched: NestSchedule, most: int) -> NestSchedule:
    """Few accumulators, whose steps wait for one another: results that share nothing are interleaved with them.

    Short reductions overlap by themselves, and read memory in its order.
    """
    candidates = [
        dim
        for dim, size in nest.dims.items()
        if size > 1 and dim != sched.vector and dim not in nest.rdims
    ]
    chains = -(-PRODUCTS_UNDER_WAY // (sched.unroll * len(nest.reductions)))
    if (
        nest.ordered
        or not candidates
        or min(chains, most) < 2
        or math.prod(nest.dims[rdim] for rdim in nest.rdims) < LONG_WAIT
    ):
        return sched
    rows = nest.dims[candidates[-1]]
    turns = -(-rows // min(chains, most))
    return replace(sched, jam={candidates[-1]: -(-rows // turns)})


def _jam_second(nest: Nest, sched: NestSchedule, jam: str, cost: float, room: int) -> NestSchedule:
    """Points of one more dimension in a tile that holds all of the first: windows of a few rows and columns."""
    first, vectors = nest.dims[jam], _vectors(nest, sched)
    candidates = [dim for dim in _sharing_dims(nest, sched.along) if dim != jam]
    if not candidates:
        return sched
    second = candidates[-1]
    rows, best = nest.dims[second], (cost * nest.dims[second], 1, sched.unroll)
    for unroll in range(1, min(4, vectors) + 1):
        registers = sched.registers - _operand_registers(nest, sched, unroll)
        for j in range(
            2, min(room // (unroll * first), (registers // unroll - 1) // first, rows) + 1
        ):
            together = _tiled(
                rows,
                j,
                lambda height, unroll=unroll: _tiled(
                    vectors, unroll, lambda width: _step_cycles(height * first, width)
                ),
            )
            if together < best[0] * CLEARLY_LESS:
                best = (together, j, unroll)
    _, count, unroll = best
    if count == 1:
        return sched
    # The first dimension keeps its place among those of the tile.
    jam_of_both = {**sched.jam, second: count, jam: first}
    return replace(sched, jam=jam_of_both, unroll=unroll)


def _operand_registers(nest: Nest, sched: NestSchedule, unroll: int) -> int:
    """Registers that a step of so many vectors needs beside accumulators and vectors.

    They hold one element that is broadcast, and for a partial vector the zeros that it is filled
    with and what is loaded of it. Where registers are few, these may be in memory in one of many tiles.
    """
    if nest.dims[sched.along] % sched.lanes == 0:
        return 1
    is_rare = sched.registers <= FEW_REGISTERS and _vectors(nest, sched) > MANY_TILES * unroll
    return 1 if is_rare else 3


def _bodies(size: int, tile: int) -> int:
    """Texts of a tile along a dimension: one for whole tiles, one for what is left."""
    return 1 + (size % tile > 0)


def _tiled(size: int, tile: int, cost) -> float:
    full, rest = divmod(size, tile)
    return full * cost(tile) + (cost(rest) if rest else 0.0)


def _step_cycles(rows: int, vectors: int, is_near: bool = True) -> float:
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


def _jam_dim(nest: Nest, vector: str) -> str | None:
    """A result dimension whose points share the vector operand of the reduction."""
    inside = [
        load for reduction in nest.reductions for load in Nest({}, reductions=(reduction,)).loads()
    ]
    candidates = _sharing_dims(nest, vector)
    if not candidates and len(inside) == 1 and not nest.ordered:
        return _stencil_like(nest, vector, inside[0])
    return max(
        candidates,
        key=lambda candidate: (min(nest.dims[candidate], 6), list(nest.dims).index(candidate)),
        default=None,
    )


def _sharing_dims(nest: Nest, vector: str) -> list[str]:
    inside = [
        load for reduction in nest.reductions for load in Nest({}, reductions=(reduction,)).loads()
    ]
    return [
        dim
        for dim, size in nest.dims.items()
        if size > 1
        and dim != vector
        and dim not in nest.rdims
        and any(vector in expr.symbols and dim not in expr.symbols for expr in inside)
    ]


def _stencil_like(nest: Nest, vector: str, load: Load | Gather) -> str | None:
    """Window reductions: points along a windowed dimension share loads. Windows side by side share none."""
    for i in load.index:
        if i is None:
            continue
        linear = i.linear()
        window = sum(abs(linear.coefficient(rdim)) * (nest.dims[rdim] - 1) for rdim in nest.rdims)
        for symbol in i.symbols:
            if (
                symbol in nest.dims
                and symbol not in nest.rdims
                and symbol != vector
                and nest.dims[symbol] > 1
                and abs(linear.coefficient(symbol)) <= window
            ):
                return symbol
    return None


def _capped(nest: Nest, sched: NestSchedule) -> NestSchedule:
    """A smaller tile where the code of a step would be too long."""
    if sched.transpose is not None or joint_stores(nest, sched.along)[1]:
        return sched
    nodes = max(len(nest.nodes()), 1)
    limit = (
        MAX_TILE_NODES
        if any(reduction.is_product for reduction in nest.reductions)
        else MAX_SERIAL_NODES
        if _is_serial(nest)
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
