"""NVIDIA GPUs as the cost model sees them."""

from __future__ import annotations

from pbkern.core.machine import Machine
from pbkern.targets.simt.machine import Figures
from pbkern.targets.simt.machine import machine as figured

from .devices import NvDeviceKind

# Sources: NVIDIA's data sheets and architecture white papers: A100 (SXM 80 GB), GA102 (RTX 3090),
# AD102 (RTX 4090), H100 (SXM5; H200 has 4.8 TB/s), B200 (half of a GB200's figures), GB202 (RTX
# 5090). near: "L1 data cache / shared memory" of an SM. matrices: dense float16 with float32 sums.
FIGURES = {
    "sm_80": Figures(108, 19.5e12, 40 << 20, 192 << 10, 2.04e12, 1.41e9, matrices=312e12),
    "sm_86": Figures(
        82, 35.6e12, 6 << 20, 128 << 10, 0.94e12, 1.70e9, doubles=1 / 64, matrices=71e12
    ),
    "sm_89": Figures(
        128, 82.6e12, 72 << 20, 128 << 10, 1.01e12, 2.52e9, doubles=1 / 64, matrices=165e12
    ),
    "sm_90a": Figures(
        132, 66.9e12, 50 << 20, 256 << 10, 3.35e12, 1.83e9, matrices=989e12, groups=True
    ),
    "sm_100": Figures(148, 75.0e12, 126 << 20, 256 << 10, 8.0e12, 1.97e9, matrices=2250e12),
    "sm_120": Figures(
        170, 104.8e12, 96 << 20, 128 << 10, 1.79e12, 2.41e9, doubles=1 / 64, matrices=210e12
    ),
}


def machine(kind: NvDeviceKind) -> Machine:
    """The figures of a device."""
    return figured(
        f"nvgpu {kind.architecture}",
        FIGURES[kind.architecture],
        kind.device.warp,
        "data sheets and white papers of NVIDIA",
    )
