"""AMD GPUs as the cost model sees them."""

from __future__ import annotations

from pbkern.core.machine import Machine
from pbkern.targets.simt.machine import Figures
from pbkern.targets.simt.machine import machine as figured

from .devices import AmdDeviceKind

# Sources: AMD's data sheets of MI250X (one of its two dies), MI300X and RX 7900 XTX. near: LDS and
# vector cache of a compute unit. matrices: dense float16 with float32 sums.
FIGURES = {
    "gfx90a": Figures(
        110, 23.9e12, 8 << 20, 80 << 10, 1.64e12, 1.70e9, doubles=1.0, matrices=191.5e12
    ),
    "gfx942": Figures(304, 163.4e12, 256 << 20, 96 << 10, 5.3e12, 2.10e9, matrices=1307e12),
    "gfx1100": Figures(
        96, 61.4e12, 96 << 20, 96 << 10, 0.96e12, 2.50e9, doubles=1 / 32, matrices=122.8e12
    ),
}


def machine(kind: AmdDeviceKind) -> Machine:
    """The figures of a device."""
    return figured(
        f"amdgpu {kind.architecture}",
        FIGURES[kind.architecture],
        kind.device.warp,
        "data sheets of AMD",
    )
