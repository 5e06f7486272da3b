"""Devices by the names that people give them -> architecture, PTX version, limits."""

from __future__ import annotations

from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.targets.simt.device import NVIDIA, VendorCode, kind_of_name


@dataclass(frozen=True)
class NvDeviceKind:
    """Kind of device that code is made for.

    Attributes:
      architecture: as ptxas and LLVM call it. ptx: version of PTX, times ten.
      shared_bytes: most shared memory of a block. Source: CUDA C++ Programming Guide, table of
        technical specifications per compute capability, "maximum amount of shared memory per thread
        block".
    """

    architecture: str
    ptx: int
    shared_bytes: int
    device: VendorCode = NVIDIA

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: (8, 6) of "sm_86"."""
        number = int(self.architecture.removeprefix("sm_").rstrip("a"))
        return number // 10, number % 10


KINDS = {
    kind.architecture: kind
    for kind in (
        NvDeviceKind("sm_80", 80, 163 << 10),
        NvDeviceKind("sm_86", 80, 99 << 10),
        NvDeviceKind("sm_89", 80, 99 << 10),
        NvDeviceKind("sm_90a", 80, 227 << 10),
        NvDeviceKind("sm_100", 86, 227 << 10),
        NvDeviceKind("sm_120", 87, 99 << 10),
    )
}
NAMES = {
    "a100": "sm_80",
    "a10": "sm_86",
    "rtx3090": "sm_86",
    "rtx4090": "sm_89",
    "l40s": "sm_89",
    "h100": "sm_90a",
    "h200": "sm_90a",
    "b200": "sm_100",
    "rtx5090": "sm_120",
}
DEFAULT = "sm_90a"


def of_capability(major: int, minor: int) -> NvDeviceKind:
    """The newest architecture of a device's major version that is not newer than it.

    A device runs such code (CUDA C++ Programming Guide, binary compatibility). Raises OptionError
    where there is none.
    """
    runs = [
        kind
        for kind in KINDS.values()
        if kind.capability[0] == major and kind.capability[1] <= minor
    ]
    if runs:
        return max(runs, key=lambda run: run.capability)
    raise OptionError(
        f"there is no code for devices of compute capability {major}.{minor}",
        why=f"architectures are {', '.join(KINDS)}",
        hint="compile_options={'device': ...} names one that it runs",
    )


def device_kind(name: str | None) -> NvDeviceKind:
    """The device of a name: an architecture, or a product. Raises OptionError."""
    return kind_of_name(name or DEFAULT, KINDS, NAMES, "device")
