"""The HIP runtime's functions, on a machine with an AMD GPU and ROCm.

No device was at hand: a library stands in in tests.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from typing import ClassVar

from pbkern.core.errors import TargetError
from pbkern.targets.simt.launch.driver import LoadedKernel
from pbkern.targets.simt.launch.library import LibraryDriver

from .devices import AmdDeviceKind, kind_of_architecture

# Bytes for hipDeviceProp_t, whose size and places differ between versions: it has 792 bytes up to
# ROCm 5, 1,472 since.
PROPERTIES_BYTES = 4096
_ARCHITECTURE = re.compile(rb"gfx[0-9a-f]{3,}")


class HipDriver(LibraryDriver):
    """AMD's."""

    platform, vendor, library_name, initialise = "ROCM", "AMD", "libamdhip64.so", "hipInit"
    symbols: ClassVar[Mapping[str, str]] = {
        "launch": "hipModuleLaunchKernel",
        "copy": "hipMemcpyDtoDAsync",
        "read": "hipMemcpyDtoHAsync",
        "synchronize": "hipStreamSynchronize",
        "clear": "hipMemsetD8Async",
        "device": "hipGetDevice",
    }
    capture_mode = "hipThreadExchangeStreamCaptureMode"
    error_texts = "hipDrvGetErrorName", "hipDrvGetErrorString"
    hint = "rocminfo shows whether ROCm is installed and finds a device; target 'cpu' runs the same function"

    def loaded(self, kernel: LoadedKernel, what: str, image: bytes, device: int) -> int:
        """A kernel of a module, which belongs to the current device."""
        name = kernel.function.name
        module = self.pointer(f"given kernel `{name}`", "hipModuleLoadData", image)
        handle = self.pointer(
            f"asked for `{name}`", "hipModuleGetFunction", module, name.encode()
        ).value
        assert handle is not None
        return handle

    def kind_of(self, device: int) -> AmdDeviceKind:
        return kind_of_architecture(self.architecture(device))

    def architecture(self, device: int) -> str:
        """The name of a device's instructions, without its features: "gfx90a" of "gfx90a:sramecc+:xnack-"."""
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        newer = "hipGetDevicePropertiesR0600"
        symbol = newer if hasattr(self.library, newer) else "hipGetDeviceProperties"
        self.check(self.call(symbol, properties, device), f"asked for device {device}")
        names = _ARCHITECTURE.findall(properties.raw)
        if not names:
            raise TargetError(
                f"AMD device {device} does not say which instructions it has",
                why=f"{symbol} stores no gfx name",
                hint="compile_options={'device': ...} names its architecture",
            )
        return names[-1].decode()  # a device's own name, which stands before, may begin so as well

    def current_device(self) -> int:
        return self.number("asked for its device", "hipGetDevice")


@functools.cache
def driver() -> HipDriver:
    return HipDriver()


@functools.cache
def present_architecture() -> str | None:
    """The architecture of this computer's device; None where there is no ROCm or no device."""
    try:
        return driver().architecture(driver().current_device())
    except TargetError:
        return None
