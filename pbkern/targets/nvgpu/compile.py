"""MLIR of one kernel for threads -> LLVM IR -> PTX. Neither a GPU nor a CUDA toolkit is needed."""

from __future__ import annotations

import re

from pbkern.core.errors import InternalError
from pbkern.targets.simt import llvm
from pbkern.targets.simt.emit.kernel import ThreadFunction

from .devices import NvDeviceKind

TRIPLE = "nvptx64-nvidia-cuda"
# Threads that a multiprocessor is to hold at least, so that each may have 128 registers: without a
# number, ptxas spills some of them to have room for more blocks.
RESIDENT_THREADS = 512
# Registers of a thread's tiles, and of copies on their way to some, of those that are alive at a time, from which on half as
# many threads are resident, with 255 registers each. Source: what ptxas 13 takes for attention, its gradients and convolutions:
# 80 fit 128 registers, 88 spill some.
MANY_TILE_WORDS = 84
# Registers of tiles from which on three quarters as many threads are resident, if blocks divide them, with 168 registers each.
# Source: what ptxas 13 takes for a gradient of cross-entropy whose operand is computed: 72 spill one register of 128.
SOME_TILE_WORDS = 70
# Registers of a thread's sums of products under way, or of one array, from which on the same holds: they are alive all along,
# beside 45 others.
# Source: what ptxas 13 takes.
MANY_SUM_WORDS = 80


def llvm_ir(function: ThreadFunction) -> str:
    """LLVM IR of a kernel. Raises InternalError."""
    many = function.tile_words > MANY_TILE_WORDS or function.sum_words > MANY_SUM_WORDS
    some = (
        function.tile_words > SOME_TILE_WORDS and 3 * RESIDENT_THREADS // 4 % function.threads == 0
    )
    resident = RESIDENT_THREADS // 4 * (2 if many else 3 if some else 4)
    attributes = {
        "nvvm.kernel": "unit",
        "nvvm.reqntid": f"array<i32: {function.threads}>",
        "nvvm.minctasm": f"{max(resident // function.threads, 1)} : i32",
    }
    return llvm.ir_of(function, ("convert-nvvm-to-llvm",), attributes)


def ptx(ir: str, kind: NvDeviceKind) -> str:
    """PTX of LLVM IR for a device.

    Raises InternalError where code would call functions that no device has.
    """
    text = llvm.code(ir, TRIPLE, ["asm"], cpu=kind.architecture, features=f"+ptx{kind.ptx}")[
        "asm"
    ].decode()
    missing = re.search(r"\.extern \.func .*?([\w.$]+)\s*(?:\(|;)", text)
    if missing:
        raise InternalError(
            f"code of a kernel calls `{missing[1]}`", why="no device has such a function"
        )
    text = re.sub(
        r"(\.extern \.shared [^;\[]*)\[\d+\];", r"\1[];", text
    )  # its size is the launch's
    return re.sub(r"(\.target \w+), debug", r"\1", text)
