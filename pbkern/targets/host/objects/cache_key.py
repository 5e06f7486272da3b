"""Key of what a program's machine code depends on: equal for programs with equal code, in any process.

The key is made of kernels, before anything is lowered: a hit costs neither lowering nor MLIR. It
names the program's steps, each kernel's blocks and body, the options and threads that lowering
bakes in, and the environment: pbkern's own sources, the MLIR package, the version of XLA's FFI and
the processor's instructions.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import re
from collections.abc import Callable

from pbkern.core.process import disk_cache
from pbkern.dsl.checks import can_fail
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.lower.build_options import BuildOptions
from pbkern.targets import mlir
from pbkern.targets.host.processor import cpu_flags, cpuinfo
from pbkern.targets.host.runtime import xla

PACKAGE = pathlib.Path(__file__).parents[3]
# What fusion and frontends decide is in the kernels; these decide what becomes of a kernel.
ROOMS = ("", "core", "dsl", "lower", "targets")


def program_key(
    program: HostProgram,
    options_of: Callable[[Kernel], BuildOptions],
    threads_of: Callable[[Kernel], int],
    opt_level: int | None,
    processor: mlir.Processor | None = None,
) -> str:
    """Digest of everything above but the environment. processor: see compile_program in targets/host/compile.py."""
    kernels = program.kernels()
    number = {id(kernel): n for n, kernel in enumerate(kernels)}
    steps = program.text(lambda launched: f"kernel{number[id(launched)]}")
    # Failed checks tell the kernel's name. No other name counts, so that like parts of a function
    # have one code.
    contents = tuple(
        (can_fail(kernel) and kernel.name, kernel.content, options_of(kernel), threads_of(kernel))
        for kernel in kernels
    )
    positions = tuple(buffer.position for buffer in program.buffers)
    return disk_cache.digest((steps, positions, contents, opt_level, processor))


@functools.cache
def environment() -> str:
    """Digest of what code depends on beside its program."""
    runtime = xla.API_VERSION, xla.runtime_module_text()
    return disk_cache.digest((sources(), mlir.installed(), *runtime, processor()))


def sources(package: pathlib.Path = PACKAGE, rooms: tuple[str, ...] = ROOMS) -> str:
    """Digest of the modules in some rooms of pbkern; by default, of those that turn kernels into code."""
    digest = hashlib.sha256()
    for room in rooms:
        levels = os.walk(package / room) if room else [(str(package), [], os.listdir(package))]
        for folder, _, names in sorted(levels):
            for name in sorted(name for name in names if name.endswith(".py")):
                path = f"{folder}/{name}"
                with open(path, "rb") as file:
                    digest.update(f"{path[len(str(package)) :]}\n".encode() + file.read())
    return digest.hexdigest()


def processor() -> tuple:
    """Facts that tell LLVM which instructions there are: the models of the cores, and the flags that the system admits."""
    text = cpuinfo()
    models = re.findall(r"^(vendor_id|cpu family|model|CPU \w+)\s*: (.*)$", text, re.MULTILINE)
    return platform.machine(), tuple(dict.fromkeys(models)), tuple(sorted(cpu_flags(text)))
