"""A compiled program called with addresses, on the threads of an OpenMP runtime that is in the process.

The program's objects are loaded once more, with the parallel loop of runtime/openmp.py in the place of the one that asks XLA's
call frame for threads. omp_set_num_threads, and with it torch.set_num_threads, is obeyed, calls inside a parallel region are
serial, and ctypes releases the interpreter's lock around a call. Without OpenMP a program runs on the calling thread.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from pbkern.targets import mlir

from . import object_files
from .compile import Compiled, image_of, runtime_symbols
from .elf_loader import Image
from .runtime import openmp, serial

PARALLEL = "_mlir_ciface_pbk_parallel"
CALLED = ("GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads", "omp_in_parallel")
MAPS = pathlib.Path("/proc/self/maps")
_loaded: list[Image] = []  # stays as long as the process: programs call into it


def entry(compiled: Compiled) -> Callable[[Any], None]:
    """f(pointers): runs the program on a ctypes array of addresses of inputs, then results, which start at cache lines."""
    symbols = runtime_symbols() | {PARALLEL: _parallel_loop(_openmp_library())}
    image = image_of(compiled.code, symbols)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(image.address("pbk_call"))
    call.image = image  # type: ignore[attr-defined]
    return call


def _openmp_library() -> str | None:
    """File of the OpenMP runtime that this process has loaded, such as the one that comes with Torch."""
    if not MAPS.exists():
        return None
    for line in MAPS.read_text().splitlines():
        name = line.split(maxsplit=5)[-1]
        if pathlib.Path(name).name.startswith(("libgomp", "libomp", "libiomp5")):
            return name
    return None


@functools.cache
def _parallel_loop(library: str | None) -> int:
    """Address of the function that divides programs among threads."""
    addresses = {}
    if library is not None:
        handle = ctypes.CDLL(library)
        addresses = {n: _address(getattr(handle, n)) for n in CALLED}
    module = object_files.host_module(openmp.OPENMP if library is not None else serial.SERIAL)
    mlir.check_lowered(module)
    code = mlir.object_code(module, object_files.VECTOR_OPT_LEVEL, PARALLEL, addresses)
    image = Image(code, addresses)
    _loaded.append(image)
    return image.address(PARALLEL)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
