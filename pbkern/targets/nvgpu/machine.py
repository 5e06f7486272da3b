"""NVIDIA GPUs as the cost model sees them: a core is a streaming multiprocessor, its nearest caches its shared memory.

Peaks are those of code without tensor cores. Scratch of a program has to fit the shared memory of a block, which stands
where CPUs have a private second-level cache.
"""

from __future__ import annotations

from pbkern.core.machine import Machine
from pbkern.targets.simt.machine import BLOCK_SECONDS, LAUNCH_SECONDS, SCRATCH_SHARE

from .devices import DeviceKind

_FIGURES = {
    # SMs, f32 TFLOP/s, L2 bytes, memory bytes per second, clock. Sources: NVIDIA's data sheets and architecture white papers:
    # A100 (SXM 80 GB), GA102, AD102 (RTX 4090), H100 (SXM5), B200 (half of a GB200's figures), GB202 (RTX 5090).
    "sm_80": (108, 19.5e12, 40 << 20, 2.04e12, 1.41e9),
    "sm_86": (82, 35.6e12, 6 << 20, 0.94e12, 1.70e9),
    "sm_89": (128, 82.6e12, 72 << 20, 1.01e12, 2.52e9),
    "sm_90a": (132, 66.9e12, 50 << 20, 3.35e12, 1.83e9),
    "sm_100": (148, 75.0e12, 126 << 20, 8.0e12, 1.97e9),
    "sm_120": (170, 104.8e12, 96 << 20, 1.79e12, 2.41e9),
}  # fmt: skip
WARP_BITS = 32 * 32  # 32 lanes of float32 take one instruction


def machine(kind: DeviceKind) -> Machine:
    """The figures of a device."""
    cores, flops, l2, bandwidth, clock = _FIGURES[kind.architecture]
    return Machine(
        name=f"nvgpu {kind.architecture}", cores=cores, vector_bits=WARP_BITS,
        l1_bytes=32 << 10, l2_bytes=min(kind.shared_bytes // SCRATCH_SHARE, kind.device.declared_bytes), l3_bytes=l2,
        dram_bandwidth=bandwidth, l3_bandwidth=2.5 * bandwidth, l2_bandwidth=10 * bandwidth,
        peak_flops={"float32": flops, "float64": flops / (2 if kind.architecture in ("sm_80", "sm_90a", "sm_100") else 64),
                    "bfloat16": flops, "float16": flops, "int8": flops},
        clock_hz=4 * clock,  # a multiprocessor has four schedulers
        launch_seconds=LAUNCH_SECONDS, program_seconds=BLOCK_SECONDS,
        source="data sheets and white papers of NVIDIA; near caches assumed in proportion to memory; not measured here",
    )  # fmt: skip
