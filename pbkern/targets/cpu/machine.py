"""This computer's CPU -> CpuMachine: cores, vector width and caches as the system reports them, with their sources.

Bandwidths and peaks are scaled from figures measured on one machine: relative prices are what
fusion needs of them.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pbkern.core.machine import DEFAULT_MACHINE, Machine
from pbkern.targets.host.processor import CPUINFO, cpu_flags, cpuinfo, may_use_tiles

CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
# Control groups of this process, a line each: number:controllers:path (man 7 cgroups). Version 2's
# names no controllers.
PROCESS_CGROUPS = pathlib.Path("/proc/self/cgroup")
# Where version 2 is mounted: alone, or beside version 1.
CGROUP_V2 = (pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/sys/fs/cgroup/unified"))
CGROUP_V1 = pathlib.Path("/sys/fs/cgroup/cpu")
# Elements by which copied rows are longer, so that they do not fall into one cache set. Source: not
# recorded.
ROW_PADDING = 16
# Rows of an operand that are read side by side: by a sum over rows, and by products of few rows
# with a far operand. Source: not recorded.
ROWS_AT_ONCE = 8
# Arrays of this size and more do not fit the caches of one core.
FAR_BYTES = 2 << 20
# The widest vectors of each instruction set extension, widest first.
VECTOR_BITS = (("avx512f", 512), ("avx2", 256), ("avx", 256), ("asimd", 128))


# Vector registers of NEON that schedules fill: 32 (Arm's Architecture Reference Manual, A1.4), of which four hold
# operands that x86-64's instructions read from memory. With all 32, LLVM copies sums of a product of 300 x 300 from register
# to register: 3.7 instructions per multiply-add, 1.7 with 28.
NEON_REGISTERS = 28


@dataclass(frozen=True, slots=True)
class Vectors:
    """Registers that hold vectors.

    Attributes:
      bits: width of one. registers: their number, by default that of AVX-512.
    """

    bits: int = 512
    registers: int = 32


# Those of AVX-512.
WIDE_VECTORS = Vectors()


@dataclass(frozen=True)
class CpuMachine(Machine):
    """A CPU.

    Attributes:
      registers: vector registers. x86-64 has 16, with AVX-512 32 (Intel's manual volume 1, 15.1);
        NEON_REGISTERS.
      avx512: has AVX-512F and AVX512-DQ, whose instructions targets/cpu/math/avx512.py asks for by
        name.
      bf16_pairs: multiplies pairs of bfloat16 (AVX512-BF16, with the shorter vectors of AVX512-VL)
        faster than float32.
      vnni: multiplies words of narrow integers (AVX512-VNNI, with the shorter vectors of
        AVX512-VL).
      amx_bf16, amx_int8: multiplies tiles of bfloat16, and of bytes (AMX), and the system lets this
        process use their registers.
      stores_past_caches: whether large results may be written past the caches.
    """

    registers: int = 32
    avx512: bool = False
    bf16_pairs: bool = False
    vnni: bool = False
    amx_bf16: bool = False
    amx_int8: bool = False
    stores_past_caches: bool = True


# Multiply-adds of one core by tiles, counted as two, per second, packing of operands included. Source: matmuls of 1,024 on a
# Xeon (Granite Rapids), 25 November 2026; products alone run 2.2 to 2.9 times as fast.
TILE_FLOPS: Mapping[str, float] = {"bfloat16": 1.3e12, "int8": 2.5e12}


def scaled_machine(cores: int, bits: int, share_of_peak: float = 1.0, **figures: Any) -> CpuMachine:
    """DEFAULT_MACHINE's rates at another number of cores and width of vectors; other figures as given.

    Tiles have rates of their own.
    """
    share = cores / DEFAULT_MACHINE.cores
    width = share_of_peak * bits / DEFAULT_MACHINE.vector_bits
    peaks = {k: flop * share * width for k, flop in DEFAULT_MACHINE.peak_flops.items()}
    if not figures.get("bf16_pairs"):  # they are converted to float32
        peaks["bfloat16"] = peaks["float32"]
    tiles = {"bfloat16": figures.get("amx_bf16"), "int8": figures.get("amx_int8")}
    return CpuMachine(
        cores=cores,
        vector_bits=bits,
        l2_bandwidth=DEFAULT_MACHINE.l2_bandwidth * share,
        l3_bandwidth=DEFAULT_MACHINE.l3_bandwidth * share,
        peak_flops=peaks,
        tile_flops={name: TILE_FLOPS[name] * cores for name, has in tiles.items() if has},
        **figures,
    )


# Most bytes of the last cache that count for one usable core: virtual machines report the whole cache
# of their host. Source: a softmax of 4096 x 4096 on two cores of a Xeon that reports 480 MB, 25 November
# 2026: 6.2 to 7.8 ms with this bound, 10.9 without.
L3_BYTES_PER_CORE = 32 << 20


@functools.cache
def detected_machine() -> CpuMachine:
    """The machine this process runs on. What cannot be read keeps DEFAULT_MACHINE's value.

    Examples:
      >>> machine = pbkern.cpu.machine()
      >>> machine.cores >= 1 and machine.vector_bits >= 128  # sizes are bytes, bandwidths bytes per second
      True
    """
    cores, cores_from = usable_cores()
    info = cpuinfo()
    bits, bits_from = vector_bits(info)
    caches, flags = cache_bytes(), cpu_flags(info)
    if "l3" in caches:
        caches["l3"] = min(caches["l3"], L3_BYTES_PER_CORE * cores)
    model = re.search(r"^(?:model name|CPU part)\s*: (.*)", info, re.MULTILINE)
    rate, rate_from = executed_share(info, bits)
    if "amx_tile" in flags and not may_use_tiles():
        flags = {flag for flag in flags if not flag.startswith("amx")}
    return scaled_machine(
        cores,
        bits,
        rate,
        source=f"{model[1] if model else 'unknown CPU'}; cores: {cores_from}; vectors: {bits_from}; "
        f"caches: {CACHES if caches else 'assumed'}; "
        f"rates scaled by cores and vector width{rate_from} from: {DEFAULT_MACHINE.source}",
        **instruction_sets(flags, bits, pairs_are_fast="GenuineIntel" not in info),
        **{f"{level}_bytes": size for level, size in caches.items()},
    )


def instruction_sets(
    flags: Collection[str], bits: int, pairs_are_fast: bool = True
) -> dict[str, Any]:
    """Fields of CpuMachine by flags of /proc/cpuinfo.

    `pairs_are_fast`: not so on Intel's cores, which start vdpbf16ps every other cycle: half the rate of float32. Source:
    118 and 241 GFLOP/s on a Xeon (Granite Rapids), 25 November 2026; uops.info, VDPBF16PS.
    """
    flags = set(flags)
    return {
        "registers": NEON_REGISTERS if "asimd" in flags else 16 if bits < 512 else 32,
        "stores_past_caches": "asimd" not in flags,
        "avx512": {"avx512f", "avx512dq"} <= flags,
        "bf16_pairs": pairs_are_fast and {"avx512_bf16", "avx512vl"} <= flags,
        "vnni": {"avx512_vnni", "avx512vl"} <= flags,
        "amx_bf16": {"amx_tile", "amx_bf16"} <= flags,
        "amx_int8": {"amx_tile", "amx_int8"} <= flags,
    }


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


def executed_share(cpuinfo: str, bits: int) -> tuple[float, str]:
    """(peak at this width as a share of DEFAULT_MACHINE's, why, for `source`; "" where it is the same).

    AMD's Zen 4 (family 25, as Zen 3, which has no AVX-512) executes a 512-bit operation as two
    halves of 256 bits: `python -m benchmarks.peaks` measures 118 GFLOP/s of float32 multiply-adds
    per core with either width, at 3.7 GHz, where Zen 5 reaches twice that. One 512-bit operation
    per cycle is what `clock_hz` stands for: that stays.
    """
    vendor, family = (
        re.search(rf"^{name}\s*: (.*)$", cpuinfo, re.MULTILINE)
        for name in ("vendor_id", "cpu family")
    )
    if bits == 512 and vendor and family and (vendor[1], family[1]) == ("AuthenticAMD", "25"):
        return (
            0.5,
            f", peaks halved (AMD family 25 in {CPUINFO}: 512-bit operations execute as two halves),",
        )
    return 1.0, ""


def cache_bytes() -> dict[str, int]:
    """{"l1": data cache of a core, "l2": of a core, "l3": shared}, as far as the system tells."""
    sizes = {}
    for folder in sorted(CACHES.glob("index*")):
        level, kind, size = (_read(folder / name).strip() for name in ("level", "type", "size"))
        number = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind in ("Data", "Unified") and level in ("1", "2", "3") and number:
            sizes[f"l{level}"] = int(number[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[number[2]]
    return sizes


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
