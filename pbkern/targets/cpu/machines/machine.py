"""CpuMachine: a CPU's figures for the cost model and schedules.

Bandwidths and peaks are scaled from figures measured on one machine: relative prices are what
fusion needs of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pbkern.core.machine import DEFAULT_MACHINE, Machine

# Elements by which copied rows are longer, so that they do not fall into one cache set. Source: not
# recorded.
ROW_PADDING = 16
# Rows of an operand that are read side by side: by a sum over rows, and by products of few rows
# with a far operand. Source: not recorded.
ROWS_AT_ONCE = 8
# Arrays of this size and more do not fit the caches of one core.
FAR_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Vectors:
    """Registers that hold vectors.

    Attributes:
      bits: width of one. registers: their number, by default that of AVX-512 and NEON.
    """

    bits: int = 512
    registers: int = 32


# Those of AVX-512.
WIDE_VECTORS = Vectors()


@dataclass(frozen=True)
class CpuMachine(Machine):
    """A CPU.

    Attributes:
      registers: vector registers. x86-64 has 16, with AVX-512 32 (Intel's manual volume 1, 15.1),
        NEON 32.
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


def instruction_sets(
    flags: Collection[str], bits: int, pairs_are_fast: bool = True
) -> dict[str, Any]:
    """Fields of CpuMachine by flags of /proc/cpuinfo.

    `pairs_are_fast`: not so on Intel's cores, which start vdpbf16ps every other cycle: half the rate of float32. Source:
    118 and 241 GFLOP/s on a Xeon (Granite Rapids), 25 November 2026; uops.info, VDPBF16PS.
    """
    flags = set(flags)
    return {
        "registers": 16 if bits < 512 and "asimd" not in flags else 32,
        "avx512": {"avx512f", "avx512dq"} <= flags,
        "bf16_pairs": pairs_are_fast and {"avx512_bf16", "avx512vl"} <= flags,
        "vnni": {"avx512_vnni", "avx512vl"} <= flags,
        "amx_bf16": {"amx_tile", "amx_bf16"} <= flags,
        "amx_int8": {"amx_tile", "amx_int8"} <= flags,
    }
