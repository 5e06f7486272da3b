"""HostProgram, the way to lower it -> machine code in memory. The one place that compiles what runs on this processor.

A program's code are object files, made by MLIR and LLVM (objects/object_files.py) or found in the
store on disk (core/process/disk_cache.py) under the program's content (objects/cache_key.py), and
loaded by objects/elf_loader.py either way. The nests and texts of a program that was found are
made when somebody asks for them.
"""

from __future__ import annotations

import ctypes
import itertools
import time
import weakref
from collections.abc import Callable

from pbkern.core.process import fallback, gc_pause, progress, recursion
from pbkern.core.process.disk_cache import DiskStore
from pbkern.dsl.host_program import HostProgram, ProgramSignature
from pbkern.targets import mlir

from .kernel_text import LoweredKernel
from .loaded_program import CompiledProgram, LoadedProgram, host_text
from .memory_message import memory_message
from .objects import object_files
from .objects.object_code import ObjectCode, find_code, prints, stored_code, stored_key
from .program_text import LoweredProgram
from .recording import RecordedProgram, recorded_symbols
from .runtime import xla
from .runtime_symbols import runtime_symbols

# What progress lines call the stages that may take long.
STAGES = {
    "passes": "MLIR passes",
    "llvm": "LLVM code generation",
    "host": "the host function",
    "load": "loading",
}
_serial = itertools.count()
_resident: weakref.WeakSet[LoadedProgram] = weakref.WeakSet()
# Lowers a program; the argument is called with each kernel before the next is lowered.
Lower = Callable[[Callable[[LoweredKernel], None]], LoweredProgram]


def compile_program(
    program: HostProgram,
    lower: Lower,
    key: str,
    opt_level: int | None = None,
    processor: mlir.Processor | None = None,
    recorded: bool = False,
) -> CompiledProgram:
    """Finds or makes a program's code, loads and registers it.

    Raises what `lower` raises, and InternalError.

    Args:
      program: launches of kernels, in order, without last stages.
      lower: kernels and host as texts.
      key: of what all other arguments depend on, see objects/cache_key.py.
      opt_level: of LLVM; None: as the kernels' loops need.
      processor: whose instructions code consists of; None: all that the processor at hand has.
      recorded: whether the host's text has marks (recording.py).
    """
    xla.check_api_version()
    times: dict[str, float] = {}

    def timed(stage: str, f, *args):
        progress.step(f"{program.name}: {STAGES.get(stage, stage)}")
        start = time.perf_counter()
        result = f(*args)
        times[stage] = times.get(stage, 0.0) + (time.perf_counter() - start) * 1e3
        return result

    def make() -> ObjectCode:
        mlir.bindings()  # a missing package is reported before any work
        with object_files.Parts(symbols, opt_level, timed, processor) as parts:
            lowered = timed("lower", lower, parts.add)
            objects = parts.finish(host_text(program, lowered), "pbk_handler")
        return ObjectCode(objects, lowered.arena_bytes)

    with progress.compiling(program.name), gc_pause.paused(), recursion.headroom():
        symbols = recorded_symbols(runtime_symbols()) if recorded else runtime_symbols()
        by_hand = any(
            kernel.defined_at for kernel in program.kernels()
        )  # its errors name a program that repeats them
        code, image, from_disk = stored_code(
            key, symbols, make, timed, remembers_failures=not by_hand
        )
    compiled = (RecordedProgram if recorded else CompiledProgram)(
        program.signature,
        _new_name(program.name),
        code,
        image,
        _message(memory_message(program, code.arena_bytes)),
        from_disk,
        None if fallback.is_failing() or prints(code) else stored_key(key),
        times,
        program=program,
        lower=lambda: lower(lambda kernel: None),
    )
    _resident.add(compiled)
    return compiled


def load_program(
    store: DiskStore, signature: ProgramSignature, key: str, message: str
) -> LoadedProgram | None:
    """A program whose code an earlier process has stored under `key`; None where the store has it no more.

    message: see memory_message.py.
    """
    xla.check_api_version()
    loaded_code = find_code(store, key, runtime_symbols())
    if loaded_code is None:
        return None
    name, text = _new_name(signature.name), _message(message)
    loaded = LoadedProgram(signature, name, *loaded_code, text, from_disk=True, key=key)
    _resident.add(loaded)
    return loaded


def _new_name(name: str) -> str:
    """A name for XLA, which takes each once."""
    return f"pbkern_{next(_serial)}_{name}"


def _message(text: str) -> ctypes.Array:
    return ctypes.create_string_buffer(text.encode())
