"""The NVIDIA GPU's half of lowering: its CompilerParams, and what of them is not done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pbkern.dsl.host_program import HostProgram
from pbkern.dsl.kernel import Kernel
from pbkern.targets.simt.backend import ThreadBackend
from pbkern.targets.simt.options import ThreadOptions
from pbkern.targets.simt.params import ThreadParams, of_kernel

from .params import CompilerParams

# Architectures with wgmma. Source: PTX ISA 8.7, section 9.7.15.5.2.
WARPGROUP_ARCHITECTURES = ("sm_90a",)


class NvgpuBackend(ThreadBackend):
    """See ThreadBackend."""

    params = CompilerParams()

    def build_options(
        self, kernel: Kernel, options, program: HostProgram | None = None
    ) -> ThreadOptions:
        p = of_kernel(kernel, self.params)
        build = super().build_options(kernel, options, program)
        tensor_cores = not options.polyblocks_gpu_no_tensor_core and not build.plain
        build = dataclasses.replace(build, profile_space=p.profile_space, profile_dir=p.profile_dir)
        has_groups = self.kind.architecture in WARPGROUP_ARCHITECTURES
        return self.with_matrices(
            build, kernel, tensor_cores=tensor_cores, warpgroups=tensor_cores and has_groups
        )

    def refused(self, params: ThreadParams) -> Mapping[str, str]:
        assert isinstance(params, CompilerParams)
        asked = {
            "lowering_semantics": (
                params.lowering_semantics != "Lane",
                "this target has no code for groups of warps yet",
            ),
        }
        return {field: why for field, (is_asked, why) in asked.items() if is_asked}
