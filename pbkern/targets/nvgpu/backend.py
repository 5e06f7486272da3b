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


class NvgpuBackend(ThreadBackend):
    """See ThreadBackend."""

    params = CompilerParams()

    def build_options(
        self, kernel: Kernel, options, program: HostProgram | None = None
    ) -> ThreadOptions:
        p = of_kernel(kernel, self.params)
        build = super().build_options(kernel, options, program)
        return dataclasses.replace(build, profile_space=p.profile_space, profile_dir=p.profile_dir)

    def refused(self, params: ThreadParams) -> Mapping[str, str]:
        assert isinstance(params, CompilerParams)
        asked = {
            "max_concurrent_steps": (
                params.max_concurrent_steps > 1,
                "this target prefetches no blocks yet",
            ),
            "lowering_semantics": (
                params.lowering_semantics != "Lane",
                "this target has no code for tensor cores yet",
            ),
        }
        return {field: why for field, (is_asked, why) in asked.items() if is_asked}
