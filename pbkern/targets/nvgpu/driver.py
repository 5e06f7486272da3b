"""The NVIDIA driver's functions: libcuda's, or the simulator's on arrays of the CPU.

The simulator's functions run PTX on the memory that the addresses point to: the code that launches
is the same, and can be checked without a device.
"""

from __future__ import annotations

import ctypes
import functools
import traceback
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pbkern.core.errors import SimulationError, TargetError
from pbkern.core.process import float_mode
from pbkern.simulate.launches import simulate_ptx
from pbkern.targets.simt.launch.driver import DeviceOf, Driver, LoadedKernel, address_of
from pbkern.targets.simt.launch.library import LibraryDriver

from .devices import NvDeviceKind, of_capability

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
CAPABILITY = 75, 76
MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_Launch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
_Copy = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)
_Synchronize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_Clear = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
)


class CudaDriver(LibraryDriver):
    """NVIDIA's."""

    platform, vendor, library_name, initialise = "CUDA", "NVIDIA", "libcuda.so.1", "cuInit"
    symbols: ClassVar[Mapping[str, str]] = {
        "launch": "cuLaunchKernel",
        "copy": "cuMemcpyDtoDAsync_v2",
        "read": "cuMemcpyDtoHAsync_v2",
        "synchronize": "cuStreamSynchronize",
        "clear": "cuMemsetD8Async",
        "device": "cuCtxGetDevice",
    }
    capture_mode = "cuThreadExchangeStreamCaptureMode"
    error_texts = "cuGetErrorName", "cuGetErrorString"
    hint = "nvidia-smi shows the state of driver and devices; PBKERN_GPU_DRIVER=simulator runs launches without a device"

    def loaded(self, kernel: LoadedKernel, what: str, image: bytes, device: int) -> int:
        """A kernel of a library, which every context may launch.

        The driver assembles PTX. What is of another device it refuses at the latest when the kernel
        is asked for in the device's context.
        """
        name = kernel.function.name
        library = self.pointer(
            f"given kernel `{name}`", "cuLibraryLoadData", image, None, None, 0, None, None, 0
        )
        try:
            handle = self.pointer(
                f"asked for `{name}`", "cuLibraryGetKernel", library, name.encode()
            )
            self.pointer(
                f"given kernel `{name}` for device {device}", "cuKernelGetFunction", handle
            )
            self._allow_shared(handle, kernel, device)
        except TargetError:
            self.call("cuLibraryUnload", library)
            raise
        assert handle.value is not None
        return handle.value

    def _allow_shared(self, handle: ctypes.c_void_p, kernel: LoadedKernel, device: int) -> None:
        """More shared memory than a text may declare has to be allowed, on the device."""
        size, name = kernel.function.dynamic_shared_bytes, kernel.function.name
        if size:
            number = self._device(device)
            self.check(
                self.call("cuKernelSetAttribute", MOST_DYNAMIC_SHARED, size, handle, number),
                f"asked for {size} bytes of shared memory for kernel `{name}`",
            )

    def _device(self, ordinal: int) -> int:
        return self.number(f"asked for device {ordinal}", "cuDeviceGet", ordinal)

    def kind_of(self, device: int) -> NvDeviceKind:
        return of_capability(*self.capability(device))

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability of a device."""
        number = self._device(device)
        major, minor = (
            self.number(
                f"asked for the capability of device {device}",
                "cuDeviceGetAttribute",
                attribute,
                number,
            )
            for attribute in CAPABILITY
        )
        return major, minor

    def synchronize(self) -> None:
        """Waits for every device that this process has used, from any thread.

        Raises TargetError for the first that failed.
        """
        errors = []
        for device in range(self.number("asked for devices", "cuDeviceGetCount")):
            try:
                self._wait(device)
            except TargetError as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def _wait(self, device: int) -> None:
        """Waits for what a device was given in its primary context, which is XLA's and Torch's, if it has one."""
        number, flags = self._device(device), ctypes.c_uint()
        active = ctypes.c_int()
        self.check(
            self.call(
                "cuDevicePrimaryCtxGetState", number, ctypes.byref(flags), ctypes.byref(active)
            ),
            "asked for use",
        )
        if not active.value:
            return
        context = self.pointer("asked for a context", "cuDevicePrimaryCtxRetain", number)
        try:
            self.check(self.call("cuCtxPushCurrent_v2", context), "given a context")
            try:
                self.check(self.call("cuCtxSynchronize"), "waited for")
                self.forget(device)
            finally:
                self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", number)


class SimulatorDriver(Driver):
    """Kernels run in the simulator, on the thread that launches them, with its checks.

    Their handles are their rows.
    """

    platform = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self._calls = {
            "launch": _Launch(self._noted(self._launch)),
            "copy": _Copy(_copied),
            "read": _Copy(_copied),
            "clear": _Clear(_cleared),
            "synchronize": _Synchronize(lambda stream: 0),
            "device": DeviceOf(lambda place: 0),
        }
        self.fill({name: address_of(call) for name, call in self._calls.items()})

    def open(self) -> None:
        pass

    def prepare(self, kernel: LoadedKernel, device: int) -> int:
        return ctypes.addressof(kernel.handles)

    def text_of(self, error: int) -> str:
        return f"error {error}"

    def bytes_at(self, address: int | None, size: int, stream: int | None) -> np.ndarray:
        return _memory(address, size)[:size].copy()

    def _launch(self, address, x, y, z, threads, _y, _z, shared, stream, arguments, extra) -> None:
        kernel = self.kernels[address]
        code: Any = kernel.code
        sizes = enumerate(kernel.sizes)
        arrays = [
            _memory(ctypes.cast(arguments[k], ctypes.POINTER(ctypes.c_void_p))[0], n)
            for k, n in sizes
        ]
        try:
            with float_mode.subnormals_kept():
                simulate_ptx(
                    code.ptx,
                    x,
                    threads,
                    arrays,
                    shared_bytes=shared,
                    unwritten=code.function.reads_unwritten,
                )
        except SimulationError as e:
            raise TargetError(f"kernel `{code.function.name}` failed: {e}") from None
        except Exception:
            raise TargetError(
                f"kernel `{code.function.name}` failed: {traceback.format_exc()}"
            ) from None


@functools.cache
def driver(name: str | None) -> Driver:
    """The driver that the configuration names: "simulator", or None for NVIDIA's."""
    return SimulatorDriver() if name == "simulator" else CudaDriver()


@functools.cache
def present_capability() -> tuple[int, int] | None:
    """Compute capability of this computer's first device; None where there is no driver or no device."""
    driver_here = driver(None)
    assert isinstance(driver_here, CudaDriver)
    try:
        return driver_here.capability(0)
    except TargetError:
        return None


def synchronize() -> None:
    """Waits until all devices have done what they were given. Raises TargetError without a driver."""
    driver_here = driver(None)
    assert isinstance(driver_here, CudaDriver)
    driver_here.synchronize()


def _memory(address: int | None, size: int) -> np.ndarray:
    """The bytes there; empty arrays have an address as well."""
    if not size or not address:
        return np.zeros(1, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _cleared(address: int, value: int, size: int, stream: int | None) -> int:
    ctypes.memset(address, value, size)
    return 0


def _copied(destination: int, source: int, size: int, stream: int | None) -> int:
    ctypes.memmove(destination, source, size)
    return 0
