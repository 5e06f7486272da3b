"""The driver's functions that launches call, by address: libcuda's, or the simulator's on arrays of the CPU.

    cuLaunchKernel, cuMemcpyDtoDAsync, cuMemcpyDtoHAsync, cuStreamSynchronize    as the CUDA driver API declares them
    describe(kernel, error) -> text                                             what a failed call says

A kernel is loaded once per process; its number stands for it in launches. The simulator's functions run PTX on the memory that
the addresses point to: the code that launches is the same, and can be checked without a device.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from pbkern.core.errors import SimulationError, TargetError
from pbkern.simulate.launches import simulate_ptx

from .program import Code

Address = int
LIBRARY = "libcuda.so.1"
LAUNCH_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
_Launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
                           ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)  # fmt: skip
_Copy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_Synchronize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_Describe = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class Driver(Protocol):
    """What launches need of a driver.

    Attributes:
      platform: JAX's platform whose arrays its addresses point to.
      functions: addresses by name, as in the docstring of this file.
    """

    platform: str
    functions: Mapping[str, Address]

    def load(self, code: Code, sizes: tuple[int, ...]) -> int:
        """The number of a kernel, of whose arguments `sizes` has the bytes."""


class CudaDriver:
    """NVIDIA's. Raises TargetError where it is not installed or has no device."""

    platform = "CUDA"

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(LIBRARY)
        except OSError as e:
            raise TargetError("no program can be launched on an NVIDIA GPU", why=f"{LIBRARY}: {e}",
                              hint="nvidia-smi shows whether a driver is installed; PBKERN_GPU_DRIVER=simulator runs launches "
                                   "without a device") from None  # fmt: skip
        self.names: dict[int, str] = {}
        self._check(self.library.cuInit(0), "initialised")
        names = {"cuLaunchKernel": "cuLaunchKernel", "cuMemcpyDtoDAsync": "cuMemcpyDtoDAsync_v2",
                 "cuMemcpyDtoHAsync": "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize": "cuStreamSynchronize"}  # fmt: skip
        self._describe, self._texts = _Describe(self._described), []
        found = {k: _address(getattr(self.library, symbol)) for k, symbol in names.items()}
        self.functions: Mapping[str, Address] = found | {"describe": _address(self._describe)}

    def load(self, code: Code, sizes: tuple[int, ...]) -> int:
        """A kernel of a library, which every context may launch. The driver assembles PTX where there is no ptxas."""
        image = code.image
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self.library.cuLibraryLoadData(ctypes.byref(library), image, None, None, 0, None, None, 0),
                    f"given kernel `{code.function.name}`")  # fmt: skip
        name = code.function.name.encode()
        self._check(self.library.cuLibraryGetKernel(ctypes.byref(kernel), library, name), f"asked for `{code.function.name}`")
        assert kernel.value is not None
        self.names[kernel.value] = code.function.name
        return kernel.value

    def _check(self, error: int, what: str) -> None:
        if error:
            raise TargetError(f"the CUDA driver fails when it is {what}", why=self._text(error),
                              hint="nvidia-smi shows the state of driver and devices")  # fmt: skip

    def _text(self, error: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.cuGetErrorName(error, ctypes.byref(name))
        self.library.cuGetErrorString(error, ctypes.byref(text))
        return " ".join(t.value.decode() for t in (name, text) if t.value) or f"error {error}"

    def _described(self, kernel: int | None, error: int) -> int:
        what = f"kernel `{self.names[kernel]}`" if kernel in self.names else "a copy"
        return _kept(self._texts, f"{what} was not launched: {self._text(error)}")


class SimulatorDriver:
    """Kernels run in the simulator, on the thread that launches them, with its checks."""

    platform = "cpu"

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[Code, tuple[int, ...]]] = {}
        self.failures: dict[int, str] = {}  # by thread: what its last call failed by
        self._lock = threading.Lock()
        self._texts: list[ctypes.Array] = []
        self._calls = (_Launch(self._launch), _Copy(_copied), _Copy(_copied), _Synchronize(lambda stream: 0),
                       _Describe(self._described))  # fmt: skip
        names = ("cuLaunchKernel", "cuMemcpyDtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize", "describe")
        self.functions: Mapping[str, Address] = dict(zip(names, map(_address, self._calls)))

    def load(self, code: Code, sizes: tuple[int, ...]) -> int:
        with self._lock:
            number = len(self.kernels) + 1
            self.kernels[number] = code, sizes
        return number

    def _launch(self, kernel, x, y, z, threads, _y, _z, shared, stream, arguments, extra) -> int:
        code, sizes = self.kernels[kernel]
        try:
            arrays = [_memory(ctypes.cast(arguments[k], ctypes.POINTER(ctypes.c_void_p))[0], n) for k, n in enumerate(sizes)]
            simulate_ptx(code.ptx, x, threads, arrays, shared_bytes=shared)
        except SimulationError as e:
            self.failures[threading.get_ident()] = f"kernel `{code.function.name}` failed: {e}"
            return LAUNCH_FAILED
        except Exception:  # nothing may pass through XLA's frames
            self.failures[threading.get_ident()] = f"kernel `{code.function.name}` failed: {traceback.format_exc()}"
            return LAUNCH_FAILED
        return 0

    def _described(self, kernel: int | None, error: int) -> int:
        return _kept(self._texts, self.failures.pop(threading.get_ident(), f"error {error}"))


@functools.cache
def driver(name: str | None) -> Driver:
    """The driver that the configuration names: "simulator", or None for NVIDIA's. Raises TargetError."""
    return SimulatorDriver() if name == "simulator" else CudaDriver()


def synchronize() -> None:
    """Waits until all devices have done what they were given. Raises TargetError without a driver."""
    found = driver(None)
    assert isinstance(found, CudaDriver)
    found._check(found.library.cuCtxSynchronize(), "waited for")


def _address(function: Callable) -> Address:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _memory(address: int | None, size: int) -> np.ndarray:
    """The bytes there; empty arrays have an address as well."""
    if not size or not address:
        return np.zeros(1, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _copied(destination: int, source: int, size: int, stream: int | None) -> int:
    ctypes.memmove(destination, source, size)
    return 0


def _kept(texts: list, text: str) -> int:
    """Address of a text that stays where it is while XLA may read it: the last hundred do."""
    buffer = ctypes.create_string_buffer(text.encode())
    texts.append(buffer)
    del texts[:-100]
    return ctypes.addressof(buffer)
