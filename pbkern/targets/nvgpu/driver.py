"""The NVIDIA driver's functions: libcuda's, or the simulator's on arrays of the CPU.

The simulator's functions run PTX on the memory that the addresses point to: the code that launches is the same, and can be
checked without a device.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from pbkern.core.errors import SimulationError, TargetError
from pbkern.simulate.launches import simulate_ptx
from pbkern.targets.simt.launch.driver import Describe, Driver, LibraryDriver, Record, Report, address_of, kept, written
from pbkern.targets.simt.launch.reports import receive
from pbkern.targets.simt.program import Code

from . import program

LAUNCH_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
CAPABILITY = 75, 76
MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_Launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
                           ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)  # fmt: skip
_Copy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_Synchronize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_Clear = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)


class CudaDriver(LibraryDriver):
    """NVIDIA's."""

    platform, vendor, library_name, initialise = "CUDA", "NVIDIA", "libcuda.so.1", "cuInit"
    symbols = {"launch": "cuLaunchKernel", "copy": "cuMemcpyDtoDAsync_v2", "read": "cuMemcpyDtoHAsync_v2",
               "synchronize": "cuStreamSynchronize", "clear": "cuMemsetD8Async"}  # fmt: skip
    error_texts = "cuGetErrorName", "cuGetErrorString"
    hint = ("nvidia-smi shows the state of driver and devices; PBKERN_GPU_DRIVER=simulator runs launches without a device")

    def loaded(self, code: Code) -> int:
        """A kernel of a library, which every context may launch. The driver assembles PTX where there is no ptxas."""
        library, kernel, image = ctypes.c_void_p(), ctypes.c_void_p(), code.image
        self.check(self.library.cuLibraryLoadData(ctypes.byref(library), image, None, None, 0, None, None, 0),
                   f"given kernel `{code.function.name}`")
        name = code.function.name.encode()
        self.check(self.library.cuLibraryGetKernel(ctypes.byref(kernel), library, name), f"asked for `{code.function.name}`")
        assert kernel.value is not None
        if code.function.dynamic_shared_bytes:
            self._allow_shared(kernel, code)
        return kernel.value

    def _allow_shared(self, kernel: ctypes.c_void_p, code: Code) -> None:
        """More shared memory than a text may declare has to be allowed, on every device."""
        count, device = ctypes.c_int(), ctypes.c_int()
        self.check(self.library.cuDeviceGetCount(ctypes.byref(count)), "asked for devices")
        for n in range(count.value):
            self.check(self.library.cuDeviceGet(ctypes.byref(device), n), f"asked for device {n}")
            size = code.function.dynamic_shared_bytes
            self.check(self.library.cuKernelSetAttribute(MOST_DYNAMIC_SHARED, size, kernel, device),
                       f"asked for {size} bytes of shared memory for kernel `{code.function.name}`")


    def capability(self) -> tuple[int, int]:
        """Compute capability of the first device."""
        device, value, found = ctypes.c_int(), ctypes.c_int(), []
        self.check(self.library.cuDeviceGet(ctypes.byref(device), 0), "asked for a device")
        for attribute in CAPABILITY:
            self.check(self.library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "asked for its capability")
            found.append(value.value)
        return found[0], found[1]


class SimulatorDriver:
    """Kernels run in the simulator, on the thread that launches them, with its checks."""

    platform = "cpu"

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[program.Code, tuple[int, ...]]] = {}
        self.failures: dict[int, str] = {}  # by thread: what its last call failed by
        self._lock = threading.Lock()
        self._texts: list[ctypes.Array] = []
        self._calls = {
            "launch": _Launch(self._launch), "copy": _Copy(_copied), "read": _Copy(_copied), "clear": _Clear(_cleared),
            "synchronize": _Synchronize(lambda stream: 0), "describe": Describe(self._described),
            "record": Record(self._recorded), "report": Report(self._reported),
        }  # fmt: skip
        self.functions: Mapping[str, int] = {name: address_of(f) for name, f in self._calls.items()}

    def load(self, code: program.Code, sizes: tuple[int, ...]) -> int:
        with self._lock:
            number = len(self.kernels) + 1
            self.kernels[number] = code, sizes
        return number

    def _launch(self, kernel, x, y, z, threads, _y, _z, shared, stream, arguments, extra) -> int:
        code, sizes = self.kernels[kernel]
        try:
            arrays = [_memory(ctypes.cast(arguments[k], ctypes.POINTER(ctypes.c_void_p))[0], n) for k, n in enumerate(sizes)]
            simulate_ptx(code.ptx, x, threads, arrays, shared_bytes=shared, unwritten=code.function.reads_unwritten)
        except SimulationError as e:
            self.failures[threading.get_ident()] = f"kernel `{code.function.name}` failed: {e}"
            return LAUNCH_FAILED
        except Exception:  # nothing may pass through XLA's frames
            self.failures[threading.get_ident()] = f"kernel `{code.function.name}` failed: {traceback.format_exc()}"
            return LAUNCH_FAILED
        return 0

    def _recorded(self, kernel: int, address: int, stream: int | None) -> int:
        function = self.kernels[kernel][0].function
        return written(function, _memory(address, function.record_bytes).view(np.int64), self.failures)

    def _reported(self, kernel: int, address: int, operands: Any, stream: int | None) -> int:
        function = self.kernels[kernel][0].function
        reports = function.reports
        assert reports is not None

        def read() -> list[np.ndarray]:
            sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in reports.operands]
            return [_memory(operands[k], n)[:n].view(dtype).reshape(shape).copy()
                    for k, (n, (shape, dtype)) in enumerate(zip(sizes, reports.operands))]

        receive(function, _memory(address, reports.nbytes).view(np.int64), read)
        return 0

    def _described(self, kernel: int | None, error: int) -> int:
        return kept(self._texts, self.failures.pop(threading.get_ident(), f"error {error}"))


@functools.cache
def driver(name: str | None) -> Driver:
    """The driver that the configuration names: "simulator", or None for NVIDIA's. Raises TargetError."""
    return SimulatorDriver() if name == "simulator" else CudaDriver()


@functools.cache
def present_capability() -> tuple[int, int] | None:
    """Compute capability of this computer's device; None where there is no driver or no device."""
    try:
        found = driver(None)
        return found.capability() if isinstance(found, CudaDriver) else None
    except TargetError:
        return None


def synchronize() -> None:
    """Waits until all devices have done what they were given. Raises TargetError without a driver."""
    found = driver(None)
    assert isinstance(found, CudaDriver)
    found.check(found.library.cuCtxSynchronize(), "waited for")


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
