"""The HIP runtime's functions, on a machine with an AMD GPU and ROCm. Written without one: not run so far."""

from __future__ import annotations

import ctypes
import functools

from pbkern.targets.simt.launch.driver import LibraryDriver
from pbkern.targets.simt.program import Code


class HipDriver(LibraryDriver):
    """AMD's."""

    platform, vendor, library_name, initialise = "ROCM", "AMD", "libamdhip64.so", "hipInit"
    symbols = {"launch": "hipModuleLaunchKernel", "copy": "hipMemcpyDtoDAsync", "read": "hipMemcpyDtoHAsync",
               "synchronize": "hipStreamSynchronize", "clear": "hipMemsetD8Async"}  # fmt: skip
    error_texts = "hipDrvGetErrorName", "hipDrvGetErrorString"
    hint = "rocminfo shows whether ROCm is installed and finds a device; target 'cpu' runs the same function"

    def loaded(self, code: Code) -> int:
        """A kernel of a module of the current device."""
        module, kernel, name = ctypes.c_void_p(), ctypes.c_void_p(), code.function.name
        self.check(self.library.hipModuleLoadData(ctypes.byref(module), code.image), f"given kernel `{name}`")
        self.check(self.library.hipModuleGetFunction(ctypes.byref(kernel), module, name.encode()), f"asked for `{name}`")
        assert kernel.value is not None
        return kernel.value


@functools.cache
def driver() -> HipDriver:
    """Raises TargetError where there is no ROCm or no device."""
    return HipDriver()
