"""The NVIDIA GPU's half of lowering: its CompilerParams, and what of them is not done."""

from __future__ import annotations

from collections.abc import Mapping

from pbkern.targets.simt.backend import ThreadBackend
from pbkern.targets.simt.params import ThreadParams

from .params import CompilerParams


class NvgpuBackend(ThreadBackend):
    """See ThreadBackend."""

    params = CompilerParams()

    def refused(self, params: ThreadParams) -> Mapping[str, str]:
        assert isinstance(params, CompilerParams)
        asked = {
            "max_concurrent_steps": (params.max_concurrent_steps > 1, "this target fetches no blocks ahead yet"),
            "profile_space": (params.profile_space > 0, "this target records no events yet"),
            "lowering_semantics": (params.lowering_semantics != "Lane", "this target has no code for tensor cores yet"),
        }
        return {field: why for field, (is_asked, why) in asked.items() if is_asked}
