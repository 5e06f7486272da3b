"""The runtime's functions as machine code, made once per process: addresses of what compiled programs call."""

from __future__ import annotations

import ctypes
import functools
import os
import threading

from pbkern.lower.rules.debug_callbacks import TRACE
from pbkern.targets import mlir

from . import callbacks, lifetime
from .objects import object_files
from .objects.elf_loader import Image
from .objects.object_code import ObjectCode, stored_code
from .runtime import xla

_images: list[Image] = []
_once = threading.Lock()


def runtime_symbols() -> dict[str, int]:
    """Addresses of what compiled programs call, by the names that they call it by."""
    with _once:  # threads that compile first wait for one of them
        image = _runtime()
    addresses = {name: image.address(name) for name in xla.SYMBOLS}
    assert callbacks.ADDRESS is not None
    addresses[TRACE] = callbacks.ADDRESS
    return {xla.PREFIX + name: address for name, address in addresses.items()}


def loaded(key: str, text: str, function: str, symbols: dict[str, int]) -> Image:
    """Functions in memory that programs call, as long as the process lives; `function` is one of them.

    key: by which their code is stored. symbols: addresses of what they call.
    """

    def make() -> ObjectCode:
        module = object_files.host_module(text)
        mlir.check_lowered(module)
        return ObjectCode(
            (mlir.object_code(module, object_files.VECTOR_OPT_LEVEL, function, symbols),)
        )

    _, image, _ = stored_code(key, symbols, make)
    _images.append(image)
    return image


@functools.cache
def _runtime() -> Image:
    image = loaded("runtime", xla.runtime_module_text(), xla.SYMBOLS[0], {})
    lifetime.register_state(image)
    turns = (ctypes.c_int32 * 2).from_address(image.address("pbk_turns"))
    os.register_at_fork(
        after_in_child=lambda: turns.__setitem__(slice(None), [0, 0])
    )  # threads that hold turns stay behind
    return image


def reports() -> ctypes.c_int64:
    """The word in which machine code counts numbers that are out of their range."""
    runtime_symbols()
    return ctypes.c_int64.from_address(_runtime().address("pbk_reports"))
