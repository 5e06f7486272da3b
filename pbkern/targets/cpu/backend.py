"""The CPU's KernelBackend: CompilerParams and options -> LowerOptions; nests -> vectors; launches -> tasks of threads."""

from __future__ import annotations

from collections.abc import Mapping

from pbkern.core import config
from pbkern.core.passes import Pass
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.lower.kernel_nests import KernelNests
from pbkern.targets.cpu.codegen.kernel import emit
from pbkern.targets.cpu.codegen.launches import emit_host
from pbkern.targets.host.kernel_text import LoweredKernel
from pbkern.targets.host.program_text import LoweredProgram

from .lower_options import NEVER_BYTES, LowerOptions
from .machines.devices import jit_machine
from .machines.machine import CpuMachine
from .params import CompilerParams
from .passes import CPU_PASSES

DEFAULT_PARAMS = CompilerParams()


class CpuBackend:
    """See targets.backend.KernelBackend.

    `given`: the machine to lower for; None: the one that code is compiled for just in time.
    """

    passes: tuple[Pass, ...] = CPU_PASSES

    def __init__(self, given: CpuMachine | None = None):
        self.given = given

    @property
    def machine(self) -> CpuMachine:
        return self.given or jit_machine()

    def build_options(
        self, kernel: Kernel, options, program: HostProgram | None = None
    ) -> LowerOptions:
        params, machine = _params(kernel), self.machine
        # Results that may start anywhere in a cache line are not written past the caches.
        through = not machine.stores_past_caches or (
            program is not None and kernel in program.placed_kernels
        )
        fast = not options.mlir_disable_fast_math
        return LowerOptions(
            approx_math=params.approx_math and fast,
            contract=fast,
            vectors=machine.vectors(params.vector_width),
            op_costs=machine.op_cycles,
            semantics=params.dimension_semantics,
            prefetch_steps=params.max_concurrent_steps - 1,
            avx2=machine.avx2,
            avx512=machine.vector_bits >= 512 and machine.avx512,
            bf16_pairs=fast and machine.bf16_pairs,
            vnni=machine.vnni,
            amx_bf16=fast and machine.amx_bf16,
            amx_int8=machine.amx_int8,
            asymmetric_minima=machine.asymmetric_minima,
            l1_bytes=machine.l1_bytes,
            scatter_row_bytes=machine.l1_bytes,
            l1_ways=machine.l1_ways,
            l2_bytes=machine.l2_bytes,
            followed_row_bytes=machine.followed_row_bytes,
            # With its operands and what others keep there, such a result leaves the last-level
            # cache before it is read. With its reader counted, 8 MB of 32 lose 13 % if all was in
            # the cache before, gain 20 % if not; 12 MB gain either way.
            stream_bytes=NEVER_BYTES if through else machine.l3_bytes * 3 // 8,
            # 16 MB of 32 that are made of almost nothing, call after call: 0.20 ms through the
            # cache, 0.43 past it.
            stream_traffic=machine.l3_bytes * 5 // 8,
        )

    def threads(self, kernel: Kernel) -> int:
        """Most threads that run programs of a kernel."""
        return own_threads(kernel) or config.num_threads() or self.machine.cores

    def emit(self, nests: KernelNests, name: str) -> LoweredKernel:
        return emit(nests, name)

    def emit_host(
        self, program: HostProgram, kernels: Mapping[int, LoweredKernel]
    ) -> LoweredProgram:
        return emit_host(program, kernels, self.threads)


def own_threads(kernel: Kernel) -> int | None:
    """Most threads that a kernel's CompilerParams allow, if they say it."""
    return _params(kernel).num_threads


def _params(kernel: Kernel) -> CompilerParams:
    return kernel.compiler_params.get(CompilerParams.target_name, DEFAULT_PARAMS)
