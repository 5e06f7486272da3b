"""Table of a driver's functions that launches call, and for each kernel its handles on the devices.

Handlers (handler.py) are made of addresses of both, before a driver's library is there. A library
is opened by the first call, a kernel is loaded by the first launch on a device.

    ready                              whether the functions below are there; not a function
    open() -> error                    makes them be there
    device(place) -> error             stores the number of the calling thread's device
    prepare(kernel, device) -> error   stores the kernel's handle for the device in its row
    launch, copy, read, synchronize    as the CUDA driver API declares cuLaunchKernel, cuMemcpyDtoDAsync, cuMemcpyDtoHAsync,
                                       cuStreamSynchronize; HIP's have the same arguments
    clear                              as cuMemsetD8Async
    describe(kernel, error, device) -> text    what a failed call says
    record(kernel, address, stream)    writes the trace of what a launch has recorded there
    report(kernel, address, operands, stream)    prints what a launch has stored there, and notes checks that failed;
                                                 operands: their addresses

`kernel` is the address of the kernel's row of handles, one per device.
"""

from __future__ import annotations

import abc
import ctypes
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from pbkern.core.errors import PbkernError
from pbkern.core.lazy_dataclass import dataclass
from pbkern.targets.simt.emit.kernel import ThreadFunction
from pbkern.targets.simt.program import KernelCode

from . import trace
from .reports import receive

Address = int
NAMES = (
    "ready",
    "open",
    "device",
    "prepare",
    "launch",
    "copy",
    "read",
    "synchronize",
    "clear",
    "describe",
    "record",
    "report",
)
# Devices of one process that have a place in rows.
DEVICES = 64
# Launches that are remembered per device: any of them may be the cause of an error that comes
# later.
RECENT_LAUNCHES = 8
# Errors that no driver knows: the reason is kept for the thread that called.
NOTED = -1
BEYOND = -2  # a device has no place in rows
# Numbered as CUDA and HIP number them: what a kernel did while it ran, which a later call is told.
# Source: CUDA driver API, CUresult: illegal address, timeout, assert, hardware stack, illegal
# instruction, misaligned address, invalid address space, invalid program counter, launch failure.
AFTER_LAUNCH = frozenset((700, 702, 710, 714, 715, 716, 717, 718, 719))
PROGRAM = (1 << 64) - 1  # stands for a kernel's row, in calls that are of none
Open = ctypes.CFUNCTYPE(ctypes.c_int)
DeviceOf = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
Prepare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
Describe = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
Record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
Report = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)


@dataclass(eq=False)
class LoadedKernel:
    """One kernel of a handler.

    Attributes:
      sizes: bytes of its arguments. handles: its row, by device; zero where it is not loaded.
    """

    code: KernelCode
    sizes: tuple[int, ...]
    handles: ctypes.Array

    @property
    def function(self) -> ThreadFunction:
        return self.code.function


class Driver(abc.ABC):
    """A table of functions, and the kernels that handlers launch by them.

    Both stay as long as the process.

    Attributes:
      platform: of XLA's handlers, whose arrays its addresses point to.
      kernels: by address of their row. failures: by thread, why its last call failed.
      recent: per device the number of launches, and the addresses of the last ones in a ring.
    """

    platform: str

    def __init__(self) -> None:
        self.kernels: dict[Address, LoadedKernel] = {}
        self.failures: dict[int, str] = {}
        self.failed: dict[
            int, str
        ] = {}  # device -> the names of kernels that an error was reported for
        self.recent = (ctypes.c_int64 * (DEVICES * (1 + RECENT_LAUNCHES)))()
        self._table = (ctypes.c_void_p * len(NAMES))()
        self._texts: list[ctypes.Array] = []
        self._lock = threading.RLock()
        self._callbacks = {
            "open": Open(self._noted(self._open)),
            "prepare": Prepare(self._noted(self._prepare)),
            "describe": Describe(self._described),
            "record": Record(self._noted(self._recorded)),
            "report": Report(self._noted(self._reported)),
        }
        self.fill({name: address_of(callback) for name, callback in self._callbacks.items()})

    @property
    def table(self) -> Address:
        return ctypes.addressof(self._table)

    def fill(self, functions: Mapping[str, Address]) -> None:
        for name, address in functions.items():
            self._table[NAMES.index(name)] = address

    def load(self, code: Any, sizes: tuple[int, ...]) -> Address:
        """The row of a kernel, of whose arguments `sizes` has the bytes. Asks nothing of a device."""
        handles = (ctypes.c_int64 * DEVICES)()
        address = ctypes.addressof(handles)
        with self._lock:
            self.kernels[address] = LoadedKernel(code, sizes, handles)
        return address

    # ---------------------------------------------------------------- a driver's own

    @abc.abstractmethod
    def open(self) -> None:
        """Makes the functions of the table be there. Raises TargetError."""

    @abc.abstractmethod
    def prepare(self, kernel: LoadedKernel, device: int) -> int:
        """The handle of a kernel for the calling thread's device. Raises TargetError."""

    @abc.abstractmethod
    def text_of(self, error: int) -> str: ...

    @abc.abstractmethod
    def bytes_at(self, address: int | None, size: int, stream: int | None) -> np.ndarray:
        """uint8[size] of a device. Raises TargetError."""

    # ---------------------------------------------------------------- what handlers call

    def _noted(self, call: Callable[..., None]) -> Callable[..., int]:
        """`call` as handlers call it: no exception passes through their frames."""

        def noted(*arguments: Any) -> int:
            try:
                call(*arguments)
            except (PbkernError, OSError) as e:
                self.failures[threading.get_ident()] = str(e)
                return NOTED
            except BaseException:  # an interrupt, too
                self.failures[threading.get_ident()] = traceback.format_exc()
                return NOTED
            return 0

        return noted

    def _open(self) -> None:
        with self._lock:
            self.open()
            self._table[NAMES.index("ready")] = 1

    def _prepare(self, address: Address, device: int) -> None:
        with self._lock:
            kernel = self.kernels[address]
            if not kernel.handles[device]:
                kernel.handles[device] = self.prepare(kernel, device)

    def _described(self, address: Address | None, error: int, device: int) -> int:
        try:
            text = self.described(address, error, device)
        except BaseException:  # without a text, the call would count as good
            text = f"error {error} of the driver, which does not say more: {traceback.format_exc()}"
        return address_of_text(self._texts, text)

    def described(self, address: Address | None, error: int, device: int) -> str:
        """Says why a call failed: of a kernel, of a copy (None), or of what is asked before either (PROGRAM)."""
        if error == NOTED:
            return self.failures.pop(threading.get_ident(), "a call of the driver failed")
        if error == BEYOND:
            return f"a process launches on {DEVICES} devices, those with the lowest numbers"
        what = "the program" if address == PROGRAM else "a copy"
        what = (
            f"kernel `{self.kernels[address].function.name}`" if address in self.kernels else what
        )
        if error not in AFTER_LAUNCH:
            return f"{what} was not launched: {self.text_of(error)}"
        return self.failed_before(device, f"{what} was not launched", error)

    def failed_before(self, device: int, what: str, error: int) -> str:
        """Says that an earlier launch failed: at first its kernel or kernels, later that there was one."""
        names = self.launched_last(device)
        if names:
            self.forget(device)
            self.failed[device] = names
            which = (
                f"one of kernels {names}, the last launches first"
                if "," in names
                else f"kernel {names}"
            )
            return (
                f"{which} failed on device {device} while it ran: {self.text_of(error)}. The device may refuse what "
                "follows in this process; pbkern.simulate(f, *args) finds accesses outside of arrays, and so does "
                "compute-sanitizer"
            )
        earlier = f" (kernel {self.failed[device]})" if device in self.failed else ""
        return f"{what}: device {device} has failed before{earlier}: {self.text_of(error)}"

    def launched_last(self, device: int) -> str:
        """Names of the kernels that were launched on a device since it was waited for, the last one first."""
        first = device * (1 + RECENT_LAUNCHES)
        count = self.recent[first]
        addresses = [
            self.recent[first + 1 + (count - 1 - k) % RECENT_LAUNCHES]
            for k in range(min(count, RECENT_LAUNCHES))
        ]
        return ", ".join(
            dict.fromkeys(
                f"`{self.kernels[address].function.name}`"
                for address in addresses
                if address in self.kernels
            )
        )

    def forget(self, device: int) -> None:
        """Forgets what was launched on a device: it has ended."""
        self.recent[device * (1 + RECENT_LAUNCHES)] = 0

    def _recorded(self, address: Address, place: int, stream: int | None) -> None:
        function = self.kernels[address].function
        records = self.bytes_at(place, function.record_bytes, stream).view(np.int64)
        try:
            trace.write(function, records)
        except OSError as e:
            raise OSError(
                f"what kernel `{function.name}` has recorded could not be written: {e}"
            ) from None

    def _reported(self, address: Address, place: int, operands: Any, stream: int | None) -> None:
        function = self.kernels[address].function
        reports = function.reports
        assert reports is not None
        stored = self.bytes_at(place, reports.nbytes // 8 * 8, stream).view(np.int64)

        def read() -> list[np.ndarray]:
            sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in reports.operands]
            return [
                self.bytes_at(operands[k], size, stream).view(dtype).reshape(shape)
                for k, (size, (shape, dtype)) in enumerate(zip(sizes, reports.operands))
            ]

        receive(function, stored, read)


def address_of(function: Callable) -> Address:
    address = ctypes.cast(cast(Any, function), ctypes.c_void_p).value
    assert address is not None
    return address


def address_of_text(texts: list, text: str) -> int:
    """Address of a text that stays where it is while XLA may read it: the last hundred do."""
    buffer = ctypes.create_string_buffer(text.encode())
    texts.append(buffer)
    del texts[:-100]
    return ctypes.addressof(buffer)
