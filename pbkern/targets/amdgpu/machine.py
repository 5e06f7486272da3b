"""AMD GPUs as the cost model sees them: a core is a compute unit, its nearest caches its LDS. Peaks are those of vector code,
without matrix cores."""

from __future__ import annotations

from pbkern.core.machine import Machine
from pbkern.targets.simt.machine import BLOCK_SECONDS, LAUNCH_SECONDS, SCRATCH_SHARE

from .devices import DeviceKind

_FIGURES = {
    # Compute units, f32 TFLOP/s, f64 share of it, last-level cache bytes, memory bytes per second, clock. Sources: AMD's data
    # sheets of MI250X (one of its two dies), MI300X and RX 7900 XTX.
    "gfx90a": (110, 23.9e12, 1.0, 8 << 20, 1.64e12, 1.70e9),
    "gfx942": (304, 163.4e12, 0.5, 256 << 20, 5.3e12, 2.10e9),
    "gfx1100": (96, 61.4e12, 1 / 32, 96 << 20, 0.96e12, 2.50e9),
}


def machine(kind: DeviceKind) -> Machine:
    """The figures of a device."""
    cores, flops, double, cache, bandwidth, clock = _FIGURES[kind.architecture]
    return Machine(
        name=f"amdgpu {kind.architecture}", cores=cores, vector_bits=32 * kind.device.warp,
        l1_bytes=16 << 10, l2_bytes=kind.shared_bytes // SCRATCH_SHARE, l3_bytes=cache,
        dram_bandwidth=bandwidth, l3_bandwidth=2.5 * bandwidth, l2_bandwidth=10 * bandwidth,
        peak_flops={"float32": flops, "float64": flops * double, "bfloat16": flops, "float16": flops, "int8": flops},
        clock_hz=4 * clock,  # a compute unit has four vector units
        launch_seconds=LAUNCH_SECONDS, program_seconds=BLOCK_SECONDS,
        source="data sheets of AMD; near caches assumed in proportion to memory; not measured here",
    )  # fmt: skip
