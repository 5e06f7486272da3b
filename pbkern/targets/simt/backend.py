"""A GPU's half of lowering: CompilerParams and options -> ThreadOptions; nests -> threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from pbkern.core.errors import ScheduleError
from pbkern.core.jaxprs.walks import equations
from pbkern.core.machine import MOST_BLOCK_THREADS
from pbkern.core.ops.scatter import SCATTERS
from pbkern.core.passes import Pass
from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.lower.grid.parallelism import grid_dimensions
from pbkern.lower.kernel_nests import KernelNests

from .device import DeviceKind
from .emit.kernel import ThreadFunction, emit
from .options import ThreadOptions
from .params import ThreadParams, of_kernel
from .passes import THREAD_PASSES
from .schedule.instructions import multiplied_matrices
from .schedule.lane_products import WARP_OF_LANES
from .schedule.updates import ATOMICS, UPDATE_THREADS

# Threads of a block where its author names no number: four warps of 32. Source: not recorded.
DEFAULT_THREADS = 128
# Elements of a block's product from which on it has twice as many threads: 64 sums of 128 x 128 each.
LARGE_PRODUCT = 1 << 14


class ThreadBackend:
    """One kind of device. See targets.backend.KernelBackend.

    Attributes:
      params: CompilerParams of kernels that have none.
    """

    passes: tuple[Pass, ...] = THREAD_PASSES
    params: ClassVar[ThreadParams]

    def __init__(self, kind: DeviceKind):
        self.kind = kind

    def build_options(
        self, kernel: Kernel, options, program: HostProgram | None = None
    ) -> ThreadOptions:
        """Raises ScheduleError where CompilerParams ask for what this target does not do."""
        p, warp, fast = (
            of_kernel(kernel, self.params),
            self.kind.device.warp,
            not options.mlir_disable_fast_math,
        )
        for field, why in self.refused(p).items():
            raise ScheduleError(
                f"kernel `{kernel.name}` asks for {field}={getattr(p, field)!r}",
                at=kernel.defined_at or None,
                why=why,
                hint=f"leave {field} at its default",
            )
        has_updates = self.kind.device.relaxed_atomics and any(
            SCATTERS.get(eqn.primitive.name) in ATOMICS for eqn in equations(kernel.body.jaxpr)
        )
        default = UPDATE_THREADS if has_updates else DEFAULT_THREADS
        threads = warp * p.num_warps if p.num_warps else default
        if threads > MOST_BLOCK_THREADS:
            raise ScheduleError(
                f"kernel `{kernel.name}` asks for num_warps={p.num_warps}",
                at=kernel.defined_at or None,
                why=f"these are {threads} threads of {warp} in a warp; a block of {self.kind.architecture} has at most "
                f"{MOST_BLOCK_THREADS}",
                hint=f"num_warps={MOST_BLOCK_THREADS // warp}",
            )
        build = ThreadOptions(
            semantics=p.dimension_semantics,
            contract=fast,
            approx_math=p.approx_math and fast,
            device=self.kind.device,
            threads=threads,
            shared_bytes=self.kind.shared_bytes,
            barriers=not p.unsafe_no_auto_barriers,
            stages=p.max_concurrent_steps,
            delay=p.delay_release,
        )
        if p.max_concurrent_steps == 1 or all(x.parallel for x in grid_dimensions(kernel, build)):
            return build
        if kernel.dynamic_grid:
            raise ScheduleError(
                f"kernel `{kernel.name}` asks for max_concurrent_steps={p.max_concurrent_steps}",
                at=kernel.defined_at or None,
                why="an operand gives the size of its grid, so that steps ahead may not exist",
                hint="leave max_concurrent_steps at its default",
            )
        return dataclasses.replace(build, one_case=True, block_copy_bytes=build.copy_bytes)

    def with_matrices(self, build: ThreadOptions, kernel: Kernel, **has: Any) -> ThreadOptions:
        """The options with what the device has of matrix instructions, which large products use with twice as many threads."""
        multiply_adds = build.contract and not build.plain and build.device.warp == WARP_OF_LANES
        build = dataclasses.replace(build, multiply_adds=multiply_adds, **has)
        largest = multiplied_matrices(kernel.body.jaxpr, build)
        if of_kernel(kernel, self.params).num_warps is None and largest >= LARGE_PRODUCT:
            build = dataclasses.replace(build, threads=2 * build.threads)
        return dataclasses.replace(build, one_case=build.one_case or largest > 0)

    def refused(self, params: ThreadParams) -> Mapping[str, str]:
        """Fields that ask for what is not done -> why."""
        return {}

    def emit(self, nests: KernelNests, name: str) -> ThreadFunction:
        return emit(nests, name)
