"""HostProgram -> machine code and a registered XLA FFI target.

Compiled programs are kept for the life of the process: XLA holds raw addresses of their handlers.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from ...dsl.host import HostProgram
from ...dsl.kernel import Kernel
from ...lower.host import LoweredProgram, default_threads, lower_host
from ...lower.program import LowerOptions
from .. import mlir
from . import runtime

OPT_LEVEL = 2
_serial = itertools.count()
_resident: list[Compiled] = []
_runtime: list[mlir.Loaded] = []


@dataclass
class Compiled:
    """One program in memory.

    Attributes:
      ffi_name: name under which the handler is registered with XLA.
      lowered: its MLIR text and nests.
      times: milliseconds per stage.
    """

    program: HostProgram
    ffi_name: str
    lowered: LoweredProgram
    llvm: str
    loaded: mlir.Loaded
    times: dict[str, float] = field(default_factory=dict)

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Runs on this thread on NumPy arrays; inputs must be contiguous."""
        ins = [np.ascontiguousarray(a) for a in arrays]
        outs = [np.empty(b.type.shape, b.type.dtype) for b in self.program.outputs]
        pointers = (ctypes.c_void_p * max(len(ins) + len(outs), 1))(*(a.ctypes.data for a in (*ins, *outs)))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.loaded.address("pbk_call_address"))(pointers)
        return outs


def compile_program(program: HostProgram, options_of: Callable[[Kernel], LowerOptions] = lambda k: LowerOptions(),
                    threads_of: Callable[[Kernel], int] | None = None, opt_level: int = OPT_LEVEL) -> Compiled:
    """Lowers, compiles, loads and registers a program. Raises UnsupportedOp or InternalError."""
    runtime.check_api_version()
    symbols = runtime_symbols()
    times: dict[str, float] = {}

    def timed(stage: str, f, *args):
        start = time.perf_counter()
        result = f(*args)
        times[stage] = (time.perf_counter() - start) * 1e3
        return result

    lowered = timed("lower", lower_host, program, options_of, threads_of or (lambda k: default_threads()))
    module = timed("parse", mlir.parse, lowered.kernels)
    timed("passes", mlir.run_passes, module, mlir.KERNEL_PASSES)
    sizes = tuple(b.type.nbytes for b in program.outputs)
    host = timed("host", _host_module, lowered.host + runtime.program_text(lowered.arena_bytes, len(program.inputs), sizes))
    mlir.join(module, host)
    mlir.join(module, mlir.parse(runtime.GETTERS))
    mlir.check_lowered(module)
    llvm = str(module)
    loaded = timed("llvm", mlir.Loaded, module, opt_level, symbols)
    address = timed("load", loaded.address, "pbk_handler_address")
    name = f"pbkern_{next(_serial)}_{program.name}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    compiled = Compiled(program, name, lowered, llvm, loaded, times)
    _resident.append(compiled)
    return compiled


@functools.cache
def runtime_symbols() -> dict[str, int]:
    """Addresses of the runtime's entry points, compiled on first use."""
    module = _host_module(runtime.runtime_module_text())
    mlir.join(module, mlir.parse(runtime.runtime_getters()))
    mlir.check_lowered(module)
    loaded = mlir.Loaded(module, OPT_LEVEL)
    _runtime.append(loaded)
    return {name: loaded.address(f"{name}_address") for name in runtime.SYMBOLS}


def _host_module(text: str):
    return mlir.run_passes(mlir.parse(text), mlir.HOST_PASSES)


def call(compiled: Compiled, *args):
    """The program as a JAX operation (to be traced)."""
    results = [jax.ShapeDtypeStruct(b.type.shape, b.type.dtype) for b in compiled.program.outputs]
    return jax.ffi.ffi_call(compiled.ffi_name, results)(*args)
