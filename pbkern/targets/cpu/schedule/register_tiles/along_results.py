"""Register tiles: vectors along a dimension of the results, whose sums are in registers over the reduction.

Found by a small search over (rows jammed, vectors unrolled) with the cost of one reduction step: FMA throughput, load
throughput, and what tails waste.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import LINE_BYTES
from pbkern.lower.nest.ir import Gather, Load, Nest
from pbkern.targets.costs.caches import fit
from pbkern.targets.cpu.machines.machine import Vectors
from pbkern.targets.cpu.schedule.cache_conflicts import rows_apart, stored_rows_apart
from pbkern.targets.cpu.schedule.nest_schedule import OPERAND_REGISTERS, NestSchedule
from pbkern.targets.cpu.schedule.prefetch import is_far
from pbkern.targets.cpu.schedule.vector_dimension import register_bits

from .prices import PRODUCTS_UNDER_WAY, step_cycles, tiled_cycles
from .steps import vectors_along

# Vectors that a sum over rows keeps, if it shares no operand. Of rows of 1 KB, parts of 512 B each
# were read 2.5 times as slowly from memory as whole ones.
MAX_COLUMN_VECTORS = 16
# Rows of the longest sum over rows that keeps FEW_COLUMN_VECTORS. Source: not recorded.
FEW_ROWS = 16
# Most vectors that a sum over few rows keeps: other operands in memory need registers as well, and
# rows are read side by side.
FEW_COLUMN_VECTORS = 8
# Steps of a reduction whose wait for one another shows: of fewer, the processor's window holds
# those of several results.
LONG_WAIT = 64
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
# The part of the time of a tile of one dimension's points at which another dimension's join it.
CLEARLY_LESS = 0.9
# Estimate of a tile relative to the least one, up to which the tile with the least code is taken in short products. Those of
# 64 to 1024 rows take the same time with 8 x 2 and with 11 x 2 vectors (Zen 4).
AS_QUICK = 1.03
# Multiply-adds of the smallest tile that is taken for its little code: those of smaller ones wait for one another where two
# begin in a cycle. Source: not recorded.
FEWEST_PRODUCTS = 12
# Tiles along the vectors from which the last one's partial vector counts no registers. Measured on Zen 4 with 16 registers:
# 131 x 77 x 1001 takes 0.243 ms with 3 x 3 vectors, which leave registers for it, 0.213 with 6 x 2, of which it needs more.
MANY_TILES = 16
# Most vectors of a row of a tile.
MOST_VECTORS = 4
# Registers of processors for which that was measured.
FEW_REGISTERS = 16
# Multiply-adds of a nest up to which its code costs more than its time.
SHORT_PRODUCT = 2**22


def column_vectors(registers: int) -> int:
    """Vectors that a sum over rows keeps, if it shares no operand."""
    return min(MAX_COLUMN_VECTORS, registers - OPERAND_REGISTERS)


def result_tile(
    nest: Nest,
    sched: NestSchedule,
    core: Vectors,
    products: int,
    fills: bool = False,
    has_far_rows: bool = True,
) -> NestSchedule:
    """Vectors along a result dimension, accumulators in registers over the reduction.

    `products`: multiply-adds of the nest, or of the product of which it is a part. `fills`: whether the first tile of rows
    reads the operand along the vectors where it is, which is far, and packs it. `has_far_rows`: whether rows of the operand
    that is broadcast come from where its array is.
    """
    vectors, count = vectors_along(nest, sched), len(nest.reductions)
    pair = 2 if any(reduction.op in ("argmax", "argmin") for reduction in nest.reductions) else 1
    room = max(sched.accumulators // (count * pair), 1)
    jam = _jam_dim(nest, sched.along)
    if jam is None:
        few = math.prod(nest.dims[rdim] for rdim in nest.rdims) <= FEW_ROWS
        most = FEW_COLUMN_VECTORS if few else column_vectors(sched.registers)
        unroll = min(most, vectors, room)
        return _jam_chains(nest, replace(sched, unroll=unroll), room // unroll)
    rows, apart = nest.dims[jam], rows_apart(nest, jam, sched.along)
    steps = _Steps(
        rows,
        vectors,
        room,
        tuple(
            sched.registers - _operand_registers(nest, sched, unroll)
            for unroll in range(MOST_VECTORS + 1)
        ),
        tuple(_streamed_cycles(nest, sched, core, width) for width in range(MOST_VECTORS + 1)),
        FAR_ROW_CYCLES if has_far_rows and _has_far_rows(nest, sched.along) else 0,
        EVICTED_STORE_CYCLES / max(math.prod(nest.dims[rdim] for rdim in nest.rdims), 1),
        apart,
        stored_rows_apart(nest, jam),
        core,
    )
    # Beside the quickest there are tiles that divide the nest, and need no second text for its edges.
    j, unroll, cost = _best_tile(steps, fills, AS_QUICK if products <= SHORT_PRODUCT else 1.0)
    sched = replace(sched, unroll=unroll, jam={jam: j} if j > 1 else {})
    return _jam_second(nest, sched, jam, cost, room) if j == rows else sched


@dataclass(frozen=True)
class _Steps:
    """All of a nest that the time of its tiles depends on.

    Attributes:
      rows, vectors: of the nest.
      room: registers that accumulators may fill.
      registers: those that operands leave, by the vectors of a tile's row.
      streamed: cycles of a step in which vectors come from the second cache, by their number.
      fetched: cycles that a step waits for an element of a far row.
      evicted: cycles of a step for each of the results whose lines leave the first cache.
      apart, stored_apart: bytes between rows of the operand that lanes share, and of the results.
      core: registers and the first cache.
    """

    rows: int
    vectors: int
    room: int
    registers: tuple[int, ...]
    streamed: tuple[float, ...]
    fetched: float
    evicted: float
    apart: int
    stored_apart: int
    core: Vectors

    def cycles(self, height: int, width: int) -> float:
        """Cycles of one reduction step of a tile."""
        is_evicted = not fit(height + 1, self.stored_apart, self.core)
        step = step_cycles(height, width, fit(height, self.apart, self.core))
        return (
            max(step, self.streamed[width])
            + height * self.fetched
            + (height * width * self.evicted if is_evicted else 0)
        )


# Products of equal layers ask for the same tile, each several times.
@functools.lru_cache(maxsize=4096)
def _best_tile(steps: _Steps, fills: bool, slower: float) -> tuple[int, int, float]:
    """(rows, vectors, cycles of a reduction step of the whole nest) of the tile that is taken.

    `fills`: see result_tile. `slower`: how much slower than the quickest a tile with less code may be.
    """
    rows, vectors = steps.rows, steps.vectors
    step = functools.cache(steps.cycles)

    def cycles(j: int, unroll: int) -> float:
        return (
            tiled_cycles(vectors, unroll, lambda width: _wait_cycles(j, width)) if fills else 0
        ) + tiled_cycles(
            rows, j, lambda height: tiled_cycles(vectors, unroll, lambda width: step(height, width))
        )

    tiles = {
        (j, unroll): cycles(j, unroll)
        for unroll in range(1, min(MOST_VECTORS, vectors) + 1)
        for j in range(
            1, min(steps.room // unroll, steps.registers[unroll] // unroll - 1, rows) + 1
        )
    }
    quickest = min(tiles, key=lambda tile: tiles[tile])
    enough = min(math.prod(quickest), FEWEST_PRODUCTS)
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
    return j, unroll, tiles[j, unroll]


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
    first, vectors = nest.dims[jam], vectors_along(nest, sched)
    candidates = [dim for dim in _sharing_dims(nest, sched.along) if dim != jam]
    if not candidates:
        return sched
    second = candidates[-1]
    rows, best = nest.dims[second], (cost * nest.dims[second], 1, sched.unroll)
    for unroll in range(1, min(MOST_VECTORS, vectors) + 1):
        registers = sched.registers - _operand_registers(nest, sched, unroll)
        for j in range(
            2, min(room // (unroll * first), (registers // unroll - 1) // first, rows) + 1
        ):
            together = tiled_cycles(
                rows,
                j,
                lambda height, unroll=unroll: tiled_cycles(
                    vectors, unroll, lambda width: step_cycles(height * first, width)
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
    is_rare = sched.registers <= FEW_REGISTERS and vectors_along(nest, sched) > MANY_TILES * unroll
    return 1 if is_rare else 3


def _bodies(size: int, tile: int) -> int:
    """Texts of a tile along a dimension: one for whole tiles, one for what is left."""
    return 1 + (size % tile > 0)


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
