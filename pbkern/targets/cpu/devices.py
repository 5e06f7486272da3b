"""CPUs by name, which libraries can be made for: triple, instruction sets, and a CpuMachine with its figures.

    "native"  "x86-64-v3"  "znver4"  "neoverse-n1"  "apple-m1"  "neoverse-n1/macos"

Code uses the instruction sets that a Device names and no others, so that what a library asks a
processor for before it runs (`needs`) is just what it uses. LLVM's own list for a processor would
also hold what this compiler never uses.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import platform
from dataclasses import dataclass

from pbkern.core.errors import OptionError
from pbkern.core.options import nearest
from pbkern.targets.host.processor import cpu_flags, cpuinfo, may_use_tiles

from .machine import CpuMachine, detected_machine, instruction_sets, scaled_machine

NATIVE = "native"
SYSTEMS = ("linux", "macos")
# LLVM's names of instruction sets: what the levels of x86-64 consist of (System V ABI, AMD64
# supplement, 3.1.1), as far as code can tell: older ones are part of each.
V3 = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = {"x86-64-v3": V3, "x86-64-v4": V4}
# Those that code for AArch64 may use beside NEON, which every processor has.
ARM = ("lse", "fullfp16", "dotprod")
# Further ones that code may use, with their names in /proc/cpuinfo where those differ.
FURTHER = (
    "avx512ifma",
    "avx512vbmi",
    "avx512vbmi2",
    "avx512vnni",
    "avx512bitalg",
    "avx512vpopcntdq",
    "avx512bf16",
    "avx512fp16",
    "gfni",
    "avxvnni",
    "amx-tile",
    "amx-bf16",
    "amx-int8",
)
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
ICELAKE = FURTHER[:6]


@dataclass(frozen=True)
class CpuDevice:
    """Processor that a library is made for.

    Attributes:
      name: as the option `device` says it, without the system.
      system: "linux" or "macos".
      triple: LLVM's. cpu: LLVM's processor with none but the instruction sets of a level. tune: the
        one to schedule for.
      needs: instruction sets that a processor must have. features: those of them that LLVM's `cpu`
        does not have.
      machine: figures for the cost model and schedules.
    """

    name: str
    system: str
    triple: str
    cpu: str
    tune: str
    needs: tuple[str, ...]
    machine: CpuMachine

    @property
    def is_x86(self) -> bool:
        return self.triple.startswith("x86_64")

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(need for need in self.needs if need not in LEVELS.get(self.cpu, ()))

    @property
    def asked(self) -> tuple[str, ...]:
        """Instruction sets that a library asks for first: on macOS, every Arm processor has what these devices need."""
        return () if self.system == "macos" and not self.is_x86 else self.needs

    @property
    def is_here(self) -> bool:
        """Whether this computer's system and kind of processor can load the library."""
        here = f"{platform.machine()}-unknown-{platform.system().lower()}"
        return self.triple.startswith(here)


@dataclass(frozen=True)
class _Figures:
    """cores, l1, l2, l3 in KB of one processor of a kind, and where they are from."""

    cores: int
    l1: int
    l2: int
    l3: int
    source: str


_HASWELL = "Intel 64 and IA-32 Architectures Optimization Reference Manual, Haswell to Broadwell, a desktop part"
_INTEL = "Intel 64 and IA-32 Architectures Optimization Reference Manual"
_AMD = "AMD Software Optimization Guide of the family"
_ANY = "assumed, a common size of processors of this level"
# LLVM's name -> (level, further instruction sets, figures).
_X86: dict[str, tuple[str, tuple[str, ...], _Figures]] = {
    "x86-64-v3": ("x86-64-v3", (), _Figures(8, 32, 512, 16 << 10, _ANY)),
    "x86-64-v4": ("x86-64-v4", (), _Figures(8, 32, 1024, 32 << 10, _ANY)),
    "haswell": ("x86-64-v3", (), _Figures(4, 32, 256, 8 << 10, _HASWELL)),
    "broadwell": ("x86-64-v3", (), _Figures(4, 32, 256, 8 << 10, _HASWELL)),
    "skylake": ("x86-64-v3", (), _Figures(4, 32, 256, 8 << 10, _INTEL)),
    "alderlake": ("x86-64-v3", ("gfni", "avxvnni"), _Figures(8, 48, 1280, 30 << 10, _INTEL)),
    "raptorlake": ("x86-64-v3", ("gfni", "avxvnni"), _Figures(8, 48, 2048, 36 << 10, _INTEL)),
    "meteorlake": ("x86-64-v3", ("gfni", "avxvnni"), _Figures(6, 48, 2048, 24 << 10, _INTEL)),
    "znver1": ("x86-64-v3", (), _Figures(8, 32, 512, 16 << 10, _AMD)),
    "znver2": ("x86-64-v3", (), _Figures(8, 32, 512, 32 << 10, _AMD)),
    "znver3": ("x86-64-v3", (), _Figures(8, 32, 512, 32 << 10, _AMD)),
    "skylake-avx512": ("x86-64-v4", (), _Figures(16, 32, 1024, 22 << 10, _INTEL)),
    "cascadelake": ("x86-64-v4", ("avx512vnni",), _Figures(16, 32, 1024, 22 << 10, _INTEL)),
    "cooperlake": (
        "x86-64-v4",
        ("avx512vnni", "avx512bf16"),
        _Figures(16, 32, 1024, 22 << 10, _INTEL),
    ),
    "icelake-server": ("x86-64-v4", (*ICELAKE, "gfni"), _Figures(16, 48, 1280, 24 << 10, _INTEL)),
    "tigerlake": ("x86-64-v4", (*ICELAKE, "gfni"), _Figures(4, 48, 1280, 12 << 10, _INTEL)),
    "rocketlake": ("x86-64-v4", (*ICELAKE, "gfni"), _Figures(8, 48, 512, 16 << 10, _INTEL)),
    "sapphirerapids": ("x86-64-v4", FURTHER, _Figures(16, 48, 2048, 30 << 10, _INTEL)),
    "emeraldrapids": ("x86-64-v4", FURTHER, _Figures(16, 48, 2048, 80 << 10, _INTEL)),
    "graniterapids": ("x86-64-v4", FURTHER, _Figures(32, 48, 2048, 128 << 10, _INTEL)),
    "znver4": (
        "x86-64-v4",
        (*ICELAKE, "avx512bf16", "gfni"),
        _Figures(8, 32, 1024, 32 << 10, _AMD),
    ),
    "znver5": (
        "x86-64-v4",
        (*ICELAKE, "avx512bf16", "gfni", "avxvnni"),
        _Figures(8, 48, 1024, 32 << 10, _AMD),
    ),
}
# Those without multiply-adds, for which LLVM calls `fmaf` for each lane.
_WITHOUT_FMA = (
    "x86-64",
    "x86-64-v2",
    "nocona",
    "core2",
    "penryn",
    "nehalem",
    "westmere",
    "sandybridge",
    "ivybridge",
    "btver1",
    "btver2",
    "silvermont",
    "goldmont",
    "tremont",
)
_ARM = "Arm's technical reference manual of the core; one vendor's machine"
# name -> (system where none is named, instruction sets beside NEON, figures).
_AARCH64: dict[str, tuple[str, tuple[str, ...], _Figures]] = {
    "neoverse-n1": (
        "linux",
        ("lse", "fullfp16", "dotprod"),
        _Figures(16, 64, 1024, 32 << 10, f"{_ARM}: Graviton2, 16 of 64"),
    ),
    "neoverse-v1": (
        "linux",
        ("lse", "fullfp16", "dotprod"),
        _Figures(16, 64, 1024, 32 << 10, f"{_ARM}: Graviton3, 16 of 64"),
    ),
    "neoverse-v2": (
        "linux",
        ("lse", "fullfp16", "dotprod"),
        _Figures(16, 64, 2048, 36 << 10, f"{_ARM}: Graviton4, 16 of 96"),
    ),
    "cortex-a72": (
        "linux",
        (),
        _Figures(4, 32, 256, 1 << 10, f"{_ARM}: Raspberry Pi 4, whose four cores share 1 MB"),
    ),
    "cortex-a76": (
        "linux",
        ("lse", "fullfp16", "dotprod"),
        _Figures(4, 64, 512, 2 << 10, f"{_ARM}: Raspberry Pi 5"),
    ),
    "apple-m1": (
        "macos",
        ("lse", "fullfp16", "dotprod"),
        _Figures(
            4, 128, 3072, 8 << 10, "Apple M1: four fast cores, which share 12 MB; system cache 8 MB"
        ),
    ),
}


def names() -> list[str]:
    """Every name that `device_of` knows."""
    return [NATIVE, *_X86, *_AARCH64]


@functools.cache
def device_of(given: str) -> CpuDevice:
    """The device of a name, with an operating system after a slash where it is another.

    Raises OptionError.
    """
    name, _, system = given.strip().partition("/")
    if "/" in given and system not in SYSTEMS:
        raise OptionError(
            f"libraries are not made for `{system}`",
            why=f"device={given!r}",
            hint=f"one of {', '.join(f'{name}/{option}' for option in SYSTEMS)}",
        )
    if name == NATIVE:
        return _native(system or "linux")
    if name in _X86:
        return _x86(name, system or "linux")
    if name in _AARCH64:
        return _aarch64(name, system)
    if name in _WITHOUT_FMA:
        raise OptionError(
            f"no libraries are made for `{name}`",
            why="it has no multiply-adds: each would be a call",
            hint="x86-64-v3, which processors since 2013 (Intel) and 2015 (AMD) have",
        )
    raise OptionError(
        f"there is no device `{name}`",
        why=f"devices are {', '.join(names())}",
        hint=nearest(name, names()),
    )


def devices_of(given: str | None) -> tuple[CpuDevice, ...]:
    """The devices of one library, the most demanding first: names with commas between them.

    Raises OptionError.
    """
    devices = [device_of(name) for name in (given or NATIVE).split(",")]
    first = devices[0]
    for device in devices[1:]:
        if (device.is_x86, device.system) != (first.is_x86, first.system):
            raise OptionError(
                "one library is for one kind of processor and one system",
                why=f"{first.name}: {first.triple}, {device.name}: {device.triple}",
                hint="make two libraries",
            )
    ordered = sorted(devices, key=lambda target: len(target.needs), reverse=True)
    if len({processor.needs for processor in ordered}) < len(ordered):
        alike = next(
            (left.name, right.name)
            for left, right in itertools.pairwise(ordered)
            if left.needs == right.needs
        )
        raise OptionError(
            "two devices of a library need the same instruction sets",
            why=" and ".join(alike),
            hint="leave one of them out: no processor would take it",
        )
    return tuple(ordered)


def _native(system: str) -> CpuDevice:
    """The processor at hand; a library asks for all that it uses of it."""
    flags = cpu_flags(cpuinfo())
    if platform.machine() == "aarch64":
        needs = tuple(need for need in ARM if FLAGS[need] in flags)
        return _aarch64_device(NATIVE, system, _host_name("generic"), needs, detected_machine())
    has = {flag for flag in (*V4, *FURTHER) if FLAGS.get(flag, flag) in flags}
    if not may_use_tiles():
        has = {flag for flag in has if not flag.startswith("amx")}
    level = next(
        (name for name in ("x86-64-v4", "x86-64-v3") if has.issuperset(LEVELS[name])), None
    )
    if level is None:
        raise OptionError(
            "no libraries are made for this computer's processor",
            why=f"it lacks {', '.join(flag for flag in V3 if flag not in has)}",
            hint=f"a device by name: {', '.join(names()[1:])}",
        )
    further = tuple(
        flag
        for flag in FURTHER
        if flag in has and (level == "x86-64-v4" or not flag.startswith(("avx512", "amx")))
    )
    needs, machine = (*LEVELS[level], *further), detected_machine()
    if (
        level == "x86-64-v3"
    ):  # with AVX-512 it may have some, as Knights Landing: libraries use that of x86-64-v4 or none
        bits = min(machine.vector_bits, 256)
        machine = dataclasses.replace(machine, vector_bits=bits, **instruction_sets((), bits))
    return CpuDevice(
        NATIVE, system, _triple("x86_64", system), level, _host_name(level), needs, machine
    )


def _host_name(level: str) -> str:
    """LLVM's name of the processor at hand, to schedule for; without llvmlite, which makes no libraries, that of its level."""
    try:
        return importlib.import_module("llvmlite.binding").get_host_cpu_name()
    except ImportError:
        return level


def _x86(name: str, system: str) -> CpuDevice:
    level, further, figures = _X86[name]
    if system != "linux":  # which alone hands out tile registers
        further = tuple(need for need in further if not need.startswith("amx"))
    needs, bits = (*LEVELS[level], *further), 512 if level == "x86-64-v4" else 256
    flags = [FLAGS.get(need, need) for need in needs]
    sets = instruction_sets(flags, bits, pairs_are_fast=name.startswith("znver"))
    machine = _machine(name, figures, bits, **sets)
    return CpuDevice(name, system, _triple("x86_64", system), level, name, needs, machine)


def _aarch64(name: str, system: str) -> CpuDevice:
    usual, needs, figures = _AARCH64[name]
    system = system or usual
    machine = _machine(name, figures, 128, **instruction_sets(("asimd",), 128))
    return _aarch64_device(name, system, name, needs, machine)


def _aarch64_device(
    name: str, system: str, tune: str, needs: tuple[str, ...], machine: CpuMachine
) -> CpuDevice:
    return CpuDevice(name, system, _triple("aarch64", system), "generic", tune, needs, machine)


def _machine(name: str, figures: _Figures, bits: int, **fields) -> CpuMachine:
    return scaled_machine(
        figures.cores,
        bits,
        name=name,
        l1_bytes=figures.l1 << 10,
        l2_bytes=figures.l2 << 10,
        l3_bytes=figures.l3 << 10,
        source=f"cores and caches: {figures.source}; rates scaled by cores and vector width",
        **fields,
    )


def _triple(architecture: str, system: str) -> str:
    return f"{'arm64' if architecture == 'aarch64' and system == 'macos' else architecture}-" + (
        "unknown-linux-gnu" if system == "linux" else "apple-macosx11.0.0"
    )
