"""A compiled program as a JAX operation on a device's arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from pbkern.targets.cpu.codegen.elf_loader import Image

from ..program import Compiled
from .driver import Driver
from .handler import handler

_serial = itertools.count()
_images: list[Image] = []  # of handlers: XLA keeps their addresses


def launched_call(compiled: Compiled, operands: Sequence, driver: Driver) -> list:
    """Results of the program on operands of the driver's platform. Traceable."""
    name, temporaries = _registered(compiled, driver)
    results = [jax.ShapeDtypeStruct(b.type.shape, b.type.dtype) for b in compiled.program.outputs]
    memory = jax.ShapeDtypeStruct((temporaries,), np.uint8)
    made = jax.ffi.ffi_call(name, [*results, memory], input_output_aliases=compiled.program.shared_arrays())(*operands)
    return list(made)[: len(results)]


def _registered(compiled: Compiled, driver: Driver) -> tuple[str, int]:
    """(name under which XLA knows the handler for this driver, bytes of temporaries). XLA keeps it, so the process does."""
    if driver not in compiled.handlers:
        image, temporaries = handler(compiled, driver)
        name = f"pbkern_gpu_{next(_serial)}_{compiled.program.name}"
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(image.address("pbk_handler")), platform=driver.platform)
        _images.append(image)
        compiled.handlers[driver] = name, temporaries
    return compiled.handlers[driver]
