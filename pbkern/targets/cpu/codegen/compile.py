"""HostProgram -> machine code on this processor: kernels by the CPU's passes and emission, the rest by targets/host."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from pbkern.core.process import progress, recursion
from pbkern.dsl.build_programs import in_stages
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.targets import mlir
from pbkern.targets.backend import device_functions
from pbkern.targets.cpu.lower_options import LowerOptions
from pbkern.targets.cpu.passes import CPU_PASSES
from pbkern.targets.host import compile as host
from pbkern.targets.host.kernel_text import LoweredKernel
from pbkern.targets.host.loaded_program import CompiledProgram
from pbkern.targets.host.objects import cache_key
from pbkern.targets.host.processor import allowed_cores
from pbkern.targets.host.program_text import HostText, LoweredProgram
from pbkern.targets.host.recording import RecordedText

from .kernel import emit
from .launches import emit_host


def compile_program(
    program: HostProgram,
    options_of: Callable[[Kernel], LowerOptions] = lambda launched: LowerOptions(),
    threads_of: Callable[[Kernel], int] = lambda launched: allowed_cores(),
    opt_level: int | None = None,
    key: str | None = None,
    processor: mlir.Processor | None = None,
    recorded: bool = False,
) -> CompiledProgram:
    """Finds or makes a program's code, loads and registers it.

    Raises UnsupportedOp or InternalError.

    Args:
      program: launches of kernels, in order.
      options_of: what lowering takes of each kernel; by default LowerOptions().
      threads_of: how many threads a kernel may use; by default every core.
      opt_level: of LLVM; None: as its loops need.
      key: cache_key.program_key of these arguments, where the caller has made it.
      processor: whose instructions code consists of; None: all that the processor at hand has.
      recorded: with marks around its steps, see targets/host/recording.py.
    """
    program = in_stages(program)

    def lower(ready: Callable[[LoweredKernel], None]) -> LoweredProgram:
        count = itertools.count(1)

        def announced(kernel: Kernel) -> LowerOptions:  # asked for as each kernel's turn comes
            progress.step(
                f"kernel {next(count)} of {len(program.kernels())} ({kernel.name}), lowering"
            )
            return options_of(kernel)

        return emit_host(
            program,
            device_functions(program, announced, CPU_PASSES, emit, ready),
            threads_of,
            text_of=RecordedText if recorded else HostText,
        )

    if key is None:
        with recursion.headroom():
            key = cache_key.program_key(program, options_of, threads_of, opt_level, processor)
    return host.compile_program(program, lower, key, opt_level, processor, recorded)
