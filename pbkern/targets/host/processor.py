"""This computer's processor: its kind, what the system says of it, and how many of its cores this process may use."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import platform
import re

from pbkern.core.errors import TargetError
from pbkern.core.lazy_dataclass import dataclass

CPUINFO = pathlib.Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Architecture:
    """A kind of processor that programs run on.

    Attributes:
      spin_hint: assembly statement for loops that wait for another thread.
      futex: number of that system call.
    """

    spin_hint: str
    futex: int


# Name of the kind, as Linux gives it -> its facts. Numbers: Linux, arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h. AArch64 has `yield`, which takes no time on most of its cores; `isb` takes about
# as long as `pause` (Rust's library waits by it since 2021: rust-lang/rust#84725).
ARCHITECTURES = {"x86_64": Architecture("pause", 202), "aarch64": Architecture("isb", 98)}


def architecture() -> Architecture:
    """The kind of this computer's processor. Raises TargetError where no code is made for the computer itself."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ARCHITECTURES:
        raise TargetError(
            "nothing is compiled for this computer",
            why=f"programs run on Linux on {' and '.join(ARCHITECTURES)}; this is {system} on {machine}",
            hint="pbkern.interpret runs a kernel anywhere; C libraries are made for other processors by the option `device`",
        )
    return ARCHITECTURES[machine]


def cpuinfo() -> str:
    """The system's description of its processors; empty where it has none."""
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""


def cpu_flags(cpuinfo: str) -> set[str]:
    """Instruction sets by the system's names."""
    is_arm = platform.machine() == "aarch64"
    # Emulators may show the text of the computer that they run on.
    name = "Features" if is_arm else "flags|Features"
    line = re.search(rf"^(?:{name})\s*: (.*)$", cpuinfo, re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    return flags | {"asimd"} if is_arm else flags  # its calling convention passes vectors


# Number of the system call. Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl.
ARCH_PRCTL = 158
# Code of its question which parts of a thread's state are granted. Source: Linux, arch/x86/include/uapi/asm/prctl.h.
ARCH_GET_XCOMP_PERM = 0x1022
# Code of its request for one of them. Source: as above.
ARCH_REQ_XCOMP_PERM = 0x1023
# The part of a thread's state that holds tile registers (Intel's manual volume 1, 13.1).
TILE_DATA = 18


@functools.cache
def may_use_tiles() -> bool:
    """Whether Linux lets this process use tile registers (AMX), which it is asked for once.

    It refuses where a thread has an alternate signal stack that is too small for them. Threads, and processes that are
    forked, have the permission as well.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    libc, granted = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong()
    libc.syscall(ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(granted))
    if granted.value >> TILE_DATA & 1:
        return True
    return libc.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0


def allowed_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
