"""ThreadOptions: what a GPU's CompilerParams, compile options and limits mean for lowering a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbkern.core.lazy_dataclass import dataclass
from pbkern.lower.build_options import BuildOptions, SortScratch

from .device import NVIDIA, VendorCode
from .schedule.policy import ThreadPolicy

# Lines of up to this many elements are sorted by one thread each, without other memory.
LONGEST_THREAD_LINE = 32


@dataclass(frozen=True)
class MergeScratch:
    """Scratch of simt/emit/sorts.py beside the operands: a second line of each, into which runs are merged."""

    def __call__(
        self, lines: int, length: int, dtypes: Sequence, keys: int, first: int
    ) -> list[tuple[tuple[int, ...], np.dtype]]:
        return (
            [((length,), np.dtype(dtype)) for dtype in dtypes]
            if length > LONGEST_THREAD_LINE
            else []
        )


@dataclass(frozen=True)
class ThreadOptions(BuildOptions):
    """BuildOptions as they suit GPUs, and what emission for threads wants to know.

    Attributes:
      device: the vendor's code.
      threads: of a block; a multiple of the device's warp.
      shared_bytes: most shared memory of a block. Scratch beyond lies in global memory.
      approx_math: cheaper versions of functions.
      barriers: whether barriers are placed between statements that meet; else those of copies to shared memory alone.
      tensor_cores: whether warps multiply matrices by one instruction (schedule/instructions.py).
      multiply_adds: whether lanes compute products of float32 in the same form (schedule/lane_products.py).
      mfma, wmma: whether warps of CDNA, or of RDNA 3, do (schedule/matrix_cores.py).
      warpgroups: whether groups of four warps multiply tiles of shared memory by one instruction.
      stages: steps of the loop over blocks that are active at a time: one computes, blocks of the others are on their way.
      delay: steps for which a stage is kept behind its own.
      profile_space, profile_dir: events that each block records, and the folder of the traces.
    """

    sort_scratch: SortScratch = MergeScratch()
    may_shift: bool = False  # threads mask the ends of arrays; blocks that overlap would race
    device: VendorCode = NVIDIA
    threads: int = 128
    shared_bytes: int = 227 << 10
    approx_math: bool = False
    barriers: bool = True
    tensor_cores: bool = False
    warpgroups: bool = False
    mfma: bool = False
    wmma: bool = False
    multiply_adds: bool = False
    stages: int = 1
    delay: int = 0
    profile_space: int = 0
    profile_dir: str = ""

    @property
    def copy_bytes(self) -> int:
        """Shared memory that copies of one block take, so that others fit beside it."""
        return min(self.device.declared_bytes, self.shared_bytes // 4)

    @property
    def row_bytes(self) -> int:
        """Shared memory of a copy that spares memory a second read of a row, so that another block fits beside this one."""
        return self.shared_bytes // 2

    @property
    def policy(self) -> ThreadPolicy:
        """Answers to passes for every target."""
        return ThreadPolicy(
            near_bytes=self.copy_bytes,
            row_bytes=self.row_bytes,
            threads=self.threads,
            warp=self.device.warp,
            reassociate=self.contract,
            relaxed_atomics=self.device.relaxed_atomics,
        )
