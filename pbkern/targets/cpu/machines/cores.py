"""The table of CPUs: what cores of a kind compute in a cycle, and processors that have them.

Sources, by the words that rows use. "LLVM": scheduling models of LLVM, X86Sched*.td, resource cycles of WriteFDivY or Z,
WriteFSqrtY or Z, WriteFShuffleZ. "Agner": Agner Fog, Instruction tables, 2022. "Intel": Intel 64 and IA-32 Architectures
Optimization Reference Manual. "AMD": Software Optimization Guide of the family. "Arm": technical reference manual and software
optimization guide of the core. "measured": chains of twelve independent operations, as `python -m benchmarks.peaks` runs
them. "assumed": nobody has looked it up or measured it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field, replace

from pbkern.core.lazy_dataclass import dataclass

# LLVM's names of instruction sets: what the levels of x86-64 consist of (System V ABI, AMD64
# supplement, 3.1.1), as far as code can tell: older ones are part of each.
V3 = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = {"x86-64-v3": V3, "x86-64-v4": V4}
# Bits of the vectors of a level; "generic" is LLVM's name of AArch64 with NEON.
LEVEL_BITS = {"x86-64-v3": 256, "x86-64-v4": 512, "generic": 128}
# Further ones that code may use.
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
ICELAKE = FURTHER[:6]
# Classes of bandwidths of one core, GB/s: a figure is one of a few, so that plans do not depend on
# the hour of a measurement. Second caches are 100 or 200.
L3_CLASSES = (25, 50, 100)
DRAM_CLASSES = (10, 20, 40)
# Most GB/s of a processor with two channels to its memory. Source: assumed.
CLIENT_MEMORY = 50
# Most GB/s of a processor with eight or more. Source: assumed.
SERVER_MEMORY = 200


@dataclass(frozen=True)
class CoreKind:
    """Cores of one design: what they begin in a cycle, with the widest vectors that code has for them.

    Attributes:
      l1_ways: lines of one set of the first data cache.
      multiply_add_bits: bits of vectors of multiply-adds that begin in a cycle: vectors of 512 bits in
        halves count as they are executed.
      divide_cycles, root_cycles: between two divisions, two square roots, of vectors of float32.
      shift_cycles: of shifting the lanes of two vectors into one.
      crossing_accesses: accesses of the cache by a load that is not aligned and may cross two lines.
      gathers_by_lanes: whether sixteen loads of one element each take less time than an instruction that gathers.
      followed_row_bytes: bytes of the shortest row of which prefetchers follow several side by side better than code asks for
        the next ones; 0: code always asks.
      l2_class: GB/s of the second cache to one core.
      pair_share: rate of multiply-adds of pairs of bfloat16 (vdpbf16ps), as a share of float32's.
      tile_flops: multiply-adds by tiles, counted as two, per second, packing of operands included.
      source: of all figures but those of `sources`.
      sources: figure -> source.
    """

    l1_ways: int
    multiply_add_bits: int
    divide_cycles: float
    root_cycles: float
    shift_cycles: float
    crossing_accesses: float
    source: str
    sources: Mapping[str, str] = field(default_factory=dict)
    gathers_by_lanes: bool = False
    followed_row_bytes: int = 0
    l2_class: int = 100
    pair_share: float = 0.0
    tile_flops: Mapping[str, float] = field(default_factory=dict)


_ZEN3_MEASURED = "measured on Zen 3, 26 November 2026"
_ZEN4_MEASURED = "measured on Zen 4, 27 November 2026"
_ZEN5_MEASURED = "measured on Zen 5, 25 November 2026"
_XEON_MEASURED = "measured on Granite Rapids, 25 November 2026"
_LIKE_XEON = "assumed, as Granite Rapids"
_ASSUMED = "assumed"

HASWELL = CoreKind(
    l1_ways=8,
    multiply_add_bits=512,
    divide_cycles=14,
    root_cycles=14,
    shift_cycles=2,
    crossing_accesses=2,
    source="Agner",
    sources={"l1_ways": "Intel", "l2_class": "Intel", "crossing_accesses": _LIKE_XEON},
)
BROADWELL = replace(HASWELL, divide_cycles=10)
SKYLAKE = replace(
    HASWELL, divide_cycles=5, root_cycles=6, source="LLVM, SkylakeServer, vectors of 256 bits"
)
SKYLAKE_X = CoreKind(
    l1_ways=8,
    multiply_add_bits=1024,
    divide_cycles=10,
    root_cycles=12,
    shift_cycles=1,
    crossing_accesses=2,
    source="LLVM, SkylakeServer",
    sources={
        "l1_ways": "Intel",
        "l2_class": _LIKE_XEON,
        "crossing_accesses": _LIKE_XEON,
        "pair_share": _LIKE_XEON,
    },
    l2_class=200,
    pair_share=0.5,
)
ICE_LAKE_SERVER = replace(SKYLAKE_X, l1_ways=12, source="LLVM, IceLake")
# Clients begin one multiply-add of 512 bits in a cycle, servers two.
ICE_LAKE_CLIENT = replace(
    ICE_LAKE_SERVER,
    multiply_add_bits=512,
    sources={**SKYLAKE_X.sources, "multiply_add_bits": "Intel"},
)
GOLDEN_COVE_CLIENT = replace(
    SKYLAKE, l1_ways=12, shift_cycles=1, source=_ASSUMED, sources={"l1_ways": "Intel"}, l2_class=200
)
# Pairs begin every other cycle (uops.info says the same of vdpbf16ps). Tiles: matmuls of 1,024; products
# alone run 2.2 to 2.9 times as fast.
REDWOOD_COVE = CoreKind(
    l1_ways=12,
    multiply_add_bits=1024,
    divide_cycles=9.7,
    root_cycles=12,
    shift_cycles=0.96,
    crossing_accesses=2,
    source=_XEON_MEASURED,
    l2_class=200,
    pair_share=0.5,
    tile_flops={"bfloat16": 1.3e12, "int8": 2.5e12},
)
GOLDEN_COVE = replace(REDWOOD_COVE, source=_LIKE_XEON)
# Products of one row with 4096 x 4096, eight rows at a time, ms of one thread: parts of 16 KB 4.2, with prefetches 5.1; of 8 KB
# 1.3 and 1.8 (2048 x 2048); of 4 KB 6.3 and 6.4.
ZEN3 = CoreKind(
    l1_ways=8,
    multiply_add_bits=512,
    divide_cycles=3,
    root_cycles=5,
    shift_cycles=1,
    crossing_accesses=2,
    followed_row_bytes=8192,
    source=_ZEN3_MEASURED,
    sources={"l1_ways": "AMD"},
)
ZEN2 = replace(
    ZEN3, source="assumed, as Zen 3", sources={"l1_ways": "AMD", "multiply_add_bits": "AMD"}
)
# Vectors of 256 bits in halves.
ZEN1 = replace(
    ZEN2, multiply_add_bits=256, divide_cycles=6, root_cycles=10, shift_cycles=4, source=_ASSUMED
)
# Vectors of 512 bits in halves: 118 GFLOP/s of float32 multiply-adds with either width, at 3.7 GHz. A load across two lines
# takes 0.46 ns, one within a line 0.27: with 1 for the model, 50 steps of Jacobi take 20.6 ms, with 1.7 they take 8.5.
# Sixteen elements at computed places in L1 take 27 cycles by vgatherdps, 20 one by one.
ZEN4 = replace(
    ZEN3,
    divide_cycles=6,
    root_cycles=10,
    crossing_accesses=1.7,
    followed_row_bytes=0,  # not measured
    gathers_by_lanes=True,
    source=_ZEN4_MEASURED,
    sources={"l1_ways": "AMD"},
    pair_share=2.0,
)
ZEN5 = CoreKind(
    l1_ways=12,
    multiply_add_bits=1024,
    divide_cycles=5,
    root_cycles=5,
    shift_cycles=0.5,
    crossing_accesses=1,
    source=_ZEN5_MEASURED,
    sources={"l1_ways": "AMD"},
    l2_class=200,
    pair_share=2.0,
)
# Pipes of 128 bits: two.
NEOVERSE_N1 = CoreKind(
    l1_ways=4,
    multiply_add_bits=256,
    divide_cycles=4,
    root_cycles=4,
    shift_cycles=0.5,
    crossing_accesses=2,
    source=_ASSUMED,
    sources={"l1_ways": "Arm", "multiply_add_bits": "Arm"},
)
# Four.
NEOVERSE_V = replace(NEOVERSE_N1, multiply_add_bits=512)
CORTEX_A76 = NEOVERSE_N1
CORTEX_A72 = replace(NEOVERSE_N1, l1_ways=2, multiply_add_bits=128, sources={"l1_ways": "Arm"})
APPLE = replace(
    NEOVERSE_V, l1_ways=8, shift_cycles=0.25, crossing_accesses=1, sources={}, l2_class=200
)
ANY_V3 = replace(SKYLAKE, shift_cycles=1, source=_ASSUMED, sources={})
ANY_V4 = replace(SKYLAKE_X, source=_ASSUMED, sources={})
ANY_128 = replace(NEOVERSE_N1, l1_ways=8, sources={})


@dataclass(frozen=True)
class Processor:
    """One processor of a kind.

    Attributes:
      level: LLVM's processor with none but the instruction sets of a level. further: instruction
        sets beside it, LLVM's names.
      cores; l1, l2, l3: KB of a core's data cache, of its second cache, of the cache that cores
        share. source: of these.
      l3_class, dram_class: GB/s of one core. memory: GB/s of all cores at most.
      bandwidths: source of these three.
      vendor, family, models: as /proc/cpuinfo tells them. Source: Linux,
        arch/x86/include/asm/intel-family.h and arch/x86/kernel/cpu/amd.c.
    """

    level: str
    further: tuple[str, ...]
    kind: CoreKind
    cores: int
    l1: int
    l2: int
    l3: int
    source: str
    l3_class: int = 50
    dram_class: int = 20
    memory: int = CLIENT_MEMORY
    bandwidths: str = _ASSUMED
    vendor: str = ""
    family: int = 0
    models: Collection[int] = ()

    @property
    def bits(self) -> int:
        return LEVEL_BITS[self.level]


def _intel(
    level: str, kind: CoreKind, sizes: tuple[int, int, int, int], models: Collection[int], *further
) -> Processor:
    """A processor of a desktop."""
    return Processor(level, further, kind, *sizes, "Intel", vendor=INTEL, family=6, models=models)


def _xeon(
    kind: CoreKind, sizes: tuple[int, int, int, int], models: Collection[int], *further
) -> Processor:
    """A processor of a server, whose third cache is far from most cores."""
    return Processor(
        "x86-64-v4",
        further,
        kind,
        *sizes,
        "Intel",
        l3_class=25,
        memory=SERVER_MEMORY,
        bandwidths=_XEON_MEASURED if kind is REDWOOD_COVE else _LIKE_XEON,
        vendor=INTEL,
        family=6,
        models=models,
    )


def _zen(
    kind: CoreKind,
    sizes: tuple[int, int, int, int],
    family: int,
    models: Collection[int],
    *further,
    bandwidths: str = "assumed, as Zen 3 and Zen 5",
) -> Processor:
    """Eight cores around a cache, one part of a server's or desktop's processor."""
    level = "x86-64-v4" if further else "x86-64-v3"
    return Processor(
        level,
        further,
        kind,
        *sizes,
        "AMD",
        l3_class=100,
        memory=SERVER_MEMORY,
        bandwidths=bandwidths,
        vendor=AMD,
        family=family,
        models=models,
    )


def _arm(kind: CoreKind, sizes: tuple[int, int, int, int], source: str, **figures) -> Processor:
    return Processor("generic", ARM_SETS, kind, *sizes, source, **figures)


INTEL = "GenuineIntel"
AMD = "AuthenticAMD"
ARM_SETS = ("lse", "fullfp16", "dotprod")
CLIENT = ("gfni", "avxvnni")
_ANY = "assumed, a common size of processors of this level"
# LLVM's name -> processor. Sizes are cores and KB of the three caches.
X86: dict[str, Processor] = {
    "x86-64-v3": Processor("x86-64-v3", (), ANY_V3, 8, 32, 512, 16 << 10, _ANY),
    "x86-64-v4": Processor("x86-64-v4", (), ANY_V4, 8, 32, 1024, 32 << 10, _ANY),
    "haswell": _intel("x86-64-v3", HASWELL, (4, 32, 256, 8 << 10), (0x3C, 0x3F, 0x45, 0x46)),
    "broadwell": _intel("x86-64-v3", BROADWELL, (4, 32, 256, 8 << 10), (0x3D, 0x47, 0x4F, 0x56)),
    "skylake": _intel(
        "x86-64-v3", SKYLAKE, (4, 32, 256, 8 << 10), (0x4E, 0x5E, 0x8E, 0x9E, 0xA5, 0xA6)
    ),
    "alderlake": _intel(
        "x86-64-v3", GOLDEN_COVE_CLIENT, (8, 48, 1280, 30 << 10), (0x97, 0x9A), *CLIENT
    ),
    "raptorlake": _intel(
        "x86-64-v3", GOLDEN_COVE_CLIENT, (8, 48, 2048, 36 << 10), (0xB7, 0xBA, 0xBF), *CLIENT
    ),
    "meteorlake": _intel(
        "x86-64-v3", GOLDEN_COVE_CLIENT, (6, 48, 2048, 24 << 10), (0xAA, 0xAC), *CLIENT
    ),
    "znver1": _zen(ZEN1, (8, 32, 512, 16 << 10), 0x17, range(0x30)),
    "znver2": _zen(ZEN2, (8, 32, 512, 32 << 10), 0x17, range(0x30, 0xB0)),
    "znver3": _zen(
        ZEN3,
        (8, 32, 512, 32 << 10),
        0x19,
        (*range(0x10), *range(0x20, 0x60)),
        bandwidths="assumed, as Zen 5: 60 to 71 GB/s of L3 and 14 to 17 of memory beside other work",
    ),
    "skylake-avx512": _xeon(SKYLAKE_X, (16, 32, 1024, 22 << 10), (0x55,)),
    "cascadelake": _xeon(SKYLAKE_X, (16, 32, 1024, 22 << 10), (0x55,), "avx512vnni"),
    "cooperlake": _xeon(SKYLAKE_X, (16, 32, 1024, 22 << 10), (0x55,), "avx512vnni", "avx512bf16"),
    "icelake-server": _xeon(
        ICE_LAKE_SERVER, (16, 48, 1280, 24 << 10), (0x6A, 0x6C), *ICELAKE, "gfni"
    ),
    "tigerlake": _intel(
        "x86-64-v4", ICE_LAKE_CLIENT, (4, 48, 1280, 12 << 10), (0x8C, 0x8D), *ICELAKE, "gfni"
    ),
    "rocketlake": _intel(
        "x86-64-v4", ICE_LAKE_CLIENT, (8, 48, 512, 16 << 10), (0xA7,), *ICELAKE, "gfni"
    ),
    "sapphirerapids": _xeon(GOLDEN_COVE, (16, 48, 2048, 30 << 10), (0x8F,), *FURTHER),
    "emeraldrapids": _xeon(GOLDEN_COVE, (16, 48, 2048, 80 << 10), (0xCF,), *FURTHER),
    "graniterapids": _xeon(REDWOOD_COVE, (32, 48, 2048, 128 << 10), (0xAD, 0xAE), *FURTHER),
    "znver4": _zen(
        ZEN4,
        (8, 32, 1024, 32 << 10),
        0x19,
        (*range(0x10, 0x20), *range(0x60, 0xB0)),
        *ICELAKE,
        "avx512bf16",
        "gfni",
        bandwidths=_ZEN4_MEASURED,
    ),
    "znver5": _zen(
        ZEN5,
        (8, 48, 1024, 32 << 10),
        0x1A,
        range(0x100),
        *ICELAKE,
        "avx512bf16",
        "gfni",
        "avxvnni",
        bandwidths=_ZEN5_MEASURED,
    ),
}
# name -> processor, for AArch64; apple-m1's system is macos.
AARCH64: dict[str, Processor] = {
    "neoverse-n1": _arm(
        NEOVERSE_N1, (16, 64, 1024, 32 << 10), "Arm: Graviton2, 16 of 64", memory=SERVER_MEMORY
    ),
    "neoverse-v1": _arm(
        NEOVERSE_V, (16, 64, 1024, 32 << 10), "Arm: Graviton3, 16 of 64", memory=SERVER_MEMORY
    ),
    "neoverse-v2": _arm(
        NEOVERSE_V, (16, 64, 2048, 36 << 10), "Arm: Graviton4, 16 of 96", memory=SERVER_MEMORY
    ),
    "cortex-a72": Processor(
        "generic",
        (),
        CORTEX_A72,
        4,
        32,
        256,
        1 << 10,
        "Arm: Raspberry Pi 4, whose four cores share 1 MB",
    ),
    "cortex-a76": _arm(CORTEX_A76, (4, 64, 512, 2 << 10), "Arm: Raspberry Pi 5"),
    "apple-m1": _arm(
        APPLE,
        (4, 128, 3072, 8 << 10),
        "Apple M1: four fast cores, which share 12 MB; system cache 8 MB",
        dram_class=40,
    ),
    "apple-m2": _arm(
        APPLE, (4, 128, 4096, 8 << 10), "assumed: four fast cores, which share 16 MB", dram_class=40
    ),
    "apple-m3": _arm(
        APPLE, (4, 128, 4096, 8 << 10), "assumed: four fast cores, which share 16 MB", dram_class=40
    ),
    "apple-m4": _arm(
        APPLE, (4, 128, 4096, 8 << 10), "assumed: four fast cores, which share 16 MB", dram_class=40
    ),
}
# A processor of which nothing is known but its vectors; without AVX they have 128 bits.
UNKNOWN = Processor("generic", (), ANY_128, 8, 32, 512, 16 << 10, _ASSUMED)


def row_of(
    vendor: str, family: int, model: int | None, bits: int, has: Collection[str]
) -> tuple[str, Processor]:
    """(name, row) of a processor.

    Flags overrule numbers, which virtual machines make up: a row is of vectors of `bits`, and has
    every instruction set that the processor has (`has`, LLVM's names of FURTHER ones).
    """
    has = {name for name in has if name in FURTHER}

    def distance(name: str) -> tuple:
        row = X86[name]
        is_family = (row.vendor, row.family) == (vendor, family)
        return (
            row.vendor != vendor,
            not (is_family and model in row.models),
            not is_family,
            len(row.further),
        )

    fitting = [name for name, row in X86.items() if row.bits == bits and has <= {*row.further}]
    name = min(fitting, key=distance, default="")
    if name and X86[name].vendor == vendor:
        return name, X86[name]
    level = next((level for level in LEVELS if LEVEL_BITS[level] == bits), "")
    return (level, X86[level]) if level else ("unknown", UNKNOWN)
