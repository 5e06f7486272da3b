"""The AMD GPU's half of lowering: its CompilerParams, and which matrix cores a device has."""

from __future__ import annotations

from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.targets.simt.backend import ThreadBackend
from pbkern.targets.simt.options import ThreadOptions

from .params import CompilerParams

# Architectures with MFMA. Source: AMD Instinct MI200 and CDNA 3 ISA.
MFMA_ARCHITECTURES = ("gfx90a", "gfx942")
# Architectures with WMMA. Source: RDNA 3 ISA.
WMMA_ARCHITECTURES = ("gfx1100",)


class AmdgpuBackend(ThreadBackend):
    """See ThreadBackend."""

    params = CompilerParams()

    def build_options(
        self, kernel: Kernel, options, program: HostProgram | None = None
    ) -> ThreadOptions:
        build = super().build_options(kernel, options, program)
        may_use = not options.polyblocks_gpu_no_tensor_core and not build.plain
        architecture = self.kind.architecture
        return self.with_matrices(
            build,
            kernel,
            mfma=may_use and architecture in MFMA_ARCHITECTURES,
            wmma=may_use and architecture in WMMA_ARCHITECTURES,
        )
