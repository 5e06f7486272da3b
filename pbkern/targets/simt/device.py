"""Device: the few things in which vendors' threads differ, as MLIR text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Put = Callable[[str], str]  # appends `name = text`, returns the name

# MLIR's number of the memory that a thread block shares; the same at both vendors.
SHARED = 3


class Device(Protocol):
    """Code that only one vendor understands.

    Attributes:
      name: the target's.
      warp: threads that exchange registers.
    """

    name: str
    warp: int

    def thread(self, put: Put) -> str:
        """i32: number of the thread in its block."""

    def block(self, put: Put) -> str:
        """i32: number of the block in the grid."""

    def barrier(self) -> str:
        """Waits for all threads of the block; what they stored before is there for all of them after."""

    def exchange(self, put: Put, value: str, distance: int) -> str:
        """i32 `value` of the thread of the warp whose number differs in the bit `distance`. All threads of the warp take
        part."""


@dataclass(frozen=True)
class Nvidia:
    """PTX, by the NVVM dialect."""

    name: str = "nvgpu"
    warp: int = 32

    def thread(self, put: Put) -> str:
        return put("nvvm.read.ptx.sreg.tid.x : i32")

    def block(self, put: Put) -> str:
        return put("nvvm.read.ptx.sreg.ctaid.x : i32")

    def barrier(self) -> str:
        return "nvvm.barrier"

    def exchange(self, put: Put, value: str, distance: int) -> str:
        mask, by, last = (put(f"arith.constant {n} : i32") for n in (-1, distance, 31))
        return put(f"nvvm.shfl.sync bfly {mask}, {value}, {by}, {last} : i32 -> i32")


NVIDIA = Nvidia()
