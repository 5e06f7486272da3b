"""LowerOptions: what the CPU's CompilerParams, compile options and machine mean for lowering a kernel."""

from __future__ import annotations

from dataclasses import field

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import LINE_BYTES
from pbkern.core.ops.elementwise import PriceTable
from pbkern.lower.build_options import BuildOptions, SortScratch
from pbkern.targets.costs.sorts import LONGEST_REGISTER_LINE, MOST_NETWORK_OPERATIONS
from pbkern.targets.cpu.machines.machine import FAR_BYTES, WIDE_VECTORS, Vectors
from pbkern.targets.cpu.math.op_cycles import COST

from .locality.policy import CpuPolicy
from .sorting import LineScratch

# Bytes that no array has.
NEVER_BYTES = 1 << 62


@dataclass(frozen=True)
class LowerOptions(BuildOptions):
    """BuildOptions as they suit CPUs, and what the CPU's own passes and emission want to know.

    Attributes:
      short_row: a function of rows this short is cheaper in vectors of rows, stored, than once per
        row as a scalar.
      scatter_strip: indices and updates of a strip stay in the nearest cache.
      scatter_row_bytes: results from this size on leave the nearest cache while one update takes its column. Measured on Zen 3,
        one thread, float32, 300 columns of 30 x 40 x 500: 1.9 ms column by column, 1.2 row by row; 20,000 updates of 16 x 64,
        which is near, 0.15 and 0.21.
      approx_math: cheaper versions of functions (lower/math/functions.py).
      vectors: width and number of registers that hold vectors.
      prefetch_steps: how many programs ahead blocks of operands are prefetched; 0: none.
      avx2: the machine has AVX2; avx512: AVX-512F and DQ; bf16_pairs: AVX512-BF16; vnni: AVX512-VNNI;
        amx_bf16, amx_int8: tiles of AMX.
      asymmetric_minima: see CpuMachine.
      l1_bytes, l2_bytes: caches of a core. l1_ways: lines of one set of the first.
      followed_row_bytes: see CoreKind.
      stream_bytes: results of this size and more are written past the caches; they start at a cache
        line.
      stream_traffic: if operands and results are more than this many bytes.
    """

    op_costs: PriceTable = field(default=COST, hash=False, repr=False)
    short_row: int = 64
    sort_scratch: SortScratch = LineScratch()
    short_line: int = LONGEST_REGISTER_LINE
    short_line_operations: int = MOST_NETWORK_OPERATIONS
    scatter_strip: int = 1024
    scatter_row_bytes: int = 32 << 10
    scalar_loops: bool = True
    most_taps: int = 25
    most_parts: int = 16
    fetch_ahead: int = 16
    fetch_bytes: int = FAR_BYTES
    cut_bytes: int = LINE_BYTES
    approx_math: bool = False
    vectors: Vectors = WIDE_VECTORS
    prefetch_steps: int = 0
    avx2: bool = False
    avx512: bool = False
    bf16_pairs: bool = False
    vnni: bool = False
    amx_bf16: bool = False
    amx_int8: bool = False
    asymmetric_minima: bool = False
    l1_bytes: int = 32 << 10
    l1_ways: int = 8
    l2_bytes: int = 1 << 20
    followed_row_bytes: int = 0
    stream_bytes: int = NEVER_BYTES
    stream_traffic: int = 0

    @property
    def vector_bits(self) -> int:
        return self.vectors.bits

    @property
    def pair_sums(self) -> bool:
        """The machine adds products of neighbouring int16, in its vectors: those of 512 bits came with AVX-512DQ."""
        return self.avx512 or (self.avx2 and self.vector_bits <= 256)

    @property
    def policy(self) -> CpuPolicy:
        """Answers to passes for every target."""
        return CpuPolicy(
            self.vectors.bits // 8,
            near_bytes=self.l1_bytes,
            contract=self.contract,
            vectors=self.vectors,
        )
