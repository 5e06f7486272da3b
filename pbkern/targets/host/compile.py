"""HostProgram, the way to lower it -> machine code in memory. The one place that compiles what runs on this processor.

A program's code are object files, made by MLIR and LLVM (objects/object_files.py) or found in the
store on disk (core/process/disk_cache.py) under the program's content (objects/cache_key.py), and
loaded by objects/elf_loader.py either way. The nests and texts of a program that was found are
made when somebody asks for them.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable

from pbkern.core.process import gc_pause, progress, recursion
from pbkern.dsl.host_program import HostProgram
from pbkern.targets import mlir

from . import lifetime
from .kernel_text import LoweredKernel
from .loaded_program import LoadedProgram, host_text
from .memory_message import give_message
from .objects import object_files
from .objects.object_code import ObjectCode, stored_code
from .program_text import LoweredProgram
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
    program: HostProgram, lower: Lower, key: str, opt_level: int | None = None
) -> LoadedProgram:
    """Finds or makes a program's code, loads and registers it.

    Raises what `lower` raises, and InternalError.

    Args:
      program: launches of kernels, in order, without last stages.
      lower: kernels and host as texts.
      key: of what `lower` and `opt_level` depend on, see objects/cache_key.py.
      opt_level: of LLVM; None: as the kernels' loops need.
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
        with object_files.Parts(symbols, opt_level, timed) as parts:
            lowered = timed("lower", lower, parts.add)
            objects = parts.finish(host_text(program, lowered), "pbk_handler")
        return ObjectCode(objects, lowered.arena_bytes)

    with progress.compiling(program.name), gc_pause.paused(), recursion.headroom():
        symbols = runtime_symbols()
        by_hand = any(
            kernel.defined_at for kernel in program.kernels()
        )  # its errors name a program that repeats them
        code, image, from_disk = stored_code(
            key, symbols, make, timed, remembers_failures=not by_hand
        )
    name = f"pbkern_{next(_serial)}_{program.name}"
    compiled = LoadedProgram(
        program, name, code, image, lambda: lower(lambda kernel: None), from_disk, times
    )
    lifetime.free_with(compiled, image)
    give_message(image, compiled.no_memory)
    _resident.add(compiled)
    return compiled
