"""This computer's CPU -> CpuMachine: cores, vector width and caches as the system reports them, with their sources."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import re
from collections.abc import Collection
from typing import Any

from pbkern.targets.host.processor import CPUINFO, cpu_flags, cpuinfo, may_use_tiles

from . import calibration
from .calibration import Calibration
from .cores import ARM_SETS, FURTHER, V4, X86, row_of
from .machine import CpuMachine, machine_of

CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
# Control groups of this process, a line each: number:controllers:path (man 7 cgroups). Version 2's
# names no controllers.
PROCESS_CGROUPS = pathlib.Path("/proc/self/cgroup")
# Where version 2 is mounted: alone, or beside version 1.
CGROUP_V2 = (pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/sys/fs/cgroup/unified"))
CGROUP_V1 = pathlib.Path("/sys/fs/cgroup/cpu")
# Names of instruction sets in /proc/cpuinfo, where LLVM has others.
FLAGS = {
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
    "lse": "atomics",
    "fullfp16": "asimdhp",
    "dotprod": "asimddp",
}
# The widest vectors of each instruction set extension, widest first.
VECTOR_BITS = (("avx512f", 512), ("avx2", 256), ("avx", 256), ("asimd", 128))


def detected_machine() -> CpuMachine:
    """The machine this process runs on. What the system does not tell is that of the row of the table."""
    return _machine(calibration.stored())


def calibrate() -> CpuMachine:
    """Measures bandwidths of this computer, rounds them to classes and keeps these for later processes.

    Takes half a second, in which the computer should have nothing else to do. The classes are in the
    cache on disk, by processor; plans made before are not used any more where a class changes.

    Returns the machine with them. Raises TargetError if measurements do not repeat, OptionError
    where nothing is kept on disk.

    Examples:
      >>> machine = pbkern.cpu.calibrate()  # doctest: +SKIP
    """
    calibration.keep(calibration.measured(_machine(None)))
    return detected_machine()


@functools.cache
def _machine(calibrated: Calibration | None) -> CpuMachine:
    cores, cores_from = usable_cores()
    info = cpuinfo()
    bits, bits_from = vector_bits(info)
    flags = cpu_flags(info)
    if "amx_tile" in flags and not may_use_tiles():
        flags = {flag for flag in flags if not flag.startswith("amx")}
    name, row = row_of(*processor_numbers(info), bits, present(flags))
    caches = cache_figures()
    model = re.search(r"^(?:model name|CPU part)\s*: (.*)", info, re.MULTILINE)
    sources = {
        **dict.fromkeys(caches, str(CACHES)),
        "cores": cores_from,
        "vector_bits": bits_from,
    }
    known = dict[str, Any](caches)
    if calibrated is not None:
        known |= {"l3_class": calibrated.l3_class, "dram_class": calibrated.dram_class}
        known["note"] = str(calibrated)
        sources |= calibrated.sources
    return machine_of(
        "cpu",
        row,
        flags,
        cores=cores,
        vector_bits=bits,
        sources=sources,
        source=f"{model[1] if model else 'unknown CPU'}, as {name}; cores: {cores_from}; vectors: {bits_from}; "
        f"caches: {CACHES if caches else 'assumed'}; rates: {row.kind.source}",
        **known,
    )


def detected_name() -> str | None:
    """The name of this processor's row in the table, which is LLVM's; None where no row is like it."""
    info = cpuinfo()
    name, _ = row_of(*processor_numbers(info), vector_bits(info)[0], present(cpu_flags(info)))
    return name if name in X86 else None


def processor_numbers(cpuinfo: str) -> tuple[str, int, int | None]:
    """(vendor, family, model or None) of a processor; ("", 0, None) where the system does not say it."""
    vendor, family, model = (
        re.search(rf"^{name}\s*: (.*)$", cpuinfo, re.MULTILINE)
        for name in ("vendor_id", "cpu family", "model")
    )
    return (
        vendor[1] if vendor else "",
        int(family[1]) if family else 0,
        int(model[1]) if model else None,
    )


def present(flags: Collection[str]) -> set[str]:
    """LLVM's names of the instruction sets beyond x86-64-v2, and beyond NEON, that flags of /proc/cpuinfo name."""
    return {name for name in (*V4, *FURTHER, *ARM_SETS) if FLAGS.get(name, name) in flags}


def usable_cores() -> tuple[int, str]:
    """(hardware threads this process may use, where the number comes from): affinity, then the container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores, source = len(os.sched_getaffinity(0)), "sched_getaffinity"
    else:
        cores, source = os.cpu_count() or 1, "os.cpu_count"
    quota = _cgroup_quota()
    if quota is not None and quota < cores:
        return max(1, math.ceil(quota)), "cgroup quota"
    return cores, source


def _cgroup_quota() -> float | None:
    """CPUs' worth of time that the process's control groups grant: the least of each group and those above it.

    None without a limit. systemd, Slurm and the kubelet set limits on groups far below the root.
    """
    limits = []
    for line in [
        "0::/",
        ":cpu:/",
        *_read(PROCESS_CGROUPS).splitlines(),
    ]:  # a container's own root shows its limit
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            limits += [
                _read(group / "cpu.max").split()
                for root in CGROUP_V2
                for group in _group_and_above(root, path)
            ]
        elif "cpu" in controllers.split(","):
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            limits += [
                [_read(group / file).strip() for file in files]
                for group in _group_and_above(CGROUP_V1, path)
            ]
    return min((quota for words in limits if (quota := _cores_of(words)) is not None), default=None)


def _group_and_above(root: pathlib.Path, path: str) -> list[pathlib.Path]:
    """Folders of a control group and of all groups that contain it, up to the root."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _cores_of(words: list[str]) -> float | None:
    """Quota / period, both in microseconds; None for "max", -1, or no such file."""
    try:
        quota, period = map(int, words[:2])
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def vector_bits(cpuinfo: str) -> tuple[int, str]:
    """(bits of the widest vectors, the flag that says so)."""
    flags = cpu_flags(cpuinfo)
    return next(
        ((bits, f"flag {flag} in {CPUINFO}") for flag, bits in VECTOR_BITS if flag in flags),
        (128, "assumed"),
    )


def cache_figures() -> dict[str, int]:
    """Fields of CpuMachine about caches, as far as the system tells them: sizes, and the ways of the first."""
    figures = {}
    for folder in sorted(CACHES.glob("index*")):
        level, kind, size, ways = (
            _read(folder / name).strip()
            for name in ("level", "type", "size", "ways_of_associativity")
        )
        number = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind in ("Data", "Unified") and level in ("1", "2", "3") and number:
            figures[f"l{level}_bytes"] = (
                int(number[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[number[2]]
            )
            if level == "1" and ways.isdecimal() and int(ways):
                figures["l1_ways"] = int(ways)
    return figures


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
