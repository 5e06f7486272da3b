"""A compiled program as a JAX operation on a device's arrays, and as a function of addresses."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from pbkern import _jax
from pbkern.core.errors import TargetError
from pbkern.targets.host.objects.elf_loader import Image
from pbkern.targets.simt.program import DeviceProgram

from .driver import Driver
from .handler import handler

_serial = itertools.count()
_images: list[Image] = []  # of handlers: XLA keeps their addresses


def launched_call(compiled: DeviceProgram, label: str, operands: Sequence, driver: Driver) -> list:
    """Results of the program on operands of the driver's platform, for functions that are compiled."""
    name, temporaries = _registered(compiled, driver)
    results = [
        jax.ShapeDtypeStruct(output.type.shape, output.type.dtype)
        for output in compiled.program.outputs
    ]
    memory = jax.ShapeDtypeStruct((temporaries,), np.uint8)
    shared = compiled.program.shared_arrays().items()
    return _jax.ffi_call(name, label, [*results, memory], operands, shared)[: len(results)]


def _registered(compiled: DeviceProgram, driver: Driver) -> tuple[str, int]:
    """(name under which XLA knows the handler for this driver, bytes of temporaries).

    XLA keeps it, so the process does.
    """
    image, temporaries = _made(compiled, driver)
    if driver not in compiled.names:
        name = f"pbkern_gpu_{next(_serial)}_{compiled.program.name}"
        jax.ffi.register_ffi_target(
            name, jax.ffi.pycapsule(image.address("pbk_handler")), platform=driver.platform
        )
        compiled.names[driver] = name
    return compiled.names[driver], temporaries


def _made(compiled: DeviceProgram, driver: Driver) -> tuple[Image, int]:
    if driver not in compiled.handlers:
        compiled.handlers[driver] = handler(compiled, driver)
        _images.append(compiled.handlers[driver][0])
    return compiled.handlers[driver]


def direct_entry(
    compiled: DeviceProgram, driver: Driver
) -> tuple[Callable[[bytes, int, int], None], int]:
    """(f(addresses, temporaries, stream), bytes of temporaries): the program on addresses of inputs, then results.

    f is called in a thread that is on the device. It raises TargetError with what the driver says.
    """
    image, temporaries = _made(compiled, driver)
    call = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)(
        image.address("pbk_direct")
    )

    def run(addresses: bytes, arena: int, stream: int) -> None:
        error = call(addresses, arena, stream)
        if error is not None:
            raise TargetError(error.decode())

    return run, temporaries
