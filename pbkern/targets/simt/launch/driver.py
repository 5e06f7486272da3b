"""The functions of a driver that launches call, by address, and what every vendor's library has of them.

    launch, copy, read, synchronize    as the CUDA driver API declares cuLaunchKernel, cuMemcpyDtoDAsync, cuMemcpyDtoHAsync,
                                       cuStreamSynchronize; HIP's have the same arguments
    describe(kernel, error) -> text    what a failed call says
    clear                              as cuMemsetD8Async
    record(kernel, address, stream)    writes the trace of what a launch has recorded there
    report(kernel, address, operands, stream)    prints what a launch has stored there, and notes checks that failed;
                                                 operands: their addresses

A kernel is loaded once per process; its number stands for it in launches.
"""

from __future__ import annotations

import abc
import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np

from pbkern.core.errors import TargetError

from ..emit.kernel import ThreadFunction
from ..program import Code
from . import trace
from .reports import receive

Address = int
Describe = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
Record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
Report = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
NO_TRACE = -1  # an error that no driver knows: what was recorded could not be written


class Driver(Protocol):
    """What launches need of a driver.

    Attributes:
      platform: of XLA's handlers, whose arrays its addresses point to.
      functions: addresses by name, as in the docstring of this file.
    """

    @property
    def platform(self) -> str: ...

    @property
    def functions(self) -> Mapping[str, Address]: ...

    def load(self, code: Any, sizes: tuple[int, ...]) -> int:
        """The number of a kernel, of whose arguments `sizes` has the bytes."""


class LibraryDriver(abc.ABC):
    """A vendor's library. Raises TargetError where it is not installed or has no device.

    Attributes:
      vendor: in messages. library_name: of the file. symbols: name in `functions` -> the library's. initialise: its symbol.
      error_texts: functions that store the name and the text of an error. hint: of errors.
    """

    platform: str
    vendor: str
    library_name: str
    symbols: Mapping[str, str]
    initialise: str
    error_texts: tuple[str, ...]
    hint: str

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(self.library_name)
        except OSError as e:
            raise TargetError(f"no program can be launched on an {self.vendor} GPU", why=f"{self.library_name}: {e}",
                              hint=self.hint) from None
        self.functions_of: dict[int, ThreadFunction] = {}  # kernels
        self.failures: dict[int, str] = {}  # by thread: why its last trace was not written
        self.check(getattr(self.library, self.initialise)(0), "initialised")
        self._texts = list[ctypes.Array]()
        self._own = {"describe": Describe(self._described), "record": Record(self._recorded), "report": Report(self._reported)}
        found = {k: address_of(getattr(self.library, symbol)) for k, symbol in self.symbols.items()}
        self.functions: Mapping[str, Address] = found | {k: address_of(f) for k, f in self._own.items()}

    def load(self, code: Code, sizes: tuple[int, ...]) -> int:
        kernel = self.loaded(code)
        self.functions_of[kernel] = code.function
        return kernel

    @abc.abstractmethod
    def loaded(self, code: Code) -> int:
        """The library's handle of a kernel."""

    def check(self, error: int, what: str) -> None:
        """Raises TargetError for what the library calls an error."""
        if error:
            raise TargetError(f"the driver of the {self.vendor} GPU fails when it is {what}", why=self._text(error),
                              hint=self.hint)

    def _text(self, error: int) -> str:
        found = []
        for symbol in self.error_texts:
            text = ctypes.c_char_p()
            getattr(self.library, symbol)(error, ctypes.byref(text))
            found += [text.value.decode()] if text.value else []
        return " ".join(found) or f"error {error}"

    def _described(self, kernel: int | None, error: int) -> int:
        if error == NO_TRACE:
            return kept(self._texts, self.failures.pop(threading.get_ident()))
        what = f"kernel `{self.functions_of[kernel].name}`" if kernel in self.functions_of else "a copy"
        return kept(self._texts, f"{what} was not launched: {self._text(error)}")

    def _recorded(self, kernel: int, address: int, stream: int | None) -> int:
        function = self.functions_of[kernel]
        records = np.zeros(function.record_bytes // 8, np.int64)
        return self._read(records, address, stream) or written(function, records, self.failures)

    def _reported(self, kernel: int, address: int, operands: Any, stream: int | None) -> int:
        reports = self.functions_of[kernel].reports
        assert reports is not None
        stored = np.zeros(reports.nbytes // 8, np.int64)
        if error := self._read(stored, address, stream):
            return error

        def read() -> list[np.ndarray]:
            found = [np.zeros(shape, dtype) for shape, dtype in reports.operands]
            for k, a in enumerate(found):
                self.check(self._read(a, operands[k], stream), "asked for operands")
            return found

        receive(self.functions_of[kernel], stored, read)
        return 0

    def _read(self, into: np.ndarray, address: int, stream: int | None) -> int:
        """Copies bytes of the device, and waits for them."""
        read, synchronize = (getattr(self.library, self.symbols[name]) for name in ("read", "synchronize"))
        if not into.nbytes:
            return 0
        error = read(ctypes.c_void_p(into.ctypes.data), ctypes.c_void_p(address), ctypes.c_size_t(into.nbytes),
                     ctypes.c_void_p(stream))
        return error or synchronize(ctypes.c_void_p(stream))


def written(function: ThreadFunction, records: np.ndarray, failures: dict[int, str]) -> int:
    """0, or the error whose reason is among the failures now."""
    try:
        trace.write(function, records)
    except OSError as e:
        failures[threading.get_ident()] = f"what kernel `{function.name}` has recorded could not be written: {e}"
        return NO_TRACE
    return 0


def address_of(function: Callable) -> Address:
    address = ctypes.cast(cast(Any, function), ctypes.c_void_p).value
    assert address is not None
    return address


def kept(texts: list, text: str) -> int:
    """Address of a text that stays where it is while XLA may read it: the last hundred do."""
    buffer = ctypes.create_string_buffer(text.encode())
    texts.append(buffer)
    del texts[:-100]
    return ctypes.addressof(buffer)
