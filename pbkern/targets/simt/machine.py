"""Figures that the cost model takes of all GPUs alike."""

from __future__ import annotations

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import Machine
from pbkern.simulate.counts import SECTOR_BYTES

# Blocks that share a multiprocessor, each with one of its four schedulers.
RESIDENT_BLOCKS = 4
# Bytes of loads that a block of 128 threads has under way, two of 16 bytes each: at a latency of
# some 600 ns, 528 such blocks keep 3.6 TB/s busy. An order of magnitude, not measured here; see
# CUDA C++ Best Practices Guide, "Occupancy".
IN_FLIGHT_BYTES = 4096
# Bytes of loads that such a block has under way while it copies a large block to shared memory: loops of copies are
# unrolled, up to eight loads of 16 bytes. Read in the PTX of stencils.
COPY_IN_FLIGHT_BYTES = 16384
# Seconds of a launch in a stream. Source: order of magnitude in NVIDIA's developer blog "Getting
# Started with CUDA Graphs" (2019), 2.2 us per launch with a graph and up to 9 without; not measured
# here.
LAUNCH_SECONDS = 3e-6
# Seconds of one block's start. An order of magnitude, not measured here.
BLOCK_SECONDS = 2e-7


# Bytes of one way of a first cache: 64 lines. Source: assumed.
WAY_BYTES = 4096


@dataclass(frozen=True)
class Figures:
    """Figures of one device.

    Attributes:
      multiprocessors: streaming multiprocessors, compute units. flops: float32 per second, without
        tensor cores.
      doubles: of float64, as a part of it. matrices: products of 16 bits per second by matrix
        instructions, summed in float32; 0 where none are used. groups: whether several warps multiply tiles of shared memory
        by one instruction. cache: bytes of the last one. near: bytes of a
        multiprocessor's own memory, shared memory and first cache together. bandwidth: bytes of
        memory per second.
    """

    multiprocessors: int
    flops: float
    cache: int
    near: int
    bandwidth: float
    clock: float
    doubles: float = 0.5
    matrices: float = 0.0
    groups: bool = False


def machine(name: str, figures: Figures, warp: int, source: str) -> Machine:
    """The figures as the cost model takes them."""
    specs = figures
    return Machine(
        name=name,
        cores=RESIDENT_BLOCKS * specs.multiprocessors,
        vector_bits=32 * warp,
        l1_bytes=specs.near // (2 * RESIDENT_BLOCKS),
        l1_ways=max(specs.near // (2 * RESIDENT_BLOCKS) // WAY_BYTES, 1),
        l2_bytes=specs.near // RESIDENT_BLOCKS,
        l3_bytes=specs.cache,
        dram_bandwidth=specs.bandwidth,
        run_bytes=0,
        sector_bytes=SECTOR_BYTES,
        l3_bandwidth=2.5 * specs.bandwidth,
        l2_bandwidth=10 * specs.bandwidth,
        peak_flops={
            "float32": specs.flops,
            "float64": specs.flops * specs.doubles,
            "bfloat16": specs.matrices or specs.flops,
            "float16": specs.matrices or specs.flops,
            "int8": 2 * specs.matrices or specs.flops,
            "uint8": 2 * specs.matrices or specs.flops,
        },
        wide_products=specs.groups,
        clock_hz=specs.clock,
        launch_seconds=LAUNCH_SECONDS,
        program_seconds=BLOCK_SECONDS,
        source=f"{source}; near caches assumed in proportion to memory; not measured here",
    )
