"""A vendor's library as a driver: opened by the first call, its functions by address in the table."""

from __future__ import annotations

import abc
import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from pbkern.core.errors import OptionError, TargetError

from .driver import AFTER_LAUNCH, Driver, LoadedKernel, address_of

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed


class DeviceFailed(TargetError):
    """A kernel failed on the device before the call that says so."""


class LibraryDriver(Driver):
    """A vendor's library.

    Attributes:
      vendor: in messages. library_name: of the file. symbols: name in the table -> the library's. initialise: its symbol.
      capture_mode: the function that changes what a thread may do while a stream is recorded.
      error_texts: functions that store the name and the text of an error. hint: of errors.
    """

    vendor: str
    library_name: str
    symbols: ClassVar[Mapping[str, str]]
    initialise: str
    capture_mode: str
    error_texts: tuple[str, ...]
    hint: str

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        super().__init__()

    @property
    def library(self) -> Any:
        """Raises TargetError where it is not installed or has no device."""
        with self._lock:
            if self._library is None:
                try:
                    self._library = ctypes.CDLL(self.library_name)
                except OSError as e:
                    raise TargetError(
                        f"no program can be launched on an {self.vendor} GPU",
                        why=f"{self.library_name}: {e}",
                        hint=self.hint,
                    ) from None
                try:
                    self.check(self.call(self.initialise, 0), "initialised")
                except TargetError:
                    self._library = None
                    raise
            return self._library

    def open(self) -> None:
        self.fill(
            {name: address_of(self.function(symbol)) for name, symbol in self.symbols.items()}
        )

    def function(self, symbol: str) -> Any:
        """Raises TargetError for a library without such a function."""
        try:
            return getattr(self.library, symbol)
        except AttributeError:
            raise TargetError(
                f"the driver of the {self.vendor} GPU has no function {symbol}",
                why=f"{self.library_name} is older than what this target needs",
                hint=self.hint,
            ) from None

    def call(self, symbol: str, *arguments: Any) -> int:
        """The error of a call. Raises TargetError for a library without such a function."""
        return self.function(symbol)(*arguments)

    def check(self, error: int, what: str) -> None:
        """Raises TargetError for what the library calls an error, DeviceFailed for what a kernel did before."""
        if error in AFTER_LAUNCH:
            device = ctypes.c_int()
            self.call(self.symbols["device"], ctypes.byref(device))
            raise DeviceFailed(
                self.failed_before(device.value, f"it cannot be {what}", error), hint=self.hint
            )
        if error:
            raise TargetError(
                f"the driver of the {self.vendor} GPU fails when it is {what}",
                why=self.text_of(error),
                hint=self.hint,
            )

    def number(self, what: str, symbol: str, *arguments: Any) -> int:
        """The integer that a function stores at its first argument. Raises TargetError."""
        value = ctypes.c_int()
        self.check(self.call(symbol, ctypes.byref(value), *arguments), what)
        return value.value

    def pointer(self, what: str, symbol: str, *arguments: Any) -> ctypes.c_void_p:
        """The pointer that a function stores at its first argument. Raises TargetError."""
        value = ctypes.c_void_p()
        self.check(self.call(symbol, ctypes.byref(value), *arguments), what)
        return value

    def text_of(self, error: int) -> str:
        texts = []
        for symbol in self.error_texts:
            text = ctypes.c_char_p()
            self.call(symbol, error, ctypes.byref(text))
            texts += [text.value.decode()] if text.value else []
        return " ".join(texts) or f"error {error}"

    # ---------------------------------------------------------------- kernels

    @abc.abstractmethod
    def kind_of(self, device: int) -> Any:
        """The DeviceKind of a device.

        Raises OptionError where there is no code for it, TargetError.
        """

    @abc.abstractmethod
    def loaded(self, kernel: LoadedKernel, what: str, image: bytes, device: int) -> int:
        """The handle of a kernel in an image, for the calling thread's device. Raises TargetError."""

    def prepare(self, kernel: LoadedKernel, device: int) -> int:
        """The first image that the device takes: those that the code was made for, then what is made for the device itself."""
        refused: list[str] = []
        with self._relaxed():
            for what, image in self._images(kernel, device, refused):
                try:
                    return self.loaded(kernel, what, image, device)
                except DeviceFailed:
                    raise
                except TargetError as e:
                    refused.append(f"{what}: {e.why or e.what}")
        raise TargetError(
            f"device {device} takes no code of kernel `{kernel.function.name}`",
            why="; ".join(refused),
            hint="compile_options={'device': ...} names the architecture of the device; "
            + self.hint,
        )

    def _images(
        self, kernel: LoadedKernel, device: int, refused: list[str]
    ) -> Iterator[tuple[str, bytes]]:
        """(what it is, image); what cannot be made is noted in `refused`."""
        yield from kernel.code.images(refused)
        try:
            other = kernel.code.made_for(self.kind_of(device))
        except (OptionError, TargetError) as e:
            refused.append(e.what)
            return
        if other is not None:
            yield from other.images(refused)

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Lets the thread load code, though it may be recording a stream."""
        mode = ctypes.c_int(RELAXED)
        self.check(self.call(self.capture_mode, ctypes.byref(mode)), "about to be given a kernel")
        try:
            yield
        finally:
            self.call(self.capture_mode, ctypes.byref(mode))

    # ---------------------------------------------------------------- memory

    def bytes_at(self, address: int | None, size: int, stream: int | None) -> np.ndarray:
        contents = np.zeros(size, np.uint8)
        if size:
            self.check(
                self.call(
                    self.symbols["read"],
                    ctypes.c_void_p(contents.ctypes.data),
                    ctypes.c_void_p(address),
                    ctypes.c_size_t(size),
                    ctypes.c_void_p(stream),
                ),
                "read",
            )
            self.check(
                self.call(self.symbols["synchronize"], ctypes.c_void_p(stream)), "waited for"
            )
        return contents
