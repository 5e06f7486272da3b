"""ThreadCosts: a GPU's Machine as the fuser asks it: the formulas that targets share, and what differs for blocks.

A core of the Machine is the place of one block: RESIDENT_BLOCKS of them share a multiprocessor, its
arithmetic, and its near memory, out of which scratch of a program comes. Few blocks, or blocks so
large that few fit beside each other, leave bandwidth and arithmetic idle. Stores do not read what
they overwrite.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pbkern.core.ops.scatter import SCATTERS
from pbkern.fuse.access.blocks import Step, volume
from pbkern.fuse.cost.model import Price
from pbkern.fuse.cost.roofline import Spread, Terms
from pbkern.fuse.cost.sizes import Sizes
from pbkern.targets.costs.model import MachineCosts
from pbkern.targets.costs.sizes import SIZES

from .machine import COPY_IN_FLIGHT_BYTES, IN_FLIGHT_BYTES, RESIDENT_BLOCKS
from .schedule.updates import ATOMICS, STEPS_UNDER_WAY, UPDATE_THREADS

# The part of a multiprocessor's own memory that shared memory may take: 227 of 256 KB, 163 of 192,
# 99 of 128. Source: CUDA C++ Programming Guide, technical specifications.
SHARED_SHARE = 0.8
# Bytes that a block of a matrix product has under way: two steps of 128 rows and 128 columns of 64 bytes.
STREAMED_BYTES = 2 * 2 * 128 * 64
# Fewer than two blocks per multiprocessor leave one waiting for the other: the part of the time that is lost. Not measured.
UNBALANCED = 0.05
# Cycles of two loads from memory, the second of what the first one finds, and an atomic operation: an order of magnitude,
# not measured here; see CUDA C++ Best Practices Guide, "Occupancy".
UPDATE_CYCLES = 1200.0
# A second kernel costs less than 20 such steps in a row.
SCATTER_CYCLES = 20 * UPDATE_CYCLES
# Rows of 512 bytes, 128 words, are a warp's widest loads. Blocks of 64 x 64 elements are turned in 16 KB of shared memory.
# Products of float32 have tiles of whole lanes (schedule/lane_products.py).
# Chunks of a scatter store to the last cache what the next kernel reads there.
THREAD_SIZES = replace(
    SIZES,
    tile_rows=(32, 64, 128),
    tile_columns=(64, 128),
    longest_row_part=0,
    far_row_bytes=512,
    busy_programs=1,
    turned_side=64,
    leaves_out_hidden=False,
    cuts_planes=True,
    loop_elements=0,
    shared_loop_elements=0,
    square_side=64,
    line_parts=(64, 128, 256, 512, 1024, 2048),
    even_part=32,
    equal_parts=False,
    scatter_cycles=SCATTER_CYCLES,
    updates_per_result=1,
)
# The sums of 128 x 128 fill half of the registers of 256 threads; tiles below 64 read each operand
# too often.
# Registers of 128 threads hold 176 such words each, of 255, beside operands and places. Source: what ptxas 13 takes for
# gradients of attention. Other operands have 80 KB of shared memory: each pass over chunks copies those that stay once more,
# and devices give a block 99 KB and more.
MATRIX_SIZES = replace(
    THREAD_SIZES,
    held_words=176 * 128,
    held_bytes=80 << 10,
    matrix_types=frozenset(("bfloat16", "float16", "int8", "uint8")),
    matrix_tiles=(64, 128),
    matrix_columns=(64, 128),
)
# Groups of warps read tiles by themselves: their threads have room for twice as many sums.
GROUP_SIZES = replace(MATRIX_SIZES, matrix_columns=(64, 128, 256))


class ThreadCosts(MachineCosts):
    """`l2_bytes`: a block's share of a multiprocessor's memory."""

    @property
    def sizes(self) -> Sizes:
        """Machines with matrix instructions have a higher rate for float16, some have wide ones."""
        if self.wide_products:
            return GROUP_SIZES
        has_matrices = self.flops("float16") > self.flops("float32")
        return MATRIX_SIZES if has_matrices else THREAD_SIZES

    @property
    def near_bytes(self) -> int:
        """A block may have all of it."""
        return self.l2_bytes * RESIDENT_BLOCKS

    @property
    def scratch_bytes(self) -> int:
        return self.l1_bytes // 4

    def step_price(self, of: Step) -> Price:
        """The price as on CPUs, but for copies of operands to panels, which threads do not make, and for scatters."""
        price = replace(super().step_price(of), packing=0.0)
        if of.eqn.primitive.name not in SCATTERS:
            return price
        _, indices, updates = of.pull.inputs
        cycles = self._update_cycles(of.eqn, volume(indices[:-1]), volume(updates))
        return replace(price, seconds=cycles / self.clock_hz)

    def scatter_cycles(self, eqn: Any) -> float:
        indices, updates = (var.aval for var in eqn.invars[1:])
        return self._update_cycles(eqn, math.prod(indices.shape[:-1]), updates.size)

    def _update_cycles(self, eqn: Any, windows: int, elements: int) -> float:
        """Cycles in which one block takes so many windows: some at a time where these are atomic operations, or one by one."""
        points = max(elements // max(windows, 1), 1)
        at_a_time = 1
        if SCATTERS[eqn.primitive.name] in ATOMICS:
            team = min(1 << (points - 1).bit_length(), UPDATE_THREADS)
            at_a_time = UPDATE_THREADS // team * STEPS_UNDER_WAY
        return -(-windows // at_a_time) * -(-points // UPDATE_THREADS) * UPDATE_CYCLES

    def spread(self, terms: Terms) -> Spread:
        """Blocks beside each other, as many as have room; blocks start as soon as others end."""
        programs, cores = terms.programs, self.cores
        # Blocks whose scratch fits one multiprocessor.
        beside = min(self.near_bytes // max(terms.scratch, 1), RESIDENT_BLOCKS)
        idle = RESIDENT_BLOCKS / max(beside, 1)
        # What is copied a strip at a time, for want of room, has a few loads under way.
        copied = min(terms.copied, COPY_IN_FLIGHT_BYTES) if terms.copied <= self.l2_bytes else 0
        under_way = max(min(terms.working_set, IN_FLIGHT_BYTES), copied)
        under_way = STREAMED_BYTES if terms.streams else under_way
        loads = under_way / IN_FLIGHT_BYTES
        rounds = math.ceil(programs / cores) * (1 + UNBALANCED * (1 < programs < 2 * cores))
        stalls = terms.trips if terms.scratch > self.l2_bytes else 0.0
        if terms.scratch > SHARED_SHARE * self.near_bytes:  # it lies in global memory
            stalls += 2 * terms.scratch * programs / self.memory_bandwidth
        return Spread(
            rounds=rounds * (idle if programs > cores else 1),
            starts=programs / cores,
            bandwidth=max(
                min(programs * max(loads, 1), cores / idle) * min(loads, 1) / cores, 1e-9
            ),
            store_passes=1,
            stalls=stalls,
        )
