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
from collections.abc import Collection
from typing import Any

from pbkern.core import config
from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.options import nearest
from pbkern.targets import mlir
from pbkern.targets.host.processor import cpu_flags, cpuinfo, may_use_tiles

from .cores import AARCH64, ANY_V3, ARM_SETS, FURTHER, LEVELS, V3, X86, Processor
from .detect import FLAGS, detected_machine, detected_name, present, usable_cores
from .machine import CpuMachine, instruction_sets, machine_of

NATIVE = "native"
SYSTEMS = ("linux", "macos")
# An instruction set of AMD's processors, as Linux names it.
SSE4A = "sse4a"
# Prefetches of lines that are stored to: LLVM's name and Linux's.
PREFETCHES_OF_STORES = ("prfchw", "3dnowprefetch")


@dataclass(frozen=True)
class CpuDevice:
    """Processor that a library is made for.

    Attributes:
      name: as the option `device` says it, without the system.
      system: "linux" or "macos".
      triple: LLVM's. cpu: LLVM's processor with none but the instruction sets of a level. tune: the
        one to schedule for.
      needs: instruction sets that a processor must have.
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
    def processor(self) -> mlir.Processor:
        return self.cpu, self.tune, self.needs

    @property
    def asked(self) -> tuple[str, ...]:
        """Instruction sets that a library asks for first: on macOS, every Arm processor has what these devices need."""
        return () if self.system == "macos" and not self.is_x86 else self.needs

    @property
    def is_here(self) -> bool:
        """Whether this computer's system and kind of processor can load the library."""
        here = f"{platform.machine()}-unknown-{platform.system().lower()}"
        return self.triple.startswith(here)


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


def names() -> list[str]:
    """Every name that `device_of` knows."""
    return [NATIVE, *X86, *AARCH64]


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
    if name in X86:
        return _x86(name, system or "linux")
    if name in AARCH64:
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


def jit_device() -> CpuDevice | None:
    """The device of PBKERN_MACHINE, whose code is compiled just in time; None: the processor at hand.

    Raises OptionError where this processor lacks an instruction set of it.
    """
    name = config.current().machine
    return None if name in (None, NATIVE) else _runnable(str(name))


@functools.cache
def _runnable(name: str) -> CpuDevice:
    """The device of a name, with the cores of this process."""
    device, has = device_of(name), _present()
    lacking = [need for need in device.needs if need not in has]
    if lacking or not device.is_here:
        what = f"lacks {', '.join(lacking)}" if device.is_here else f"is not for {device.triple}"
        devices = map(device_of, (*X86, *AARCH64))
        fitting = [fit.name for fit in devices if fit.is_here and has.issuperset(fit.needs)]
        raise OptionError(
            f"this computer cannot run code for `{name}`",
            why=f"PBKERN_MACHINE={name}; it {what}",
            hint=f"it can run code for {', '.join(fitting)}" if fitting else None,
        )
    make = _x86 if device.is_x86 else _aarch64
    return make(name, device.system, usable_cores()[0])


def jit_processor() -> mlir.Processor | None:
    """LLVM's names of what code consists of that is compiled just in time; None: all that it finds here.

    A processor with SSE4A gets the instruction sets of its level, without that one. LLVM shuffles bytes by `insertq`, whose
    encoding leaves the upper half of its register as it is: on Zen 3 it takes 114 ns, and not 2, while any register's upper
    half is in use.
    """
    device = jit_device()
    return _processor_at_hand() if device is None else device.processor


@functools.cache
def _processor_at_hand() -> mlir.Processor | None:
    flags, has = cpu_flags(cpuinfo()), _present()
    level = _level(has) if SSE4A in flags else None
    if level is None:
        return None
    stores = (PREFETCHES_OF_STORES[0],) if PREFETCHES_OF_STORES[1] in flags else ()
    return level, detected_name() or level, (*_sets(level, has), *stores)


def jit_machine() -> CpuMachine:
    """The CPU that code is compiled for just in time: the one this process runs on, or that of PBKERN_MACHINE.

    What cannot be read keeps DEFAULT_MACHINE's value. Raises OptionError for a machine that does not run here.

    Examples:
      >>> machine = pbkern.cpu.machine()
      >>> machine.cores >= 1 and machine.vector_bits >= 128  # sizes are bytes, bandwidths bytes per second
      True
    """
    device = jit_device()
    return detected_machine() if device is None else device.machine


def _present() -> set[str]:
    """LLVM's names of the instruction sets that the processor at hand has and this process may use."""
    tiles = may_use_tiles()
    return {name for name in present(cpu_flags(cpuinfo())) if tiles or not name.startswith("amx")}


def _native(system: str) -> CpuDevice:
    """The processor at hand; a library asks for all that it uses of it."""
    has = _present()
    if platform.machine() == "aarch64":
        needs = tuple(need for need in ARM_SETS if need in has)
        return _aarch64_device(NATIVE, system, _host_name("generic"), needs, detected_machine())
    level = _level(has)
    if level is None:
        raise OptionError(
            "no libraries are made for this computer's processor",
            why=f"it lacks {', '.join(flag for flag in V3 if flag not in has)}",
            hint=f"a device by name: {', '.join(names()[1:])}",
        )
    needs, machine = _sets(level, has), detected_machine()
    if (
        level == "x86-64-v3"
    ):  # with AVX-512 it may have some, as Knights Landing: libraries use that of x86-64-v4 or none
        bits = min(machine.vector_bits, 256)
        sets = instruction_sets(V3, bits, ANY_V3)
        machine = dataclasses.replace(machine, vector_bits=bits, **sets)
    return CpuDevice(
        NATIVE, system, _triple("x86_64", system), level, _host_name(level), needs, machine
    )


def _level(has: Collection[str]) -> str | None:
    """The highest level whose instruction sets a processor has."""
    return next((name for name in reversed(LEVELS) if set(has).issuperset(LEVELS[name])), None)


def _sets(level: str, has: Collection[str]) -> tuple[str, ...]:
    """Instruction sets that code for a processor of a level may use."""
    is_wide = level == "x86-64-v4"
    further = (flag for flag in FURTHER if is_wide or not flag.startswith(("avx512", "amx")))
    return (*LEVELS[level], *(flag for flag in further if flag in has))


def _host_name(level: str) -> str:
    """LLVM's name of the processor at hand, to schedule for; without llvmlite, which makes no libraries, that of its level."""
    try:
        return importlib.import_module("llvmlite.binding").get_host_cpu_name()
    except ImportError:
        return level


def _x86(name: str, system: str, cores: int | None = None) -> CpuDevice:
    row = X86[name]
    further = row.further
    if system != "linux":  # which alone hands out tile registers
        further = tuple(need for need in further if not need.startswith("amx"))
    needs = (*LEVELS[row.level], *further)
    flags = [FLAGS.get(need, need) for need in needs]
    machine = machine_of(name, row, flags, source=_source(row), **_of_process(name, cores))
    return CpuDevice(name, system, _triple("x86_64", system), row.level, name, needs, machine)


def _of_process(name: str, cores: int | None) -> dict[str, Any]:
    """Fields of a machine on which the process at hand runs, with so many cores; None: it does not."""
    if cores is None:
        return {}
    return {
        "cores": cores,
        "sources": {"cores": "this process"},
        "note": f"PBKERN_MACHINE={name}",
    }


def _aarch64(name: str, system: str, cores: int | None = None) -> CpuDevice:
    row = AARCH64[name]
    system = system or ("macos" if name.startswith("apple") else "linux")
    known = _of_process(name, cores)
    machine = machine_of(name, row, ("asimd",), source=_source(row), **known)
    return _aarch64_device(name, system, name, row.further, machine)


def _aarch64_device(
    name: str, system: str, tune: str, needs: tuple[str, ...], machine: CpuMachine
) -> CpuDevice:
    return CpuDevice(name, system, _triple("aarch64", system), "generic", tune, needs, machine)


def _source(row: Processor) -> str:
    return f"cores and caches: {row.source}; rates: {row.kind.source}"


def _triple(architecture: str, system: str) -> str:
    return f"{'arm64' if architecture == 'aarch64' and system == 'macos' else architecture}-" + (
        "unknown-linux-gnu" if system == "linux" else "apple-macosx11.0.0"
    )
