"""Devices by the names that people give them -> architecture, wavefront, limits."""

from __future__ import annotations

from pbkern.core.errors import OptionError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.targets.simt.device import Amd, kind_of_name


@dataclass(frozen=True)
class AmdDeviceKind:
    """Kind of device that code is made for.

    Attributes:
      architecture: as LLVM calls it.
      device: how threads exchange; a wavefront has 64 of them on CDNA, 32 on RDNA. Source: LLVM,
        User Guide for AMDGPU Backend, target features (wavefrontsize64).
      shared_bytes: most LDS of a workgroup. Sources: AMD Instinct MI200 and CDNA 3 ISA, "LDS"; RDNA
        3 ISA, "LDS".
    """

    architecture: str
    device: Amd
    shared_bytes: int = 64 << 10


KINDS = {
    kind.architecture: kind
    for kind in (
        AmdDeviceKind("gfx90a", Amd(warp=64)),
        AmdDeviceKind("gfx942", Amd(warp=64)),
        AmdDeviceKind("gfx1100", Amd(warp=32)),
    )
}
NAMES = {
    "mi210": "gfx90a",
    "mi250x": "gfx90a",
    "mi300a": "gfx942",
    "mi300x": "gfx942",
    "mi325x": "gfx942",
    "rx7900xtx": "gfx1100",
}
DEFAULT = "gfx942"


def kind_of_architecture(name: str) -> AmdDeviceKind:
    """The kind of a device that says what it is. Raises OptionError where there is no code for it."""
    if name in KINDS:
        return KINDS[name]
    raise OptionError(
        f"there is no code for AMD devices of architecture {name}",
        why=f"architectures are {', '.join(KINDS)}",
        hint="compile_options={'device': ...} names one that it runs",
    )


def device_kind(name: str | None) -> AmdDeviceKind:
    """The device of a name: an architecture, or a product. Raises OptionError."""
    return kind_of_name(name or DEFAULT, KINDS, NAMES, "AMD device")
