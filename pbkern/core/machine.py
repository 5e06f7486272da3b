"""Machine: figures of a target for the cost model and for schedules.

Types here, values with each target.

Bandwidths and peaks are sustained figures of all cores together, so that a kernel's limit is
max(flops / peak, bytes / bandwidth). `op_cycles` prices one element of an elementwise primitive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.elementwise import ELEMENTWISE, UNMEASURED, PriceTable

# Bytes of a cache line, on all processors so far.
LINE_BYTES = 64
# Bytes of the shortest run of results that code for CPUs writes past the caches wherever it begins, line by line
# (targets/cpu/emit/streamed_rows.py). Products with a row, Zen 4: 401 floats 3.6 -> 2.4 ms, 301 the same, 203 2.45 -> 2.8.
# Rows of 16,388 bytes, 96 MB: runs of up to 1 KB 7.1 to 13 ms, of 2 KB 4.7.
STREAMED_RUN_BYTES = 1536
# Bytes of the smallest pages of x86-64 and of Linux on AArch64.
PAGE_BYTES = 4096
# Most threads of a block of a GPU. Sources: CUDA C++ Programming Guide, technical specifications;
# HIP programming guide, hardware features.
MOST_BLOCK_THREADS = 1024
# Vector instructions per vector of f32 results of equations that are not elementwise; 1 where absent.
OTHER_CYCLES: Mapping[str, float] = {
    "threefry2x32": 90,
    "gather": 8,
    "dynamic_slice": 4,
    "cumsum": 4,
    "cumprod": 4,
    "cummax": 4,
    "cummin": 4,
    "cumlogsumexp": 30,
    "transpose": 2,
    "argmax": 3,
    "argmin": 3,
    "rev": 2,
}


@dataclass(frozen=True)
class Machine:
    """One target device.

    Attributes:
      name: how reports call it.
      cores: hardware threads that run programs at the same time.
      vector_bits: width of one vector register.
      l1_bytes, l2_bytes: private cache of one core, bytes.
      l1_ways: lines of one set of the l1 cache.
      l3_bytes: shared last-level cache, bytes.
      dram_bandwidth, l3_bandwidth, l2_bandwidth: bytes per second, all cores.
      peak_flops: dtype name -> multiply-adds counted as two, per second, all cores.
      tile_flops: the same of products of tiles, for dtypes of operands that an instruction on tiles multiplies.
      run_bytes: bytes that could have come from memory in the time that a run of neighbours takes to begin.
      stream_bytes: bytes of a run of neighbours after which memory is read ahead; those before come at half the bandwidth.
      sector_bytes: memory moves multiples of this, and threads ask for it a vector register at a time; 0: caches of a core
        hold what a run leaves of its lines.
      wide_products: whether an instruction multiplies tiles of 256 columns, so that blocks of as many are worth a try.
      clock_hz: vector instructions per second of one core.
      launch_seconds: start and end of one kernel on all cores.
      program_seconds: overhead of one program (index arithmetic, call).
      op_cycles: elementwise primitive -> vector instructions per vector of f32 results.
      source: where the numbers come from.
      note: how they were chosen, where that is not the usual way.
    """

    name: str = "cpu"
    cores: int = 2
    vector_bits: int = 512
    l1_bytes: int = 48 << 10
    l1_ways: int = 12
    l2_bytes: int = 1 << 20
    l3_bytes: int = 32 << 20
    dram_bandwidth: float = 54e9
    l3_bandwidth: float = 210e9
    l2_bandwidth: float = 463e9
    peak_flops: Mapping[str, float] = field(
        default_factory=lambda: {
            "float32": 469e9,
            "float64": 234e9,
            "bfloat16": 928e9,
            "float16": 469e9,
            "int8": 928e9,
        }
    )
    tile_flops: Mapping[str, float] = field(default_factory=dict)
    run_bytes: int = 128
    stream_bytes: int = 0
    sector_bytes: int = 0
    wide_products: bool = False
    clock_hz: float = 3.7e9
    launch_seconds: float = 5e-6
    program_seconds: float = 2e-7
    op_cycles: PriceTable = UNMEASURED
    source: str = "AMD Zen 5 server, two cores, measured with STREAM-like loops and FMA chains"
    note: str = ""

    def lanes(self, itemsize: int) -> int:
        """Elements of one vector register."""
        return max(1, self.vector_bits // (8 * max(itemsize, 1)))

    def flops(self, dtype_name: str) -> float:
        """Peak of contractions in a dtype, per second; the f32 figure where none is given."""
        return self.peak_flops.get(dtype_name, self.peak_flops["float32"])

    def cycles(self, primitive: str) -> float:
        """Vector instructions of a primitive per vector of f32 results."""
        if primitive in ELEMENTWISE:
            return self.op_cycles[primitive]
        return OTHER_CYCLES.get(primitive, 1.0)


DEFAULT_MACHINE = Machine()
