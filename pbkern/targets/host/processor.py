"""This computer's processor as the system describes it, and how many of its cores this process may use."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import platform
import re

CPUINFO = pathlib.Path("/proc/cpuinfo")


def cpuinfo() -> str:
    """The system's description of its processors; empty where it has none."""
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""


def cpu_flags(cpuinfo: str) -> set[str]:
    line = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo, re.MULTILINE)
    return set(line[1].split()) if line else set()


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
