"""CpuMachine: a CPU's figures for the cost model and schedules, made of a row of the table of CPUs (cores.py)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any

from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.machine import DEFAULT_MACHINE, Machine
from pbkern.core.ops.elementwise import PriceTable
from pbkern.targets.cpu.math.op_cycles import COST

from .cores import CoreKind, Processor

# Elements by which copied rows are longer, so that they do not fall into one cache set. Source: not
# recorded.
ROW_PADDING = 16
# Rows of an operand that are read side by side: by a sum over rows, and by products of few rows
# with a far operand. Source: not recorded.
ROWS_AT_ONCE = 8
# Arrays of this size and more do not fit the caches of one core.
FAR_BYTES = 2 << 20
# Bits of vectors of multiply-adds that DEFAULT_MACHINE's cores begin in a cycle: two of 512.
DEFAULT_MULTIPLY_ADD_BITS = 1024
# Bytes that could have come from memory in the time that a run of neighbours takes to begin. Source: runs of
# 256 to 1024 bytes, 23 KB apart, came at 9 to 14 GB/s on Zen 3 where whole rows came at 18 (26 November 2026),
# which makes 240 to 360; runs of 512 bytes at 14 where whole rows came at 25 on Zen 4 and Zen 5.
RUN_BYTES = 300
# Bytes of a run after which prefetchers follow it. Source: a C program on Zen 4, 27 November 2026, one thread, arrays of
# 25 MB in blocks of 64 rows: runs of 256 bytes to 8 KB came at 11 to 15 GB/s and were stored at 12, runs of 16 KB at 32,
# whole rows at 43; of arrays of 6 MB, which the last cache holds, all came at 60 to 75.
STREAM_BYTES = 8192
# Most bytes of the last cache that count for one usable core: virtual machines report the whole cache
# of their host. Source: a softmax of 4096 x 4096 on two cores of a Xeon that reports 480 MB, 25 November
# 2026: 6.2 to 7.8 ms with this bound, 10.9 without.
L3_BYTES_PER_CORE = 32 << 20

# Vector registers of NEON that schedules fill: 32 (Arm's Architecture Reference Manual, A1.4), of which four hold
# operands that x86-64's instructions read from memory. With all 32, LLVM copies sums of a product of 300 x 300 from register
# to register: 3.7 instructions per multiply-add, 1.7 with 28.
NEON_REGISTERS = 28


@dataclass(frozen=True, slots=True)
class Vectors:
    """Registers that hold vectors, and what a schedule pays for moving them.

    Attributes:
      bits: width of one. registers: their number, by default that of AVX-512.
      shift_cycles: cycles of shifting the lanes of two into one.
      crossing_accesses: accesses of the cache by a load that is not aligned and may cross two lines.
      l1_bytes, l1_ways: the first data cache.
      gathers_by_lanes: whether loads of one element each take less time than instructions that gather.
    """

    bits: int = 512
    registers: int = 32
    shift_cycles: float = 0.5
    crossing_accesses: float = 2.0
    l1_bytes: int = DEFAULT_MACHINE.l1_bytes
    l1_ways: int = DEFAULT_MACHINE.l1_ways
    gathers_by_lanes: bool = False


# Those of AVX-512.
WIDE_VECTORS = Vectors()


@dataclass(frozen=True)
class CpuMachine(Machine):
    """A CPU.

    Attributes:
      registers: vector registers. x86-64 has 16, with AVX-512 32 (Intel's manual volume 1, 15.1);
        NEON_REGISTERS.
      shift_cycles, crossing_accesses, gathers_by_lanes: see Vectors.
      followed_row_bytes: see CoreKind.
      avx2: has AVX2.
      avx512: has AVX-512F and AVX512-DQ, whose instructions targets/cpu/math/avx512.py asks for by
        name.
      bf16_pairs: multiplies pairs of bfloat16 (AVX512-BF16, with the shorter vectors of AVX512-VL)
        faster than float32.
      vnni: multiplies words of narrow integers (AVX512-VNNI, with the shorter vectors of
        AVX512-VL).
      amx_bf16, amx_int8: multiplies tiles of bfloat16, and of bytes (AMX), and the system lets this
        process use their registers.
      asymmetric_minima: the instruction for the smaller of two floats returns its second operand where one is NaN or both
        are zeros (MINPS; Intel's manual, volume 2).
      stores_past_caches: whether large results may be written past the caches.
      sources: figure -> where it comes from. Keys of what is kept on disk do not depend on it.
    """

    registers: int = 32
    shift_cycles: float = WIDE_VECTORS.shift_cycles
    crossing_accesses: float = WIDE_VECTORS.crossing_accesses
    gathers_by_lanes: bool = False
    followed_row_bytes: int = 0
    avx2: bool = False
    avx512: bool = False
    bf16_pairs: bool = False
    vnni: bool = False
    amx_bf16: bool = False
    amx_int8: bool = False
    asymmetric_minima: bool = True
    stores_past_caches: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def vectors(self, width: int | None = None) -> Vectors:
        """The registers, with vectors of so many bits; None: the widest."""
        return Vectors(
            width or self.vector_bits,
            self.registers,
            self.shift_cycles,
            self.crossing_accesses,
            self.l1_bytes,
            self.l1_ways,
            self.gathers_by_lanes,
        )


def machine_of(name: str, row: Processor, flags: Collection[str], **known: Any) -> CpuMachine:
    """The machine of a row.

    Args:
      name: how reports call it.
      row: the figures.
      flags: of /proc/cpuinfo.
      known: fields that are known otherwise; `sources` says of each where from.
    """
    kind, sources = row.kind, known.pop("sources", {})
    figures = {
        "cores": row.cores,
        "vector_bits": row.bits,
        "l1_bytes": row.l1 << 10,
        "l1_ways": kind.l1_ways,
        "l2_bytes": row.l2 << 10,
        "l3_bytes": row.l3 << 10,
        "l3_class": row.l3_class,
        "dram_class": row.dram_class,
    } | known
    cores, bits = figures["cores"], figures["vector_bits"]
    figures["l3_bytes"] = min(figures["l3_bytes"], L3_BYTES_PER_CORE * cores)
    per_core = {
        "l3_bandwidth": figures.pop("l3_class"),
        "dram_bandwidth": figures.pop("dram_class"),
    }
    bandwidths = {name: cores * rate * 1e9 for name, rate in per_core.items()}
    bandwidths["dram_bandwidth"] = min(bandwidths["dram_bandwidth"], row.memory * 1e9)
    sets = instruction_sets(flags, bits, kind)
    return CpuMachine(
        name=name,
        l2_bandwidth=kind.l2_class * cores * 1e9,
        peak_flops=_peaks(kind, cores, bits, sets),
        tile_flops={
            dtype: kind.tile_flops[dtype] * cores
            for dtype, has in (("bfloat16", sets["amx_bf16"]), ("int8", sets["amx_int8"]))
            if has
        },
        run_bytes=RUN_BYTES,
        stream_bytes=STREAM_BYTES,
        op_cycles=_prices(kind, bits),
        shift_cycles=kind.shift_cycles,
        crossing_accesses=kind.crossing_accesses,
        gathers_by_lanes=kind.gathers_by_lanes,
        followed_row_bytes=kind.followed_row_bytes,
        sources=_sources(row) | sources,
        **bandwidths,
        **sets,
        **figures,
    )


def _peaks(kind: CoreKind, cores: int, bits: int, sets: Mapping[str, Any]) -> dict[str, float]:
    """Multiply-adds, counted as two, per second.

    Bytes and pairs are multiplied at the rate of whole vectors (vpdpbusd 952 and vpdpwssd 463 GOP/s beside 241 GFLOP/s of
    float32 on Granite Rapids, 25 November 2026). Without instructions for them, bytes are multiplied as pairs of int16, whose
    products take an addition: 132 GOP/s beside 71 of float32 on one core of Zen 3, 28 November 2026. bfloat16 is multiplied as
    float32: 121 GFLOP/s beside 120 of float32 on Zen 3, 26 November 2026.
    """
    share = cores / DEFAULT_MACHINE.cores * kind.multiply_add_bits / DEFAULT_MULTIPLY_ADD_BITS
    single = DEFAULT_MACHINE.peak_flops["float32"] * share
    narrow = {"int16": 2, "int8": 4, "uint8": 4} if sets["vnni"] else {}
    if not narrow and sets["avx2"] and (sets["avx512"] or bits <= 256):
        narrow = {"int16": 2, "int8": 2, "uint8": 2}
    return {
        "float32": single,
        "float64": DEFAULT_MACHINE.peak_flops["float64"] * share,
        "float16": single,
        "bfloat16": single * (kind.pair_share if sets["bf16_pairs"] else 1),
        **{dtype: single * narrow.get(dtype, 1) for dtype in ("int8", "uint8", "int16")},
    }


def _prices(kind: CoreKind, bits: int) -> PriceTable:
    """Prices in additions, which begin as often as multiply-adds."""
    additions = kind.multiply_add_bits / bits
    core_prices = {"div": kind.divide_cycles * additions, "sqrt": kind.root_cycles * additions}
    return PriceTable(COST.measured | core_prices)


def instruction_sets(flags: Collection[str], bits: int, kind: CoreKind) -> dict[str, Any]:
    """Fields of CpuMachine by flags of /proc/cpuinfo."""
    flags = set(flags)
    return {
        "registers": NEON_REGISTERS if "asimd" in flags else 16 if bits < 512 else 32,
        "asymmetric_minima": "asimd" not in flags,
        "stores_past_caches": "asimd" not in flags,
        "avx2": "avx2" in flags,
        "avx512": {"avx512f", "avx512dq"} <= flags,
        "bf16_pairs": kind.pair_share > 1 and {"avx512_bf16", "avx512vl"} <= flags,
        "vnni": {"avx512_vnni", "avx512vl"} <= flags,
        "amx_bf16": {"amx_tile", "amx_bf16"} <= flags,
        "amx_int8": {"amx_tile", "amx_int8"} <= flags,
    }


def _sources(row: Processor) -> dict[str, str]:
    """Source of each figure of a row."""
    kind = row.kind

    def of(*figures: str) -> str:
        return "; ".join(dict.fromkeys(kind.sources.get(figure, kind.source) for figure in figures))

    return {
        "cores": row.source,
        "vector_bits": f"level {row.level}",
        **dict.fromkeys(("l1_bytes", "l2_bytes", "l3_bytes"), row.source),
        "l1_ways": of("l1_ways"),
        "l2_bandwidth": f"class by kind, {of('l2_class')}",
        **dict.fromkeys(("l3_bandwidth", "dram_bandwidth"), f"class by kind, {row.bandwidths}"),
        "peak_flops": f"{of('multiply_add_bits', 'pair_share')}; scaled from: {DEFAULT_MACHINE.source}",
        "tile_flops": of("tile_flops"),
        "div": of("divide_cycles"),
        "sqrt": of("root_cycles"),
        "shift_cycles": of("shift_cycles"),
        "crossing_accesses": of("crossing_accesses"),
        "gathers_by_lanes": of("gathers_by_lanes"),
        "followed_row_bytes": of("followed_row_bytes"),
        "clock_hz": f"assumed: {DEFAULT_MACHINE.source}",
    }
