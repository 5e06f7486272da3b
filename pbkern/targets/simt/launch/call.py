"""A compiled program as a JAX operation on a device's arrays, and as a function of addresses."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from pbkern import _jax
from pbkern.core.errors import InternalError, TargetError
from pbkern.core.process.disk_cache import DiskStore
from pbkern.targets.simt.program import DeviceProgram, LinkedHandler, LoadedDeviceProgram

from .driver import Driver
from .handler import handler, stored_handler

_serial = itertools.count()
_handlers: list[LinkedHandler] = []  # XLA keeps their addresses


def launched_call(
    compiled: LoadedDeviceProgram, label: str, operands: Sequence, driver: Driver
) -> list:
    """Results of the program on operands of the driver's platform, for functions that are compiled."""
    name, temporaries = _registered(compiled, driver)
    signature = compiled.signature
    results = [jax.ShapeDtypeStruct(output.shape, output.dtype) for output in signature.outputs]
    memory = jax.ShapeDtypeStruct((temporaries,), np.uint8)
    types = [*results, memory]
    return _jax.ffi_call(name, label, types, operands, signature.shared)[: len(results)]


def _registered(compiled: LoadedDeviceProgram, driver: Driver) -> tuple[str, int]:
    """(name under which XLA knows the handler for this driver, bytes of temporaries).

    XLA keeps it, so the process does.
    """
    linked = handler_of(compiled, driver)
    if driver not in compiled.names:
        name = f"pbkern_gpu_{next(_serial)}_{compiled.signature.name}"
        address = jax.ffi.pycapsule(linked.image.address("pbk_handler"))
        jax.ffi.register_ffi_target(name, address, platform=driver.platform)
        compiled.names[driver] = name
    return compiled.names[driver], linked.temporaries


def handler_of(compiled: LoadedDeviceProgram, driver: Driver) -> LinkedHandler:
    """The program's handler for a driver, which is made once."""
    if driver not in compiled.handlers:
        if not isinstance(compiled, DeviceProgram):
            raise InternalError(
                f"program `{compiled.signature.name}` was read from disk for another driver"
            )
        compiled.handlers[driver] = handler(compiled, driver)
        _handlers.append(compiled.handlers[driver])
    return compiled.handlers[driver]


def add_stored(
    compiled: LoadedDeviceProgram,
    driver: Driver,
    store: DiskStore,
    key: str,
    sizes: Sequence[tuple[int, ...]],
) -> bool:
    """Gives a program the handler that an earlier process has stored; False where the store has it no more."""
    linked = stored_handler(store, key, compiled.kernels, sizes, driver)
    if linked is None:
        return False
    compiled.handlers[driver] = linked
    _handlers.append(linked)
    return True


def direct_entry(
    compiled: LoadedDeviceProgram, driver: Driver
) -> tuple[Callable[[bytes, int, int], None], int]:
    """(f(addresses, temporaries, stream), bytes of temporaries): the program on addresses of inputs, then results.

    f is called in a thread that is on the device. It raises TargetError with what the driver says.
    """
    linked = handler_of(compiled, driver)
    call = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)(
        linked.image.address("pbk_direct")
    )

    def run(addresses: bytes, arena: int, stream: int) -> None:
        error = call(addresses, arena, stream)
        if error is not None:
            raise TargetError(error.decode())

    return run, linked.temporaries
