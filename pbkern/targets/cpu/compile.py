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
from ...dsl.kernel import ArrayType, Kernel
from ...lower.host import ALIGNMENT, LoweredProgram, default_threads, lower_host
from ...lower.program import LowerOptions
from ...lower.traces import TRACE
from .. import mlir
from . import runtime, traces

# LLVM's optimiser finds nothing in explicitly vectorised code (measured: docs/decisions), but does in scalar loops.
VECTOR_OPT_LEVEL, SCALAR_OPT_LEVEL = 0, 2
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
    module: object
    loaded: mlir.Loaded
    times: dict[str, float] = field(default_factory=dict)

    @property
    def llvm(self) -> str:
        """Text of the LLVM dialect module."""
        return str(self.module)

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Runs on this thread on NumPy arrays; inputs must be contiguous."""
        ins = [np.ascontiguousarray(a) for a in arrays]
        outs = [_aligned(b.type) for b in self.program.outputs]
        pointers = (ctypes.c_void_p * max(len(ins) + len(outs), 1))(*(a.ctypes.data for a in (*ins, *outs)))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.loaded.address("pbk_call_address"))(pointers)
        return outs


def _aligned(t: ArrayType) -> np.ndarray:
    """A new array that starts at a cache line, as XLA's do."""
    memory = np.empty(t.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + t.nbytes].view(t.dtype).reshape(t.shape)


def compile_program(program: HostProgram, options_of: Callable[[Kernel], LowerOptions] = lambda k: LowerOptions(),
                    threads_of: Callable[[Kernel], int] | None = None, opt_level: int | None = None) -> Compiled:
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
    if opt_level is None:
        opt_level = SCALAR_OPT_LEVEL if any(k.has_scalar_loops for k in lowered.lowered) else VECTOR_OPT_LEVEL
    loaded = timed("llvm", mlir.Loaded, module, opt_level, symbols)
    address = timed("load", loaded.address, "pbk_handler_address")
    name = f"pbkern_{next(_serial)}_{program.name}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    compiled = Compiled(program, name, lowered, module, loaded, times)
    _resident.append(compiled)
    return compiled


@functools.cache
def runtime_symbols() -> dict[str, int]:
    """Addresses of the runtime's entry points, compiled on first use."""
    module = _host_module(runtime.runtime_module_text())
    mlir.join(module, mlir.parse(runtime.runtime_getters()))
    mlir.check_lowered(module)
    loaded = mlir.Loaded(module, VECTOR_OPT_LEVEL)
    _runtime.append(loaded)
    return {name: loaded.address(f"{name}_address") for name in runtime.SYMBOLS} | {TRACE: traces.ADDRESS}


def _host_module(text: str):
    return mlir.run_passes(mlir.parse(text), mlir.HOST_PASSES)


def call(compiled: Compiled, *args):
    """The program as a JAX operation (to be traced)."""
    results = [jax.ShapeDtypeStruct(b.type.shape, b.type.dtype) for b in compiled.program.outputs]
    return jax.ffi.ffi_call(compiled.ffi_name, results)(*args)
