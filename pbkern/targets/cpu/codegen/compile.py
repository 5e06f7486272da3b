"""HostProgram -> machine code and a registered XLA FFI target. The one place that compiles.

A program's code are object files, made by MLIR and LLVM (object_files.py) or found in the store on
disk (core/process/disk_cache.py) under the program's content (cache_key.py), and loaded by
elf_loader.py either way. With a hit nothing is lowered and MLIR is not imported: the nests and
texts of such a program are made when somebody asks for them.

Programs stay in memory while something may call them, see lifetime.py. Their texts and nests do
not: whoever asks for those of one has it lowered again.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pbkern import _jax
from pbkern.core import fallback
from pbkern.core.errors import InternalError
from pbkern.core.process import disk_cache, gc_pause, progress, recursion
from pbkern.dsl.build_programs import in_stages
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import ArrayType, Kernel
from pbkern.lower.nest.scratch import BUFFER_ALIGNMENT
from pbkern.lower.rules.debug_callbacks import TRACE
from pbkern.targets import mlir
from pbkern.targets.backend import device_functions
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.passes import CPU_PASSES

from . import cache_key, callbacks, known_failures, lifetime, object_files
from . import elf_loader as objects
from .host import LoweredProgram, default_threads, emit_host
from .kernel import LoweredKernel, emit
from .memory_message import give_message, memory_message
from .runtime import xla

KIND = "code"
# What progress lines call the stages that may take long.
STAGES = {
    "passes": "MLIR passes",
    "llvm": "LLVM code generation",
    "host": "the host function",
    "load": "loading",
}
_serial = itertools.count()
_resident: weakref.WeakSet[LoadedProgram] = weakref.WeakSet()
_runtime: list[objects.Image] = []
_looked_at: list = []  # weak reference to a program, its lowered form


@dataclass(frozen=True)
class ObjectCode:
    """Machine code of one program, as it is kept on disk.

    Attributes:
      objects: ELF object files. Each may call functions of those before it; the last has
        @pbk_handler and @pbk_call.
      arena_bytes: memory of one call for temporaries and scratch.
    """

    objects: tuple[bytes, ...]
    arena_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.objects))

    def packed(self) -> bytes:
        head = {"arena_bytes": self.arena_bytes, "sizes": [len(obj) for obj in self.objects]}
        return b"".join([json.dumps(head).encode(), b"\n", *self.objects])

    @classmethod
    def unpacked(cls, payload: bytes) -> ObjectCode:
        first, _, rest = payload.partition(b"\n")
        head = json.loads(first)
        ends = list(itertools.accumulate(head["sizes"]))
        return cls(
            tuple(rest[end - size : end] for end, size in zip(ends, head["sizes"])),
            head["arena_bytes"],
        )


@dataclass(eq=False)
class LoadedProgram:
    """One program in memory.

    Attributes:
      name: name under which XLA knows the handler, once it is asked for as `ffi_name`.
      code: its machine code.
      from_disk: whether an earlier process had compiled it.
      times: milliseconds per stage; those of different kernels overlap.
    """

    program: HostProgram
    name: str
    code: ObjectCode
    image: objects.Image
    lower: Callable[[], LoweredProgram]
    from_disk: bool = False
    times: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def no_memory(self) -> Any:
        """Text for a call that gets no memory for the arena: a buffer of characters, which the code points to."""
        return ctypes.create_string_buffer(
            memory_message(self.program, self.code.arena_bytes).encode()
        )

    @functools.cached_property
    def ffi_name(self) -> str:
        """Registers the handler.

        Not before somebody asks: until XLA has a client it only keeps the address, and the program
        may have gone when it calls there.
        """
        lifetime.register(self.name, self.image)
        return self.name

    @property
    def lowered(self) -> LoweredProgram:
        """MLIR text and nests, made again; those of the program that was last asked for are kept."""
        if not _looked_at or _looked_at[0]() is not self:
            _looked_at[:] = [weakref.ref(self), self.lower()]
        return _looked_at[1]

    @property
    def llvm(self) -> str:
        """Text of the LLVM dialect module."""
        host = _host_text(self.program, self.lowered)
        return str(
            object_files.llvm_module(self.lowered.kernels, host, lambda stage, f, *args: f(*args))
        )

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Runs on this thread on NumPy arrays; inputs must be contiguous."""
        ins = [np.ascontiguousarray(array) for array in arrays]
        outs = [_aligned(output.type) for output in self.program.outputs]
        pointers = (ctypes.c_void_p * max(len(ins) + len(outs), 1))(
            *(buffer.ctypes.data for buffer in (*ins, *outs))
        )
        self.entry(self.image)(pointers)
        return outs

    def entry(self, image: objects.Image) -> Any:
        """The program in an image of its code, as a function of addresses, which raises MemoryError."""

        def check(status: int, *_) -> None:
            if status:
                raise MemoryError(self.no_memory.value.decode())

        call: Any = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(image.address("pbk_call"))
        call.errcheck = check
        return call


def _aligned(spec: ArrayType) -> np.ndarray:
    """A new array that starts at a cache line, as XLA's do."""
    memory = np.empty(spec.nbytes + BUFFER_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % BUFFER_ALIGNMENT
    return memory[start : start + spec.nbytes].view(spec.dtype).reshape(spec.shape)


def compile_program(
    program: HostProgram,
    options_of: Callable[[Kernel], LowerOptions] = lambda launched: LowerOptions(),
    threads_of: Callable[[Kernel], int] | None = None,
    opt_level: int | None = None,
    key: str | None = None,
) -> LoadedProgram:
    """Finds or makes a program's code, loads and registers it.

    Raises UnsupportedOp or InternalError.

    Args:
      program: launches of kernels, in order.
      options_of: what lowering takes of each kernel; by default LowerOptions().
      threads_of: how many threads a kernel may use; by default every core.
      opt_level: of LLVM; None: as its loops need.
      key: content.program_key of these arguments, where the caller has made it.
    """
    xla.check_api_version()
    program = in_stages(program)
    threads_of = threads_of or (lambda launched: default_threads())
    times: dict[str, float] = {}

    def timed(stage: str, f, *args):
        progress.step(f"{program.name}: {STAGES.get(stage, stage)}")
        start = time.perf_counter()
        result = f(*args)
        times[stage] = times.get(stage, 0.0) + (time.perf_counter() - start) * 1e3
        return result

    def lower(ready: Callable[[LoweredKernel], None] = lambda kernel: None) -> LoweredProgram:
        count = itertools.count(1)

        def announced(kernel: Kernel) -> LowerOptions:  # asked for as each kernel's turn comes
            progress.step(
                f"kernel {next(count)} of {len(program.kernels())} ({kernel.name}), lowering"
            )
            return options_of(kernel)

        return emit_host(
            program, device_functions(program, announced, CPU_PASSES, emit, ready), threads_of
        )

    def make() -> ObjectCode:
        mlir.bindings()  # a missing package is reported before any work
        with object_files.Parts(symbols, opt_level, timed) as parts:
            lowered = timed("lower", lower, parts.add)
            objects = parts.finish(_host_text(program, lowered), "pbk_handler")
        return ObjectCode(objects, lowered.arena_bytes)

    with progress.compiling(program.name), gc_pause.paused(), recursion.headroom():
        symbols = runtime_symbols()
        key = key or timed("key", cache_key.program_key, program, options_of, threads_of, opt_level)
        by_hand = any(
            kernel.defined_at for kernel in program.kernels()
        )  # its errors name a program that repeats them
        code, image, found = kept(key, symbols, make, timed, remembers_failures=not by_hand)
    name = f"pbkern_{next(_serial)}_{program.name}"
    compiled = LoadedProgram(program, name, code, image, lower, found, times)
    lifetime.free_with(compiled, image)
    give_message(image, compiled.no_memory)
    _resident.add(compiled)
    return compiled


def kept(
    key: str,
    symbols: dict[str, int],
    make: Callable[[], ObjectCode],
    timed=lambda stage, f, *args: f(*args),
    remembers_failures: bool = False,
):
    """(code, its image, whether it was on disk): what the store has under `key`, else what `make` makes, stored.

    remembers_failures: a failure of `make` is stored, too, and raised again in later processes
    without another try.
    """
    store = None if fallback.is_failing() else disk_cache.current()
    if store is not None:
        key = disk_cache.digest((key, timed("environment", cache_key.environment)))
        payload = timed("read", store.get, KIND, key)
        if payload is not None:
            try:
                code = ObjectCode.unpacked(payload)
                return code, timed("load", image_of, code, symbols), True
            except (InternalError, ValueError, KeyError):  # no object of ours: make it again
                store.remove(KIND, key)
    with known_failures.remembered(store if remembers_failures else None, key):
        code = make()
        image = timed("load", image_of, code, symbols)
    if store is not None and not prints(code):
        timed("write", store.put, KIND, key, code.packed())
    return code, image, False


def image_of(code: ObjectCode, symbols: Mapping[str, int]) -> objects.Image:
    """The last object's image, which keeps those of the others alive. Raises InternalError."""
    image = None
    for made in code.objects:
        image = objects.Image(made, symbols, image)
    if image is None:
        raise InternalError("a program has no object file")
    return image


def prints(code: ObjectCode) -> bool:
    """Whether the code holds numbers of print sites, which mean nothing in another process."""
    return any(objects.undefined_symbols(obj) & {TRACE, xla.PREFIX + TRACE} for obj in code.objects)


def _host_text(program: HostProgram, lowered: LoweredProgram) -> str:
    sizes = tuple(output.type.nbytes for output in program.outputs)
    return lowered.host + xla.program_text(lowered.arena_bytes, len(program.inputs), sizes)


_once = threading.Lock()


def runtime_symbols() -> dict[str, int]:
    """Addresses of what compiled programs call, by the names that they call it by."""
    with _once:  # threads that compile first wait for one of them
        return _loaded_runtime()


@functools.cache
def _loaded_runtime() -> dict[str, int]:

    def make() -> ObjectCode:
        module = object_files.host_module(xla.runtime_module_text())
        mlir.check_lowered(module)
        return ObjectCode(
            (mlir.object_code(module, object_files.VECTOR_OPT_LEVEL, xla.SYMBOLS[0], {}),)
        )

    _, image, _ = kept("runtime", {}, make)
    _runtime.append(image)
    lifetime.register_state(image)
    turns = (ctypes.c_int32 * 2).from_address(image.address("pbk_turns"))
    os.register_at_fork(
        after_in_child=lambda: turns.__setitem__(slice(None), [0, 0])
    )  # threads that hold turns stay behind
    addresses = {name: image.address(name) for name in xla.SYMBOLS} | {TRACE: callbacks.ADDRESS}
    return {xla.PREFIX + name: address for name, address in addresses.items()}


def reports() -> ctypes.c_int64:
    """The word in which machine code counts numbers that are out of their range."""
    runtime_symbols()
    return ctypes.c_int64.from_address(_runtime[0].address("pbk_reports"))


def call(compiled: LoadedProgram, *args):
    """The program as a JAX operation (to be traced)."""
    results = [
        jax.ShapeDtypeStruct(output.type.shape, output.type.dtype)
        for output in compiled.program.outputs
    ]
    return _jax.ffi_call(
        compiled.ffi_name, results, *args, input_output_aliases=compiled.program.shared_arrays()
    )


def call_into(compiled: LoadedProgram, operands, places) -> tuple[list, jax.Array]:
    """See targets.target.Target.call_into. The places are operands that the handler writes to."""
    small = [
        output.type for output in compiled.program.outputs if output.type.nbytes < xla.POOLED_BYTES
    ]
    types = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in small]
    flag = jax.ShapeDtypeStruct((0,), np.uint8)
    call = jax.ffi.ffi_call(compiled.ffi_name, [*types, flag], has_side_effect=True)
    *others, done = call(*operands, *places)
    return others, done
